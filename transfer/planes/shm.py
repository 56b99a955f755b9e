"""Data plane between two processes of one host: the reader maps the holder's cache read-only and copies once.

The holder's buffers lie in one anonymous shared file. Whoever presents the token of the handshake at the holder's door
(`shm_server`) gets a descriptor of it that can be read alone, whatever user or container of the host it belongs to. The
reader checks that it is the very file the holder described (device, inode, size) and that it cannot shrink, which would
kill a process that reads it. The file has no name and leaves nothing behind.

A read touches the holder neither by a message nor by a thread, so the guard is not asked: a reader that was let in sees
the whole cache, cannot write to it, and the confirmation after the read is what protects. The connection to the door
stays open as the sign of life. After each read the reader looks at it; a holder that died or closed meanwhile makes the
read fail.

Page tables are filled as pages are read: one fault per 2 MiB where the holder's memory lies in huge pages.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transfer.planes.base import Buffers, Guard, PlaneError, PlaneUnavailable, Runs, endpoint_field
from transfer.planes.copying import RunCopier
from transfer.planes.gate import Gate
from transfer.planes.mapping import ReadOnlyMapping
from transfer.planes.shm_server import MAX_ANSWER_BYTES, OPEN, ShmServer, address_of

CONNECT_S = 5  # whole seconds for any one step of getting in
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK_NAMESPACE = Path("/proc/self/ns/net")


def _host() -> str:
    """Changes with each boot of each host."""
    return _BOOT_ID.read_text().strip()


def _network_namespace() -> int:
    """Where the abstract sockets of this process are known."""
    return _NETWORK_NAMESPACE.stat().st_ino


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
            return ShmServer(buffers, guard, {"host": _host(), "network_namespace": _network_namespace()})
        except OSError as error:
            raise PlaneUnavailable(f"shared memory cannot be served: {error}") from error

    def connect(self, endpoint: Mapping[str, object], token: bytes, buffers: Buffers) -> ShmReader:
        if endpoint_field(endpoint, "host", str) != _host():
            raise PlaneUnavailable("the holder runs on another host")
        if endpoint_field(endpoint, "network_namespace", int) != _network_namespace():
            raise PlaneUnavailable("the holder runs in another network namespace of this host")
        file = _SharedFile.of(endpoint)
        connection, fd = _enter(endpoint_field(endpoint, "door", str), token)
        try:
            return ShmReader(file, file.map(fd), connection, buffers)
        except PlaneUnavailable:
            connection.close()
            raise
        finally:
            os.close(fd)


def _enter(door: str, token: bytes) -> tuple[socket.socket, int]:
    """The connection and the descriptor that came over it. Raises PlaneUnavailable with the holder's reason."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # with Python's timeout a full queue would not be waited for
        connection.setsockopt(socket.SOL_SOCKET, limit, struct.pack("@ll", CONNECT_S, 0))
    try:
        connection.connect(address_of(door))
        connection.send(token)
        answer, fds, *_ = socket.recv_fds(connection, MAX_ANSWER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: no name of a socket
        connection.close()
        raise PlaneUnavailable(f"the holder's door does not open: {error}") from error
    connection.setblocking(False)
    if answer == OPEN and fds:
        return connection, fds[0]
    connection.close()
    for fd in fds:
        os.close(fd)
    raise PlaneUnavailable(answer.decode(errors="replace") or "the holder closed the connection")


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedFile:
    """The holder's file as its endpoint describes it."""

    identity: tuple[int, int]  # device, inode
    num_bytes: int
    offsets: list[int]
    lens: list[int]

    @classmethod
    def of(cls, endpoint: Mapping[str, object]) -> _SharedFile:
        offsets, lens = (_sizes(endpoint, name) for name in ("offsets", "lens"))
        num_bytes = endpoint_field(endpoint, "num_bytes", int)
        if len(offsets) != len(lens) or any(o + n > num_bytes for o, n in zip(offsets, lens, strict=True)):
            raise PlaneUnavailable(f"the endpoint's buffers do not lie in its file of {num_bytes} bytes")
        identity = (endpoint_field(endpoint, "device", int), endpoint_field(endpoint, "inode", int))
        return cls(identity=identity, num_bytes=num_bytes, offsets=offsets, lens=lens)

    def map(self, fd: int) -> ReadOnlyMapping:
        """Raises PlaneUnavailable unless `fd` is this file and safe to read."""
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) != self.identity:
                raise PlaneUnavailable("what the holder handed out is not the file it described")
            if status.st_size != self.num_bytes or not self.num_bytes:
                raise PlaneUnavailable(f"the file has {status.st_size} bytes, the holder said {self.num_bytes}")
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise PlaneUnavailable("the holder's file is not sealed against shrinking")
            return ReadOnlyMapping(fd, self.num_bytes)
        except OSError as error:
            raise PlaneUnavailable(f"the holder's shared memory cannot be mapped: {error}") from error


def _sizes(endpoint: Mapping[str, object], name: str) -> list[int]:
    values = endpoint_field(endpoint, name, list)
    if not all(isinstance(value, int) and 0 <= value < 2**63 for value in values):
        raise PlaneUnavailable(f"the endpoint's field {name!r} should hold sizes in bytes")
    return values


class ShmReader:
    """Owns the mapping and the connection to the holder's door."""

    def __init__(
        self, file: _SharedFile, mapping: ReadOnlyMapping, connection: socket.socket, buffers: Buffers
    ) -> None:
        self._mapping, self._connection = mapping, connection
        self._gate = Gate("the reader")
        ptrs = [mapping.address + offset for offset in file.offsets]
        self._copier = RunCopier(ptrs, file.lens, buffers.ptrs, buffers.lens)

    def read(self, lease_id: str, runs: Runs, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s

        def check() -> None:
            self._gate.check()
            if time.monotonic() >= deadline:
                raise PlaneError(f"the read of {runs.num_bytes} bytes did not end within {timeout_s} s")

        with self._gate.passing():
            self._copier.copy(runs, check)
            check()
            if not self._is_held():
                raise PlaneError("the holder died or closed its shared memory during the read")

    def _is_held(self) -> bool:
        """The holder says nothing after it opened; there is something to receive only when the connection ended."""
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        self._gate.close()
        self._mapping.close()
        self._connection.close()
