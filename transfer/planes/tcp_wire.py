"""What travels on a connection of the tcp plane.

    reader                              holder
           ◄──────────────────────────  status            (there is room, or why not)
    hello  ──────────────────────────►                    (the reader's token)
           ◄──────────────────────────  status            (welcome, or why not)
    request ──────────────────────────►
           ◄──────────────────────────  status, then the bytes of all runs if it is ok
    request ──────────────────────────►  ...

A frame is its length (4 bytes, little-endian) and a msgpack map. Its length is limited by what may come at that point,
before anything is allocated: a stranger, who has no token, can send no more than a hello.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass

import msgpack
import numpy as np

from transfer.planes.base import Int64Array

VERSION = 2
MAX_RUNS = 500_000  # per request: 12 MB of 3 × 8 bytes; a larger read is sent as several requests
MAX_REQUEST_BYTES = 16 * 2**20
MAX_HELLO_BYTES = 1024
MAX_STATUS_BYTES = 8192

_LENGTH = struct.Struct("<I")
_TIMEVAL = struct.Struct("@ll")
_LITTLE = np.dtype("<i8")
_MAX_STR_BYTES = 4096
_MAX_PROBLEM = _MAX_STR_BYTES // 4  # characters, of up to 4 bytes
_MIN_TIMEOUT_S = 1e-3  # the kernel takes 0 for "no timeout"


class FrameError(Exception):
    """The other side does not speak this protocol."""


class Disconnected(Exception):
    """The other side closed the connection between two frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Three arrays of one length: the runs' buffers, offsets and lengths in the holder's memory."""

    lease_id: str
    buffer: Int64Array
    offset: Int64Array
    length: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """`problem` is empty when all is well; `refused` tells a refused read from a connection that is no use."""

    problem: str = ""
    refused: bool = False


def encode_hello(token: bytes) -> bytes:
    return _frame({"v": VERSION, "token": token})


def decode_hello(body: memoryview) -> bytes:
    """The token. Raises FrameError."""
    token = _message(body).get("token")
    if not isinstance(token, bytes):
        raise FrameError("a hello has a token")
    return token


def encode_request(request: Request) -> bytes:
    arrays = [np.ascontiguousarray(a, _LITTLE).data for a in (request.buffer, request.offset, request.length)]
    return _frame({"v": VERSION, "lease": request.lease_id, "runs": arrays})


def decode_request(body: memoryview) -> Request:
    """Raises FrameError."""
    message = _message(body)
    lease_id, runs = message.get("lease"), message.get("runs")
    if not isinstance(lease_id, str) or not isinstance(runs, list) or len(runs) != 3:
        raise FrameError("a request has a lease and three arrays of runs")
    if not all(isinstance(r, bytes) and len(r) % 8 == 0 and len(r) == len(runs[0]) for r in runs):
        raise FrameError("runs are three arrays of int64 of one length")
    buffer, offset, length = (np.frombuffer(r, _LITTLE).astype(np.int64, copy=False) for r in runs)
    return Request(lease_id=lease_id, buffer=buffer, offset=offset, length=length)


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


def receive_frame(sock: socket.socket, max_bytes: int, first_byte_by: float, rest_within_s: float) -> memoryview:
    """One frame's body. Its length must come until `first_byte_by` (monotonic), the rest `rest_within_s` later.

    Raises Disconnected when the other side closed instead, FrameError when it closed or stalled in the middle and for
    a length over `max_bytes`, TimeoutError when nothing came, or OSError.
    """
    header = memoryview(bytearray(_LENGTH.size))
    if not _receive(sock, header, first_byte_by):
        raise Disconnected("the other side closed the connection")
    (length,) = _LENGTH.unpack(header)
    if length > max_bytes:
        raise FrameError(f"a frame of {length} bytes is over the limit of {max_bytes}")
    body = np.empty(length, np.uint8).data  # unlike a bytearray not touched before bytes arrive
    try:
        is_whole = _receive(sock, body, time.monotonic() + rest_within_s)
    except TimeoutError as error:
        raise FrameError(f"a frame of {length} bytes did not arrive whole: {error}") from error
    if not is_whole:
        raise FrameError(f"a frame of {length} bytes did not arrive whole: the other side closed the connection")
    return body


def _receive(sock: socket.socket, area: memoryview, deadline: float) -> bool:
    """Fills `area`; False when the other side closed before the first byte. Raises like `receive_frame`."""
    at = 0
    while at < len(area):
        _set_timeout(sock, socket.SO_RCVTIMEO, deadline - time.monotonic())
        try:
            num_bytes = sock.recv_into(area[at:], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            continue  # the timeout passed without a byte; the next look at the clock ends it
        if not num_bytes and at:
            raise FrameError("the other side closed the connection in the middle of a frame")
        if not num_bytes:
            return False
        at += num_bytes
    return True


def send_frame(sock: socket.socket, frame: bytes, deadline: float) -> None:
    """Raises TimeoutError at the deadline (monotonic), or OSError."""
    rest = memoryview(frame)
    while rest:
        _set_timeout(sock, socket.SO_SNDTIMEO, deadline - time.monotonic())
        try:
            rest = rest[sock.send(rest, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            continue  # as in `_receive`


def limit_sending(sock: socket.socket, stall_s: float) -> None:
    """From here on a send that could not send a byte for so long ends with BlockingIOError."""
    _set_timeout(sock, socket.SO_SNDTIMEO, stall_s)


def _set_timeout(sock: socket.socket, option: int, seconds: float) -> None:
    if seconds <= 0:
        raise TimeoutError("no time left")
    whole, fraction = divmod(max(seconds, _MIN_TIMEOUT_S), 1)
    sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(whole), int(fraction * 1e6)))


def tune(sock: socket.socket) -> None:
    """Blocking; small frames leave at once; a host that is gone is found within seconds although nobody sends."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
