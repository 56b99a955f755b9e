"""The holder's side of the tcp plane: one listener, one thread per connection, bytes straight from cache memory.

Nothing a stranger sends can end the server: what is not a request is counted and its connection closed. Memory is
touched only after the guard agreed. Threads wait on their socket alone, so that shutting the sockets down ends them
all, and `close` returns when they have ended.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import threading
import time
from collections.abc import Mapping

from transfer.planes import tcp_wire as wire
from transfer.planes.base import Buffers, Guard, PlaneUnavailable, ReadRefused

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
IDLE_S = 120.0  # a connection without a request for so long is closed; readers open another one
STALL_S = 10.0  # no byte could be sent or received for so long in the middle of a frame or an answer
_PAUSE_S = 0.1  # after a failed accept (descriptors used up), before the next


class TcpServer:
    """Serves `buffers` at `host`, port 0. Raises PlaneUnavailable when it cannot listen there."""

    def __init__(self, host: str, buffers: Buffers, guard: Guard, *, max_connections: int = MAX_CONNECTIONS,
                 idle_s: float = IDLE_S, stall_s: float = STALL_S) -> None:  # fmt: skip
        self._guard = guard
        self._views = memory_views(buffers, writable=False)
        self._max_connections, self._idle_s, self._stall_s = max_connections, idle_s, stall_s
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
        """Frames so far that were no request of this protocol."""
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
            wire.tune(sock)
            wire.send(sock, [memoryview(wire.encode_status(wire.Status()))], self._stall_s)
            while not self._closed.is_set():
                body = wire.receive_frame(sock, time.monotonic() + self._idle_s, self._stall_s)
                self._answer(sock, wire.decode_request(body))
        except wire.FrameError as error:
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

    def _answer(self, sock: socket.socket, request: wire.Request) -> None:
        try:
            self._guard.check(request.token, request.lease_id, request.buffer, request.offset, request.length)
        except ReadRefused as refusal:
            status = wire.Status(problem=str(refusal), refused=True)
            wire.send(sock, [memoryview(wire.encode_status(status))], self._stall_s)
            return
        # The status leaves together with the first bytes, so that the reader wakes up once.
        before = [memoryview(wire.encode_status(wire.Status()))]
        for pieces in wire.batches(self._views, request.buffer, request.offset, request.length):
            wire.send(sock, before + pieces, self._stall_s)
            before = []
        wire.send(sock, before, self._stall_s)


def memory_views(buffers: Buffers, *, writable: bool) -> list[memoryview]:
    """One view of bytes per buffer."""
    arrays = ((ctypes.c_ubyte * size).from_address(ptr) for ptr, size in zip(buffers.ptrs, buffers.lens, strict=True))
    views = (memoryview(array).cast("B") for array in arrays)
    return [view if writable else view.toreadonly() for view in views]


def _listen(host: str) -> socket.socket:
    try:
        family, kind, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
    except OSError as error:
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
            wire.send(sock, [memoryview(wire.encode_status(wire.Status(problem=problem)))], 1.0)
        except OSError as error:
            logger.debug("tcp plane: a refused connection was gone: %s", error)


def _shut(sock: socket.socket) -> None:
    """Wakes whoever waits on the socket; it may be gone already."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        logger.debug("tcp plane: socket was closed: %s", error)
