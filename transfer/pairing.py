"""Who reads what from whom: the heads of each buffer, and for each the source rank they come from. Pure.

    source  rank 0 |h0 h1|      dest  rank 0 |h0|         tiles of dest rank 1:
            rank 1 |h0 h1|            rank 1 |h1 h2|        h1 from rank 0 or 1, in turn
            rank 2 |h2 h3|            rank 2 |h3|           h2 from rank 2

Every head is read once, also when several source ranks hold it (more ranks than heads, latent attention). Then the
reads of these heads are dealt out to the holders in turn: they are numbered by layer (of those with the same attention
type) and within a layer by destination rank, and read i goes to holder i modulo the number of holders. Each side can
compute this alone, and the holders serve as much as each other, to one buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from transfer.layout import BufferLayout, EngineLayout, differing


@dataclass(frozen=True, slots=True)
class Tile:
    """The heads [first_head, end_head) of one buffer, and where they come from. Indices are those on data planes."""

    source: BufferLayout
    source_index: int
    dest: BufferLayout
    dest_index: int
    first_head: int
    end_head: int


def pair(source: EngineLayout, dest: EngineLayout, dest_rank: int) -> list[Tile]:
    """What `dest_rank` of `dest` reads from the ranks of `source`; buffer by buffer, by head.

    Raises ValueError for a rank that `dest` has not, for a cache or heads that `source` lacks, and for a cache that
    means something else there.
    """
    holders_of, readers_of = source.by_key(), dest.by_key()
    index_of, turn_of = source.index_of(), _turns(dest)
    tiles: list[Tile] = []
    for dest_index, b in enumerate(dest.of_rank(dest_rank)):
        holders = holders_of.get(b.key)
        if not holders:
            raise ValueError(f"{b.place} is missing in the source")
        if reasons := differing(holders[0], b):
            raise ValueError(f"source and destination hold different things: {'; '.join(reasons)}")
        for first, end, a in _split(b, holders, readers_of[b.key], turn_of[b.attn_type, b.layer]):
            tiles.append(Tile(a, index_of[a.rank, a.key], b, dest_index, first, end))
    return tiles


def _turns(layout: EngineLayout) -> dict[tuple[str, int], int]:
    """The place of each layer among those of its attention type. Alternating types would else share turns unequally."""
    turns: dict[tuple[str, int], int] = {}
    num: dict[str, int] = {}
    for attn_type, layer in sorted({(b.attn_type, b.layer) for b in layout.buffers}):
        turns[attn_type, layer] = num.get(attn_type, 0)
        num[attn_type] = turns[attn_type, layer] + 1
    return turns


def _split(
    b: BufferLayout, holders: list[BufferLayout], readers: list[BufferLayout], turn: int
) -> list[tuple[int, int, BufferLayout]]:
    """(first head, end head, holder) that together are the heads of `b`, as few as can be."""
    parts: list[tuple[int, int, BufferLayout]] = []
    bounds = {bound for x in (*holders, *readers) for bound in (x.first_head, x.end_head)}
    for first, end in pairwise(sorted(x for x in bounds if b.first_head <= x <= b.end_head)):
        able = [x for x in holders if x.first_head <= first and end <= x.end_head]
        if not able:
            raise ValueError(f"{b.place}: no rank of the source holds heads {first} to {end - 1}")
        wanting = [x.rank for x in readers if x.first_head <= first and end <= x.end_head]
        chosen = able[(turn * len(wanting) + wanting.index(b.rank)) % len(able)]
        if parts and parts[-1][2] is chosen:
            first = parts.pop()[0]
        parts.append((first, end, chosen))
    return parts
