"""Bytes between sockets and memory that lies in many pieces, one system call per batch of pieces.

The kernel takes pieces as an array of (address, bytes). numpy writes that array for all pieces of a transfer at once,
so that a piece costs what the kernel takes for it and nothing in Python, and no byte is copied here. Addresses are
trusted: runs must have been checked to lie inside their buffers.

A receiver asks to be woken when much has come, not at each packet. Waking is work of the sender's side where both share
a host: measured there, 6.5 GB/s against 5.4, with half the receiver's processor time.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import select
import socket
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from transfer.planes.base import Int64Array

SEND_BYTES = 1 * 2**20  # per call: a socket that is sending handles no acknowledgements until the call ends
TAKE_BYTES = 4 * 2**20  # most bytes per receiving call
MOST_WAKE_BYTES = 1 * 2**20
LEAST_WAKE_BYTES = 256 * 2**10
WAKE_SHARE = 4  # wakes at one part in so many of what is left, so that little is left to do when the last byte comes
MAX_PIECES = 1024  # the kernel's limit per call (UIO_MAXIOV)

_MAX_POLL_MS = 2**31 - 1

_libc = ctypes.CDLL(None, use_errno=True)  # releases the GIL during a call
for _call in (_libc.sendmsg, _libc.recvmsg):
    _call.argtypes, _call.restype = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int), ctypes.c_ssize_t


Addresses = npt.NDArray[np.uint64]


class _Message(ctypes.Structure):
    """`struct msghdr` of sendmsg(2) on 64-bit Linux."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint),
        ("pieces", ctypes.c_void_p),
        ("num_pieces", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class Pieces:
    """Pieces of memory in the order in which their bytes travel, `num_bytes` in all; those of no bytes are left out."""

    def __init__(self, addresses: Addresses, lengths: Int64Array) -> None:
        filled = lengths > 0
        self._pieces = np.stack((addresses[filled], lengths[filled].astype(np.uint64)), axis=1)  # [n, 2]
        self._ends = np.cumsum(lengths[filled])
        self.num_bytes = int(self._ends[-1]) if len(self._ends) else 0

    @classmethod
    def of_runs(cls, ptrs: Addresses, buffer: Int64Array, offset: Int64Array, length: Int64Array) -> Pieces:
        """`ptrs` are the buffers' addresses."""
        return cls(ptrs[buffer] + offset.astype(np.uint64), length)

    def batch(self, start: int, most_bytes: int) -> Addresses:
        """[n, 2] of address and bytes: what lies from byte `start` on, at most `most_bytes` and one call's pieces."""
        first = int(self._ends.searchsorted(start, "right"))
        last = min(int(self._ends.searchsorted(start + most_bytes)), first + MAX_PIECES - 1, len(self._ends) - 1)
        found = self._pieces[first : last + 1].copy()
        done = int(found[0, 1]) - (int(self._ends[first]) - start)
        found[0] += np.array((done, -done)).astype(np.uint64)
        over = int(self._ends[last]) - (start + most_bytes)
        if over > 0:
            found[-1, 1] -= np.uint64(over)
        return found


def send(sock: socket.socket, head: bytes, pieces: Pieces) -> None:
    """Sends `head` and all pieces, together where that is possible.

    Raises TimeoutError when no byte could be sent within the socket's own limit (see `limit_sending`), or OSError.
    """
    try:
        sock.sendall(head, socket.MSG_NOSIGNAL | (socket.MSG_MORE if pieces.num_bytes else 0))
        start = 0
        while start < pieces.num_bytes:
            batch = pieces.batch(start, SEND_BYTES)
            start += _move(_libc.sendmsg, sock, batch, socket.MSG_NOSIGNAL)
    except BlockingIOError as error:
        raise TimeoutError("the other side took nothing for too long") from error


class _Filling:
    """One socket whose next bytes belong into pieces."""

    def __init__(self, sock: socket.socket, pieces: Pieces) -> None:
        self._sock, self._pieces = sock, pieces
        self._start = self._wake_bytes = 0
        self.wait_for_more()

    @property
    def is_complete(self) -> bool:
        return self._start == self._pieces.num_bytes

    def wait_for_more(self) -> None:
        """The socket counts as readable when so much has come; what is left of the transfer suffices at its end."""
        left = self._pieces.num_bytes - self._start
        wake_bytes = max(1, min(left, MOST_WAKE_BYTES, max(LEAST_WAKE_BYTES, left // WAKE_SHARE)))
        if wake_bytes != self._wake_bytes:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
            self._wake_bytes = wake_bytes

    def take(self) -> None:
        batch = self._pieces.batch(self._start, TAKE_BYTES)
        try:
            num_bytes = _move(_libc.recvmsg, self._sock, batch, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return  # readiness is a hint
        if not num_bytes:
            raise ConnectionResetError("the other side closed the connection in the middle")
        self._start += num_bytes
        self.wait_for_more()


def receive(streams: Sequence[tuple[socket.socket, Pieces]], deadline: float) -> None:
    """Fills the pieces of each socket from it, all sockets side by side.

    Raises TimeoutError at the deadline (monotonic), or OSError. Between calls the sockets wake at any byte.
    """
    poll = select.poll()
    waiting = {sock.fileno(): _Filling(sock, pieces) for sock, pieces in streams if pieces.num_bytes}
    for fd in waiting:
        poll.register(fd, select.POLLIN)
    while waiting:
        left_ms = math.ceil(max(0.0, deadline - time.monotonic()) * 1e3)
        ready = poll.poll(min(left_ms, _MAX_POLL_MS))
        if not ready:
            raise TimeoutError("the bytes did not come in time")
        for fd, _ in ready:
            filling = waiting[fd]
            filling.take()
            if filling.is_complete:
                poll.unregister(fd)
                del waiting[fd]


def _move(call: Callable[[int, int, int], int], sock: socket.socket, batch: Addresses, flags: int) -> int:
    message = _Message(pieces=batch.ctypes.data, num_pieces=len(batch))
    while True:
        num_bytes = call(sock.fileno(), ctypes.addressof(message), flags)
        if num_bytes >= 0:
            return num_bytes
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
