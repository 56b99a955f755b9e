"""What an engine's KV cache looks like, and why two of them cannot exchange it.

Values only. Two engines describe themselves, `compare` names every difference; an empty list means that bytes can move
between them unchanged. A cache is known by (layer, cache name), never by its position in a list.

A rank is one worker of an engine with memory of its own: ranks count from 0 without a gap, over all hosts, all pipeline
stages and all tensor-parallel parts of the engine. A reader's rank names a holder's rank by that number and the
incarnation of the holder's engine; which ranks it reads from follows from the two layouts (see `transfer.pairing`), so
neither side tells the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

LAYOUT_VERSION = 2

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}
MAX_BYTES = 2**62  # so that every offset into a buffer, and the sum of two, is an int64

BufferKey = tuple[int, str]

# Must be equal for bytes to mean the same on both sides, whatever the reader does with them.
_MEANING = ("attn_type", "total_heads", "dim", "dtype", "sliding_window")
# A plan can cut by any block size. What surrounds it cannot: where the reader's size does not divide the holder's, a
# block at a window's edge is filled in part, and the reader's prefix cache would take it for a whole one.
_SAME_CUT = ("block_size",)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
    """One buffer of one rank, in memory [blocks, block_size, num_heads, dim] of `dtype`.

    With `is_heads_first` it is [blocks, num_heads, block_size, dim]. It holds the heads [first_head, first_head +
    num_heads) of the model's `total_heads`: at least one, so several ranks may hold the same. `dtype` is torch's name
    without prefix. `sliding_window` is in tokens, the current one included; 0: none. `num_bytes` is a whole number of
    blocks. Raises ValueError naming the field, since a description may come from another process.
    """

    layer: int
    cache_name: str
    attn_type: str
    block_size: int
    first_head: int
    num_heads: int
    total_heads: int
    dim: int
    dtype: str
    num_bytes: int
    sliding_window: int = 0
    is_heads_first: bool = False
    rank: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.place}: dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        for name, least in (
            ("layer", 0), ("block_size", 1), ("first_head", 0), ("num_heads", 1), ("dim", 1), ("rank", 0)
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{self.place}: {name} must be at least {least}, given {getattr(self, name)}")
        if self.end_head > self.total_heads:
            raise ValueError(
                f"{self.place}: heads {self.first_head} to {self.end_head} do not lie in the model's {self.total_heads}"
            )
        if self.num_bytes < 0 or self.num_bytes % self.bytes_per_block:
            raise ValueError(
                f"{self.place}: {self.num_bytes} bytes are not a whole number of blocks of {self.bytes_per_block}"
            )
        if max(self.num_bytes, self.bytes_per_block) > MAX_BYTES:
            raise ValueError(f"{self.place}: num_bytes and bytes per block must be at most {MAX_BYTES}")
        if self.sliding_window < 0:
            raise ValueError(f"{self.place}: sliding_window must not be negative, given {self.sliding_window}")

    @property
    def key(self) -> BufferKey:
        return self.layer, self.cache_name

    @property
    def place(self) -> str:
        return f"layer {self.layer} {self.cache_name}"

    @property
    def end_head(self) -> int:
        return self.first_head + self.num_heads

    @property
    def bytes_per_head(self) -> int:
        """Of one token."""
        return self.dim * ITEM_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        return self.num_heads * self.bytes_per_head

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token

    @property
    def num_blocks(self) -> int:
        """The null block included."""
        return self.num_bytes // self.bytes_per_block


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """All buffers of one engine, of all its ranks; a buffer's place among those of its rank is its index on that
    rank's data plane.

    `model` is the fingerprint of the model: architecture, sizes and the identity of the weights. All ranks use the same
    block ids. Raises ValueError when one rank has two buffers of a layer and cache name, when two ranks disagree on
    what such a cache is, when buffers of one attention type differ in block size or window, and when a rank below the
    highest has no buffer.
    """

    version: int
    model: str
    buffers: tuple[BufferLayout, ...]

    def __post_init__(self) -> None:
        seen: set[tuple[int, BufferKey]] = set()
        first_of: dict[BufferKey, BufferLayout] = {}
        cuts: dict[str, tuple[int, int]] = {}
        for b in self.buffers:
            if (b.rank, b.key) in seen:
                raise ValueError(f"{b.place} is described twice for rank {b.rank}")
            seen.add((b.rank, b.key))
            first = first_of.setdefault(b.key, b)
            if reasons := differing(first, b):
                raise ValueError(f"ranks {first.rank} and {b.rank} disagree: {'; '.join(reasons)}")
            cut = (b.block_size, b.sliding_window)
            if cuts.setdefault(b.attn_type, cut) != cut:
                raise ValueError(
                    f"{b.place}: {b.attn_type} has (block_size, sliding_window) {cut} here and "
                    f"{cuts[b.attn_type]} in another buffer; one block table cannot serve both"
                )
        ranks = {rank for rank, _ in seen}
        if ranks and max(ranks) >= len(ranks):
            raise ValueError(f"ranks must count from 0 without a gap, given {sorted(ranks)}")

    @property
    def num_ranks(self) -> int:
        return 1 + max((b.rank for b in self.buffers), default=0)

    def of_rank(self, rank: int) -> list[BufferLayout]:
        """The buffers of one rank, by their index on its data plane. Raises ValueError for a rank that is none."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is not one of 0 to {self.num_ranks - 1}")
        return [b for b in self.buffers if b.rank == rank]

    def index_of(self) -> dict[tuple[int, BufferKey], int]:
        """Index of each buffer on its rank's data plane, by rank and (layer, cache name)."""
        index: dict[tuple[int, BufferKey], int] = {}
        num_of: Counter[int] = Counter()
        for b in self.buffers:
            index[b.rank, b.key] = num_of[b.rank]
            num_of[b.rank] += 1
        return index

    def by_key(self) -> dict[BufferKey, list[BufferLayout]]:
        """What the ranks hold of each cache, in the order of ranks."""
        held: dict[BufferKey, list[BufferLayout]] = {}
        for b in sorted(self.buffers, key=lambda one: one.rank):
            held.setdefault(b.key, []).append(b)
        return held


