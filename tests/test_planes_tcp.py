"""What only the `tcp` plane promises: the guard is asked, and nothing a stranger sends ends the server."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import msgpack
import numpy as np
import pytest
from plane_memory import LENS, Bounds, Open, Region, apply, random_runs, runs_of

from transfer.guard import ReadGuard
from transfer.layout import BufferLayout, EngineLayout
from transfer.planes import tcp_wire as wire
from transfer.planes.base import PlaneError, PlaneUnavailable, ReadRefused
from transfer.planes.tcp import TcpPlane, TcpReader
from transfer.planes.tcp_server import TcpServer

HOST = "127.0.0.1"
TIMEOUT_S = 30.0
WAIT_S = 60.0
PLANE = TcpPlane(HOST)


@pytest.fixture
def regions() -> Iterator[tuple[Region, Region]]:
    made = Region(1), Region(2)
    yield made
    for region in made:
        region.close()


@pytest.fixture
def server(regions: tuple[Region, Region]) -> Iterator[TcpServer]:
    made = TcpServer(HOST, regions[0].buffers, Open())
    yield made
    made.close()


@contextlib.contextmanager
def reading(server: TcpServer, region: Region, token: bytes = b"token") -> Iterator[TcpReader]:
    reader = PLANE.connect(server.endpoint, token, region.buffers)
    try:
        yield reader
    finally:
        reader.close()


def join_connections() -> None:
    for thread in threading.enumerate():
        if thread.name == "kv-tcp-serve":
            thread.join(WAIT_S)
            assert not thread.is_alive()


# ---- the guard


@pytest.fixture
def guarded() -> Iterator[tuple[ReadGuard, TcpServer, Region]]:
    """Two buffers of 8 blocks of 16 bytes; reader "alice" may read block 3 under "lease"."""
    layout = EngineLayout(
        version=1, model="m", buffers=tuple(
            BufferLayout(layer=i, cache_name="k", attn_type="FullAttention", block_size=4, first_head=0, num_heads=1,
                         total_heads=1, dim=4, dtype="int8", num_bytes=128) for i in range(2)
        ),
    )  # fmt: skip
    guard = ReadGuard(layout)
    guard.register_reader(b"alice")
    guard.admit("lease", b"alice", {"FullAttention": [3]})
    source, dest = Region(1, (128, 128)), Region(2, (128, 128))
    server = TcpServer(HOST, source.buffers, guard)
    yield guard, server, dest
    for end in (server, source, dest):
        end.close()


@pytest.mark.parametrize(
    ("token", "lease", "offset"),
    [
        (b"mallory", "lease", 48),
        (b"", "lease", 48),
        (b"alice", "other", 48),
        (b"alice", "lease", 49),
        (b"alice", "", 0),
    ],
)
def test_what_the_guard_refuses_is_not_read(
    guarded: tuple[ReadGuard, TcpServer, Region], token: bytes, lease: str, offset: int
) -> None:
    _, server, dest = guarded
    before = dest.bytes.copy()
    with reading(server, dest, token) as reader, pytest.raises(ReadRefused):
        reader.read(lease, runs_of((0, offset, 0, 0, 16)), TIMEOUT_S)
    np.testing.assert_array_equal(dest.bytes, before)


def test_a_refusal_leaves_the_connection_usable_until_the_lease_ends(
    guarded: tuple[ReadGuard, TcpServer, Region],
) -> None:
    guard, server, dest = guarded
    runs = runs_of((0, 48, 0, 0, 16), (1, 50, 1, 0, 3))
    with reading(server, dest, b"alice") as reader:
        for _ in range(3):
            with pytest.raises(ReadRefused):
                reader.read("lease", runs_of((0, 0, 0, 0, 1)), TIMEOUT_S)
            reader.read("lease", runs, TIMEOUT_S)
        assert server.num_connections == 1
        guard.revoke("lease")
        with pytest.raises(ReadRefused, match="the lease has ended"):
            reader.read("lease", runs, TIMEOUT_S)
    assert server.refused_frames == 0


# ---- requests


def test_a_read_of_more_runs_than_a_request_holds_is_several_requests(
    regions: tuple[Region, Region], server: TcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_RUNS", 7)
    source, dest = regions
    expected = Region(2)
    runs = random_runs(5, 100)
    apply(runs, source.arrays, expected.arrays)
    with reading(server, dest) as reader:
        reader.read("lease", runs, TIMEOUT_S)
    np.testing.assert_array_equal(dest.bytes, expected.bytes)
    expected.close()


def test_the_longest_request_fits_a_frame() -> None:
    full = np.zeros(wire.MAX_RUNS, np.int64)
    request = wire.Request(token=b"t" * 64, lease_id="l" * 1024, buffer=full, offset=full, length=full)
    assert len(wire.encode_request(request)) < wire.MAX_FRAME_BYTES


def test_a_message_comes_back_as_it_was() -> None:
    runs = np.array([1, -2, 2**62], np.int64)
    request = wire.Request(token=b"t", lease_id="löss", buffer=runs, offset=runs + 1, length=runs + 2)
    decoded = wire.decode_request(memoryview(wire.encode_request(request)[4:]))
    assert (decoded.token, decoded.lease_id) == (b"t", "löss")
    for name in ("buffer", "offset", "length"):
        np.testing.assert_array_equal(getattr(decoded, name), getattr(request, name))
    for status in (wire.Status(), wire.Status(problem="no", refused=True), wire.Status(problem="é" * 9000)):
        back = wire.decode_status(memoryview(wire.encode_status(status)[4:]))
        assert status.problem.startswith(back.problem)
        assert back.refused == status.refused


# ---- connections


def test_more_connections_than_allowed_are_told_so(regions: tuple[Region, Region]) -> None:
    server = TcpServer(HOST, regions[0].buffers, Open(), max_connections=1)
    with reading(server, regions[1]) as reader:
        with pytest.raises(PlaneUnavailable, match="serves 1 connections already"):
            PLANE.connect(server.endpoint, b"token", regions[1].buffers)
        reader.read("lease", random_runs(0, 10), TIMEOUT_S)
    join_connections()
    with reading(server, regions[1]) as reader:
        reader.read("lease", random_runs(0, 10), TIMEOUT_S)
    server.close()


def test_closed_connections_leave_no_thread(regions: tuple[Region, Region], server: TcpServer) -> None:
    for _ in range(5):
        with reading(server, regions[1]) as reader:
            reader.read("lease", random_runs(0, 10), TIMEOUT_S)
    join_connections()
    assert server.num_connections == 0


def test_an_idle_connection_ends_and_the_next_read_opens_another(regions: tuple[Region, Region]) -> None:
    server = TcpServer(HOST, regions[0].buffers, Open(), idle_s=0.01)
    with reading(server, regions[1]) as reader:
        join_connections()
        reader.read("lease", random_runs(0, 10), TIMEOUT_S)
    server.close()
    assert server.refused_frames == 0


def test_a_reader_that_takes_nothing_does_not_hold_a_thread(regions: tuple[Region, Region]) -> None:
    server = TcpServer(HOST, regions[0].buffers, Open(), stall_s=0.05)
    num = 2048  # times 64 KiB: far more than the kernel buffers
    request = wire.Request(
        token=b"", lease_id="l", buffer=np.full(num, 3), offset=np.zeros(num, np.int64), length=np.full(num, LENS[3])
    )
    with connected(server) as sock:
        sock.sendall(wire.encode_request(request))
        join_connections()
    assert server.num_connections == 0
    server.close()


class Blocking(Open):
    """A guard that answers when it is told to."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def check(self, *_: object) -> None:
        self.asked.set()
        assert self.go_on.wait(WAIT_S)


