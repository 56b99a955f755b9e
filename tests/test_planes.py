"""One conformance suite for every data plane; `test_planes_shm` and `test_planes_tcp` hold what only one promises."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgpack
import numpy as np
import pytest
from plane_memory import LENS, NAME, Bounds, Open, Region, apply, random_runs, runs_of

from transfer.planes import PLANE_NAMES, make_plane
from transfer.planes.base import Plane, PlaneError, PlaneReader, PlaneServer, PlaneUnavailable, Runs

TIMEOUT_S = 30.0
WAIT_S = 60.0  # for things that happen at once; only a fault makes a test wait so long
ROOT = Path(__file__).parent.parent


@pytest.fixture(params=PLANE_NAMES)
def plane(request: pytest.FixtureRequest) -> Plane:
    return make_plane(request.param, host="127.0.0.1")


@pytest.fixture(params=["shm", "tcp"])
def between_processes(request: pytest.FixtureRequest) -> Plane:
    return make_plane(request.param, host="127.0.0.1")


class Pair:
    """A holder and a reader of one plane in this process."""

    def __init__(self, plane: Plane, lens: tuple[int, ...] = LENS) -> None:
        self.source, self.dest = Region(1, lens), Region(2, lens)
        self.server: PlaneServer = plane.serve(self.source.buffers, Open())
        self.reader: PlaneReader = plane.connect(self.server.endpoint, b"token", self.dest.buffers)

    def close(self) -> None:
        self.reader.close()
        self.server.close()
        self.source.close()
        self.dest.close()


@pytest.fixture
def pair(plane: Plane) -> Iterator[Pair]:
    made = Pair(plane)
    yield made
    made.close()


@pytest.fixture
def holder(between_processes: Plane) -> Iterator[subprocess.Popen[str]]:
    process = start_holder(between_processes.name)
    yield process
    process.kill()
    process.communicate()


def start_holder(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).parent / "plane_memory.py"), *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


def endpoint_of(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    return msgpack.unpackb(bytes.fromhex(process.stdout.readline()))


def read_and_compare(pair: Pair, runs: Runs) -> None:
    holder_before = pair.source.bytes.copy()
    expected = Region(0)
    expected.bytes[:] = pair.dest.bytes
    apply(runs, pair.source.arrays, expected.arrays)
    pair.reader.read("lease", runs, TIMEOUT_S)
    np.testing.assert_array_equal(pair.dest.bytes, expected.bytes)  # also the gaps between the buffers
    np.testing.assert_array_equal(pair.source.bytes, holder_before)
    expected.close()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num", [1, 50, 3000])
def test_a_read_copies_exactly_the_runs(pair: Pair, num: int, seed: int) -> None:
    read_and_compare(pair, random_runs(seed, num))


@pytest.mark.parametrize("num_runs", [1, 5])
def test_one_pattern_in_many_buffers_arrives_in_each(pair: Pair, num_runs: int) -> None:
    """Buffers 0, 1 and 4 are alike, 0 and 1 at another distance than 1 and 4."""
    places = [(100 + 64 * i, 900 - 64 * i, 33 + i) for i in range(num_runs)]
    read_and_compare(pair, runs_of(*((b, s, b, d, n) for b in (0, 1, 4) for s, d, n in places)))


def test_a_pattern_repeats_although_buffers_are_paired_crosswise(pair: Pair) -> None:
    read_and_compare(pair, runs_of((4, 1, 0, 5, 99), (1, 1, 1, 5, 99), (0, 1, 4, 5, 99)))


def test_whole_buffers_and_single_bytes_are_runs_too(pair: Pair) -> None:
    read_and_compare(pair, runs_of((3, 0, 3, 0, 65536), (5, 0, 5, 0, 1), (2, 776, 2, 776, 1), (0, 0, 1, 0, 4096)))


def test_runs_without_bytes_copy_nothing(pair: Pair) -> None:
    read_and_compare(pair, runs_of((0, 5, 1, 5, 0), (0, 4096, 1, 4096, 0), (2, 3, 2, 7, 2), (5, 1, 5, 1, 0)))


def test_a_read_without_runs_succeeds(pair: Pair) -> None:
    read_and_compare(pair, runs_of())


@pytest.mark.parametrize("size", [40 * 2**20 + 13])
def test_a_run_longer_than_any_step_arrives_whole(plane: Plane, size: int) -> None:
    pair = Pair(plane, (size, size))
    pair.reader.read("lease", runs_of((0, 3, 0, 1, size - 5), (1, 3, 1, 1, size - 5)), TIMEOUT_S)
    for source, dest in zip(pair.source.arrays, pair.dest.arrays, strict=True):
        assert np.array_equal(dest[1:-4], source[3:-2])
    del source, dest
    pair.close()


def test_reads_run_side_by_side(pair: Pair) -> None:
    expected = Region(0)
    expected.bytes[:] = pair.dest.bytes
    whole = random_runs(9, 3000)
    parts = [
        Runs(**{name: getattr(whole, name)[i::6] for name in Runs.__dataclass_fields__}) for i in range(6)
    ]  # fmt: skip
    apply(whole, pair.source.arrays, expected.arrays)
    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(pair.reader.read, f"l{i}", part, TIMEOUT_S) for i, part in enumerate(parts)]:
            done.result(WAIT_S)
    np.testing.assert_array_equal(pair.dest.bytes, expected.bytes)
    expected.close()


OUTSIDE = [
    (6, 0, 0, 0, 1),
    (-1, 0, 0, 0, 1),
    (0, -1, 0, 0, 1),
    (0, 0, 0, 0, -1),
    (0, 4096, 0, 0, 1),
    (0, 2**63 - 1, 0, 0, 2**63 - 1),
    (0, 0, 6, 0, 1),
    (0, 0, -1, 0, 1),
    (0, 0, 0, -1, 1),
    (3, 0, 0, 0, 4097),
    (0, 0, 2, 777, 1),
]


@pytest.mark.parametrize("run", OUTSIDE)
def test_a_run_outside_the_buffers_fails_and_writes_nothing(plane: Plane, run: tuple[int, int, int, int, int]) -> None:
    source, dest = Region(1), Region(2)
    before = dest.bytes.copy()
    server = plane.serve(source.buffers, Bounds())
    reader = plane.connect(server.endpoint, b"token", dest.buffers)
    with pytest.raises(PlaneError, match="of buffer"):
        reader.read("lease", runs_of((0, 0, 0, 0, 8), run), TIMEOUT_S)
    np.testing.assert_array_equal(dest.bytes, before)
    for end in (reader, server, source, dest):
        end.close()


def test_no_time_is_a_timeout(pair: Pair) -> None:
    with pytest.raises(PlaneError, match=r"did not end within 0\.0 s"):
        pair.reader.read("lease", random_runs(0, 10), 0.0)
    read_and_compare(pair, random_runs(1, 10))


def read_until_error(pair: Pair, was_read: threading.Event) -> PlaneError:
    runs = random_runs(3, 2000)
    while True:
        try:
            pair.reader.read("lease", runs, TIMEOUT_S)
        except PlaneError as error:
            return error
        was_read.set()


@pytest.mark.parametrize("side", ["reader", "server"])
def test_closing_either_side_ends_reads_and_touches_nothing_after(plane: Plane, side: str) -> None:
    pair = Pair(plane)
    was_read = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(read_until_error, pair, was_read)
        assert was_read.wait(WAIT_S)
        close: Callable[[], None] = getattr(pair, side).close
        close()
        if side == "reader":
            after_close = pair.dest.bytes.copy()
        assert isinstance(error.result(WAIT_S), PlaneError)
    if side == "reader":
        np.testing.assert_array_equal(pair.dest.bytes, after_close)
    pair.close()


def test_a_closed_side_refuses_and_closing_again_is_no_error(plane: Plane) -> None:
    for side in ("reader", "server"):
        pair = Pair(plane)
        for _ in range(2):
            getattr(pair, side).close()
        with pytest.raises(PlaneError):
            pair.reader.read("lease", random_runs(0, 10), TIMEOUT_S)
        pair.close()


def test_a_closed_server_cannot_be_connected_to(plane: Plane) -> None:
    source, dest = Region(1), Region(2)
    server = plane.serve(source.buffers, Open())
    endpoint = dict(server.endpoint)
    server.close()
    with pytest.raises(PlaneUnavailable):
        plane.connect(endpoint, b"token", dest.buffers)
    source.close()
    dest.close()


def test_an_endpoint_survives_msgpack(plane: Plane) -> None:
    source, dest = Region(1), Region(2)
    server = plane.serve(source.buffers, Open())
    reader = plane.connect(msgpack.unpackb(msgpack.packb(dict(server.endpoint))), b"token", dest.buffers)
    reader.read("lease", runs_of((0, 0, 0, 0, 4096)), TIMEOUT_S)
    assert np.array_equal(dest.arrays[0], source.arrays[0])
    for end in (reader, server, source, dest):
        end.close()


@pytest.mark.parametrize("bad", [None, "x", -1, 2**70, 1.5, b"", [], True, {}])
def test_any_endpoint_field_can_be_nonsense(plane: Plane, bad: object) -> None:
    source, dest = Region(1), Region(2)
    server = plane.serve(source.buffers, Open())
    for name in server.endpoint:
        for endpoint in ({**server.endpoint, name: bad}, {k: v for k, v in server.endpoint.items() if k != name}):
            with pytest.raises(PlaneUnavailable):
                plane.connect(endpoint, b"token", dest.buffers)
    with pytest.raises(PlaneUnavailable):
        plane.connect(bad, b"token", dest.buffers)  # type: ignore[arg-type]
    for end in (server, source, dest):
        end.close()


def open_descriptors() -> set[str]:
    return {str(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}


def test_nothing_is_left_after_close(plane: Plane) -> None:
    pair = Pair(plane)
    pair.close()
    gc.collect()  # what earlier tests left to the collector is not ours
    descriptors, threads = open_descriptors(), set(threading.enumerate())
    for _ in range(3):
        pair = Pair(plane)
        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(pair.reader.read, "lease", random_runs(i, 500), TIMEOUT_S) for i in range(3)]:
                done.result(WAIT_S)
        pair.close()
    assert open_descriptors() == descriptors
    assert set(threading.enumerate()) == threads
    assert NAME not in Path("/proc/self/maps").read_text()


def test_a_read_between_processes_copies_exactly(between_processes: Plane, holder: subprocess.Popen[str]) -> None:
    source, dest, expected = Region(1), Region(2), Region(2)
    reader = between_processes.connect(endpoint_of(holder), b"token", dest.buffers)
    runs = random_runs(4, 1000)
    apply(runs, source.arrays, expected.arrays)
    reader.read("lease", runs, TIMEOUT_S)
    np.testing.assert_array_equal(dest.bytes, expected.bytes)
    for end in (reader, source, dest, expected):
        end.close()


@pytest.mark.parametrize("is_frozen_first", [False, True])
def test_a_killed_holder_ends_reads_and_the_reader_lives(
    between_processes: Plane, holder: subprocess.Popen[str], is_frozen_first: bool
) -> None:
    """Frozen first: over a socket the read is then certainly waiting for the holder when it dies."""
    dest = Region(2)
    reader = between_processes.connect(endpoint_of(holder), b"token", dest.buffers)
    was_read = threading.Event()
    pair = Pair.__new__(Pair)
    pair.reader = reader
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(read_until_error, pair, was_read)
        assert was_read.wait(WAIT_S)
        if is_frozen_first:
            holder.send_signal(signal.SIGSTOP)
        holder.kill()
        assert isinstance(error.result(WAIT_S), PlaneError)
    with pytest.raises(PlaneError):
        reader.read("lease", random_runs(3, 10), TIMEOUT_S)
    reader.close()
    dest.close()


def test_memory_joins_one_process_only() -> None:
    plane = make_plane("memory", host="")
    source, dest = Region(1), Region(2)
    server = plane.serve(source.buffers, Open())
    answer = start_holder("memory", msgpack.packb(dict(server.endpoint)).hex()).communicate()[0]
    assert answer.strip() == "the holder is another process"
    for end in (server, source, dest):
        end.close()


def test_an_unknown_plane_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown data plane 'rdma', known are memory, shm, tcp"):
        make_plane("rdma", host="127.0.0.1")
