"""The conformance suite of the data planes: sides that close, die, hang or are slow, and that nothing is left."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgpack
import numpy as np
import pytest
from plane_memory import LENS, NAME, Open, Region, random_runs
from plane_suite import TIMEOUT_S, WAIT_S, Other, OtherHolder, Pair, make, planes, read_and_compare

from transfer.planes import PLANE_NAMES
from transfer.planes.base import Plane, PlaneError, PlaneReader, PlaneUnavailable

HUGE = 64 * 2**20  # bytes: more than any socket or step takes at once
ROUNDS = 3


@pytest.fixture(params=PLANE_NAMES)
def plane(request: pytest.FixtureRequest) -> Plane:
    return make(request.param)


@pytest.fixture(params=planes("other processes"))
def between_processes(request: pytest.FixtureRequest) -> Plane:
    return make(request.param)


def read_until_error(reader: PlaneReader, was_read: threading.Event) -> PlaneError:
    runs = random_runs(3, 2000)
    while True:
        try:
            reader.read("lease", runs, TIMEOUT_S)
        except PlaneError as error:
            return error
        was_read.set()


# ---- in one process


def test_no_time_is_a_timeout_and_the_reader_lives(plane: Plane) -> None:
    with Pair(plane) as pair:
        with pytest.raises(PlaneError, match=r"did not end within 0\.0 s"):
            pair.reader.read("lease", random_runs(0, 10), 0.0)
        read_and_compare(pair.reader, pair.source, pair.dest, random_runs(1, 10))


@pytest.mark.parametrize("side", ["reader", "server"])
def test_closing_either_side_ends_reads_and_touches_nothing_after(plane: Plane, side: str) -> None:
    with Pair(plane) as pair, ThreadPoolExecutor(1) as pool:
        was_read = threading.Event()
        error = pool.submit(read_until_error, pair.reader, was_read)
        assert was_read.wait(WAIT_S)
        getattr(pair, side).close()
        if side == "reader":
            after_close = pair.dest.bytes.copy()
        assert isinstance(error.result(WAIT_S), PlaneError)
        if side == "reader":
            np.testing.assert_array_equal(pair.dest.bytes, after_close)


@pytest.mark.parametrize("side", ["reader", "server"])
def test_a_closed_side_refuses_and_closing_again_is_no_error(plane: Plane, side: str) -> None:
    with Pair(plane) as pair:
        for _ in range(2):
            getattr(pair, side).close()
        with pytest.raises(PlaneError):
            pair.reader.read("lease", random_runs(0, 10), TIMEOUT_S)


def test_both_sides_can_be_closed_by_several_threads_at_once(plane: Plane) -> None:
    with Pair(plane) as pair, ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(side.close) for side in (pair.reader, pair.server) for _ in range(2)]:
            done.result(WAIT_S)


def test_a_closed_server_cannot_be_connected_to(plane: Plane) -> None:
    with Pair(plane) as pair:
        endpoint = dict(pair.server.endpoint)
        pair.server.close()
        with pytest.raises(PlaneUnavailable):
            plane.connect(endpoint, b"token", pair.dest.buffers)


def test_the_end_of_one_reader_does_not_touch_another(plane: Plane) -> None:
    with Pair(plane) as pair:
        dest = Region(3)
        plane.connect(pair.server.endpoint, b"token", dest.buffers).close()
        read_and_compare(pair.reader, pair.source, pair.dest, random_runs(1, 50))
        dest.close()


# ---- between processes

ENDS: dict[str, Callable[[OtherHolder], None]] = {
    "closed": OtherHolder.close_server,
    "killed": OtherHolder.kill,
    "frozen, then killed": lambda holder: (holder.freeze(), holder.kill())[-1],
}


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_holder_that_ended_before_it_was_connected_to_is_unavailable(between_processes: Plane, end: str) -> None:
    dest = Region(2)
    with OtherHolder(between_processes.name) as holder:
        ENDS[end](holder)
        with pytest.raises(PlaneUnavailable):
            between_processes.connect(holder.endpoint, b"token", dest.buffers)
    dest.close()


@pytest.mark.parametrize("has_read", [False, True])
@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_holder_that_ended_while_nobody_read_is_found_by_the_next_read(
    between_processes: Plane, end: str, has_read: bool
) -> None:
    dest = Region(2)
    with OtherHolder(between_processes.name) as holder:
        reader = between_processes.connect(holder.endpoint, b"token", dest.buffers)
        if has_read:
            reader.read("lease", random_runs(1, 10), TIMEOUT_S)
        ENDS[end](holder)
        with pytest.raises(PlaneError):
            reader.read("lease", random_runs(3, 10), TIMEOUT_S)
        reader.close()
    dest.close()


@pytest.mark.parametrize("end", ENDS)
def test_a_holder_that_ends_in_the_middle_ends_reads_and_the_reader_lives(between_processes: Plane, end: str) -> None:
    """Frozen first: over a socket the read is then certainly waiting for the holder when it dies."""
    dest = Region(2)
    with OtherHolder(between_processes.name) as holder, ThreadPoolExecutor(1) as pool:
        reader = between_processes.connect(holder.endpoint, b"token", dest.buffers)
        was_read = threading.Event()
        error = pool.submit(read_until_error, reader, was_read)
        assert was_read.wait(WAIT_S)
        ENDS[end](holder)
        assert isinstance(error.result(WAIT_S), PlaneError)
        with pytest.raises(PlaneError):
            reader.read("lease", random_runs(3, 10), TIMEOUT_S)
        reader.close()
    dest.close()


def test_a_read_from_a_frozen_holder_ends(between_processes: Plane) -> None:
    """By its bytes where the holder is not needed, else by its deadline; closing does not hang either."""
    dest = Region(2)
    with OtherHolder(between_processes.name) as holder, ThreadPoolExecutor(1) as pool:
        reader = between_processes.connect(holder.endpoint, b"token", dest.buffers)
        reader.read("lease", random_runs(1, 10), TIMEOUT_S)
        holder.freeze()
        ended = pool.submit(reader.read, "lease", random_runs(3, 10), 0.2)
        assert isinstance(ended.exception(WAIT_S), PlaneError | None)
        pool.submit(reader.close).result(WAIT_S)
    dest.close()


def test_a_reader_that_takes_nothing_holds_back_only_itself(between_processes: Plane) -> None:
    """It is frozen in an endless row of long reads, so almost certainly in the middle of one."""
    lens = (*LENS[:-1], HUGE)
    source, dest = Region(1, lens), Region(2, lens)
    server = between_processes.serve(source.buffers, Open())
    endpoint = msgpack.packb(dict(server.endpoint)).hex()
    with Other("read", between_processes.name, endpoint, *map(str, lens)) as slow:
        assert slow.hello == "reading"
        slow.freeze()
        reader = between_processes.connect(server.endpoint, b"token", dest.buffers)
        read_and_compare_huge(reader, source, dest)
        reader.close()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(server.close).result(WAIT_S)
    source.close()
    dest.close()


@pytest.mark.parametrize("is_frozen_first", [False, True])
def test_a_reader_that_dies_in_the_middle_leaves_the_holder_serving(
    between_processes: Plane, is_frozen_first: bool
) -> None:
    with Pair(between_processes) as pair:
        endpoint = msgpack.packb(dict(pair.server.endpoint)).hex()
        with Other("read", between_processes.name, endpoint, *map(str, LENS)) as doomed:
            assert doomed.hello == "reading"
            if is_frozen_first:
                doomed.freeze()
        read_and_compare(pair.reader, pair.source, pair.dest, random_runs(1, 50))
        dest = Region(3)
        late = between_processes.connect(pair.server.endpoint, b"token", dest.buffers)
        read_and_compare(late, pair.source, dest, random_runs(2, 50))
        late.close()
        dest.close()


def read_and_compare_huge(reader: PlaneReader, source: Region, dest: Region) -> None:
    """The small buffers by random runs, without looking at every byte of the huge one."""
    runs = random_runs(7, 200, LENS[:-1])
    reader.read("lease", runs, TIMEOUT_S)
    for src, at, dst, to, n in zip(
        runs.src_buffer, runs.src_offset, runs.dst_buffer, runs.dst_offset, runs.length, strict=True
    ):
        assert np.array_equal(dest.arrays[dst][to : to + n], source.arrays[src][at : at + n])


# ---- nothing is left


def open_descriptors() -> set[str]:
    return {str(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}


def num_native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def live_once(plane: Plane) -> None:
    """All that leaves something behind if anything does: readers that end well, after a failure, and not at all."""
    with Pair(plane) as pair, ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(pair.reader.read, "lease", random_runs(i, 300), TIMEOUT_S) for i in range(3)]:
            done.result(WAIT_S)
        plane.connect(pair.server.endpoint, b"token", pair.dest.buffers).close()
        for name in pair.server.endpoint:
            with suppress(PlaneUnavailable):
                plane.connect({**pair.server.endpoint, name: None}, b"token", pair.dest.buffers).close()
        pair.server.close()
        with suppress(PlaneError):
            pair.reader.read("lease", random_runs(1, 10), TIMEOUT_S)


def test_nothing_is_left_after_close(plane: Plane) -> None:
    live_once(plane)  # what a process opens once, it keeps
    gc.collect()  # what earlier tests left to the collector is not ours
    descriptors, threads, num_native = open_descriptors(), set(threading.enumerate()), num_native_threads()
    for _ in range(ROUNDS):
        live_once(plane)
    assert open_descriptors() == descriptors
    assert set(threading.enumerate()) == threads
    assert NAME not in Path("/proc/self/maps").read_text()
    give_up = time.monotonic() + WAIT_S
    while num_native_threads() > num_native:  # the kernel takes a moment to remove a thread that was joined
        assert time.monotonic() < give_up
        os.sched_yield()
