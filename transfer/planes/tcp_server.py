"""The holder's side of the tcp plane: one listener, one thread per connection, bytes straight from cache memory.

Nothing a stranger sends can end the server: what is not a request is counted and its connection closed, and who has no
token may not send one. Memory is touched only after the guard agreed. A connection serves one read at a time and
nothing is shared between connections, so a reader that is slow holds back itself alone. Threads wait on their socket
alone, so that shutting the sockets down ends them all, and `close` returns when they have ended.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Mapping

import numpy as np

from transfer.planes import tcp_wire as wire
from transfer.planes.base import Buffers, Guard, PlaneUnavailable, ReadRefused
from transfer.planes.vectored import Pieces, send

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
HELLO_S = 5.0  # until a new connection must have said who it is
IDLE_S = 30.0  # a connection without a request for so long is closed; readers open another one
STALL_S = 10.0  # no byte could be sent or received for so long in the middle of a frame or an answer
_PAUSE_S = 0.1  # after a failed accept (descriptors used up), before the next
_GOOD = wire.encode_status(wire.Status())


class TcpServer:
    """Serves `buffers` at `host`, port 0. Raises PlaneUnavailable when it cannot listen there."""

    def __init__(self, host: str, buffers: Buffers, guard: Guard, *, max_connections: int = MAX_CONNECTIONS,
                 hello_s: float = HELLO_S, idle_s: float = IDLE_S, stall_s: float = STALL_S) -> None:  # fmt: skip
        self._guard = guard
        self._ptrs = np.array(buffers.ptrs, np.uint64)
        self._max_connections = max_connections
        self._hello_s, self._idle_s, self._stall_s = hello_s, idle_s, stall_s
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closed = threading.Event()
        self._refused_frames = 0
        self._listener = _listen(host)
        self._endpoint = {"host": host, "port": self._listener.getsockname()[1]}
        self._acceptor = threading.Thread(target=self._accept_all, name="kv-tcp-accept", daemon=True)
        self._acceptor.start()

    @property
    def endpoint(self) -> Mapping[str, object]:
        return self._endpoint

    @property
    def refused_frames(self) -> int:
        """Frames so far that did not belong to this protocol, and hellos without a known token."""
        return self._refused_frames

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def close(self) -> None:
        self._closed.set()
        _shut(self._listener)
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            connections = dict(self._connections)
        for sock in connections:
            _shut(sock)
        for thread in connections.values():
            thread.join()

    def _accept_all(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closed.is_set():
                    logger.warning("tcp plane: cannot accept a connection: %s", error)
                    self._closed.wait(_PAUSE_S)
                continue
            self._start(sock)

    def _start(self, sock: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(sock,), name="kv-tcp-serve", daemon=True)
        with self._lock:
            has_room = len(self._connections) < self._max_connections and not self._closed.is_set()
            if has_room:
                self._connections[sock] = thread
        if not has_room:
            _refuse(sock, f"the holder serves {self._max_connections} connections already")
            return
        try:
            thread.start()
        except RuntimeError as error:  # no more threads in this process
            self._forget(sock)
            _refuse(sock, str(error))

    def _serve(self, sock: socket.socket) -> None:
        try:
            token = self._welcome(sock)
            while not self._closed.is_set():
                idle_until = time.monotonic() + self._idle_s
                body = wire.receive_frame(sock, wire.MAX_REQUEST_BYTES, idle_until, self._stall_s)
                self._answer(sock, token, wire.decode_request(body))
        except wire.FrameError as error:
            with self._lock:
                self._refused_frames += 1
            logger.warning("tcp plane: closed a connection: %s", error)
            _refuse(sock, str(error))
        except (OSError, wire.Disconnected) as error:
            logger.debug("tcp plane: a connection ended: %s", error)
        finally:
            self._forget(sock)
            sock.close()

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            del self._connections[sock]

    def _welcome(self, sock: socket.socket) -> bytes:
        """The token of the reader on the other side. Raises FrameError when no reader is known by what it presents."""
        wire.tune(sock)
        wire.send_frame(sock, _GOOD, time.monotonic() + self._stall_s)
        hello_by = time.monotonic() + self._hello_s
        token = wire.decode_hello(wire.receive_frame(sock, wire.MAX_HELLO_BYTES, hello_by, self._hello_s))
        if not self._guard.knows(token):
            raise wire.FrameError("no reader with this token is known here")
        wire.send_frame(sock, _GOOD, time.monotonic() + self._stall_s)
        return token

    def _answer(self, sock: socket.socket, token: bytes, request: wire.Request) -> None:
        try:
            self._guard.check(token, request.lease_id, request.buffer, request.offset, request.length)
        except ReadRefused as refusal:
            status = wire.encode_status(wire.Status(problem=str(refusal), refused=True))
            wire.send_frame(sock, status, time.monotonic() + self._stall_s)
            return
        pieces = Pieces.of_runs(self._ptrs, request.buffer, request.offset, request.length)
        wire.limit_sending(sock, self._stall_s)
        send(sock, _GOOD, pieces)  # together, so that the reader wakes up once


def _listen(host: str) -> socket.socket:
    try:
        family, kind, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
    except (OSError, ValueError) as error:  # ValueError: no name at all
        raise PlaneUnavailable(f"cannot listen at {host!r}: {error}") from error
    try:
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise PlaneUnavailable(f"cannot listen at {host!r}: {error}") from error
    return listener


def _refuse(sock: socket.socket, problem: str) -> None:
    """Says why; the answer is small enough for the socket's empty buffer, so this does not wait."""
    with sock:
        try:
            wire.tune(sock)
            wire.send_frame(sock, wire.encode_status(wire.Status(problem=problem)), time.monotonic() + 1.0)
        except OSError as error:
            logger.debug("tcp plane: a refused connection was gone: %s", error)


def _shut(sock: socket.socket) -> None:
    """Wakes whoever waits on the socket; it may be gone already."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        logger.debug("tcp plane: socket was closed: %s", error)
