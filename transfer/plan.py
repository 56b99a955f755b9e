"""Which bytes to read: from two layouts, two block tables and a token range to byte runs. Pure.

The canonical coordinates of a cached value are (layer, cache name, token, head). Layers and heads are paired once per
pair of engines (`transfer.pairing`); a plan then cuts the token range wherever either side begins a new block, into
segments that lie in one block on each side:

    source blocks   |--- 7 ---|--- 2 ---|--- 5 --
    dest blocks     |- 4 -|- 9 -|- 3 -|- 1 -|- 8
    segments        |-----|---|-|-----|-|---|--

The tokens and heads of a segment are one piece of bytes, or several, by how they lie in memory:

    source / destination [block_size, heads, dim]        all heads held are moved: one piece; else one per token
    source / destination [heads, block_size, dim]        one piece per head
    one way here, the other there                        one piece per token and head, unless both hold one head

Blocks are paired by the tokens they hold, so spare blocks on either side do not matter, and the null block is skipped.
Pieces that adjoin on both sides become one run, also when blocks lie in descending order.

Buffers with the same cut share their runs, which are computed once, without a loop over blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from transfer.layout import BufferLayout, EngineLayout
from transfer.pairing import Tile, pair
from transfer.planes.base import Int64Array, Pattern, PatternRuns, Runs

NULL_BLOCK = 0
BlockTables = Mapping[str, Sequence[int]]
FirstToken = int | Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStats:
    """How the bytes from one rank are scattered. Lengths in bytes."""

    num_runs: int
    num_bytes: int
    largest_run: int

    @property
    def mean_run(self) -> float:
        return self.num_bytes / self.num_runs if self.num_runs else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """The byte runs of one destination rank by source rank, with every rank it is paired with."""

    runs: Mapping[int, Runs]

    @property
    def num_bytes(self) -> int:
        return sum(runs.num_bytes for runs in self.runs.values())

    def stats(self) -> dict[int, RunStats]:
        """Number and size of the runs by source rank."""
        return {
            rank: RunStats(
                num_runs=len(runs), num_bytes=runs.num_bytes, largest_run=int(runs.length.max(initial=0))
            )
            for rank, runs in self.runs.items()
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Side:
    """Where buffers of one engine keep the moved heads of a token; steps and offset in bytes."""

    block_size: int
    num_blocks: int
    block_step: int
    token_step: int
    head_step: int
    head_offset: int  # of the first moved head in its block

    @classmethod
    def of(cls, buffer: BufferLayout, first_head: int) -> _Side:
        e = buffer.bytes_per_head
        token_step, head_step = (e, buffer.block_size * e) if buffer.is_heads_first else (buffer.bytes_per_token, e)
        skipped = (first_head - buffer.first_head) * head_step
        return cls(buffer.block_size, buffer.num_blocks, buffer.bytes_per_block, token_step, head_step, skipped)


@dataclass(frozen=True, slots=True)
class _Cut:
    """All that the runs between two buffers depend on, but for the block tables."""

    attn_type: str
    sliding_window: int
    bytes_per_head: int
    num_heads: int
    source: _Side
    dest: _Side

    @classmethod
    def of(cls, tile: Tile) -> _Cut:
        a, b = tile.source, tile.dest
        sides = _Side.of(a, tile.first_head), _Side.of(b, tile.first_head)
        return cls(b.attn_type, b.sliding_window, b.bytes_per_head, tile.end_head - tile.first_head, *sides)

    def heads_per_piece(self) -> int:
        adjoin = self.source.head_step == self.dest.head_step == self.bytes_per_head
        return self.num_heads if adjoin else 1

    def has_adjoining_tokens(self) -> bool:
        """Whether the pieces of successive tokens of a block adjoin on both sides."""
        width = self.heads_per_piece() * self.bytes_per_head
        return self.source.token_step == self.dest.token_step == width


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Bytes to move within one pair of buffers: two offsets and a length for each."""

    src: Int64Array
    dst: Int64Array
    length: Int64Array


@dataclass(frozen=True, slots=True)
class _Range:
    """The tokens [first, end) of one attention type; the first token computed at the destination is `resume`."""

    first: int
    end: int
    resume: int