def test_a_holder_that_stalls_is_a_timeout(regions: tuple[Region, Region]) -> None:
    guard = Blocking()
    server = TcpServer(HOST, regions[0].buffers, guard)
    with reading(server, regions[1]) as reader:
        with pytest.raises(PlaneError, match=r"did not end within 0\.05 s"):
            reader.read("lease", random_runs(0, 10), 0.05)
        guard.go_on.set()
        reader.read("lease", random_runs(0, 10), TIMEOUT_S)
    server.close()


def test_closing_the_reader_ends_a_read_that_waits(regions: tuple[Region, Region]) -> None:
    guard = Blocking()
    server = TcpServer(HOST, regions[0].buffers, guard)
    reader = PLANE.connect(server.endpoint, b"", regions[1].buffers)
    errors: list[Exception] = []

    def read() -> None:
        try:
            reader.read("lease", random_runs(0, 10), TIMEOUT_S)
        except PlaneError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert guard.asked.wait(WAIT_S)
    reader.close()
    thread.join(WAIT_S)
    assert [str(error) for error in errors] == ["the reader was closed"]
    guard.go_on.set()
    server.close()


def test_nobody_listening_is_unavailable(regions: tuple[Region, Region]) -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PlaneUnavailable, match=f"the holder at {HOST}:{port} cannot be reached"):
        PLANE.connect({"host": HOST, "port": port}, b"", regions[1].buffers)


def test_an_address_that_is_not_ours_cannot_be_served(regions: tuple[Region, Region]) -> None:
    with pytest.raises(PlaneUnavailable, match=r"cannot listen at '192\.0\.2\.1'"):
        TcpPlane("192.0.2.1").serve(regions[0].buffers, Open())


# ---- a holder that misbehaves


def fake_holder(answer: Callable[[socket.socket], None]) -> tuple[dict[str, object], threading.Thread]:
    """Welcomes one connection, takes one request, and lets `answer` go on; then hangs up."""
    listener = socket.create_server((HOST, 0))

    def run() -> None:
        with listener, listener.accept()[0] as sock:
            sock.sendall(wire.encode_status(wire.Status()))
            (length,) = struct.unpack("<I", sock.recv(4, socket.MSG_WAITALL))
            sock.recv(length, socket.MSG_WAITALL)
            answer(sock)

    thread = threading.Thread(target=run)
    thread.start()
    return {"host": HOST, "port": listener.getsockname()[1]}, thread


