"""What only the `tcp` plane promises: who may read what, connections, streams, and that no read waits for another."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from plane_memory import LENS, Open, Region, apply, random_runs, runs_of
from plane_tcp import (
    HOST,
    OK,
    TIMEOUT_S,
    WAIT_S,
    join_connections,
    reading,
    request_of,
    welcomed,
)

from transfer.guard import ReadGuard
from transfer.layout import BufferLayout, EngineLayout
from transfer.planes import tcp
from transfer.planes import tcp_wire as wire
from transfer.planes.base import PlaneError, PlaneUnavailable, ReadRefused, Runs
from transfer.planes.tcp import TcpPlane, TcpReader
from transfer.planes.tcp_server import TcpServer


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


def read_and_compare(reader: TcpReader, regions: tuple[Region, Region], runs: Runs) -> None:
    source, dest = regions
    expected = Region(2)
    expected.bytes[:] = dest.bytes
    apply(runs, source.arrays, expected.arrays)
    reader.read("lease", runs, TIMEOUT_S)
    np.testing.assert_array_equal(dest.bytes, expected.bytes)
    expected.close()


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


@pytest.mark.parametrize(("lease", "offset"), [("other", 48), ("lease", 49), ("", 0)])
def test_what_the_guard_refuses_is_not_read(
    guarded: tuple[ReadGuard, TcpServer, Region], lease: str, offset: int
) -> None:
    _, server, dest = guarded
    before = dest.bytes.copy()
    with reading(server, dest, b"alice") as reader, pytest.raises(ReadRefused):
        reader.read(lease, runs_of((0, offset, 0, 0, 16)), TIMEOUT_S)
    np.testing.assert_array_equal(dest.bytes, before)


@pytest.mark.parametrize("token", [b"mallory", b"", b"alic", b"alice\0", b"x" * 5000])
def test_who_has_no_token_cannot_connect(guarded: tuple[ReadGuard, TcpServer, Region], token: bytes) -> None:
    _, server, dest = guarded
    with pytest.raises(PlaneUnavailable), reading(server, dest, token):
        pass
    join_connections()
    assert server.refused_frames == 1


def test_a_reader_that_was_forgotten_reads_nothing_more(guarded: tuple[ReadGuard, TcpServer, Region]) -> None:
    guard, server, dest = guarded
    with reading(server, dest, b"alice") as reader:
        guard.forget_reader(b"alice")
        with pytest.raises(ReadRefused):
            reader.read("lease", runs_of((0, 48, 0, 0, 16)), TIMEOUT_S)
    with pytest.raises(PlaneUnavailable, match="no reader with this token is known"), reading(server, dest, b"alice"):
        pass


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
    with reading(server, regions[1]) as reader:
        read_and_compare(reader, regions, random_runs(5, 100))


def test_the_longest_request_fits_a_frame() -> None:
    full = np.zeros(wire.MAX_RUNS, np.int64)
    request = wire.Request(lease_id="l" * 1024, buffer=full, offset=full, length=full)
    assert len(wire.encode_request(request)) < wire.MAX_REQUEST_BYTES


def test_a_message_comes_back_as_it_was() -> None:
    runs = np.array([1, -2, 2**62], np.int64)
    request = wire.Request(lease_id="löss", buffer=runs, offset=runs + 1, length=runs + 2)
    decoded = wire.decode_request(memoryview(wire.encode_request(request)[4:]))
    assert decoded.lease_id == "löss"
    for name in ("buffer", "offset", "length"):
        np.testing.assert_array_equal(getattr(decoded, name), getattr(request, name))
    assert wire.decode_hello(memoryview(wire.encode_hello(b"\0t\xff")[4:])) == b"\0t\xff"
    for status in (wire.Status(), wire.Status(problem="no", refused=True), wire.Status(problem="é" * 9000)):
        frame = wire.encode_status(status)
        assert len(frame) < wire.MAX_STATUS_BYTES
        back = wire.decode_status(memoryview(frame[4:]))
        assert status.problem.startswith(back.problem)
        assert back.refused == status.refused


# ---- streams


def test_a_long_read_is_divided_among_connections(
    regions: tuple[Region, Region], server: TcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "STREAM_BYTES", 1000)
    with reading(server, regions[1]) as reader:
        read_and_compare(reader, regions, random_runs(5, 10))
        assert server.num_connections == 1
        for seed in range(3):
            read_and_compare(reader, regions, random_runs(seed, 3000))
        assert server.num_connections == tcp.MAX_STREAMS


def test_a_holder_without_room_for_more_streams_serves_one(
    regions: tuple[Region, Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "STREAM_BYTES", 1000)
    server = TcpServer(HOST, regions[0].buffers, Open(), max_connections=1)
    with reading(server, regions[1]) as reader:
        read_and_compare(reader, regions, random_runs(5, 3000))
    server.close()


@pytest.mark.parametrize("num", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("max_runs", [1, 3, 1000])
def test_the_parts_of_a_read_are_all_of_it_once(num: int, max_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "STREAM_BYTES", 40)
    monkeypatch.setattr(wire, "MAX_RUNS", max_runs)
    parts = tcp._divide(random_runs(num, num))
    assert [i for part in parts for i in range(num)[part]] == list(range(num))
    assert all(part.stop - part.start <= max_runs for part in parts)


# ---- connections


def test_more_connections_than_allowed_are_told_so(regions: tuple[Region, Region]) -> None:
    server = TcpServer(HOST, regions[0].buffers, Open(), max_connections=1)
    with reading(server, regions[1]) as reader:
        with pytest.raises(PlaneUnavailable, match="serves 1 connections already"), reading(server, regions[1]):
            pass
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


def test_nobody_listening_is_unavailable(regions: tuple[Region, Region]) -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PlaneUnavailable, match=f"the holder at {HOST}:{port} cannot be reached"):
        TcpPlane(HOST).connect({"host": HOST, "port": port}, b"", regions[1].buffers)


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_a_holder_is_reached_by_any_kind_of_address(host: str, regions: tuple[Region, Region]) -> None:
    server = TcpServer(host, regions[0].buffers, Open())
    with reading(server, regions[1]) as reader:
        read_and_compare(reader, regions, random_runs(0, 10))
    server.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "x" * 300, "a..b", "\0"])
def test_an_address_that_is_not_ours_cannot_be_served(host: str, regions: tuple[Region, Region]) -> None:
    with pytest.raises(PlaneUnavailable, match="cannot listen at"):
        TcpPlane(host).serve(regions[0].buffers, Open())


@pytest.mark.parametrize("host", ["x" * 300, "a..b", "\0", ""])
def test_what_is_no_address_cannot_be_reached(host: str, regions: tuple[Region, Region]) -> None:
    with pytest.raises(PlaneUnavailable, match="cannot be reached"):
        TcpPlane(HOST).connect({"host": host, "port": 1}, b"", regions[1].buffers)


# ---- side by side


MUCH = [(3, 0, LENS[3])] * 2048  # 64 KiB each: far more than the kernel buffers


def test_a_reader_that_takes_nothing_holds_back_itself_alone(regions: tuple[Region, Region], server: TcpServer) -> None:
    with welcomed(server) as slow:
        slow.sendall(request_of(*MUCH))
        assert slow.recv(len(OK), socket.MSG_WAITALL) == OK  # the answer is on its way, and stops somewhere
        with reading(server, regions[1]) as reader:
            for seed in range(3):
                read_and_compare(reader, regions, random_runs(seed, 100))
        for _ in MUCH:
            assert slow.recv(LENS[3], socket.MSG_WAITALL) == regions[0].arrays[3].tobytes()


def test_a_reader_that_takes_nothing_does_not_hold_a_thread(regions: tuple[Region, Region]) -> None:
    server = TcpServer(HOST, regions[0].buffers, Open(), stall_s=0.05)
    with welcomed(server) as slow:
        slow.sendall(request_of(*MUCH))
        join_connections()
    assert server.num_connections == 0
    server.close()


class Blocking(Open):
    """A guard that answers for the lease "slow" when it is told to."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def check(self, token: bytes, lease_id: str, *_: object) -> None:
        if lease_id == "slow":
            self.asked.set()
            assert self.go_on.wait(WAIT_S)


