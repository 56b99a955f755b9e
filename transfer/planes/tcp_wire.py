"""What travels on a connection of the tcp plane, and how bytes get in and out of a socket.

    reader                              holder
           ◄──────────────────────────  status            (welcome, or why not)
    request ──────────────────────────►
           ◄──────────────────────────  status, then the bytes of all runs if it is ok
    request ──────────────────────────►  ...

A frame is its length (4 bytes, little-endian) and a msgpack map; its length is limited before anything is allocated.
The bytes of runs go straight between cache memory and socket. Sockets are blocking with kernel timeouts: one call moves
many pieces and returns when all are done, so that Python wakes up once per batch and not once per packet.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgpack
import numpy as np

from transfer.planes.base import Int64Array

VERSION = 1
MAX_FRAME_BYTES = 16 * 2**20
MAX_RUNS = 500_000  # per request: 12 MB of 3 × 8 bytes; a larger read is sent as several requests
BATCH = 256  # pieces per system call (the kernel takes up to 1,024): the next list is built while these bytes travel

_LENGTH = struct.Struct("<I")
_TIMEVAL = struct.Struct("@ll")
_LITTLE = np.dtype("<i8")
_MAX_STR_BYTES = 4096
_MAX_PROBLEM = _MAX_STR_BYTES // 4  # characters, of up to 4 bytes
_MIN_TIMEOUT_S = 1e-3  # the kernel takes 0 for "no timeout"


class FrameError(Exception):
    """The other side does not speak this protocol."""


class Disconnected(Exception):
    """The other side closed the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    token: bytes
    lease_id: str
    buffer: Int64Array
    offset: Int64Array
    length: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """`problem` is empty when all is well; `refused` tells a refused read from a connection that is no use."""

    problem: str = ""
    refused: bool = False


def encode_request(request: Request) -> bytes:
    arrays = [np.ascontiguousarray(a, _LITTLE).tobytes() for a in (request.buffer, request.offset, request.length)]
    return _frame({"v": VERSION, "token": request.token, "lease": request.lease_id, "runs": arrays})


def decode_request(body: memoryview) -> Request:
    """Raises FrameError."""
    message = _message(body)
    token, lease_id, runs = message.get("token"), message.get("lease"), message.get("runs")
    if not isinstance(token, bytes) or not isinstance(lease_id, str) or not isinstance(runs, list) or len(runs) != 3:
        raise FrameError("a request has token, lease and three arrays of runs")
    if not all(isinstance(r, bytes) and len(r) % 8 == 0 and len(r) == len(runs[0]) for r in runs):
        raise FrameError("runs are three arrays of int64 of one length")
    buffer, offset, length = (np.frombuffer(r, _LITTLE).astype(np.int64, copy=False) for r in runs)
    return Request(token=token, lease_id=lease_id, buffer=buffer, offset=offset, length=length)


def encode_status(status: Status) -> bytes:
    return _frame({"v": VERSION, "problem": status.problem[:_MAX_PROBLEM], "refused": status.refused})


def decode_status(body: memoryview) -> Status:
    """Raises FrameError."""
    message = _message(body)
    problem, refused = message.get("problem"), message.get("refused")
    if not isinstance(problem, str) or not isinstance(refused, bool):
        raise FrameError("a status has problem and refused")
    return Status(problem=problem, refused=refused)


def _frame(message: dict[str, object]) -> bytes:
    body: bytes = msgpack.packb(message)
    return _LENGTH.pack(len(body)) + body


def _message(body: memoryview) -> dict[str, object]:
    try:
        message = msgpack.unpackb(body, max_array_len=16, max_map_len=16, max_ext_len=0, max_str_len=_MAX_STR_BYTES)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise FrameError(f"not a msgpack map: {error}") from error
    if not isinstance(message, dict):
        raise FrameError(f"expected a map, got {type(message).__name__}")
    if message.get("v") != VERSION:
        raise FrameError(f"version {message.get('v')!r} is not known, this side speaks {VERSION}")
    return message


def receive_frame(sock: socket.socket, first_byte_by: float, rest_within_s: float) -> memoryview:
    """One frame's body. Its length must come until `first_byte_by` (monotonic), the rest `rest_within_s` later.

    Raises FrameError for a length over the limit, and what `receive` raises.
    """
    header = bytearray(_LENGTH.size)
    receive(sock, [memoryview(header)], first_byte_by)
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    body = np.empty(length, np.uint8).data  # unlike a bytearray not touched before bytes arrive
    try:
        receive(sock, [body], time.monotonic() + rest_within_s)
    except (Disconnected, TimeoutError) as error:
        raise FrameError(f"a frame of {length} bytes did not arrive whole: {error}") from error
    return body


def receive(sock: socket.socket, pieces: list[memoryview], deadline: float) -> None:
    """Fills all pieces.

    Raises TimeoutError at the deadline, Disconnected when the other side closed before the first byte, FrameError when
    it did in the middle, or OSError.
    """
    pieces = [piece for piece in pieces if len(piece)]
    is_untouched = True
    while pieces:
        _set_timeout(sock, socket.SO_RCVTIMEO, deadline - time.monotonic())
        try:
            num, *_ = sock.recvmsg_into(pieces, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            continue  # the timeout passed without a byte; the next look at the clock ends it
        if not num:
            message = "the other side closed the connection"
            raise Disconnected(message) if is_untouched else FrameError(f"{message} in the middle")
        is_untouched = False
        pieces = _rest(pieces, num)


def send(sock: socket.socket, pieces: list[memoryview], stall_s: float) -> None:
    """Sends all pieces. Raises TimeoutError when no byte could be sent for `stall_s`, or OSError."""
    _set_timeout(sock, socket.SO_SNDTIMEO, stall_s)
    while pieces:
        try:
            num = sock.sendmsg(pieces, (), socket.MSG_NOSIGNAL)
        except BlockingIOError as error:
            raise TimeoutError(f"the other side took nothing for {stall_s} s") from error
        pieces = _rest(pieces, num)


def _set_timeout(sock: socket.socket, option: int, seconds: float) -> None:
    if seconds <= 0:
        raise TimeoutError("no time left")
    whole, fraction = divmod(max(seconds, _MIN_TIMEOUT_S), 1)
    sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(whole), int(fraction * 1e6)))


def _rest(pieces: list[memoryview], num: int) -> list[memoryview]:
    """What remains of the pieces after their first `num` bytes."""
    for i, piece in enumerate(pieces):
        if num < len(piece):
            return [piece[num:], *pieces[i + 1 :]] if num else pieces[i:]
        num -= len(piece)
    return []


def batches(views: Sequence[memoryview], buffer: Int64Array, offset: Int64Array, length: Int64Array
            ) -> Iterator[list[memoryview]]:  # fmt: skip
    """The runs as pieces of memory, BATCH at a time. Runs must have been checked."""
    for first in range(0, len(length), BATCH):
        part = slice(first, first + BATCH)
        ends = (offset[part] + length[part]).tolist()
        yield [
            views[b][start:end]
            for b, start, end in zip(buffer[part].tolist(), offset[part].tolist(), ends, strict=True)
        ]


def tune(sock: socket.socket) -> None:
    """Blocking, and small frames leave at once."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
