"""Copies byte runs between two memories of this process, once, with Python's lock released while bytes move.

A paged cache repeats one pattern of runs in many buffers, and a pattern often has equal distances too. What lies at
equal distances on both sides is copied by one call, as rows of rows:

    buffer 0   ..[run]..[run]......          ...[run].[run].....
    buffer 1   ..[run]..[run]......   ───►   ...[run].[run].....      one call
    buffer 2   ..[run]..[run]......          ...[run].[run].....

so that scattered blocks of 12 KiB cost one interpreter round (and one fight for the lock) per one or two blocks instead
of one per block and buffer. A copy of few bytes is short beside what Python needs to find its way, so as little as can
be is done for each read: plans tell their patterns, and which buffers lie at equal distances is found once.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transfer.planes.base import Int64Array, Pattern, PatternRuns, Runs, check_destination, check_source

STEP_BYTES = 16 * 2**20  # most bytes between two looks at deadline and closing: a few milliseconds
_MOST_KEPT = 256  # lists of pairs whose series are remembered; the plans of one peer have a handful

# numpy moves a row of these by one memmove; of single bytes by a loop of its own, at half the speed from the L2 cache.
_ITEM_BYTES = 64
_ITEMS = {width: np.dtype((np.void, width)) for width in (1, 2, 4, 8, 16, 32, 64)}


class _Outside(Exception):
    """Some run does not lie inside its buffers."""


class _Series(NamedTuple):
    """`num` pairs of buffers of equal sizes at equal distances, in bytes; `src` and `dst` are the first addresses."""

    src: int
    dst: int
    src_step: int
    dst_step: int
    src_len: int
    dst_len: int
    num: int


class _Copy(NamedTuple):
    """[buffers, runs, bytes] from `src` to `dst`, with the distances of buffers and of runs on each side."""

    src: int
    dst: int
    shape: tuple[int, int, int]
    src_steps: tuple[int, int]
    dst_steps: tuple[int, int]


class Span:
    """The address range that several buffers lie in, as one object numpy can look into; holes are never touched."""

    def __init__(self, ptrs: Sequence[int], lens: Sequence[int]) -> None:
        self._start = min(ptrs, default=0)
        end = max((ptr + size for ptr, size in zip(ptrs, lens, strict=True)), default=0)
        self._memory = memoryview((ctypes.c_ubyte * (end - self._start)).from_address(self._start))

    def rows(self, address: int, shape: tuple[int, int, int], steps: tuple[int, int]) -> np.ndarray:
        """[buffers, runs, bytes], the last in items. numpy refuses, with ValueError, what lies outside the span."""
        buffers, runs, length = shape
        width = math.gcd(length, _ITEM_BYTES)
        return np.ndarray(
            (buffers, runs, length // width), _ITEMS[width], self._memory, address - self._start, (*steps, width)
        )


class RunCopier:
    """Copies between buffers at fixed addresses; lengths of buffers in bytes. Safe to use from several threads."""

    def __init__(self, src_ptrs: Sequence[int], src_lens: Sequence[int], dst_ptrs: Sequence[int],
                 dst_lens: Sequence[int]) -> None:  # fmt: skip
        self._src_ptrs, self._dst_ptrs = np.array(src_ptrs, np.int64), np.array(dst_ptrs, np.int64)
        self._src_lens, self._dst_lens = np.array(src_lens, np.int64), np.array(dst_lens, np.int64)
        self._src, self._dst = Span(src_ptrs, src_lens), Span(dst_ptrs, dst_lens)
        self._series: dict[bytes, list[_Series]] = {}

    def copy(self, runs: Runs, check: Callable[[], None]) -> None:
        """Calls `check` before each step; what it raises ends the copy.

        Raises PlaneError, and has copied nothing, when a run does not lie inside its buffers.
        """
        patterns = runs.patterns if isinstance(runs, PatternRuns) else _patterns(runs)
        try:
            copies = [c for p in patterns for series in self._series_of(p.pairs) for c in _copies(p, series)]
        except _Outside:
            check_source(runs, self._src_lens)
            check_destination(runs, self._dst_lens)
            raise
        for one in copies:
            self._copy(one, check)

    def _copy(self, c: _Copy, check: Callable[[], None]) -> None:
        """Cut so that no step is longer than STEP_BYTES."""
        buffers, runs, length = c.shape
        width = min(length, STEP_BYTES)
        most_runs = max(1, min(runs, STEP_BYTES // max(1, width)))
        most_buffers = max(1, STEP_BYTES // max(1, most_runs * width))
        for b in range(0, buffers, most_buffers):
            for r in range(0, runs, most_runs):
                for first in range(0, length, STEP_BYTES):
                    check()
                    piece = min(most_buffers, buffers - b), min(most_runs, runs - r), min(width, length - first)
                    src = c.src + b * c.src_steps[0] + r * c.src_steps[1] + first
                    dst = c.dst + b * c.dst_steps[0] + r * c.dst_steps[1] + first
                    self._dst.rows(dst, piece, c.dst_steps)[...] = self._src.rows(src, piece, c.src_steps)

    def _series_of(self, pairs: Int64Array) -> list[_Series]:
        key = pairs.tobytes()
        series = self._series.get(key)
        if series is None:
            if len(self._series) >= _MOST_KEPT:
                self._series.clear()
            series = self._series[key] = list(self._find_series(pairs))
        return series

    def _find_series(self, pairs: Int64Array) -> Iterator[_Series]:
        if not ((pairs >= 0) & (pairs < (len(self._src_ptrs), len(self._dst_ptrs)))).all():
            raise _Outside
        src, dst = self._src_ptrs[pairs[:, 0]], self._dst_ptrs[pairs[:, 1]]
        src_len, dst_len = self._src_lens[pairs[:, 0]], self._dst_lens[pairs[:, 1]]
        differs = (src_len[1:] != src_len[:-1]) | (dst_len[1:] != dst_len[:-1])
        for first, end in _stretches(differs, src, dst):
            yield _Series(
                src=int(src[first]),
                dst=int(dst[first]),
                src_step=_distance(src[first:end]),
                dst_step=_distance(dst[first:end]),
                src_len=int(src_len[first]),
                dst_len=int(dst_len[first]),
                num=end - first,
            )


def _distance(places: Int64Array) -> int:
    return int(places[1] - places[0]) if len(places) > 1 else 0


def _copies(pattern: Pattern, s: _Series) -> Iterator[_Copy]:
    """The runs of the pattern in all buffers of the series. Raises _Outside unless all lie in them."""
    length = pattern.length.tolist()
    src_offset, dst_offset = pattern.src_offset.tolist(), pattern.dst_offset.tolist()
    differs = pattern.length[1:] != pattern.length[:-1]
    for first, end in _stretches(differs, pattern.src_offset, pattern.dst_offset):
        num = length[first]
        if num < 0:
            raise _Outside
        src_step = _step_inside(src_offset, first, end, s.src_len - num)
        dst_step = _step_inside(dst_offset, first, end, s.dst_len - num)
        yield _Copy(
            s.src + src_offset[first],
            s.dst + dst_offset[first],
            (s.num, end - first, num),
            (s.src_step, src_step),
            (s.dst_step, dst_step),
        )


def _step_inside(offset: list[int], first: int, end: int, most: int) -> int:
    """The step of equally distant offsets. Raises _Outside unless all lie in [0, most]."""
    start, last = offset[first], offset[end - 1]
    step = offset[first + 1] - start if end - first > 1 else 0
    # Distances were compared as int64, where some may have wrapped; here they do not.
    if not (0 <= start <= most and 0 <= last <= most and start + (end - first - 1) * step == last):
        raise _Outside
    return step


def _patterns(runs: Runs) -> Iterator[Pattern]:
    """Consecutive pairs of buffers with equal runs, and these."""
    for starts, num in _equal_parts(runs):
        part, shape = slice(starts[0], starts[-1] + num), (len(starts), num)
        src_offset, dst_offset, length = (
            column[part].reshape(shape) for column in (runs.src_offset, runs.dst_offset, runs.length)
        )
        differs = (src_offset[1:] != src_offset[:-1]) | (dst_offset[1:] != dst_offset[:-1])
        differs |= length[1:] != length[:-1]
        pairs = np.stack((runs.src_buffer[starts], runs.dst_buffer[starts]), axis=1)
        cuts = [0, *(differs.any(axis=1).nonzero()[0] + 1).tolist(), len(starts)]
        for first, end in itertools.pairwise(cuts):
            yield Pattern(
                pairs=pairs[first:end], src_offset=src_offset[first], dst_offset=dst_offset[first], length=length[first]
            )


def _equal_parts(runs: Runs) -> Iterator[tuple[Int64Array, int]]:
    """Consecutive pairs of buffers with equally many runs: where the runs of each begin, and how many each has."""
    if not len(runs):
        return
    changes = runs.src_buffer[1:] != runs.src_buffer[:-1]
    changes |= runs.dst_buffer[1:] != runs.dst_buffer[:-1]
    bounds = np.concatenate(([0], changes.nonzero()[0] + 1, [len(runs)]))
    num = bounds[1:] - bounds[:-1]
    cuts = [0, *((num[1:] != num[:-1]).nonzero()[0] + 1).tolist(), len(num)]
    for first, end in itertools.pairwise(cuts):
        yield bounds[first:end], int(num[first])


def _stretches(differs: npt.NDArray[np.bool_], src: Int64Array, dst: Int64Array) -> Iterator[tuple[int, int]]:
    """Cuts places into stretches [first, end) of constant steps on both sides, in order.

    `differs[i]` keeps place i + 1 out of the stretch of place i.
    """
    if len(src) == 1:
        yield 0, 1
        return
    turns = differs.copy()
    for place in (src, dst):
        steps = place[1:] - place[:-1]
        turns[1:] |= steps[1:] != steps[:-1]
    first, must_end = 0, differs.tolist()
    for i in turns.nonzero()[0].tolist():
        if i > first or must_end[i]:  # a stretch's own first step may be any
            yield first, i + 1
            first = i + 1
    yield first, len(src)