class ReadPlanner:
    """What rank `dest_rank` of `dest` reads from the ranks of `source`. Made once per pair of engines.

    The layouts must have no difference that `compare` names, other than block sizes. Raises ValueError for a rank that
    `dest` has not, and for a cache or heads that `source` lacks or that mean something else there.
    """

    def __init__(self, source: EngineLayout, dest: EngineLayout, dest_rank: int = 0) -> None:
        pairs: dict[_Cut, dict[int, list[tuple[int, int]]]] = {}
        for tile in pair(source, dest, dest_rank):
            by_rank = pairs.setdefault(_Cut.of(tile), {})
            by_rank.setdefault(tile.source.rank, []).append((tile.source_index, tile.dest_index))
        # Cut → source rank → the pairs of buffers cut so, [pairs, (source index, destination index)].
        self._pairs = {
            cut: {rank: np.array(found, np.int64) for rank, found in by_rank.items()} for cut, by_rank in pairs.items()
        }

    @cached_property
    def source_ranks(self) -> tuple[int, ...]:
        """The ranks to connect to, ascending."""
        return tuple(sorted({rank for by_rank in self._pairs.values() for rank in by_rank}))

    def plan(
        self,
        source_tables: BlockTables,
        dest_tables: BlockTables,
        first_token: FirstToken,
        num_tokens: int,
        resume_token: int | None = None,
    ) -> ReadPlan:
        """The runs that bring the tokens [first_token, num_tokens).

        `*_tables[attn_type]` are block ids in logical order, the same for all ranks. `first_token` can be one for each
        attention type: types it does not name are not moved, and need no tables. `resume_token` is the first one
        the destination computes itself; None: `num_tokens`. Raises ValueError when the range is not a range, a table is
        too short, a block id does not exist, or the source has no block for tokens that the token at `resume_token`
        will look at and for which the destination has one.
        """
        resume = num_tokens if resume_token is None else resume_token
        for first in first_token.values() if isinstance(first_token, Mapping) else (first_token,):
            if not 0 <= first <= num_tokens <= resume:
                raise ValueError(f"tokens [{first}, {num_tokens}) before token {resume} are not a range")
        parts: dict[int, list[Pattern]] = {rank: [] for rank in self.source_ranks}
        for cut, by_rank in self._pairs.items():
            first_of_type = first_token.get(cut.attn_type) if isinstance(first_token, Mapping) else first_token
            if first_of_type is None:
                continue
            tokens = _Range(first_of_type, num_tokens, resume)
            pieces = _cut_tokens(cut, source_tables, dest_tables, tokens)
            for rank, pairs in by_rank.items():
                pattern = Pattern(
                    pairs=pairs, src_offset=pieces.src, dst_offset=pieces.dst, length=pieces.length
                )  # fmt: skip
                parts[rank].append(pattern)
        return ReadPlan(runs={rank: PatternRuns.of(found) for rank, found in parts.items()})


class OneRankPlanner:
    """What an engine of one rank reads from another of one rank. Raises ValueError for more, and as `ReadPlanner`."""

    def __init__(self, source: EngineLayout, dest: EngineLayout) -> None:
        if source.num_ranks > 1 or dest.num_ranks > 1:
            raise ValueError(f"engines of 1 rank are joined here, given {source.num_ranks} and {dest.num_ranks} ranks")
        self._planner = ReadPlanner(source, dest)

    def plan(
        self,
        source_tables: BlockTables,
        dest_tables: BlockTables,
        first_token: FirstToken,
        num_tokens: int,
        resume_token: int | None = None,
    ) -> Runs:
        """As `ReadPlanner.plan`, of the only rank."""
        plan = self._planner.plan(source_tables, dest_tables, first_token, num_tokens, resume_token)
        return plan.runs.get(0, PatternRuns.of([]))


def plan_read(
    source: EngineLayout,
    dest: EngineLayout,
    source_tables: BlockTables,
    dest_tables: BlockTables,
    first_token: int,
    num_tokens: int,
) -> Runs:
    """The runs of one read; whoever reads more than once from an engine keeps a planner."""
    return OneRankPlanner(source, dest).plan(source_tables, dest_tables, first_token, num_tokens)


