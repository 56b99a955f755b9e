"""Laws of `transfer.planes.copying`: whatever patterns it finds or is told, the bytes are those of the runs."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plane_memory import apply, random_runs, runs_of

from transfer.planes import copying
from transfer.planes.base import Pattern, PatternRuns, PlaneError, Runs
from transfer.planes.copying import RunCopier

LEN = 600
NUM_BUFFERS = 6
LENS = (LEN, LEN, LEN, LEN, LEN, LEN - 100)
# Two series of three at equal distances, and one buffer between them that breaks them.
STARTS = (0, 700, 1400, 5000, 5650, 6300)


class Memory:
    def __init__(self, seed: int) -> None:
        self.bytes = np.random.default_rng(seed).integers(0, 256, 7000, dtype=np.uint8)
        self.arrays = [self.bytes[start : start + n] for start, n in zip(STARTS, LENS, strict=True)]
        self.ptrs = [array.ctypes.data for array in self.arrays]


def copier(source: Memory, dest: Memory) -> RunCopier:
    return RunCopier(source.ptrs, LENS, dest.ptrs, LENS)


def never() -> None:
    return


def check_copy(runs: Runs) -> None:
    source, dest, expected = Memory(1), Memory(2), Memory(2)
    apply(runs, source.arrays, expected.arrays)
    copier(source, dest).copy(runs, never)
    np.testing.assert_array_equal(dest.bytes, expected.bytes)


@st.composite
def patterns(draw: st.DrawFn) -> list[Pattern]:
    """Runs that fill cells of their own in a part of each buffer, at regular and at any places; both in any order.

    Each destination buffer stands in one pair.
    """
    order = draw(st.permutations(range(NUM_BUFFERS)))
    made, first = [], 0
    while first < NUM_BUFFERS:
        num = draw(st.integers(1, NUM_BUFFERS - first))
        sources = draw(st.lists(st.integers(0, NUM_BUFFERS - 1), min_size=num, max_size=num))
        width = draw(st.sampled_from([1, 2, 3, 16, 24, 64]))
        rng = np.random.default_rng(draw(st.integers(0, 1000)))
        cells = rng.permutation((LEN - 100) // width)[: draw(st.integers(0, 6))]
        if draw(st.booleans()):
            cells = np.arange(len(cells))
        step = draw(st.integers(0, width))
        length = draw(st.lists(st.integers(0, width), min_size=len(cells), max_size=len(cells)))
        is_even = draw(st.booleans())
        made.append(
            Pattern(
                pairs=np.array([sources, order[first : first + num]], np.int64).T,
                src_offset=np.arange(len(cells), dtype=np.int64)[:: draw(st.sampled_from([1, -1]))] * step,
                dst_offset=cells.astype(np.int64) * width,
                length=np.array([width if is_even else n for n in length], np.int64),
            )
        )
        first += num
    return made


def flat(runs: Runs) -> Runs:
    return Runs(**{field.name: getattr(runs, field.name) for field in fields(Runs)})


@given(patterns())
def test_patterns_told_and_patterns_found_copy_the_same_bytes(told: list[Pattern]) -> None:
    runs = PatternRuns.of(told)
    assert len(runs) == sum(len(p.pairs) * len(p.length) for p in told)
    check_copy(runs)
    check_copy(flat(runs))


@given(patterns(), st.sampled_from([7, 64, 100]))
def test_no_step_is_longer_than_the_limit_and_each_is_preceded_by_a_look(told: list[Pattern], limit: int) -> None:
    runs = PatternRuns.of(told)
    source, dest, expected = Memory(1), Memory(2), Memory(2)
    apply(runs, source.arrays, expected.arrays)
    seen, looks = [dest.bytes.copy()], []

    def look() -> None:
        looks.append(None)
        seen.append(dest.bytes.copy())
        assert np.count_nonzero(seen[-1] != seen[-2]) <= limit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "STEP_BYTES", limit)
        copier(source, dest).copy(runs, look)
    np.testing.assert_array_equal(dest.bytes, expected.bytes)
    assert len(looks) >= math.ceil(runs.num_bytes / limit)


def test_what_the_look_raises_ends_the_copy_at_once() -> None:
    source, dest = Memory(1), Memory(2)
    before = dest.bytes.copy()

    def stop() -> None:
        raise PlaneError("stop")

    with pytest.raises(PlaneError, match="stop"):
        copier(source, dest).copy(random_runs(1, 50, LENS), stop)
    np.testing.assert_array_equal(dest.bytes, before)


def pattern(pairs: list[tuple[int, int]], *runs: tuple[int, int, int]) -> Pattern:
    columns = np.array(runs, np.int64).T
    return Pattern(
        pairs=np.array(pairs, np.int64), src_offset=columns[0], dst_offset=columns[1], length=columns[2]
    )  # fmt: skip


GOOD = (0, 0, 8)
WRAPS = 2**63 - 1


@pytest.mark.parametrize(
    ("pairs", "runs"),
    [
        ([(0, 0), (6, 1)], [GOOD]),
        ([(0, 0), (1, -1)], [GOOD]),
        ([(0, 0), (5, 1)], [GOOD, (LEN - 8, 0, 8)]),  # fits the first pair's buffers, not the shorter one
        ([(0, 0), (1, 5)], [GOOD, (0, LEN - 8, 8)]),
        ([(0, 0)], [GOOD, (-1, 0, 8)]),
        ([(0, 0)], [GOOD, (0, -1, 8)]),
        ([(0, 0)], [GOOD, (0, 0, -8)]),
        ([(0, 0)], [GOOD, (0, 0, LEN + 1)]),
        ([(0, 0)], [GOOD, (WRAPS, 0, 8)]),
        ([(0, 0)], [(0, 0, 8), (-(2**63), 0, 8), (0, 0, 8)]),  # equal distances once they wrap
        ([(0, 0)], [(0, 0, 8), (0, -(2**63), 8), (0, 0, 8)]),
        ([(0, 0)], [GOOD, (0, WRAPS, WRAPS)]),
    ],
)
def test_one_run_outside_its_buffers_and_nothing_is_copied(
    pairs: list[tuple[int, int]], runs: list[tuple[int, int, int]]
) -> None:
    told = PatternRuns.of([pattern([(2, 2)], GOOD), pattern(pairs, *runs)])
    for wrong in (told, flat(told)):
        source, dest = Memory(1), Memory(2)
        before = dest.bytes.copy()
        with pytest.raises(PlaneError, match="of buffer"):
            copier(source, dest).copy(wrong, never)
        np.testing.assert_array_equal(dest.bytes, before)


def test_a_copier_remembers_a_bounded_number_of_pairs() -> None:
    source, dest = Memory(1), Memory(2)
    c = copier(source, dest)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        pairs = [(int(s), int(d)) for s, d in zip(rng.integers(0, 6, 4), rng.permutation(6)[:4], strict=True)]
        c.copy(PatternRuns.of([pattern(pairs, GOOD)]), never)
    assert 0 < len(c._series) <= copying._MOST_KEPT


def test_equal_distances_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three buffers at equal distances, two at another, and the shorter one; four runs at equal distances."""
    calls = []
    monkeypatch.setattr(RunCopier, "_copy", lambda self, c, check: calls.append(c.shape))
    source, dest = Memory(1), Memory(2)
    same = [(b, b) for b in range(NUM_BUFFERS)]
    runs = PatternRuns.of([pattern(same, *((100 * i, 90 * i, 50) for i in range(4)))])
    for one in (runs, flat(runs)):
        calls.clear()
        copier(source, dest).copy(one, never)
        assert calls == [(3, 4, 50), (2, 4, 50), (1, 4, 50)]


def test_runs_without_bytes_and_no_runs_copy_nothing() -> None:
    check_copy(runs_of())
    check_copy(PatternRuns.of([]))
    check_copy(PatternRuns.of([pattern([(0, 0)], (LEN, LEN, 0))]))