@pytest.fixture
def blocking(regions: tuple[Region, Region]) -> Iterator[tuple[Blocking, TcpServer]]:
    guard = Blocking()
    server = TcpServer(HOST, regions[0].buffers, guard)
    yield guard, server
    guard.go_on.set()
    server.close()


def test_one_reader_s_short_read_does_not_wait_for_its_long_one(
    regions: tuple[Region, Region], blocking: tuple[Blocking, TcpServer]
) -> None:
    guard, server = blocking
    with reading(server, regions[1]) as reader, ThreadPoolExecutor(1) as pool:
        long = pool.submit(reader.read, "slow", runs_of((3, 0, 3, 0, LENS[3])), TIMEOUT_S)
        assert guard.asked.wait(WAIT_S)
        reader.read("short", runs_of((0, 0, 0, 0, 99)), TIMEOUT_S)
        assert not long.done()
        guard.go_on.set()
        long.result(WAIT_S)


def test_a_holder_that_stalls_is_a_timeout(
    regions: tuple[Region, Region], blocking: tuple[Blocking, TcpServer]
) -> None:
    guard, server = blocking
    with reading(server, regions[1]) as reader:
        with pytest.raises(PlaneError, match=r"did not end within 0\.05 s"):
            reader.read("slow", random_runs(0, 10), 0.05)
        guard.go_on.set()
        reader.read("slow", random_runs(0, 10), TIMEOUT_S)


def test_closing_the_reader_ends_a_read_that_waits(
    regions: tuple[Region, Region], blocking: tuple[Blocking, TcpServer]
) -> None:
    guard, server = blocking
    with reading(server, regions[1]) as reader, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.read, "slow", random_runs(0, 10), TIMEOUT_S)
        assert guard.asked.wait(WAIT_S)
        reader.close()
        with pytest.raises(PlaneError, match="the reader was closed"):
            waiting.result(WAIT_S)
