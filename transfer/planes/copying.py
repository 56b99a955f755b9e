"""Copies byte runs between two memories of this process, once, with Python's lock released while bytes move.

A paged cache repeats one pattern of runs in many buffers, and a pattern often has equal distances too. What lies at
equal distances on both sides is copied by one call, as rows of rows:

    buffer 0   ..[run]..[run]......          ...[run].[run].....
    buffer 1   ..[run]..[run]......   ───►   ...[run].[run].....      one call
    buffer 2   ..[run]..[run]......          ...[run].[run].....

so that scattered blocks of 12 KiB cost one interpreter round (and one fight for the lock) per one or two blocks instead
of one per block and buffer. Nothing here loops over runs but where they follow no pattern.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from transfer.planes.base import Int64Array, Runs, check_destination, check_source

STEP_BYTES = 16 * 2**20  # most bytes between two looks at deadline and closing: a few milliseconds
_Steps = tuple[int, int]  # bytes from buffer to buffer, and from run to run

# numpy moves a row of these by one memmove; of single bytes by a loop of its own, at half the speed from the L2 cache.
_ITEM_BYTES = 64
_ITEMS = {width: np.dtype((np.void, width)) for width in (1, 2, 4, 8, 16, 32, 64)}


class Span:
    """The address range that several buffers lie in, as one object numpy can look into; holes are never touched."""

    def __init__(self, ptrs: Sequence[int], lens: Sequence[int]) -> None:
        self._start = min(ptrs, default=0)
        end = max((ptr + size for ptr, size in zip(ptrs, lens, strict=True)), default=0)
        self._memory = memoryview((ctypes.c_ubyte * (end - self._start)).from_address(self._start))

    def rows(self, address: int, shape: tuple[int, int, int], steps: _Steps) -> np.ndarray:
        """[buffers, runs, bytes], the last in items. numpy refuses, with ValueError, what lies outside the span."""
        buffers, runs, length = shape
        width = math.gcd(length, _ITEM_BYTES)
        return np.ndarray(
            (buffers, runs, length // width), _ITEMS[width], self._memory, address - self._start, (*steps, width)
        )


class RunCopier:
    """Copies between buffers at fixed addresses; lengths of buffers in bytes."""

    def __init__(self, src_ptrs: Sequence[int], src_lens: Sequence[int], dst_ptrs: Sequence[int],
                 dst_lens: Sequence[int]) -> None:  # fmt: skip
        self._src_ptrs, self._dst_ptrs = np.array(src_ptrs, np.int64), np.array(dst_ptrs, np.int64)
        self._src_lens, self._dst_lens = np.array(src_lens, np.int64), np.array(dst_lens, np.int64)
        self._src, self._dst = Span(src_ptrs, src_lens), Span(dst_ptrs, dst_lens)

    def copy(self, runs: Runs, check: Callable[[], None]) -> None:
        """Calls `check` before each step; what it raises ends the copy.

        Raises PlaneError, and has copied nothing, when a run does not lie inside its buffers.
        """
        check_source(runs, self._src_lens)
        check_destination(runs, self._dst_lens)
        for starts, num in _equal_parts(runs):
            part, shape = slice(starts[0], starts[-1] + num), (len(starts), num)
            src_offset, dst_offset, length = (
                column[part].reshape(shape) for column in (runs.src_offset, runs.dst_offset, runs.length)
            )
            differs = (src_offset[1:] != src_offset[:-1]) | (dst_offset[1:] != dst_offset[:-1])
            differs |= length[1:] != length[:-1]
            src, dst = self._src_ptrs[runs.src_buffer[starts]], self._dst_ptrs[runs.dst_buffer[starts]]
            for first, end in _stretches(differs.any(axis=1), src, dst):
                at = src[first:end], dst[first:end]
                self._copy_pattern(*at, src_offset[first], dst_offset[first], length[first], check)

    def _copy_pattern(self, src: Int64Array, dst: Int64Array, src_offset: Int64Array, dst_offset: Int64Array,
                      length: Int64Array, check: Callable[[], None]) -> None:  # fmt: skip
        """The runs of the pattern in every buffer; `src` and `dst` are the buffers' addresses, at equal distances."""
        src_start, src_step, dst_start, dst_step = int(src[0]), _step(src), int(dst[0]), _step(dst)
        for first, end in _stretches(length[1:] != length[:-1], src_offset, dst_offset):
            from_, to = src_offset[first:end], dst_offset[first:end]
            self._copy_rows(
                (src_start + int(from_[0]), dst_start + int(to[0])),
                (len(src), end - first, int(length[first])),
                ((src_step, _step(from_)), (dst_step, _step(to))),
                check,
            )

    def _copy_rows(self, at: tuple[int, int], shape: tuple[int, int, int], steps: tuple[_Steps, _Steps],
                   check: Callable[[], None]) -> None:  # fmt: skip
        """[buffers, runs, bytes], cut so that no step is longer than STEP_BYTES."""
        (src, dst), (buffers, runs, length), (src_steps, dst_steps) = at, shape, steps
        width = min(length, STEP_BYTES)
        most_runs = max(1, min(runs, STEP_BYTES // max(1, width)))
        most_buffers = max(1, STEP_BYTES // max(1, most_runs * width))
        for b in range(0, buffers, most_buffers):
            for r in range(0, runs, most_runs):
                for first in range(0, length, STEP_BYTES):
                    check()
                    piece = min(most_buffers, buffers - b), min(most_runs, runs - r), min(width, length - first)
                    source = self._src.rows(src + b * src_steps[0] + r * src_steps[1] + first, piece, src_steps)
                    dest = self._dst.rows(dst + b * dst_steps[0] + r * dst_steps[1] + first, piece, dst_steps)
                    dest[...] = source


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


def _step(places: Int64Array) -> int:
    return int(places[1] - places[0]) if len(places) > 1 else 0
