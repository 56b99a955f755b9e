"""Which bytes to read: from two layouts, two block tables and a token range to byte runs. Pure.

The canonical coordinates of a cached value are (layer, cache name, token, head). The token range is cut wherever either
side begins a new block, into segments that lie in one block on each side:

    source blocks   |--- 7 ---|--- 2 ---|--- 5 --
    dest blocks     |- 4 -|- 9 -|- 3 -|- 1 -|- 8
    segments        |-----|---|-|-----|-|---|--

For equal block sizes a segment is a block. When both sides hold the same heads a segment is one piece of bytes; else
each token is a segment of its own and only the heads both hold are moved. Blocks are paired by the tokens they hold, so
spare blocks on either side do not matter, and the null block is skipped. Pieces that adjoin on both sides become one
run.

All buffers with the same cut share their runs, which are computed once, without a loop over blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from transfer.layout import BufferLayout, EngineLayout
from transfer.planes.base import Int64Array, Runs

NULL_BLOCK = 0
BlockTables = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Bytes to move within one pair of buffers, in the order of tokens."""

    src: Int64Array
    dst: Int64Array
    length: Int64Array


_CutKey = tuple[str, int, int, int, int, int, int, int, int, int]


def plan_read(
    source: EngineLayout,
    dest: EngineLayout,
    source_tables: BlockTables,
    dest_tables: BlockTables,
    first_token: int,
    num_tokens: int,
) -> Runs:
    """The runs that bring the tokens [first_token, num_tokens) from `source` to `dest`; buffer by buffer, by token.

    `*_tables[attn_type]` are block ids in logical order. The layouts must have no difference that `compare` names,
    other than how blocks and heads are cut. Raises ValueError when the range is not a range, a buffer of `dest` is
    missing in `source`, a table is too short, a block id does not exist, or the source has no block for tokens that the
    token at `num_tokens` will look at and for which the destination has one.
    """
    if not 0 <= first_token <= num_tokens:
        raise ValueError(f"tokens [{first_token}, {num_tokens}) are not a range")
    source_index = source.index_of()
    cuts: dict[_CutKey, _Pieces] = {}
    pairs: list[tuple[int, int, _Pieces]] = []
    for dst_index, b in enumerate(dest.buffers):
        if b.key not in source_index:
            raise ValueError(f"{b.place} is missing in the source")
        src_index = source_index[b.key]
        a = source.buffers[src_index]
        key = (b.attn_type, a.block_size, b.block_size, a.first_head, a.num_heads, b.first_head, b.num_heads,
               b.bytes_per_head, a.num_bytes, b.num_bytes)  # fmt: skip
        if key not in cuts:
            cuts[key] = _cut(a, b, source_tables, dest_tables, first_token, num_tokens)
            _check_size(a, cuts[key].src, cuts[key].length, "source")
            _check_size(b, cuts[key].dst, cuts[key].length, "destination")
        pairs.append((src_index, dst_index, cuts[key]))
    return _spread(pairs)


