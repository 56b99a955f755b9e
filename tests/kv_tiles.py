"""Engines split in every way, their memory filled by the meaning of each value, and a copy element by element.

A `Cache` is what the model has; an engine holds it in blocks of some size, in one order or the other, its heads and
layers divided among ranks. Tables are by attention type, memory by rank and index on the rank's data plane.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from hypothesis import strategies as st

from transfer.layout import ITEM_BYTES, BufferKey, BufferLayout, EngineLayout
from transfer.planes.base import Runs

FULL, SLIDING = "FullAttention", "SlidingWindow"
NOISE, POISON = 0xDD, 0xEE  # in the source where no token is; in the destination before it reads

Tables = dict[str, list[int]]
Memory = dict[tuple[int, int], np.ndarray]
Values = dict[BufferKey, np.ndarray]  # [tokens, heads, bytes per head]


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache of every layer in `layers`."""

    name: str
    attn_type: str
    num_heads: int
    layers: tuple[int, ...]
    dim: int = 2
    dtype: str = "int16"
    window: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """One destination rank's read. `resume` is the first token it computes itself."""

    source: EngineLayout
    dest: EngineLayout
    rank: int
    source_tables: Tables
    dest_tables: Tables
    first: int
    end: int
    resume: int


def heads_of(num_heads: int, size: int, part: int) -> tuple[int, int]:
    """First head and number of heads of one of `size` tensor-parallel parts; at least one head each."""
    first = part * num_heads // size
    return first, max(1, (part + 1) * num_heads // size - first)


def split(
    caches: Iterable[Cache],
    stages: Sequence[tuple[Sequence[int], int]],
    *,
    block_size: int = 4,
    num_blocks: int = 8,
    is_heads_first: bool = False,
) -> EngineLayout:
    """An engine whose pipeline stages are (layers, tensor-parallel size)."""
    buffers = []
    before = 0  # ranks of earlier stages
    for layers, size in stages:
        for part, cache in product(range(size), caches):
            first, num = heads_of(cache.num_heads, size, part)
            num_bytes = num_blocks * block_size * num * cache.dim * ITEM_BYTES[cache.dtype]
            buffers += [
                BufferLayout(
                    layer=layer, cache_name=cache.name, attn_type=cache.attn_type, block_size=block_size,
                    first_head=first, num_heads=num, total_heads=cache.num_heads, dim=cache.dim, dtype=cache.dtype,
                    num_bytes=num_bytes, sliding_window=cache.window, is_heads_first=is_heads_first, rank=before + part,
                )
                for layer in layers if layer in cache.layers
            ]  # fmt: skip
        before += size
    return EngineLayout(version=2, model="m", buffers=tuple(buffers))


def empty_memory(layout: EngineLayout, value: int) -> Memory:
    ranks = range(layout.num_ranks)
    return {
        (rank, i): np.full(b.num_bytes, value, np.uint8) for rank in ranks for i, b in enumerate(layout.of_rank(rank))
    }


def elements(memory: np.ndarray, b: BufferLayout) -> np.ndarray:
    """A view [blocks, block_size, heads, bytes per head], whatever the order in memory."""
    if b.is_heads_first:
        return memory.reshape(-1, b.num_heads, b.block_size, b.bytes_per_head).transpose(0, 2, 1, 3)
    return memory.reshape(-1, b.block_size, b.num_heads, b.bytes_per_head)


def values_of(layout: EngineLayout, num_tokens: int) -> Values:
    rng = np.random.default_rng(0)
    return {
        b.key: rng.integers(0, 200, (num_tokens, b.total_heads, b.bytes_per_head), np.uint8) for b in layout.buffers
    }


def filled_memory(layout: EngineLayout, tables: Tables, values: Values) -> Memory:
    """What the ranks hold once every token with a block is computed; copies of a head are equal."""
    memory = empty_memory(layout, NOISE)
    for rank in range(layout.num_ranks):
        for i, b in enumerate(layout.of_rank(rank)):
            for token, value in enumerate(values[b.key]):
                block = tables[b.attn_type][token // b.block_size]
                if block:
                    elements(memory[rank, i], b)[block, token % b.block_size] = value[b.first_head : b.end_head]
    return memory


def copied_memory(read: Read, values: Values) -> tuple[Memory, int]:
    """The destination's memory after its rank got, one by one, every value that both sides have a block for, and the
    number of bytes that took."""
    memory = empty_memory(read.dest, POISON)
    block_sizes = {b.attn_type: b.block_size for b in read.source.buffers}
    num_bytes = 0
    for i, b in enumerate(read.dest.of_rank(read.rank)):
        for token, head in product(range(read.first, read.end), range(b.first_head, b.end_head)):
            block = read.dest_tables[b.attn_type][token // b.block_size]
            if block and read.source_tables[b.attn_type][token // block_sizes[b.attn_type]]:
                place = block, token % b.block_size, head - b.first_head
                elements(memory[read.rank, i], b)[place] = values[b.key][token, head]
                num_bytes += b.bytes_per_head
    return memory, num_bytes


def apply(runs: Runs, source_rank: int, source: Memory, dest_rank: int, dest: Memory) -> None:
    for sb, so, db, do, n in zip(
        runs.src_buffer, runs.src_offset, runs.dst_buffer, runs.dst_offset, runs.length, strict=True
    ):
        dest[dest_rank, db][do : do + n] = source[source_rank, sb][so : so + n]


def new_table(draw: st.DrawFn, num_blocks: int, num_null: int, needed: int) -> list[int]:
    """Null blocks, then distinct ones in any order, a few more than needed."""
    ids = draw(st.permutations(range(1, num_blocks)) | st.just(list(range(1, num_blocks))))
    return [0] * num_null + list(ids[num_null : needed + draw(st.integers(0, 2))])


@st.composite
def engines(
    draw: st.DrawFn, caches: Sequence[Cache], num_tokens: int, block_size: int, is_heads_first: bool
) -> EngineLayout:
    """Holds all caches for `num_tokens` tokens, split among ranks in any way, its buffers in any order."""
    layers = sorted({layer for cache in caches for layer in cache.layers})
    border = draw(st.integers(1, len(layers)))
    parts = [part for part in (layers[:border], layers[border:]) if part]
    made = split(
        caches,
        [(part, draw(st.sampled_from([1, 1, 2, 3, 4, 8]))) for part in parts],
        block_size=block_size,
        num_blocks=-(-num_tokens // block_size) + 4,
        is_heads_first=is_heads_first,
    )
    return EngineLayout(version=2, model="m", buffers=tuple(draw(st.permutations(made.buffers))))


@st.composite
def reads(draw: st.DrawFn, orders: tuple[bool, bool] | None = None) -> Read:
    """Grouped, windowed and latent caches, engines in any cut, any token range, null blocks where a window allows.

    `orders` says for source and destination whether heads come first in memory; None: any.
    """
    first, end, resume = sorted(draw(st.lists(st.integers(0, 23), min_size=3, max_size=3)))
    window = draw(st.integers(1, 8))
    num_heads = draw(st.sampled_from([1, 2, 3, 4]))
    caches = [
        Cache("k", FULL, num_heads, (0, 2, 10)),
        Cache("latent", FULL, 1, (2, 10), dim=3, dtype="int8"),
        Cache("window", SLIDING, num_heads, (2, 3), window=window),
    ]
    sizes = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)) | st.integers(1, 5).map(lambda size: (size, size)))
    orders = orders or draw(st.tuples(st.booleans(), st.booleans()))
    layouts = [draw(engines(caches, resume, *cut)) for cut in zip(sizes, orders, strict=True)]
    tables: list[Tables] = []
    for block_size, layout in zip(sizes, layouts, strict=True):
        needed, num_blocks = -(-resume // block_size), layout.buffers[0].num_blocks
        num_null = draw(st.integers(0, max(0, resume - window + 1) // block_size))
        tables.append(
            {FULL: new_table(draw, num_blocks, 0, needed), SLIDING: new_table(draw, num_blocks, num_null, needed)}
        )
    rank = draw(st.integers(0, layouts[1].num_ranks - 1))
    return Read(layouts[0], layouts[1], rank, tables[0], tables[1], first, end, resume)