def _cut_tokens(cut: _Cut, source_tables: BlockTables, dest_tables: BlockTables, tokens: _Range) -> _Pieces:
    """Merged pieces of the tokens between two buffers cut so."""
    src_table = _table(source_tables, cut.attn_type, cut.source, tokens.end, "source")
    dst_table = _table(dest_tables, cut.attn_type, cut.dest, tokens.end, "destination")
    sizes = (cut.source.block_size, cut.dest.block_size) if cut.has_adjoining_tokens() else (1, 1)
    token, num = segments(tokens.first, tokens.end, *sizes)
    src_block, dst_block = src_table[token // cut.source.block_size], dst_table[token // cut.dest.block_size]
    _check_visible(cut, token + num, (src_block == NULL_BLOCK) & (dst_block != NULL_BLOCK), tokens)
    real = (src_block != NULL_BLOCK) & (dst_block != NULL_BLOCK)
    token, num = token[real], num[real]
    head = np.arange(0, cut.num_heads, cut.heads_per_piece(), dtype=np.int64)
    return _merge(
        _offset(cut.source, src_block[real], token, head),
        _offset(cut.dest, dst_block[real], token, head),
        np.repeat(num * (cut.heads_per_piece() * cut.bytes_per_head), len(head)),
    )


def _table(tables: BlockTables, attn_type: str, side: _Side, num_tokens: int, name: str) -> Int64Array:
    table = np.asarray(tables.get(attn_type, ()), np.int64)
    needed = -(-num_tokens // side.block_size)
    if len(table) < needed:
        raise ValueError(
            f"{name} block table of {attn_type} has {len(table)} blocks, {num_tokens} tokens need {needed}"
        )
    table = table[:needed]
    if wrong := table[(table < 0) | (table >= side.num_blocks)].tolist():
        raise ValueError(
            f"{name} block table of {attn_type} names block {wrong[0]}, its blocks are 0 to {side.num_blocks - 1}"
        )
    return table


def segments(first: int, end: int, *block_sizes: int) -> tuple[Int64Array, Int64Array]:
    """First token and number of tokens of each segment of [first, end), cut at the blocks of every size."""
    grids = [np.arange(first - first % size, end, size, dtype=np.int64) for size in set(block_sizes)]
    starts = np.unique(np.maximum(np.concatenate(grids), first))
    starts = starts[starts < end]  # an empty range has none
    return starts, np.diff(starts, append=end)


def _check_visible(cut: _Cut, segment_end: Int64Array, lost: np.ndarray, tokens: _Range) -> None:
    """The token at `resume` sees all before it, or the last `sliding_window - 1` of them; none of these may be lost."""
    seen_from = max(0, tokens.resume - cut.sliding_window + 1) if cut.sliding_window else 0
    lost = lost & (segment_end > seen_from)
    if lost.any():
        token = segment_end[np.argmax(lost)] - 1
        raise ValueError(f"the source has no {cut.attn_type} block for token {token}, which token {tokens.resume} sees")


def _offset(side: _Side, block: Int64Array, token: Int64Array, head: Int64Array) -> Int64Array:
    """Byte offset of every head (counted from the first moved one) of each (block, token): [tokens * heads]."""
    start = block * side.block_step + token % side.block_size * side.token_step + side.head_offset
    offset: Int64Array = (start[:, None] + head * side.head_step).ravel()
    return offset


def _merge(src: Int64Array, dst: Int64Array, length: Int64Array) -> _Pieces:
    """Ascending by source; only neighbours there can adjoin on both sides."""
    if not len(length):
        return _Pieces(src, dst, length)
    if (src[1:] < src[:-1]).any():
        order = np.argsort(src, kind="stable")
        src, dst, length = src[order], dst[order], length[order]
    adjoins = (src[1:] == src[:-1] + length[:-1]) & (dst[1:] == dst[:-1] + length[:-1])
    starts = np.flatnonzero(np.concatenate(([True], ~adjoins)))
    return _Pieces(src[starts], dst[starts], np.add.reduceat(length, starts))
