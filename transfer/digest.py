"""Sampled digests: does the reader have what the holder still has? Says nothing of what was wrong on both sides.

A piece is what some tokens and heads have in one cache, named in coordinates that mean the same whatever the block
sizes, ranks and orders in memory of the two sides. It lies in one block on each of them:

    source blocks   |--- 7 ---|--- 2 ---|          a piece: (layer, cache name, tokens, heads)
    dest blocks     |- 4 -|- 9 -|- 3 -|            its digest: CRC-32 of its bytes, token by token, in a token
    pieces          |-----|---|-|-----|              head by head

The reader draws pieces of what it has pulled and digests its own copies; the holder digests its memory of the same
pieces while the lease still protects them. CRC-32 finds what faulty memory, cables, planes and plans do to bytes; it
is no defence against somebody who wants to deceive, who would be the holder or the reader itself.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np

from transfer.layout import BufferKey, BufferLayout, EngineLayout
from transfer.pairing import Tile, pair
from transfer.plan import NULL_BLOCK, BlockTables, segments
from transfer.planes.base import Buffers, Int64Array

MAX_PIECES = 2**16  # of one pull: its message stays under 4 MB and its check under a second, whatever the rate


class Piece(NamedTuple):
    """Tokens and heads of one cache, each counted as [first, first + num)."""

    layer: int
    cache_name: str
    first_token: int
    num_tokens: int
    first_head: int
    num_heads: int

    @property
    def key(self) -> BufferKey:
        return self.layer, self.cache_name

    def __str__(self) -> str:
        return f"layer {self.layer} {self.cache_name} tokens {_range(self.first_token, self.num_tokens)}"


Digests = Mapping[Piece, int]


def _range(first: int, num: int) -> str:
    return f"{first} to {first + num - 1}"


@dataclass(frozen=True, slots=True)
class _Group:
    """Pairs of buffers that are cut alike, and the pieces a read brings into each: first token and number of them."""

    tiles: Sequence[Tile]
    first: Int64Array
    num: Int64Array

    def __len__(self) -> int:
        return len(self.tiles) * len(self.first)

    def piece(self, index: int) -> tuple[int, Piece]:
        tile, at = self.tiles[index // len(self.first)], index % len(self.first)
        tokens = int(self.first[at]), int(self.num[at])
        heads = tile.first_head, tile.end_head - tile.first_head
        return tile.source.rank, Piece(*tile.dest.key, *tokens, *heads)


class Sampler:
    """Draws pieces of what rank `dest_rank` of `dest` reads from `source`. Made once per pair of engines.

    Raises ValueError as `ReadPlanner` does.
    """

    def __init__(self, source: EngineLayout, dest: EngineLayout, dest_rank: int = 0) -> None:
        self._tiles: dict[tuple[str, int, int], list[Tile]] = {}
        for tile in pair(source, dest, dest_rank):
            cut = tile.dest.attn_type, tile.source.block_size, tile.dest.block_size
            self._tiles.setdefault(cut, []).append(tile)

    def draw(
        self,
        source_tables: BlockTables,
        dest_tables: BlockTables,
        first_token: int,
        num_tokens: int,
        rate: float,
        random: Random,
    ) -> dict[int, list[Piece]]:
        """Pieces of the tokens [first_token, num_tokens), by source rank: about the fraction `rate` of all.

        At least one if any byte was read, at most MAX_PIECES; none with rate 0. The arguments are those of the plan.
        """
        groups = [
            _Group(tiles, *_pulled(source_tables[cut[0]], dest_tables[cut[0]], first_token, num_tokens, *cut[1:]))
            for cut, tiles in self._tiles.items()
        ]
        total = sum(map(len, groups))
        wanted = min(total, MAX_PIECES, math.ceil(rate * total))
        drawn: dict[int, list[Piece]] = {}
        for index in random.sample(range(total), wanted):
            rank, piece = _at(groups, index)
            drawn.setdefault(rank, []).append(piece)
        return drawn


def _pulled(
    source: Sequence[int], dest: Sequence[int], first_token: int, num_tokens: int, source_size: int, dest_size: int
) -> tuple[Int64Array, Int64Array]:
    """First token and number of tokens of each segment that has a block on both sides."""
    first, num = segments(first_token, num_tokens, source_size, dest_size)
    is_real = (np.asarray(source, np.int64)[first // source_size] != NULL_BLOCK) & (
        np.asarray(dest, np.int64)[first // dest_size] != NULL_BLOCK
    )
    return first[is_real], num[is_real]


def _at(groups: Sequence[_Group], index: int) -> tuple[int, Piece]:
    for group in groups:
        if index < len(group):
            return group.piece(index)
        index -= len(group)
    raise IndexError(index)


class KvDigests:
    """Digests of one rank's memory, the buffers of `layouts` in their order. They must stay mapped."""

    def __init__(self, layouts: Sequence[BufferLayout], buffers: Buffers) -> None:
        self._views = {b.key: (b, _elements(ptr, b)) for b, ptr in zip(layouts, buffers.ptrs, strict=True)}

    def of(self, pieces: Sequence[Piece], tables: BlockTables) -> dict[Piece, int]:
        """The digest of each piece. `tables` are those of the request by attention type.

        Raises ValueError, naming the piece, for one that is not held here, spans blocks, or has no block: pieces may
        come from another process.
        """
        return {piece: zlib.crc32(self._bytes(piece, tables)) for piece in pieces}

    def differing(self, theirs: Digests, tables: BlockTables) -> list[Piece]:
        """The pieces that are not the same here, or not here at all, in the order of layers and tokens."""
        return sorted(piece for piece, digest in theirs.items() if not self._is_same(piece, digest, tables))

    def _is_same(self, piece: Piece, digest: int, tables: BlockTables) -> bool:
        try:
            return zlib.crc32(self._bytes(piece, tables)) == digest
        except ValueError:
            return False

    def _bytes(self, piece: Piece, tables: BlockTables) -> memoryview:
        held = self._views.get(piece.key)
        if held is None:
            raise ValueError(f"{piece}: no such cache here")
        b, view = held
        head = piece.first_head - b.first_head
        if piece.num_heads < 1 or not 0 <= head <= b.num_heads - piece.num_heads:
            heads = _range(piece.first_head, piece.num_heads)
            raise ValueError(f"{piece}: heads {heads} are not all of {_range(b.first_head, b.num_heads)}")
        index, offset = divmod(piece.first_token, b.block_size)
        if piece.num_tokens < 1 or piece.first_token < 0 or offset + piece.num_tokens > b.block_size:
            raise ValueError(f"{piece}: these are not tokens of one block of {b.block_size}")
        table = tables.get(b.attn_type, ())
        if index >= len(table) or table[index] == NULL_BLOCK:
            raise ValueError(f"{piece}: there is no block for them")
        found = view[table[index], offset : offset + piece.num_tokens, head : head + piece.num_heads]
        return np.ascontiguousarray(found).data  # no copy unless heads come first, or not all are meant


def describe_places(pieces: Sequence[Piece], most: int = 3) -> str:
    """For people: the first few of them, and how many there are."""
    shown = "; ".join(map(str, pieces[:most]))
    return f"{shown}; and {len(pieces) - most} more" if len(pieces) > most else shown


def _elements(ptr: int, b: BufferLayout) -> np.ndarray:
    """A view [blocks, block_size, heads, bytes per head], whatever the order in memory."""
    memory = np.frombuffer(memoryview((ctypes.c_ubyte * b.num_bytes).from_address(ptr)), np.uint8)
    shape = (b.num_heads, b.block_size) if b.is_heads_first else (b.block_size, b.num_heads)
    blocks: np.ndarray = memory.reshape(-1, *shape, b.bytes_per_head)
    return blocks.swapaxes(1, 2) if b.is_heads_first else blocks
