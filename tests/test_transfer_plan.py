"""Laws of `transfer.plan`, against an oracle that copies one element after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.layout import ITEM_BYTES, BufferLayout, EngineLayout
from transfer.plan import plan_read
from transfer.planes.base import Runs

FULL, SLIDING = "FullAttention", "SlidingWindow"
POISON = 0xEE


def buffer(layer: int, name: str, attn_type: str, block_size: int, heads: tuple[int, int], num_blocks: int,
           dim: int = 2, dtype: str = "int16", window: int = 0) -> BufferLayout:  # fmt: skip
    first, num = heads
    return BufferLayout(
        layer=layer, cache_name=name, attn_type=attn_type, block_size=block_size, first_head=first, num_heads=num,
        total_heads=8, dim=dim, dtype=dtype, sliding_window=window,
        num_bytes=num_blocks * block_size * num * dim * ITEM_BYTES[dtype],
    )  # fmt: skip


def engine(*buffers: BufferLayout) -> EngineLayout:
    return EngineLayout(version=1, model="m", buffers=buffers)


def apply(runs: Runs, source: list[np.ndarray], dest: list[np.ndarray]) -> None:
    for sb, so, db, do, n in zip(
        runs.src_buffer, runs.src_offset, runs.dst_buffer, runs.dst_offset, runs.length, strict=True
    ):
        dest[db][do : do + n] = source[sb][so : so + n]


def elements(memory: np.ndarray, b: BufferLayout) -> np.ndarray:
    """[blocks, block_size, heads, bytes per head]"""
    return memory.reshape(-1, b.block_size, b.num_heads, b.bytes_per_head)


Tables = dict[str, list[int]]
Memory = list[np.ndarray]


def oracle(
    source: EngineLayout,
    dest: EngineLayout,
    src: Memory,
    dst: Memory,
    src_tables: Tables,
    dst_tables: Tables,
    first: int,
    end: int,
) -> None:
    """Element by element: token by token and head by head through both tables."""
    by_key = {b.key: (b, memory) for b, memory in zip(source.buffers, src, strict=True)}
    for b, memory in zip(dest.buffers, dst, strict=True):
        a, a_memory = by_key[b.key]
        for token in range(first, end):
            src_block = src_tables[a.attn_type][token // a.block_size]
            dst_block = dst_tables[b.attn_type][token // b.block_size]
            if not src_block or not dst_block:
                continue
            for head in range(
                max(a.first_head, b.first_head), min(a.first_head + a.num_heads, b.first_head + b.num_heads)
            ):
                elements(memory, b)[dst_block, token % b.block_size, head - b.first_head] = elements(a_memory, a)[
                    src_block, token % a.block_size, head - a.first_head
                ]


def tables(draw: st.DrawFn, num_blocks: int, needed: int, num_null: int) -> list[int]:
    ids = draw(st.permutations(range(1, num_blocks)))
    return [0] * num_null + list(ids[num_null : needed + draw(st.integers(0, 2))])


@st.composite
def reads(draw: st.DrawFn) -> tuple[EngineLayout, EngineLayout, dict[str, list[int]], dict[str, list[int]], int, int]:
    """Two engines with buffers in different order, two attention types, and any block sizes and head ranges."""
    end = draw(st.integers(0, 23))
    first = draw(st.integers(0, end))
    window = draw(st.integers(1, 8))
    names = [(layer, name, attn) for layer in (0, 2, 10) for name, attn in (("k", FULL), ("s", SLIDING))]
    sides, all_tables = [], []
    is_equal = draw(st.booleans())
    cut = (draw(st.sampled_from([1, 2, 4])), (draw(st.integers(0, 2)), draw(st.integers(1, 2))))
    for _ in range(2):
        block_size, heads = cut if is_equal else (
            draw(st.sampled_from([1, 2, 3, 4])), (draw(st.integers(0, 2)), draw(st.integers(1, 3)))
        )  # fmt: skip
        needed = -(-end // block_size)
        num_blocks = needed + 4
        order = draw(st.permutations(names))
        sides.append(
            engine(*(buffer(la, n, t, block_size, heads, num_blocks, window=window if t == SLIDING else 0)
                     for la, n, t in order))
        )  # fmt: skip
        unseen = max(0, end - window + 1) // block_size
        sliding_null = draw(st.integers(0, unseen))
        all_tables.append(
            {FULL: tables(draw, num_blocks, needed, 0), SLIDING: tables(draw, num_blocks, needed, sliding_null)}
        )
    return sides[0], sides[1], all_tables[0], all_tables[1], first, end


@given(reads())
def test_a_plan_moves_what_copying_element_by_element_moves(read: tuple) -> None:
    source, dest, src_tables, dst_tables, first, end = read
    rng = np.random.default_rng(0)
    src = [rng.integers(0, 200, b.num_bytes, dtype=np.uint8) for b in source.buffers]
    planned, wanted = ([np.full(b.num_bytes, POISON, np.uint8) for b in dest.buffers] for _ in range(2))
    oracle(source, dest, src, wanted, src_tables, dst_tables, first, end)
    apply(plan_read(source, dest, src_tables, dst_tables, first, end), src, planned)
    for got, want in zip(planned, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


@given(reads())
def test_runs_are_maximal_and_not_empty(read: tuple) -> None:
    runs = plan_read(*read)
    assert (runs.length > 0).all()
    same = (np.diff(runs.src_buffer) == 0) & (np.diff(runs.dst_buffer) == 0)
    adjoins = (np.diff(runs.src_offset) == runs.length[:-1]) & (np.diff(runs.dst_offset) == runs.length[:-1])
    assert not (same & adjoins).any()


def one_buffer(num_blocks: int = 20) -> EngineLayout:
    return engine(buffer(0, "k", FULL, 4, (0, 2), num_blocks))


def blocks_touched(runs: Runs) -> set[int]:
    last = (runs.dst_offset + runs.length - 1) // 32
    return {b for f, e in zip(runs.dst_offset // 32, last, strict=True) for b in range(f, e + 1)}


@pytest.mark.parametrize("num_tokens", range(1, 18))
def test_exactly_the_needed_blocks_move_whatever_is_spare(num_tokens: int) -> None:
    rng = np.random.default_rng(num_tokens)
    source_table, dest_table = rng.permutation(np.arange(1, 20)), rng.permutation(np.arange(1, 20))
    needed = -(-num_tokens // 4)
    for spare_source, spare_dest in ((0, 0), (0, 3), (3, 0), (5, 2)):
        runs = plan_read(one_buffer(), one_buffer(), {FULL: source_table[: needed + spare_source].tolist()},
                         {FULL: dest_table[: needed + spare_dest].tolist()}, 0, num_tokens)  # fmt: skip
        assert blocks_touched(runs) == set(dest_table[:needed].tolist())
        assert runs.num_bytes == num_tokens * 8


@pytest.mark.parametrize("hit", [0, 4, 8, 12, 16])
def test_a_prefix_hit_moves_the_rest_by_logical_index(hit: int) -> None:
    runs = plan_read(one_buffer(), one_buffer(), {FULL: [9, 3, 7, 1]}, {FULL: [2, 4, 6, 8]}, hit, 16)
    assert runs.src_offset.tolist() == [block * 32 for block in [9, 3, 7, 1][hit // 4 :]]
    assert runs.dst_offset.tolist() == [block * 32 for block in [2, 4, 6, 8][hit // 4 :]]


def test_neighbours_on_both_sides_are_one_run() -> None:
    runs = plan_read(one_buffer(), one_buffer(), {FULL: [3, 4, 5, 9]}, {FULL: [7, 8, 9, 10]}, 0, 16)
    assert runs.length.tolist() == [96, 32]


def test_buffers_are_paired_by_name_not_by_order() -> None:
    names = [(layer, name) for layer in range(12) for name in ("k", "v")]
    source = engine(*(buffer(layer, name, FULL, 4, (0, 2), 4) for layer, name in names))
    dest = engine(*(buffer(layer, name, FULL, 4, (0, 2), 4) for layer, name in sorted(names, key=str)))
    runs = plan_read(source, dest, {FULL: [1]}, {FULL: [2]}, 0, 4)
    for src, dst in zip(runs.src_buffer, runs.dst_buffer, strict=True):
        assert source.buffers[src].key == dest.buffers[dst].key


@pytest.mark.parametrize(
    ("source_table", "dest_table", "message"),
    [
        ([1, 2], [1, 2, 3], "source block table of FullAttention has 2 blocks, 9 tokens need 3"),
        ([1, 2, 3], [1], "destination block table of FullAttention has 1 blocks, 9 tokens need 3"),
        ([1, 2, 20], [1, 2, 3], "source block table of FullAttention names a block that layer 0 k does not have"),
        ([1, 2, 3], [1, -1, 3], "destination block table of FullAttention names a block that layer 0 k does not have"),
        ([1, 0, 3], [1, 2, 3], "the source has no FullAttention block for token 4, which token 9 sees"),
    ],
)
def test_tables_that_cannot_serve_the_range_are_refused(
    source_table: list[int], dest_table: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_read(one_buffer(), one_buffer(), {FULL: source_table}, {FULL: dest_table}, 0, 9)


@pytest.mark.parametrize("window", range(1, 14))
def test_a_block_the_window_still_sees_must_be_there(window: int) -> None:
    layout = engine(buffer(0, "s", SLIDING, 4, (0, 2), 20, window=window))

    def plan(table: Sequence[int]) -> Runs:
        return plan_read(layout, layout, {SLIDING: table}, {SLIDING: [1, 2, 3]}, 0, 12)

    num_unseen = max(0, 12 - window + 1) // 4  # whole blocks before the window of the token at position 12
    assert plan([0] * num_unseen + [9] * (3 - num_unseen)).num_bytes == (3 - num_unseen) * 32
    if num_unseen < 3:
        with pytest.raises(ValueError, match="which token 12 sees"):
            plan([0] * (num_unseen + 1) + [9] * (2 - num_unseen))


def test_a_missing_table_is_a_table_without_blocks() -> None:
    with pytest.raises(ValueError, match="source block table of FullAttention has 0 blocks, 1 tokens need 1"):
        plan_read(one_buffer(), one_buffer(), {}, {FULL: [1]}, 0, 1)


def test_a_buffer_the_source_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="layer 5 k is missing in the source"):
        plan_read(one_buffer(), engine(buffer(5, "k", FULL, 4, (0, 2), 4)), {FULL: [1]}, {FULL: [1]}, 0, 1)


@pytest.mark.parametrize(("first", "end"), [(-1, 4), (5, 4)])
def test_a_range_that_is_none_is_refused(first: int, end: int) -> None:
    with pytest.raises(ValueError, match="are not a range"):
        plan_read(one_buffer(), one_buffer(), {FULL: [1, 2]}, {FULL: [1, 2]}, first, end)
