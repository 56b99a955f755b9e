"""The reader's connections to one holder: made when needed, kept for later reads, interrupted when the reader closes.

A connection is used by one read at a time. It goes back only when all that was asked for on it has come; one that
failed in any way is closed, never used again.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from transfer.planes import tcp_wire as wire
from transfer.planes.base import PlaneError, ReadRefused
from transfer.planes.gate import Gate

CONNECT_S = 5.0  # until a holder must have accepted and welcomed us
MAX_IDLE = 8  # connections kept for later reads


class Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.is_clean = False  # nothing is under way on it

    def ask(self, request: wire.Request, deadline: float) -> None:
        self.is_clean = False
        wire.send_frame(self.sock, wire.encode_request(request), deadline)

    def expect_ok(self, deadline: float) -> None:
        """Raises ReadRefused, PlaneError with what the holder says, or what `wire.receive_frame` raises."""
        frame = wire.receive_frame(self.sock, wire.MAX_STATUS_BYTES, deadline, deadline - time.monotonic())
        status = wire.decode_status(frame)
        if status.refused:
            self.is_clean = True
            raise ReadRefused(status.problem)
        if status.problem:
            raise PlaneError(status.problem)


class Connections:
    """Those of one reader, whose `gate` says whether it was closed."""

    def __init__(self, host: str, port: int, token: bytes, gate: Gate) -> None:
        self._host, self._port, self._token = host, port, token
        self._gate = gate
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._idle: list[Connection] = []

    @contextmanager
    def using(self, num: int, deadline: float) -> Iterator[list[Connection]]:
        """At least one connection and at most `num`, as many as the holder allows. All errors leave as PlaneError."""
        taken: list[Connection] = []
        try:
            taken.append(self._take(deadline))
            with suppress(PlaneError):
                while len(taken) < num:
                    taken.append(self._take(deadline))
            yield taken
        except (OSError, wire.Disconnected, wire.FrameError) as error:
            raise PlaneError(f"{type(error).__name__}: {error}") from error
        finally:
            for connection in taken:
                self._give_back(connection)

    def interrupt(self) -> None:
        """Ends all that waits for a connection."""
        with self._lock:
            for sock in self._open:
                with suppress(OSError):  # not connected yet, or gone
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """When nobody uses a connection any more."""
        with self._lock:
            for sock in self._open:
                sock.close()
            self._open.clear()
            self._idle.clear()

    def _take(self, deadline: float) -> Connection:
        while True:
            with self._lock:
                idle = self._idle.pop() if self._idle else None
            if idle is None:
                return self._connect(min(deadline, time.monotonic() + CONNECT_S))
            if _is_quiet(idle.sock):
                return idle
            self._drop(idle.sock)

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if connection.is_clean and not self._gate.closed and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        self._drop(connection.sock)

    def _connect(self, deadline: float) -> Connection:
        """Tries each address of the host. Raises PlaneError with the last one's reason."""
        problem: Exception | None = None
        try:
            for family, kind, *_, address in socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM):
                try:
                    return self._connect_to(family, kind, address, deadline)
                except (OSError, wire.Disconnected, wire.FrameError) as error:
                    problem = error
        except (OSError, ValueError) as error:  # ValueError: no name at all
            problem = error
        raise PlaneError(f"{type(problem).__name__}: {problem}") from problem

    def _connect_to(self, family: int, kind: int, address: tuple[object, ...], deadline: float) -> Connection:
        sock = socket.socket(family, kind)
        self._adopt(sock)
        try:
            sock.settimeout(max(1e-3, deadline - time.monotonic()))
            sock.connect(address)
            wire.tune(sock)
            self._gate.check()  # an unconnected socket cannot be interrupted
            connection = Connection(sock)
            connection.expect_ok(deadline)
            wire.send_frame(sock, wire.encode_hello(self._token), deadline)
            connection.expect_ok(deadline)
            connection.is_clean = True
        except BaseException:
            self._drop(sock)
            raise
        return connection

    def _adopt(self, sock: socket.socket) -> None:
        """From here on `interrupt` can end what this socket waits for."""
        with self._lock:
            self._open.add(sock)
        if self._gate.closed:
            self._drop(sock)
            self._gate.check()

    def _drop(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.discard(sock)
        sock.close()


def _is_quiet(sock: socket.socket) -> bool:
    """An idle connection has nothing to say; anything else means that the holder closed it."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
