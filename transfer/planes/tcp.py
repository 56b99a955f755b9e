"""Data plane over any network: the reader asks for runs, the holder answers with raw bytes.

No byte is copied in Python: the kernel takes them from the holder's cache and puts them into the reader's. Each read
has a connection of its own from a pool, so reads run side by side. `tcp_wire` says what travels, `tcp_server` serves.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from transfer.planes import tcp_wire as wire
from transfer.planes.base import (
    Buffers,
    Guard,
    PlaneError,
    PlaneUnavailable,
    ReadRefused,
    Runs,
    check_destination,
    endpoint_field,
)
from transfer.planes.gate import Gate
from transfer.planes.tcp_server import TcpServer, memory_views

CONNECT_S = 5.0  # until a holder must have accepted and welcomed us
MAX_IDLE = 4  # connections kept for later reads


class TcpPlane:
    """Serves at `host`, an address of this machine that the readers can reach."""

    name = "tcp"

    def __init__(self, host: str) -> None:
        self._host = host

    def serve(self, buffers: Buffers, guard: Guard) -> TcpServer:
        return TcpServer(self._host, buffers, guard)

    def connect(self, endpoint: Mapping[str, object], token: bytes, buffers: Buffers) -> TcpReader:
        host, port = endpoint_field(endpoint, "host", str), endpoint_field(endpoint, "port", int)
        if not 0 < port < 65536:
            raise PlaneUnavailable(f"the endpoint's port should be 1 to 65535, given {port}")
        reader = TcpReader(host, port, token, buffers)
        try:
            reader.probe()
        except PlaneError as error:
            reader.close()
            raise PlaneUnavailable(f"the holder at {host}:{port} cannot be reached: {error}") from error
        return reader


class TcpReader:
    """Connections to one holder. A connection that failed is closed, never used again."""

    def __init__(self, host: str, port: int, token: bytes, buffers: Buffers) -> None:
        self._host, self._port, self._token = host, port, token
        self._lens = buffers.lens
        self._views = memory_views(buffers, writable=True)
        self._gate = Gate("the reader")
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._idle: list[socket.socket] = []

    def probe(self) -> None:
        """Raises PlaneError unless a connection can be had; it is kept for the first read."""
        with self._gate.passing(), self._connection(time.monotonic() + CONNECT_S):
            pass

    def read(self, lease_id: str, runs: Runs, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._gate.passing():
            check_destination(runs, self._lens)
            try:
                with self._connection(deadline) as sock:
                    for first in range(0, max(1, len(runs)), wire.MAX_RUNS):
                        self._read_part(sock, lease_id, runs, slice(first, first + wire.MAX_RUNS), deadline)
            except PlaneError:
                self._gate.check()
                if time.monotonic() >= deadline:
                    raise PlaneError(f"the read of {runs.num_bytes} bytes did not end within {timeout_s} s") from None
                raise

    def close(self) -> None:
        self._gate.close(self._interrupt)
        with self._lock:
            for sock in self._open:
                sock.close()
            self._open.clear()
            self._idle.clear()

    def _read_part(self, sock: socket.socket, lease_id: str, runs: Runs, part: slice, deadline: float) -> None:
        request = wire.Request(
            token=self._token,
            lease_id=lease_id,
            buffer=runs.src_buffer[part],
            offset=runs.src_offset[part],
            length=runs.length[part],
        )
        wire.send(sock, [memoryview(wire.encode_request(request))], deadline - time.monotonic())
        self._expect_ok(sock, deadline)
        for pieces in wire.batches(self._views, runs.dst_buffer[part], runs.dst_offset[part], runs.length[part]):
            wire.receive(sock, pieces, deadline)

    def _expect_ok(self, sock: socket.socket, deadline: float) -> None:
        status = wire.decode_status(wire.receive_frame(sock, deadline, deadline - time.monotonic()))
        if status.refused:
            raise ReadRefused(status.problem)
        if status.problem:
            raise PlaneError(status.problem)

    @contextmanager
    def _connection(self, deadline: float) -> Iterator[socket.socket]:
        """An idle connection or a new one; given back unless the block fails. All errors leave as PlaneError."""
        sock = self._take_idle()
        try:
            if sock is None:
                sock = self._connect(min(deadline, time.monotonic() + CONNECT_S))
            yield sock
        except ReadRefused:
            self._give_back(sock)
            raise
        except (OSError, wire.Disconnected, wire.FrameError) as error:
            self._drop(sock)
            raise PlaneError(f"{type(error).__name__}: {error}") from error
        except BaseException:
            self._drop(sock)
            raise
        else:
            self._give_back(sock)

    def _connect(self, deadline: float) -> socket.socket:
        family, kind, *_, address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind)
        self._adopt(sock)
        try:
            sock.settimeout(max(1e-3, deadline - time.monotonic()))
            sock.connect(address)
            wire.tune(sock)
            self._gate.check()  # an unconnected socket cannot be interrupted
            self._expect_ok(sock, deadline)
        except BaseException:
            self._drop(sock)
            raise
        return sock

    def _adopt(self, sock: socket.socket) -> None:
        """From here on `close` can interrupt what this socket waits for."""
        with self._lock:
            self._open.add(sock)
        if self._gate.closed:
            self._drop(sock)
            self._gate.check()

    def _take_idle(self) -> socket.socket | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                sock = self._idle.pop()
            if _is_quiet(sock):
                return sock
            self._drop(sock)

    def _give_back(self, sock: socket.socket | None) -> None:
        with self._lock:
            if sock is not None and not self._gate.closed and len(self._idle) < MAX_IDLE:
                self._idle.append(sock)
                return
        self._drop(sock)

    def _drop(self, sock: socket.socket | None) -> None:
        if sock is not None:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def _interrupt(self) -> None:
        with self._lock:
            for sock in self._open:
                with suppress(OSError):  # not connected yet, or gone
                    sock.shutdown(socket.SHUT_RDWR)


def _is_quiet(sock: socket.socket) -> bool:
    """An idle connection has nothing to say; anything else means that the holder closed it."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
