"""Memory for tests of data planes, and the sides of one in a process of its own (`python plane_memory.py ROLE ...`).

hold PLANE LENS...             prints the endpoint (msgpack, hex) of a `Region` and serves it; answers any line with
                               "closed" when it no longer does
read PLANE ENDPOINT LENS...    prints "reading" and reads all buffers again and again, or prints why it cannot
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np

from transfer.planes import make_plane
from transfer.planes.base import (
    Buffers,
    Int64Array,
    Plane,
    PlaneUnavailable,
    ReadRefused,
    Runs,
    SharedMemory,
    outside,
)

NAME = "plane-test"
SECRET = b"secret"
LENS = (4096, 4096, 777, 65536, 4096, 1)


class Region:
    """Buffers of `lens` bytes in one sealed memfd, 64 bytes apart, filled at random from `seed`."""

    def __init__(self, seed: int, lens: Sequence[int] = LENS, *, sealed: bool = True) -> None:
        starts = [64 + sum(lens[:i]) + 64 * i for i in range(len(lens))]
        size = starts[-1] + lens[-1] + 64
        self.fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        if sealed:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._mapping = mmap.mmap(self.fd, size)
        self.bytes = np.frombuffer(self._mapping, np.uint8)
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        self.arrays = [self.bytes[start : start + n] for start, n in zip(starts, lens, strict=True)]
        base = self.bytes.ctypes.data
        shared = SharedMemory(fd=self.fd, base_ptr=base, num_bytes=size)
        self.buffers = Buffers(ptrs=tuple(base + start for start in starts), lens=tuple(lens), shared=shared)

    def close(self) -> None:
        del self.bytes, self.arrays
        self._mapping.close()
        os.close(self.fd)


class Open:
    """A guard that lets everybody read everything."""

    def knows(self, token: bytes) -> bool:
        return True

    def check(self, token: bytes, lease_id: str, buffer: Int64Array, offset: Int64Array, length: Int64Array) -> None:
        return


class Secret(Open):
    """A guard that knows one token only, `SECRET`."""

    def knows(self, token: bytes) -> bool:
        return token == SECRET

    def check(self, token: bytes, lease_id: str, buffer: Int64Array, offset: Int64Array, length: Int64Array) -> None:
        if token != SECRET:
            raise ReadRefused("this reader is not known")


class Ended(Open):
    """A guard whose leases have all ended."""

    def check(self, token: bytes, lease_id: str, buffer: Int64Array, offset: Int64Array, length: Int64Array) -> None:
        raise ReadRefused("the lease has ended")


class Bounds(Open):
    """A guard that knows the buffers' sizes, as the real one does."""

    def check(self, token: bytes, lease_id: str, buffer: Int64Array, offset: Int64Array, length: Int64Array) -> None:
        if problem := outside(buffer, offset, length, LENS):
            raise ReadRefused(problem)


def runs_of(*runs: tuple[int, int, int, int, int]) -> Runs:
    """From tuples (source buffer, offset, destination buffer, offset, length)."""
    columns = np.array(runs, np.int64).reshape(-1, 5)
    return Runs(
        src_buffer=columns[:, 0], src_offset=columns[:, 1], dst_buffer=columns[:, 2], dst_offset=columns[:, 3],
        length=columns[:, 4],
    )  # fmt: skip


def random_runs(seed: int, num: int, lens: Sequence[int] = LENS) -> Runs:
    """Runs of odd sizes at odd places, that do not overlap in the destination: each fills a cell of its own."""
    rng = np.random.default_rng(seed)
    cells = [(b, at) for b, n in enumerate(lens) for at in range(0, n - 16, 17)]
    chosen = []
    for dst, at in (cells[i] for i in rng.permutation(len(cells))[:num]):
        length = int(rng.integers(0, 18))
        src = int(rng.choice([b for b, n in enumerate(lens) if n >= length]))
        chosen.append((src, int(rng.integers(0, lens[src] - length + 1)), dst, at, length))
    return runs_of(*chosen)


def apply(runs: Runs, source: Sequence[np.ndarray], dest: Sequence[np.ndarray]) -> None:
    """What a read should do, byte by byte."""
    for sb, so, db, do, n in zip(
        runs.src_buffer, runs.src_offset, runs.dst_buffer, runs.dst_offset, runs.length, strict=True
    ):
        for i in range(n):
            dest[db][do + i] = source[sb][so + i]


def hold(plane: Plane, lens: Sequence[int]) -> None:
    region = Region(1, lens)
    server = plane.serve(region.buffers, Open())
    print(msgpack.packb(dict(server.endpoint)).hex(), flush=True)
    for _ in sys.stdin:
        server.close()
        print("closed", flush=True)


def read(plane: Plane, endpoint: Mapping[str, Any], lens: Sequence[int]) -> None:
    region = Region(2, lens)
    try:
        reader = plane.connect(endpoint, b"token", region.buffers)
    except PlaneUnavailable as reason:
        print(reason)
        return
    print("reading", flush=True)
    while True:
        reader.read("lease", runs_of(*((b, 0, b, 0, n) for b, n in enumerate(lens))), 60.0)


def main() -> None:
    role, name, *rest = sys.argv[1:]
    plane = make_plane(name, host="127.0.0.1")
    if role == "hold":
        hold(plane, [int(n) for n in rest])
    else:
        read(plane, msgpack.unpackb(bytes.fromhex(rest[0])), [int(n) for n in rest[1:]])


if __name__ == "__main__":
    main()
