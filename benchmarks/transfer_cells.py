"""What the transfer benchmark moves: the caches of two models, and the byte runs of prompts between two of them.

Both engines hold half as many tokens again as the longest prompt, and a block. Contiguous tables are in order on both
sides; scattered ones are drawn from the whole cache on each. All systems move the same runs, given as offsets into one
region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transfer.layout import ITEM_BYTES, LAYOUT_VERSION, BufferLayout, EngineLayout
from transfer.plan import plan_read
from transfer.planes.base import Int64Array, Runs

ATTN_TYPE = "FullAttention"
TABLES = ("contiguous", "scattered")
ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`caches` of each layer are (name, heads, values per head)."""

    name: str
    num_layers: int
    caches: tuple[tuple[str, int, int], ...]
    dtype: str


MODELS = {
    "smollm2": Model(
        name="SmolLM2-135M", num_layers=30, caches=(("k_cache", 3, 64), ("v_cache", 3, 64)), dtype="float32"
    ),
    "mla": Model(
        name="MLA of DeepSeek's dimensions",
        num_layers=27,
        caches=(("nope_cache", 1, 512), ("rope_cache", 1, 64)),
        dtype="bfloat16",
    ),
}


def layout(model: Model, block_size: int, num_tokens: int) -> EngineLayout:
    """The cache of an engine that holds `num_tokens` tokens, the null block included."""
    buffers = tuple(
        BufferLayout(
            layer=layer,
            cache_name=name,
            attn_type=ATTN_TYPE,
            block_size=block_size,
            first_head=0,
            num_heads=heads,
            total_heads=heads,
            dim=dim,
            dtype=model.dtype,
            num_bytes=num_tokens * heads * dim * ITEM_BYTES[model.dtype],
        )
        for layer in range(model.num_layers)
        for name, heads, dim in model.caches
    )
    return EngineLayout(version=LAYOUT_VERSION, model=model.name, buffers=buffers)


def cache_tokens(longest_prompt: int, block_size: int) -> int:
    """How many tokens an engine's cache has room for, the null block included; a whole number of blocks."""
    return block_size * (-(-3 * longest_prompt // (2 * block_size)) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One prompt length and kind of block tables, with the runs between two engines of one layout."""

    num_tokens: int
    block_size: int
    tables: str
    runs: Runs


def cells(shape: EngineLayout, prompts: Sequence[int]) -> list[Cell]:
    """Every prompt with every kind of tables."""
    rng = np.random.default_rng(1)
    first = shape.buffers[0]
    ordered = np.arange(1, first.num_blocks)
    made = []
    for num_tokens in prompts:
        for kind in TABLES:
            ids = [ordered if kind == "contiguous" else rng.permutation(ordered) for _ in range(2)]
            source, dest = ({ATTN_TYPE: each.tolist()} for each in ids)
            runs = plan_read(shape, shape, source, dest, 0, num_tokens)
            made.append(Cell(num_tokens=num_tokens, block_size=first.block_size, tables=kind, runs=runs))
    return made


def flat(runs: Runs, src_starts: Int64Array, dst_starts: Int64Array) -> Int64Array:
    """[3, runs]: offsets in the source region, in the destination region, and lengths; `*_starts` are the buffers'."""
    src = src_starts[runs.src_buffer] + runs.src_offset
    dst = dst_starts[runs.dst_buffer] + runs.dst_offset
    return np.stack((src, dst, runs.length))


def erase(region: ByteArray, runs: Int64Array) -> None:
    """Zeroes the destination of flat runs."""
    for at, length in runs[1:].T.tolist():
        region[at : at + length] = 0


def first_wrong(source: ByteArray, dest: ByteArray, runs: Int64Array) -> int | None:
    """The first of these flat runs whose bytes did not arrive."""
    for i, (src, dst, length) in enumerate(runs.T.tolist()):
        if not np.array_equal(source[src : src + length], dest[dst : dst + length]):
            return i
    return None