OK = wire.encode_status(wire.Status())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        OK[:3],
        OK[:-1],
        OK,
        OK + bytes(4095),
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x00",
        struct.pack("<I", 3) + b"abc",
        struct.pack("<I", 1) + msgpack.packb([]),
        wire._frame({"v": 1, "problem": 5, "refused": False}),
        wire.encode_status(wire.Status(problem="out of order")),
        OK.replace(b"\xa1v\x01", b"\xa1v\x02"),
    ],
)
def test_an_answer_cut_short_or_wrong_is_an_error(regions: tuple[Region, Region], data: bytes) -> None:
    endpoint, thread = fake_holder(lambda sock: sock.sendall(data))
    reader = PLANE.connect(endpoint, b"", regions[1].buffers)
    with pytest.raises(PlaneError):
        reader.read("lease", runs_of((0, 0, 0, 0, 4096)), TIMEOUT_S)
    reader.close()
    thread.join(WAIT_S)


def test_a_holder_that_stalls_half_way_is_a_timeout(regions: tuple[Region, Region]) -> None:
    read_ended = threading.Event()

    def half(sock: socket.socket) -> None:
        sock.sendall(OK + bytes(2000))
        assert read_ended.wait(WAIT_S)

    endpoint, thread = fake_holder(half)
    reader = PLANE.connect(endpoint, b"", regions[1].buffers)
    with pytest.raises(PlaneError, match=r"did not end within 0\.05 s"):
        reader.read("lease", runs_of((0, 0, 0, 0, 4096)), 0.05)
    read_ended.set()
    reader.close()
    thread.join(WAIT_S)


# ---- strangers


@contextlib.contextmanager
def connected(server: TcpServer) -> Iterator[socket.socket]:
    """A connection that has been welcomed."""
    with socket.create_connection((server.endpoint["host"], server.endpoint["port"]), timeout=WAIT_S) as sock:
        assert sock.recv(len(OK), socket.MSG_WAITALL) == OK
        yield sock


def say(server: TcpServer, data: bytes) -> bytes:
    """Sends `data`, ends, and returns what came back until the server hung up."""
    answer = b""
    with connected(server) as sock, contextlib.suppress(OSError):  # hung up on while we spoke
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while piece := sock.recv(65536):
            answer += piece
    return answer


def valid_request() -> bytes:
    run = np.array([0, 1], np.int64)
    return wire.encode_request(wire.Request(token=b"token", lease_id="lease", buffer=run, offset=run, length=run + 5))


BAD = [
    b"\x00",
    struct.pack("<I", wire.MAX_FRAME_BYTES + 1),
    b"\xff\xff\xff\xff",
    struct.pack("<I", wire.MAX_FRAME_BYTES) + b"short",
    struct.pack("<I", 0),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    wire._frame({}),
    wire._frame({"v": 2, "token": b"", "lease": "", "runs": [b"", b"", b""]}),
    wire._frame({"v": 1, "token": "text", "lease": "", "runs": [b"", b"", b""]}),
    wire._frame({"v": 1, "token": b"", "lease": b"", "runs": [b"", b"", b""]}),
    wire._frame({"v": 1, "token": b"", "lease": "", "runs": [b"", b""]}),
    wire._frame({"v": 1, "token": b"", "lease": "", "runs": [b"1234567", b"1234567", b"1234567"]}),
    wire._frame({"v": 1, "token": b"", "lease": "", "runs": [b"12345678", b"", b""]}),
    wire._frame({"v": 1, "token": b"", "lease": "", "runs": [1, 2, 3]}),
    struct.pack("<I", 200_000) + b"\x91" * 200_000,
    struct.pack("<I", 6) + b"\xdd\x7f\xff\xff\xff\x00",
    valid_request()[:-1],
]


@pytest.mark.parametrize("data", BAD)
def test_each_bad_frame_is_counted_once_and_harms_nobody(
    regions: tuple[Region, Region], server: TcpServer, data: bytes
) -> None:
    with reading(server, regions[1]) as reader:
        say(server, data)
        assert server.refused_frames == 1
        reader.read("lease", random_runs(0, 10), TIMEOUT_S)


def test_an_unknown_version_is_told_both_versions(server: TcpServer) -> None:
    answer = say(server, wire._frame({"v": 2, "something": "new"}))
    assert b"version 2 is not known, this side speaks 1" in answer


def test_no_sequence_of_random_frames_ends_the_server(regions: tuple[Region, Region]) -> None:
    server = TcpServer(HOST, regions[0].buffers, Bounds())
    rng = np.random.default_rng(0)
    for i in range(1200):
        frame = bytearray(valid_request())
        if i % 3 == 0:
            frame = bytearray(rng.bytes(int(rng.integers(1, 200))))
        elif i % 3 == 1:
            frame = frame[: int(rng.integers(1, len(frame)))]
        else:
            for at in rng.integers(4, len(frame), 3):
                frame[at] = int(rng.integers(256))
        say(server, bytes(frame))
    join_connections()
    assert server.num_connections == 0
    assert server.refused_frames > 800
    with reading(server, regions[1]) as reader:
        reader.read("lease", random_runs(0, 10), TIMEOUT_S)
    server.close()
