"""Holders that die, stall or lie, and strangers: each ends one connection with an error and harms nobody else."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgpack
import numpy as np
import pytest
from plane_memory import Open, Region, random_runs, runs_of
from plane_tcp import (
    HOST,
    OK,
    TIMEOUT_S,
    WAIT_S,
    answering,
    connected,
    fake_holder,
    join_connections,
    reading,
    request_of,
    say,
    take_frame,
    welcome,
    welcomed,
)

from transfer.planes import tcp_wire as wire
from transfer.planes.base import PlaneError, PlaneUnavailable
from transfer.planes.tcp import TcpPlane
from transfer.planes.tcp_server import TcpServer

PLANE = TcpPlane(HOST)
RUNS = runs_of((0, 0, 0, 0, 4096))


@pytest.fixture
def dest() -> Iterator[Region]:
    made = Region(2)
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[TcpServer]:
    source = Region(1)
    made = TcpServer(HOST, source.buffers, Open())
    yield made
    made.close()
    source.close()


# ---- a holder that dies


def hears_a_hello(sock: socket.socket) -> None:
    sock.sendall(OK)
    take_frame(sock)


@pytest.mark.parametrize("until", [lambda sock: None, lambda sock: sock.sendall(OK[:-1]), hears_a_hello])
def test_a_holder_that_dies_before_its_welcome_is_unavailable(
    until: Callable[[socket.socket], None], dest: Region
) -> None:
    endpoint, thread = fake_holder(until)
    with pytest.raises(PlaneUnavailable, match="cannot be reached"):
        PLANE.connect(endpoint, b"", dest.buffers)
    thread.join(WAIT_S)


def test_a_holder_that_dies_between_two_reads_fails_the_second(dest: Region) -> None:
    endpoint, thread = fake_holder(answering(lambda sock: sock.sendall(OK + bytes(4096))))
    reader = PLANE.connect(endpoint, b"", dest.buffers)
    reader.read("lease", RUNS, TIMEOUT_S)
    thread.join(WAIT_S)
    with pytest.raises(PlaneError):
        reader.read("lease", RUNS, TIMEOUT_S)
    reader.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        OK[:3],
        OK[:-1],
        OK,
        OK + bytes(4095),
        b"\xff\xff\xff\xff",
        struct.pack("<I", wire.MAX_STATUS_BYTES + 1),
        b"\x00\x00\x00\x00",
        struct.pack("<I", 3) + b"abc",
        struct.pack("<I", 1) + msgpack.packb([]),
        wire._frame({"v": wire.VERSION, "problem": 5, "refused": False}),
        wire.encode_status(wire.Status(problem="out of order")),
        OK.replace(b"\xa1v\x02", b"\xa1v\x01"),
    ],
)
def test_an_answer_cut_short_or_wrong_is_an_error(dest: Region, data: bytes) -> None:
    endpoint, thread = fake_holder(answering(lambda sock: sock.sendall(data)))
    reader = PLANE.connect(endpoint, b"", dest.buffers)
    with pytest.raises(PlaneError):
        reader.read("lease", RUNS, TIMEOUT_S)
    reader.close()
    thread.join(WAIT_S)


def test_bytes_beyond_an_answer_end_the_connection_they_came_on(dest: Region) -> None:
    """They would be taken for the next answer."""
    endpoint, thread = fake_holder(answering(lambda sock: sock.sendall(OK + bytes(4096) + OK + bytes(4096))))
    reader = PLANE.connect(endpoint, b"", dest.buffers)
    reader.read("lease", RUNS, TIMEOUT_S)
    thread.join(WAIT_S)
    with pytest.raises(PlaneError):
        reader.read("lease", RUNS, TIMEOUT_S)
    reader.close()


@pytest.fixture
def half() -> Iterator[tuple[dict[str, object], threading.Event]]:
    """A holder that sends half an answer; the event tells that it has."""
    is_sent, is_over = threading.Event(), threading.Event()

    def answer(sock: socket.socket) -> None:
        sock.sendall(OK + bytes(2000))
        is_sent.set()
        assert is_over.wait(WAIT_S)

    endpoint, thread = fake_holder(answering(answer))
    yield endpoint, is_sent
    is_over.set()
    thread.join(WAIT_S)


def test_a_holder_that_stalls_half_way_is_a_timeout(
    dest: Region, half: tuple[dict[str, object], threading.Event]
) -> None:
    reader = PLANE.connect(half[0], b"", dest.buffers)
    with pytest.raises(PlaneError, match=r"did not end within 0\.05 s"):
        reader.read("lease", RUNS, 0.05)
    reader.close()


def test_closing_in_the_middle_of_the_bytes_ends_the_read_and_nothing_is_written_after(
    dest: Region, half: tuple[dict[str, object], threading.Event]
) -> None:
    reader = PLANE.connect(half[0], b"", dest.buffers)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(reader.read, "lease", RUNS, TIMEOUT_S)
        assert half[1].wait(WAIT_S)
        reader.close()
        after = dest.bytes.copy()
        with pytest.raises(PlaneError, match="the reader was closed"):
            running.result(WAIT_S)
    np.testing.assert_array_equal(dest.bytes, after)
    reader.close()


def test_a_holder_that_takes_no_request_is_a_timeout(dest: Region) -> None:
    is_over = threading.Event()

    def deaf(sock: socket.socket) -> None:
        welcome(sock)
        assert is_over.wait(WAIT_S)

    endpoint, thread = fake_holder(deaf)
    reader = PLANE.connect(endpoint, b"", dest.buffers)
    with pytest.raises(PlaneError, match=r"did not end within 0\.05 s"):
        reader.read("lease", runs_of(*[(0, 0, 0, 0, 1)] * wire.MAX_RUNS), 0.05)  # more than the kernel buffers
    is_over.set()
    reader.close()
    thread.join(WAIT_S)


# ---- strangers


BAD_ANYWHERE = [
    b"\x00",
    b"\xff\xff\xff\xff",
    struct.pack("<I", wire.MAX_REQUEST_BYTES + 1),
    struct.pack("<I", 0),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    wire._frame({}),
    struct.pack("<I", 1000) + b"\x91" * 1000,
    struct.pack("<I", 6) + b"\xdd\x7f\xff\xff\xff\x00",
    struct.pack("<I", 6) + b"\xc6\x7f\xff\xff\xff\x00",
]
BAD_HELLO = [
    struct.pack("<I", wire.MAX_HELLO_BYTES + 1),
    wire._frame({"v": wire.VERSION, "token": "text"}),
    wire.encode_hello(b"t" * wire.MAX_HELLO_BYTES),
    wire.encode_hello(b"token")[:-1],
    request_of((0, 0, 1)),
]
BAD_REQUEST = [
    struct.pack("<I", wire.MAX_REQUEST_BYTES) + b"short",
    wire._frame({"v": wire.VERSION, "lease": b"", "runs": [b"", b"", b""]}),
    wire._frame({"v": wire.VERSION, "lease": "", "runs": [b"", b""]}),
    wire._frame({"v": wire.VERSION, "lease": "", "runs": [b"1234567", b"1234567", b"1234567"]}),
    wire._frame({"v": wire.VERSION, "lease": "", "runs": [b"12345678", b"", b""]}),
    wire._frame({"v": wire.VERSION, "lease": "", "runs": [1, 2, 3]}),
    struct.pack("<I", 200_000) + b"\x91" * 200_000,
    request_of((0, 0, 5), (1, 1, 6))[:-1],
    wire.encode_hello(b"token"),
]


@pytest.mark.parametrize("data", BAD_ANYWHERE + BAD_HELLO)
def test_each_bad_hello_is_counted_once_and_harms_nobody(dest: Region, server: TcpServer, data: bytes) -> None:
    with reading(server, dest) as reader:
        with connected(server) as sock:
            say(sock, data)
        assert server.refused_frames == 1
        reader.read("lease", random_runs(0, 10), TIMEOUT_S)


@pytest.mark.parametrize("data", BAD_ANYWHERE + BAD_REQUEST)
def test_each_bad_request_is_counted_once_and_harms_nobody(dest: Region, server: TcpServer, data: bytes) -> None:
    with reading(server, dest) as reader:
        with welcomed(server) as sock:
            say(sock, data)
        assert server.refused_frames == 1
        reader.read("lease", random_runs(0, 10), TIMEOUT_S)


def test_an_unknown_version_is_told_both_versions(server: TcpServer) -> None:
    with connected(server) as sock:
        answer = say(sock, wire._frame({"v": 1, "something": "old"}))
    assert b"version 1 is not known, this side speaks 2" in answer


def test_a_stranger_that_says_nothing_does_not_hold_a_thread() -> None:
    source = Region(1)
    server = TcpServer(HOST, source.buffers, Open(), hello_s=0.02)
    with connected(server):
        join_connections()
    assert server.num_connections == 0
    server.close()
    source.close()
