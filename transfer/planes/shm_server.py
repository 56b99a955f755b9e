"""The holder's side of the shm plane: a door that hands the cache's descriptor to whoever presents a known token.

    reader                                 holder
           connect ─────────────────────►
           token ───────────────────────►
           ◄───────────────────────────── "open" and the descriptor     (or why not, and the end)
                       ... the connection stays: its end is the end of either side ...

The door is a Unix-domain socket in the abstract namespace: it leaves no file behind, other users can reach it, and
containers that share a network namespace too. Messages keep their boundaries (SOCK_SEQPACKET). The descriptor is opened
for reading alone.

One thread serves all. It never waits for a single connection; strangers have little time and little room, and cannot
take the place of a reader.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import selectors
import socket
import threading
import time
from collections.abc import Mapping

from transfer.planes.base import Buffers, Guard

logger = logging.getLogger(__name__)

OPEN = b"open"
MAX_TOKEN_BYTES = 256
MAX_ANSWER_BYTES = 1024
MAX_READERS = 256
MAX_STRANGERS = 32  # connections that have shown no token yet; one more, and the oldest is closed
GREETING_S = 2.0  # for the token to come
_PAUSE_S = 0.1  # after a failed accept (descriptors used up), before the next


class ShmServer:
    """Serves the shared file that `buffers` lie in; `where` are the endpoint's fields about this host.

    Raises OSError when the file cannot be opened or the socket not be made.
    """

    def __init__(self, buffers: Buffers, guard: Guard, where: Mapping[str, object], *, greeting_s: float = GREETING_S,
                 max_readers: int = MAX_READERS) -> None:  # fmt: skip
        assert buffers.shared is not None
        self._guard, self._greeting_s, self._max_readers = guard, greeting_s, max_readers
        self._strangers: dict[socket.socket, float] = {}  # → when its time is up, oldest first
        self._readers: dict[socket.socket, bytes] = {}  # → token
        self._lock = threading.Lock()  # of closing
        self._is_closed = False
        door = secrets.token_hex(16)
        self._fd = os.open(f"/proc/self/fd/{buffers.shared.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(self._fd)
            self._listener = _listen(door)
        except OSError:
            os.close(self._fd)
            raise
        self._endpoint: dict[str, object] = {
            **where,
            "door": door,
            "device": status.st_dev,
            "inode": status.st_ino,
            "num_bytes": status.st_size,
            "offsets": [ptr - buffers.shared.base_ptr for ptr in buffers.ptrs],
            "lens": list(buffers.lens),
        }
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="kv-shm-door", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> Mapping[str, object]:
        return self._endpoint

    @property
    def num_connections(self) -> int:
        return len(self._strangers) + len(self._readers)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._waker.close()
        self._thread.join()
        for sock in (*self._strangers, *self._readers, self._listener, self._woken):
            sock.close()
        self._selector.close()
        os.close(self._fd)

    def _run(self) -> None:
        while True:
            ready = {key.fileobj for key, _ in self._selector.select(self._time_left())}
            if self._woken in ready:
                return
            for sock in ready:
                assert isinstance(sock, socket.socket)
                if sock is self._listener:
                    self._accept()
                elif sock in self._strangers:
                    self._greet(sock)
                elif sock in self._readers:
                    self._drop(sock)  # it went, or it says what no reader says
            self._drop_the_late()

    def _time_left(self) -> float | None:
        first = next(iter(self._strangers.values()), None)
        return None if first is None else max(0.0, first - time.monotonic())

    def _drop_the_late(self) -> None:
        now = time.monotonic()
        for sock in [sock for sock, end in self._strangers.items() if end <= now]:
            self._drop(sock)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            logger.warning("shm plane: cannot accept a connection: %s", error)
            select.select([self._woken], [], [], _PAUSE_S)
            return
        sock.setblocking(False)
        if len(self._strangers) == MAX_STRANGERS:
            self._drop(next(iter(self._strangers)))
        self._strangers[sock] = time.monotonic() + self._greeting_s
        self._selector.register(sock, selectors.EVENT_READ)

    def _drop(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        self._strangers.pop(sock, None)
        self._readers.pop(sock, None)
        sock.close()

    def _greet(self, sock: socket.socket) -> None:
        """Its first message is the token, whole, or it is no reader."""
        self._drop_the_forgotten()
        try:
            token = sock.recv(MAX_TOKEN_BYTES + 1)
            reason = self._refusal(token)
            socket.send_fds(sock, [reason.encode() or OPEN], [] if reason else [self._fd])
        except OSError as error:  # it went away, or does not read
            reason = str(error)
        if reason:
            logger.info("shm plane: refused a reader: %s", reason)
            self._drop(sock)
        else:
            del self._strangers[sock]
            self._readers[sock] = token

    def _drop_the_forgotten(self) -> None:
        """Readers whose channel has ended, and who should have gone by themselves, take no place from others."""
        for sock in [sock for sock, token in self._readers.items() if not self._guard.knows(token)]:
            self._drop(sock)

    def _refusal(self, token: bytes) -> str:
        """Empty when the token opens the door."""
        if len(token) > MAX_TOKEN_BYTES or not self._guard.knows(token):
            return "the holder does not know this reader's token"
        if len(self._readers) >= self._max_readers:
            return f"the holder serves {self._max_readers} readers already"
        return ""


def address_of(door: str) -> str:
    """Of the socket; the prefix keeps an endpoint from leading a reader to the socket of another service."""
    return f"\0pd-kv-{door}"


def _listen(door: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.setblocking(False)
        listener.bind(address_of(door))
        listener.listen(MAX_STRANGERS)
    except OSError:
        listener.close()
        raise
    return listener