def differing(a: BufferLayout, b: BufferLayout) -> list[str]:
    """Every reason why a value of this cache does not mean the same in `a` and in `b`, with both values."""
    return _named(a, b, _MEANING)


def compare(a: EngineLayout, b: EngineLayout) -> list[str]:
    """Every reason why KV cannot move between `a` and `b`, one line each with both values; empty when it can.

    Numbers of ranks and of blocks, heads per rank, layers per rank, order of buffers and order in memory are none.
    """
    reasons = [
        f"{name} differs: {getattr(a, name)!r} and {getattr(b, name)!r}"
        for name in ("version", "model")
        if getattr(a, name) != getattr(b, name)
    ]
    left, right = a.by_key(), b.by_key()
    for key in sorted(left.keys() | right.keys()):
        reasons += _compare_held(key, left.get(key, []), right.get(key, []))
    return reasons


def _compare_held(key: BufferKey, a: list[BufferLayout], b: list[BufferLayout]) -> list[str]:
    layer, cache_name = key
    if not a or not b:
        present, absent = ("first", "second") if a else ("second", "first")
        return [f"layer {layer} {cache_name} is present in the {present} layout and missing in the {absent}"]
    reasons = _named(a[0], b[0], (*_MEANING, *_SAME_CUT))
    if _heads_of(a) != _heads_of(b):
        reasons.append(f"layer {layer} {cache_name}: heads held by all ranks differ: {_heads_of(a)} and {_heads_of(b)}")
    return reasons


def _named(a: BufferLayout, b: BufferLayout, fields: Iterable[str]) -> list[str]:
    return [
        f"{a.place}: {name} differs: {getattr(a, name)!r} and {getattr(b, name)!r}"
        for name in fields
        if getattr(a, name) != getattr(b, name)
    ]


def _heads_of(buffers: list[BufferLayout]) -> str:
    """The heads that at least one of them holds."""
    spans: list[tuple[int, int]] = []
    for b in sorted(buffers, key=lambda one: one.first_head):
        if spans and b.first_head <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], b.end_head))
        else:
            spans.append((b.first_head, b.end_head))
    return ", ".join(f"{first} to {end - 1}" for first, end in spans)
