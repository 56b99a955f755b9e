"""What an engine's KV cache looks like, and why two of them cannot exchange it.

Values only. Two engines describe themselves, `compare` names every difference; an empty list means that bytes can move
between them unchanged. Buffers are known by (layer, cache name), never by their position in the list.
"""

from __future__ import annotations

from dataclasses import dataclass

LAYOUT_VERSION = 1

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

BufferKey = tuple[int, str]

# Must be equal for bytes to mean the same on both sides, whatever the reader does with them.
_MEANING = ("attn_type", "total_heads", "dim", "dtype", "sliding_window")
# `plan_read` can cut by block and by head; what surrounds it (which rank reads which heads from whom, block-wise
# prefix hits) takes equal ones only. Delete this line to let them differ.
_SAME_CUT = ("block_size", "first_head", "num_heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
    """One buffer, in memory [blocks, block_size, num_heads, dim] of `dtype`.

    It holds the heads [first_head, first_head + num_heads) of the model's `total_heads`. `dtype` is torch's name
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

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.place}: dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        for name, least in (("layer", 0), ("block_size", 1), ("first_head", 0), ("num_heads", 1), ("dim", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{self.place}: {name} must be at least {least}, given {getattr(self, name)}")
        if self.first_head + self.num_heads > self.total_heads:
            raise ValueError(
                f"{self.place}: heads {self.first_head} to {self.first_head + self.num_heads} do not lie in the "
                f"model's {self.total_heads}"
            )
        if self.num_bytes < 0 or self.num_bytes % self.bytes_per_block:
            raise ValueError(
                f"{self.place}: {self.num_bytes} bytes are not a whole number of blocks of {self.bytes_per_block}"
            )
        if self.sliding_window < 0:
            raise ValueError(f"{self.place}: sliding_window must not be negative, given {self.sliding_window}")

    @property
    def key(self) -> BufferKey:
        return self.layer, self.cache_name

    @property
    def place(self) -> str:
        return f"layer {self.layer} {self.cache_name}"

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
    """All buffers of one engine; a buffer's index here is its index on the data plane.

    `model` is the fingerprint of the model: architecture, sizes and the identity of the weights. Raises ValueError when
    two buffers share layer and cache name, or when buffers of one attention type differ in block size or window.
    """

    version: int
    model: str
    buffers: tuple[BufferLayout, ...]

    def __post_init__(self) -> None:
        seen: set[BufferKey] = set()
        cuts: dict[str, tuple[int, int]] = {}
        for b in self.buffers:
            if b.key in seen:
                raise ValueError(f"{b.place} is described twice")
            seen.add(b.key)
            cut = (b.block_size, b.sliding_window)
            if cuts.setdefault(b.attn_type, cut) != cut:
                raise ValueError(
                    f"{b.place}: {b.attn_type} has (block_size, sliding_window) {cut} here and "
                    f"{cuts[b.attn_type]} in another buffer; one block table cannot serve both"
                )

    def index_of(self) -> dict[BufferKey, int]:
        """Index of each buffer by (layer, cache name)."""
        return {b.key: i for i, b in enumerate(self.buffers)}


def compare(a: EngineLayout, b: EngineLayout) -> list[str]:
    """Every reason why KV cannot move between `a` and `b`, one line each with both values; empty when it can."""
    reasons = [
        f"{name} differs: {getattr(a, name)!r} and {getattr(b, name)!r}"
        for name in ("version", "model")
        if getattr(a, name) != getattr(b, name)
    ]
    left, right = ({x.key: x for x in side.buffers} for side in (a, b))
    for key in sorted(left.keys() | right.keys()):
        reasons += _compare_buffers(key, left.get(key), right.get(key))
    return reasons


def _compare_buffers(key: BufferKey, a: BufferLayout | None, b: BufferLayout | None) -> list[str]:
    layer, cache_name = key
    if a is None or b is None:
        present, absent = ("second", "first") if a is None else ("first", "second")
        return [f"layer {layer} {cache_name} is present in the {present} layout and missing in the {absent}"]
    return [
        f"layer {layer} {cache_name}: {name} differs: {getattr(a, name)!r} and {getattr(b, name)!r}"
        for name in (*_MEANING, *_SAME_CUT)
        if getattr(a, name) != getattr(b, name)
    ]