def _cut(
    a: BufferLayout, b: BufferLayout, source_tables: BlockTables, dest_tables: BlockTables, first: int, end: int
) -> _Pieces:
    """Merged pieces for the tokens [first, end) between a buffer like `a` and one like `b`."""
    src_table = _table(source_tables, a, end, "source")
    dst_table = _table(dest_tables, b, end, "destination")
    first_head = max(a.first_head, b.first_head)
    num_heads = min(a.first_head + a.num_heads, b.first_head + b.num_heads) - first_head
    if num_heads <= 0:
        return _Pieces(*(np.empty(0, np.int64) for _ in range(3)))
    is_whole = num_heads == a.num_heads == b.num_heads
    token, num = _segments(first, end, a.block_size if is_whole else 1, b.block_size if is_whole else 1)
    src_block, dst_block = src_table[token // a.block_size], dst_table[token // b.block_size]
    _check_visible(b, token, num, (src_block == NULL_BLOCK) & (dst_block != NULL_BLOCK), end)
    real = (src_block != NULL_BLOCK) & (dst_block != NULL_BLOCK)
    token, num = token[real], num[real]
    return _merge(
        _offset(a, src_block[real], token, first_head),
        _offset(b, dst_block[real], token, first_head),
        num * (num_heads * b.bytes_per_head),
    )


def _table(tables: BlockTables, buffer: BufferLayout, num_tokens: int, side: str) -> Int64Array:
    table = np.asarray(tables.get(buffer.attn_type, ()), np.int64)
    needed = -(-num_tokens // buffer.block_size)
    if len(table) < needed:
        raise ValueError(
            f"{side} block table of {buffer.attn_type} has {len(table)} blocks, {num_tokens} tokens need {needed}"
        )
    return table[:needed]


def _segments(first: int, end: int, block_size_a: int, block_size_b: int) -> tuple[Int64Array, Int64Array]:
    """First token and number of tokens of each segment of [first, end)."""
    starts = np.arange(first - first % block_size_a, end, block_size_a, dtype=np.int64)
    if block_size_a != block_size_b:
        starts = np.union1d(starts, np.arange(first - first % block_size_b, end, block_size_b, dtype=np.int64))
    starts = np.unique(np.maximum(starts, first))
    starts = starts[starts < end]  # an empty range has none
    return starts, np.diff(starts, append=end)


def _check_visible(buffer: BufferLayout, token: Int64Array, num: Int64Array, lost: np.ndarray, end: int) -> None:
    """The token at `end` sees all before it, or the last `sliding_window - 1` of them; none of these may be lost."""
    seen_from = max(0, end - buffer.sliding_window + 1) if buffer.sliding_window else 0
    lost = lost & (token + num > seen_from)
    if lost.any():
        raise ValueError(
            f"the source has no {buffer.attn_type} block for token {token[np.argmax(lost)]}, which token {end} sees"
        )


def _offset(buffer: BufferLayout, block: Int64Array, token: Int64Array, first_head: int) -> Int64Array:
    """Byte offset of (block, token, head) in a buffer."""
    return (
        block * buffer.bytes_per_block
        + token % buffer.block_size * buffer.bytes_per_token
        + (first_head - buffer.first_head) * buffer.bytes_per_head
    )


def _merge(src: Int64Array, dst: Int64Array, length: Int64Array) -> _Pieces:
    if not len(length):
        return _Pieces(src, dst, length)
    adjoins = (src[1:] == src[:-1] + length[:-1]) & (dst[1:] == dst[:-1] + length[:-1])
    starts = np.flatnonzero(np.concatenate(([True], ~adjoins)))
    return _Pieces(src[starts], dst[starts], np.add.reduceat(length, starts))


def _check_size(buffer: BufferLayout, offset: Int64Array, length: Int64Array, side: str) -> None:
    if len(offset) and (offset.min() < 0 or (offset + length).max() > buffer.num_bytes):
        raise ValueError(
            f"{side} block table of {buffer.attn_type} names a block that {buffer.place} does not have "
            f"(its blocks are 0 to {buffer.num_blocks - 1})"
        )


def _spread(pairs: list[tuple[int, int, _Pieces]]) -> Runs:
    """The pieces of every pair of buffers (source index, destination index, pieces), one after the other."""
    counts = [len(pieces.length) for _, _, pieces in pairs]

    def joined(arrays: list[Int64Array]) -> Int64Array:
        return np.concatenate(arrays) if arrays else np.empty(0, np.int64)

    return Runs(
        src_buffer=np.repeat(np.array([src for src, _, _ in pairs], np.int64), counts),
        src_offset=joined([pieces.src for _, _, pieces in pairs]),
        dst_buffer=np.repeat(np.array([dst for _, dst, _ in pairs], np.int64), counts),
        dst_offset=joined([pieces.dst for _, _, pieces in pairs]),
        length=joined([pieces.length for _, _, pieces in pairs]),
    )
