"""Laws of `transfer.plan`, against an oracle that copies one element after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kv_tiles import (
    FULL,
    POISON,
    SLIDING,
    Cache,
    Read,
    apply,
    copied_memory,
    empty_memory,
    filled_memory,
    reads,
    split,
    values_of,
)
from transfer.layout import EngineLayout
from transfer.plan import ReadPlan, ReadPlanner, RunStats, plan_read
from transfer.planes.base import Runs


def planned(read: Read, first: int | None = None, end: int | None = None) -> ReadPlan:
    planner = ReadPlanner(read.source, read.dest, read.rank)
    start, stop = read.first if first is None else first, read.end if end is None else end
    return planner.plan(read.source_tables, read.dest_tables, start, stop, read.resume)


def runs_of(plan: ReadPlan) -> list[tuple[int, int, int, int, int, int]]:
    """(source rank, source buffer, source offset, destination buffer, destination offset, length)"""
    return [
        (rank, *(int(x) for x in run))  # type: ignore[misc]
        for rank, r in plan.runs.items()
        for run in zip(r.src_buffer, r.src_offset, r.dst_buffer, r.dst_offset, r.length, strict=True)
    ]


@pytest.mark.parametrize("orders", list(product((False, True), repeat=2)))
@given(data=st.data())
def test_a_plan_moves_what_copying_element_by_element_moves_and_no_byte_twice(
    orders: tuple[bool, bool], data: st.DataObject
) -> None:
    read = data.draw(reads(orders))
    values = values_of(read.source, read.resume)
    source, got = filled_memory(read.source, read.source_tables, values), empty_memory(read.dest, POISON)
    wanted, num_bytes = copied_memory(read, values)
    plan = planned(read)
    for source_rank, runs in plan.runs.items():
        apply(runs, source_rank, source, read.rank, got)
    for place, memory in got.items():
        np.testing.assert_array_equal(memory, wanted[place])
    assert plan.num_bytes == num_bytes


@given(reads())
def test_runs_are_as_few_as_can_be_and_not_empty(read: Read) -> None:
    runs = runs_of(planned(read))
    starts = {(rank, sb, so, db, do) for rank, sb, so, db, do, _ in runs}
    ends = {(rank, sb, so + n, db, do + n) for rank, sb, so, db, do, n in runs}
    assert not starts & ends
    assert all(length > 0 for *_, length in runs)


@given(reads(), st.lists(st.integers(0, 23)))
def test_chunks_move_together_what_one_read_moves(read: Read, cuts: list[int]) -> None:
    values = values_of(read.source, read.resume)
    source = filled_memory(read.source, read.source_tables, values)
    whole, chunked = (empty_memory(read.dest, POISON) for _ in range(2))
    bounds = sorted({read.first, read.end, *(cut for cut in cuts if read.first < cut < read.end)})
    plans = [planned(read, first, end) for first, end in pairwise(bounds)]
    for memory, made in ((whole, [planned(read)]), (chunked, plans)):
        for plan in made:
            for rank, runs in plan.runs.items():
                apply(runs, rank, source, read.rank, memory)
    assert sum(plan.num_bytes for plan in plans) == planned(read).num_bytes
    for place, memory in whole.items():
        np.testing.assert_array_equal(memory, chunked[place])


@given(reads())
def test_each_attention_type_can_be_read_by_itself_without_the_tables_of_others(read: Read) -> None:
    planner = ReadPlanner(read.source, read.dest, read.rank)
    moved = []
    for attn_type in {buffer.attn_type for buffer in read.dest.buffers}:
        tables = [
            {key: table[key] for key in table if key == attn_type} for table in (read.source_tables, read.dest_tables)
        ]
        moved += runs_of(planner.plan(*tables, {attn_type: read.first}, read.end, read.resume))
    assert sorted(moved) == sorted(runs_of(planned(read)))


@given(reads())
def test_the_report_counts_the_runs_of_each_source_rank(read: Read) -> None:
    plan = planned(read)
    lengths: dict[int, list[int]] = {rank: [] for rank in ReadPlanner(read.source, read.dest, read.rank).source_ranks}
    for rank, *_, length in runs_of(plan):
        lengths[rank].append(length)
    assert plan.stats() == {
        rank: RunStats(num_runs=len(of), num_bytes=sum(of), largest_run=max(of, default=0))
        for rank, of in lengths.items()
    }
    for rank, of in lengths.items():
        assert plan.stats()[rank].mean_run == pytest.approx(np.mean(of) if of else 0.0)


def one_buffer(num_blocks: int = 20, block_size: int = 4) -> EngineLayout:
    """32 bytes per block of 4 tokens."""
    return split([Cache("k", FULL, 2, (0,))], [((0,), 1)], num_blocks=num_blocks, block_size=block_size)


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
    source_table, dest_table = [9, 3, 7, 1], [2, 4, 6, 8]
    runs = plan_read(one_buffer(), one_buffer(), {FULL: source_table}, {FULL: dest_table}, hit, 16)
    moved = set(zip((runs.src_offset // 32).tolist(), (runs.dst_offset // 32).tolist(), strict=True))
    assert moved == set(zip(source_table[hit // 4 :], dest_table[hit // 4 :], strict=True))
    assert runs.length.tolist() == [32] * len(moved)


@pytest.mark.parametrize("is_descending", [False, True])
def test_neighbours_on_both_sides_are_one_run_in_either_order(is_descending: bool) -> None:
    tables = [list(reversed(t)) if is_descending else t for t in ([3, 4, 5, 9], [7, 8, 9, 10])]
    runs = plan_read(one_buffer(), one_buffer(), {FULL: tables[0]}, {FULL: tables[1]}, 0, 16)
    assert sorted(runs.length.tolist()) == [32, 96]


@pytest.mark.parametrize(("source_size", "dest_size"), [(2, 16), (16, 2), (3, 8), (8, 3)])
def test_contiguous_blocks_of_any_sizes_are_one_run(source_size: int, dest_size: int) -> None:
    layouts = [one_buffer(num_blocks=49 // size + 3, block_size=size) for size in (source_size, dest_size)]
    tables = [{FULL: list(range(1, 49 // size + 2))} for size in (source_size, dest_size)]
    runs = plan_read(*layouts, *tables, 0, 48)
    assert runs.length.tolist() == [48 * 8]


@pytest.mark.parametrize(("is_heads_first", "num_runs"), [(True, 3), (False, 12)])
def test_half_of_the_heads_are_a_run_per_block_or_per_token_as_they_lie(is_heads_first: bool, num_runs: int) -> None:
    cache = [Cache("k", FULL, 2, (0,))]
    whole, halves = (split(cache, [((0,), size)], is_heads_first=is_heads_first) for size in (1, 2))
    stats = ReadPlanner(whole, halves, 1).plan({FULL: [1, 2, 3]}, {FULL: [1, 2, 3]}, 0, 12).stats()
    assert stats == {0: RunStats(num_runs=num_runs, num_bytes=48, largest_run=48 // num_runs)}


@pytest.mark.parametrize(
    ("source_table", "dest_table", "message"),
    [
        ([1, 2], [1, 2, 3], "source block table of FullAttention has 2 blocks, 9 tokens need 3"),
        ([1, 2, 3], [1], "destination block table of FullAttention has 1 blocks, 9 tokens need 3"),
        ([1, 2, 20], [1, 2, 3], "source block table of FullAttention names block 20, its blocks are 0 to 19"),
        ([1, 2**62, 3], [1, 2, 3], f"source block table of FullAttention names block {2**62}, its blocks are 0 to 19"),
        ([1, 2, 3], [1, -1, 3], "destination block table of FullAttention names block -1, its blocks are 0 to 19"),
        ([1, 0, 3], [1, 2, 3], "the source has no FullAttention block for token 7, which token 9 sees"),
    ],
)
def test_tables_that_cannot_serve_the_range_are_refused(
    source_table: list[int], dest_table: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_read(one_buffer(), one_buffer(), {FULL: source_table}, {FULL: dest_table}, 0, 9)


@pytest.mark.parametrize("resume", [12, 15])
@pytest.mark.parametrize("window", range(1, 14))
def test_a_block_the_window_still_sees_must_be_there(window: int, resume: int) -> None:
    layout = split([Cache("s", SLIDING, 2, (0,), window=window)], [((0,), 1)], num_blocks=20)

    def plan(table: Sequence[int]) -> ReadPlan:
        return ReadPlanner(layout, layout).plan({SLIDING: table}, {SLIDING: [1, 2, 3]}, 0, 12, resume)

    num_unseen = min(3, max(0, resume - window + 1) // 4)  # whole blocks before the window of the token at `resume`
    assert plan([0] * num_unseen + [9] * (3 - num_unseen)).num_bytes == (3 - num_unseen) * 32
    if num_unseen < 3:
        with pytest.raises(ValueError, match=f"which token {resume} sees"):
            plan([0] * (num_unseen + 1) + [9] * (2 - num_unseen))


def test_a_missing_table_is_a_table_without_blocks() -> None:
    with pytest.raises(ValueError, match="source block table of FullAttention has 0 blocks, 1 tokens need 1"):
        plan_read(one_buffer(), one_buffer(), {}, {FULL: [1]}, 0, 1)


@pytest.mark.parametrize(("first", "end", "resume"), [(-1, 4, 4), (5, 4, 4), (0, 4, 3)])
def test_a_range_that_is_none_is_refused(first: int, end: int, resume: int) -> None:
    planner = ReadPlanner(one_buffer(), one_buffer())
    with pytest.raises(ValueError, match="are not a range"):
        planner.plan({FULL: [1, 2]}, {FULL: [1, 2]}, first, end, resume)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_engines_of_several_ranks_have_no_single_list_of_runs(sizes: tuple[int, int]) -> None:
    layouts = [split([Cache("k", FULL, 2, (0,))], [((0,), size)]) for size in sizes]
    with pytest.raises(ValueError, match=f"engines of 1 rank are joined here, given {sizes[0]} and {sizes[1]} ranks"):
        plan_read(*layouts, {FULL: [1]}, {FULL: [1]}, 0, 1)


def test_engines_without_paged_caches_have_nothing_to_move() -> None:
    nothing = EngineLayout(version=2, model="m", buffers=())
    assert len(plan_read(nothing, nothing, {}, {}, 0, 5)) == 0
