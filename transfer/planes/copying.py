"""Copies byte runs between two memories of this process, once, with the GIL released while bytes move.

A paged cache repeats one pattern of runs in many buffers. Buffers that lie at equal distances on both sides are copied
by one strided copy per run of the pattern:

    buffer 0   ..[run]......          ...[run].....
    buffer 1   ..[run]......   ───►   ...[run].....      one call
    buffer 2   ..[run]......          ...[run].....

so that scattered blocks of 12 KiB cost one interpreter round (and one fight for the GIL) per block instead of one per
block and buffer. Measured: 13 GB/s against 7.6 for a call per run, where one large copy reaches 17.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from transfer.planes.base import Int64Array, Runs

STEP_BYTES = 16 * 2**20  # most bytes between two looks at deadline and closing: a few milliseconds


@dataclass(frozen=True, slots=True)
class _Series:
    """`count` pairs of buffers whose addresses grow by a constant step on each side."""

    src: int
    dst: int
    src_step: int
    dst_step: int
    count: int


class Span:
    """The address range that several buffers lie in, as one object numpy can look into; holes are never touched."""

    def __init__(self, ptrs: Sequence[int], lens: Sequence[int]) -> None:
        self._start = min(ptrs, default=0)
        end = max((ptr + size for ptr, size in zip(ptrs, lens, strict=True)), default=0)
        self._memory = memoryview((ctypes.c_ubyte * (end - self._start)).from_address(self._start))

    def rows(self, address: int, step: int, count: int, length: int) -> np.ndarray:
        """[count, length] bytes, the rows `step` bytes apart."""
        return np.ndarray((count, length), np.uint8, self._memory, address - self._start, (step, 1))


class RunCopier:
    """Copies between buffers at fixed addresses. Runs must have been checked to lie inside them."""

    def __init__(self, src_ptrs: Sequence[int], src_lens: Sequence[int], dst_ptrs: Sequence[int],
                 dst_lens: Sequence[int]) -> None:  # fmt: skip
        self._src_ptrs, self._dst_ptrs = src_ptrs, dst_ptrs
        self._src, self._dst = Span(src_ptrs, src_lens), Span(dst_ptrs, dst_lens)

    def copy(self, runs: Runs, check: Callable[[], None]) -> None:
        """Calls `check` before each step; what it raises ends the copy."""
        for pairs, src_offset, dst_offset, length in _patterns(runs):
            addresses = [(self._src_ptrs[src], self._dst_ptrs[dst]) for src, dst in pairs]
            pattern = list(zip(src_offset.tolist(), dst_offset.tolist(), length.tolist(), strict=True))
            for series in _series(addresses):
                for src, dst, num in pattern:
                    self._copy_series(series, src, dst, num, check)

    def _copy_series(self, s: _Series, src: int, dst: int, length: int, check: Callable[[], None]) -> None:
        rows = max(1, STEP_BYTES // max(1, length))
        for first in range(0, s.count, rows):
            count = min(rows, s.count - first)
            src_at, dst_at = s.src + first * s.src_step + src, s.dst + first * s.dst_step + dst
            if count > 1:
                check()
                from_rows = self._src.rows(src_at, s.src_step, count, length)
                np.copyto(self._dst.rows(dst_at, s.dst_step, count, length), from_rows)
            else:
                _copy_one(src_at, dst_at, length, check)


def _copy_one(src: int, dst: int, length: int, check: Callable[[], None]) -> None:
    for at in range(0, length, STEP_BYTES):
        check()
        ctypes.memmove(dst + at, src + at, min(STEP_BYTES, length - at))


def _patterns(runs: Runs) -> Iterator[tuple[list[tuple[int, int]], Int64Array, Int64Array, Int64Array]]:
    """Pairs of buffers that have equal runs, with these runs: source offsets, destination offsets, lengths."""
    if not len(runs):
        return
    changes = (np.diff(runs.src_buffer) != 0) | (np.diff(runs.dst_buffer) != 0)
    starts = [0, *(np.flatnonzero(changes) + 1).tolist(), len(runs)]
    shape = np.stack((runs.src_offset, runs.dst_offset, runs.length), axis=1)  # [runs, 3]
    sources, destinations = runs.src_buffer[starts[:-1]].tolist(), runs.dst_buffer[starts[:-1]].tolist()
    pairs = list(zip(sources, destinations, strict=True))
    found: dict[bytes, tuple[list[tuple[int, int]], slice]] = {}
    if _is_repeated(shape, starts):
        found[b""] = (pairs, slice(starts[1]))
    else:
        for pair, start, end in zip(pairs, starts, starts[1:], strict=False):
            found.setdefault(shape[start:end].tobytes(), ([], slice(start, end)))[0].append(pair)
    for alike, part in found.values():
        yield alike, runs.src_offset[part], runs.dst_offset[part], runs.length[part]


def _is_repeated(shape: Int64Array, starts: list[int]) -> bool:
    """Whether all parts of `shape` are like the first; with one attention type they are, and no loop is needed."""
    num_parts, part = len(starts) - 1, starts[1]
    if num_parts * part != len(shape) or starts != list(range(0, len(shape) + 1, part)):
        return False
    parts = shape.reshape(num_parts, part, 3)
    return bool((parts == parts[0]).all())


def _series(addresses: list[tuple[int, int]]) -> Iterator[_Series]:
    """Cuts a list of (source, destination) addresses into stretches of constant steps, in order."""
    first = 0
    while first < len(addresses):
        src, dst = addresses[first]
        end = first + 1
        src_step = dst_step = 0
        if end < len(addresses):
            src_step, dst_step = addresses[end][0] - src, addresses[end][1] - dst
        while end < len(addresses) and addresses[end] == (
            src + (end - first) * src_step,
            dst + (end - first) * dst_step,
        ):
            end += 1
        yield _Series(src, dst, src_step, dst_step, end - first)
        first = end
