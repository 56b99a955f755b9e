"""100,000 random and damaged frames: each is refused with a `FrameError`, and the server that got them serves on."""

from __future__ import annotations

import gc
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgpack
import mutations
import numpy as np
import pytest
from plane_memory import LENS, Bounds, Open, Region, apply, random_runs
from plane_tcp import HOST, OK, TIMEOUT_S, connected, join_connections, reading, request_of, say

from transfer.planes import PLANE_NAMES, make_plane
from transfer.planes import tcp_wire as wire
from transfer.planes.base import Int64Array, PlaneUnavailable
from transfer.planes.tcp_server import TcpServer

HELLO = wire.encode_hello(b"token")
VALID = [
    HELLO,
    request_of(),
    request_of((0, 0, 5), (1, 1, 6), (5, 0, 1), (9, -1, 2**62)),
    request_of(*[(i % 6, i, 1) for i in range(40)], lease_id="läase"),
    wire.encode_status(wire.Status()),
    wire.encode_status(wire.Status(problem="é" * 99, refused=True)),
]
REQUESTS = VALID[2:4]


@pytest.mark.parametrize("decode", [wire.decode_hello, wire.decode_request, wire.decode_status])
def test_a_damaged_message_is_decoded_or_refused(decode: Callable[[memoryview], object]) -> None:
    rng = np.random.default_rng(1)
    num_refused = 0
    for i in range(20_000):
        try:
            decode(memoryview(mutations.damaged(rng, VALID[i % len(VALID)][4:])))
        except wire.FrameError:
            num_refused += 1
    assert 15_000 < num_refused < 20_000


class Counting(Bounds):
    """Knows the buffers' sizes and one token, and counts the requests it judges."""

    def __init__(self) -> None:
        self.num_asked = 0

    def knows(self, token: bytes) -> bool:
        return token == b"token"

    def check(self, token: bytes, lease_id: str, buffer: Int64Array, offset: Int64Array, length: Int64Array) -> None:
        self.num_asked += 1
        super().check(token, lease_id, buffer, offset, length)


def other_runs(rng: np.random.Generator, frame: bytes) -> bytes:
    """Still a request: the bytes of its last array are others."""
    return frame[:-3] + rng.bytes(3)


def frames(rng: np.random.Generator, num: int) -> bytes:
    """Of one connection: mostly requests that may only be refused, then damaged ones with right and wrong lengths."""
    made = []
    for _ in range(num):
        frame = REQUESTS[int(rng.integers(len(REQUESTS)))]
        kind = int(rng.integers(12))
        if kind == 0:
            made.append(mutations.damaged(rng, frame))
        elif kind == 1:
            body = mutations.damaged(rng, frame[4:])
            made.append(struct.pack("<I", len(body)) + body)
        else:
            made.append(other_runs(rng, frame))
    return b"".join(made)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_server_that_got_damaged_frames_serves_on_and_leaks_nothing() -> None:
    rng = np.random.default_rng(2)
    source, dest, expected = Region(1), Region(2), Region(2)
    guard = Counting()
    server = TcpServer(HOST, source.buffers, guard)
    gc.collect()  # what earlier tests left to the collector is not ours
    before, threads = descriptors(), set(threading.enumerate())
    for i in range(1_000):
        hello = mutations.damaged(rng, HELLO) if i % 4 == 0 else HELLO
        with connected(server) as sock:
            say(sock, hello + frames(rng, 40))
    join_connections()
    assert guard.num_asked > 4_000
    assert server.refused_frames > 700
    assert server.num_connections == 0
    assert (descriptors(), set(threading.enumerate())) == (before, threads)
    with reading(server, dest) as reader:
        runs = random_runs(0, 500)
        reader.read("lease", runs, TIMEOUT_S)
    apply(runs, source.arrays, expected.arrays)
    np.testing.assert_array_equal(dest.bytes, expected.bytes)
    for end in (server, source, dest, expected):
        end.close()


def test_a_frame_of_any_announced_length_takes_no_memory_before_its_bytes_come() -> None:
    """More connections than would fit into memory announce the longest request and send nothing more."""
    source = Region(1)
    server = TcpServer(HOST, source.buffers, Open())
    before = resident_bytes()
    with ExitStack() as ends:
        ends.callback(source.close)
        ends.callback(server.close)
        for _ in range(60):
            sock = ends.enter_context(socket.create_connection((HOST, server.endpoint["port"])))
            sock.sendall(HELLO + struct.pack("<I", wire.MAX_REQUEST_BYTES))
            assert sock.recv(2 * len(OK), socket.MSG_WAITALL) == OK + OK
        assert resident_bytes() - before < 60 * wire.MAX_REQUEST_BYTES / 4


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def refuse_connection(*_: object, **__: object) -> None:
    raise ConnectionRefusedError("nobody listens")


@pytest.mark.parametrize("name", PLANE_NAMES)
def test_a_damaged_endpoint_is_unavailable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    monkeypatch.setattr(socket, "getaddrinfo", refuse_connection)  # a damaged address may be somebody's
    source, dest = Region(1, LENS[:2]), Region(2, LENS[:2])
    plane = make_plane(name, host=HOST)
    endpoint = {"host": "holder", "port": 5, "pid": 1, "fd": 9, "num_bytes": 7, "offsets": [1], "lens": [5],
                "device": 1, "inode": 2, "pid_namespace": 3, "process": "p", "server": "s"}  # fmt: skip
    valid = msgpack.packb(endpoint)
    num_tried = 0
    for _ in range(2_000):
        try:
            found = msgpack.unpackb(mutations.damaged(rng, valid))
        except ValueError:
            continue
        num_tried += 1
        with pytest.raises(PlaneUnavailable):
            plane.connect(found, b"token", dest.buffers)
    assert num_tried > 200
    source.close()
    dest.close()
