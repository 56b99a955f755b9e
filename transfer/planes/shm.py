"""Data plane between two processes of one host: the reader maps the holder's cache read-only and copies once.

The holder's buffers lie in one anonymous shared file. The reader reaches it through /proc/<pid>/fd/<fd>, which the
kernel allows to the same user in the same pid namespace, and checks that it is the very file the holder described
(device, inode, size) and that it cannot shrink, which would kill a process that reads it. The file has no name and
leaves nothing behind.

A read touches the holder neither by a message nor by a thread, so the guard is not asked: the reader sees the whole
cache, cannot write to it, and the confirmation after the read is what protects. After each read the reader looks
whether the file is still open over there; a holder that died or closed meanwhile makes the read fail.

Page tables are filled as pages are read, which doubles the time of a page's first read. Filling them at `connect` was
measured at 70 ms per GiB, and would make the holder's untouched cache real memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transfer.planes.base import (
    Buffers,
    Guard,
    PlaneError,
    PlaneUnavailable,
    Runs,
    endpoint_field,
)
from transfer.planes.copying import RunCopier
from transfer.planes.gate import Gate

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


def _host() -> str:
    """Changes with each boot of each host."""
    return _BOOT_ID.read_text().strip()


def _pid_namespace() -> int:
    return _PID_NAMESPACE.stat().st_ino


class ShmPlane:
    name = "shm"

    def serve(self, buffers: Buffers, guard: Guard) -> ShmServer:
        if buffers.shared is None:
            raise PlaneUnavailable("the cache does not lie in shared memory")
        for ptr, size in zip(buffers.ptrs, buffers.lens, strict=True):
            offset = ptr - buffers.shared.base_ptr
            if offset < 0 or offset + size > buffers.shared.num_bytes:
                raise PlaneUnavailable(f"a buffer of {size} bytes at offset {offset} lies outside the shared memory")
        try:
            return ShmServer(buffers, _host(), _pid_namespace())
        except OSError as error:
            raise PlaneUnavailable(f"shared memory cannot be served: {error}") from error

    def connect(self, endpoint: Mapping[str, object], token: bytes, buffers: Buffers) -> ShmReader:
        if endpoint_field(endpoint, "host", str) != _host():
            raise PlaneUnavailable("the holder runs on another host")
        if endpoint_field(endpoint, "pid_namespace", int) != _pid_namespace():
            raise PlaneUnavailable("the holder runs in another pid namespace")
        return ShmReader(_SharedFile.of(endpoint), buffers)


class ShmServer:
    """Holds a descriptor of its own to the shared file, so that closing shows on the other side."""

    def __init__(self, buffers: Buffers, host: str, pid_namespace: int) -> None:
        assert buffers.shared is not None
        self._fd: int | None = os.dup(buffers.shared.fd)
        status = os.fstat(self._fd)
        self._endpoint: dict[str, object] = {
            "host": host,
            "pid_namespace": pid_namespace,
            "pid": os.getpid(),
            "fd": self._fd,
            "device": status.st_dev,
            "inode": status.st_ino,
            "num_bytes": status.st_size,
            "offsets": [ptr - buffers.shared.base_ptr for ptr in buffers.ptrs],
            "lens": list(buffers.lens),
        }

    @property
    def endpoint(self) -> Mapping[str, object]:
        return self._endpoint

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedFile:
    """The holder's file as its endpoint describes it."""

    path: str
    identity: tuple[int, int]  # device, inode
    num_bytes: int
    offsets: list[int]
    lens: list[int]

    @classmethod
    def of(cls, endpoint: Mapping[str, object]) -> _SharedFile:
        pid, fd = (endpoint_field(endpoint, name, int) for name in ("pid", "fd"))
        offsets, lens = (_sizes(endpoint, name) for name in ("offsets", "lens"))
        num_bytes = endpoint_field(endpoint, "num_bytes", int)
        if len(offsets) != len(lens) or any(o + n > num_bytes for o, n in zip(offsets, lens, strict=True)):
            raise PlaneUnavailable(f"the endpoint's buffers do not lie in its file of {num_bytes} bytes")
        identity = (endpoint_field(endpoint, "device", int), endpoint_field(endpoint, "inode", int))
        path = f"/proc/{pid}/fd/{fd}"
        return cls(path=path, identity=identity, num_bytes=num_bytes, offsets=offsets, lens=lens)

    def map(self) -> mmap.mmap:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise PlaneUnavailable(f"the holder's shared memory cannot be opened: {error}") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) != self.identity:
                raise PlaneUnavailable(f"{self.path} is not the file the holder described; it was replaced")
            if status.st_size != self.num_bytes or not self.num_bytes:
                raise PlaneUnavailable(f"{self.path} has {status.st_size} bytes, the holder said {self.num_bytes}")
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise PlaneUnavailable(f"{self.path} is not sealed against shrinking")
            return mmap.mmap(fd, self.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError, OverflowError) as error:
            raise PlaneUnavailable(f"the holder's shared memory cannot be mapped: {error}") from error
        finally:
            os.close(fd)

    def is_open(self) -> bool:
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self.identity


def _sizes(endpoint: Mapping[str, object], name: str) -> list[int]:
    values = endpoint_field(endpoint, name, list)
    if not all(isinstance(value, int) and 0 <= value < 2**63 for value in values):
        raise PlaneUnavailable(f"the endpoint's field {name!r} should hold sizes in bytes")
    return values


class ShmReader:
    def __init__(self, file: _SharedFile, buffers: Buffers) -> None:
        self._file = file
        self._gate = Gate("the reader")
        self._mapping = file.map()
        # The numpy view is only a way to learn the address; while it lives the mapping could not be closed.
        base = np.frombuffer(self._mapping, np.uint8).ctypes.data
        self._copier = RunCopier([base + offset for offset in file.offsets], file.lens, buffers.ptrs, buffers.lens)

    def read(self, lease_id: str, runs: Runs, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s

        def check() -> None:
            self._gate.check()
            if time.monotonic() >= deadline:
                raise PlaneError(f"the read of {runs.num_bytes} bytes did not end within {timeout_s} s")

        with self._gate.passing():
            self._copier.copy(runs, check)
            check()
            if not self._file.is_open():
                raise PlaneError("the holder died or closed its shared memory during the read")

    def close(self) -> None:
        self._gate.close()
        self._mapping.close()
