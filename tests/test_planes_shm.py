"""What only the `shm` plane promises: it maps the very file the holder meant, and cannot write to it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plane_memory import NAME, SECRET, Open, Region, Secret, random_runs, runs_of
from plane_suite import TIMEOUT_S, read_and_compare

from transfer.planes.base import PlaneError, PlaneUnavailable
from transfer.planes.mapping import ReadOnlyMapping
from transfer.planes.shm import ShmPlane, ShmServer

PLANE = ShmPlane()


@pytest.fixture
def regions() -> Iterator[tuple[Region, Region]]:
    made = Region(1), Region(2)
    yield made
    for region in made:
        region.close()


@pytest.fixture
def server(regions: tuple[Region, Region]) -> Iterator[ShmServer]:
    made = PLANE.serve(regions[0].buffers, Open())
    yield made
    made.close()


def permissions() -> list[str]:
    return sorted(line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if NAME in line)


def test_the_readers_mapping_cannot_be_written(regions: tuple[Region, Region], server: ShmServer) -> None:
    assert permissions() == ["rw-s", "rw-s"]
    reader = PLANE.connect(server.endpoint, b"", regions[1].buffers)
    assert permissions() == ["r--s", "rw-s", "rw-s"]
    reader.close()
    reader.close()
    assert permissions() == ["rw-s", "rw-s"]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("host", "elsewhere", "the holder runs on another host"),
        ("network_namespace", 1, "the holder runs in another network namespace of this host"),
        ("door", "nobody's", "the holder's door does not open: .*refused"),
        ("door", "x" * 200, "the holder's door does not open: .*too long"),
        ("inode", 4_242_424_242, "is not the file it described"),
        ("device", 4_242_424_242, "is not the file it described"),
        ("num_bytes", 1 << 40, "the holder said 1099511627776"),
        ("offsets", [1 << 40], "do not lie in its file"),
        ("lens", [1 << 40] * 6, "do not lie in its file"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    regions: tuple[Region, Region], server: ShmServer, field: str, value: object, reason: str
) -> None:
    with pytest.raises(PlaneUnavailable, match=reason):
        PLANE.connect({**server.endpoint, field: value}, b"", regions[1].buffers)


def test_a_file_that_could_shrink_under_the_reader_is_refused(regions: tuple[Region, Region]) -> None:
    region = Region(3, sealed=False)
    server = PLANE.serve(region.buffers, Open())
    with pytest.raises(PlaneUnavailable, match="not sealed against shrinking"):
        PLANE.connect(server.endpoint, b"", regions[1].buffers)
    server.close()
    region.close()


def test_memory_that_is_not_shared_is_not_served(regions: tuple[Region, Region]) -> None:
    with pytest.raises(PlaneUnavailable, match="does not lie in shared memory"):
        PLANE.serve(replace(regions[0].buffers, shared=None), Open())


def test_a_buffer_outside_the_shared_memory_is_not_served(regions: tuple[Region, Region]) -> None:
    with pytest.raises(PlaneUnavailable, match="lies outside the shared memory"):
        PLANE.serve(replace(regions[0].buffers, ptrs=regions[1].buffers.ptrs), Open())


def test_a_holder_without_descriptors_left_does_not_serve(regions: tuple[Region, Region]) -> None:
    assert regions[0].buffers.shared is not None
    gone = replace(regions[0].buffers, shared=replace(regions[0].buffers.shared, fd=1 << 20))
    with pytest.raises(PlaneUnavailable, match="shared memory cannot be served"):
        PLANE.serve(gone, Open())


def traces() -> tuple[int, int, int]:
    """Descriptors, mappings and threads of this process."""
    descriptors = [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return len(descriptors), len(permissions()), threading.active_count()


def test_twenty_rounds_of_connect_and_close_leave_nothing_behind(regions: tuple[Region, Region]) -> None:
    source, dest = regions
    gc.collect()  # what earlier tests left to the collector is not ours
    before, shared_files = traces(), set(Path("/dev/shm").iterdir())
    for i in range(20):
        server = PLANE.serve(source.buffers, Secret())
        with pytest.raises(PlaneUnavailable):
            PLANE.connect(server.endpoint, b"wrong", dest.buffers)
        with pytest.raises(PlaneUnavailable):
            PLANE.connect({**server.endpoint, "inode": 1}, SECRET, dest.buffers)
        reader = PLANE.connect(server.endpoint, SECRET, dest.buffers)
        reader.read("lease", random_runs(i, 50), TIMEOUT_S)
        for end in (reader, server) if i % 2 else (server, reader):
            end.close()
    assert traces() == before
    assert set(Path("/dev/shm").iterdir()) == shared_files


def reserved_sizes() -> set[int]:
    """Bytes of each stretch of addresses that is taken and not accessible."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ends = [[int(end, 16) for end in line[0].split("-")] for line in lines if line[1] == "---p"]
    return {end - start for start, end in ends}


def test_a_mapping_leaves_no_reservation_whether_it_was_made_or_not(regions: tuple[Region, Region]) -> None:
    size = 123 << 21  # like no other
    read_end, write_end = os.pipe()
    with pytest.raises(OSError, match="No such device"):
        ReadOnlyMapping(read_end, size)
    mapping = ReadOnlyMapping(regions[0].fd, size)  # longer than its file, which nobody looks at here
    assert mapping.address % (2 << 20) == 0
    mapping.close()
    mapping.close()
    assert not {size, size + (2 << 20)} & reserved_sizes()
    os.close(read_end)
    os.close(write_end)


def test_another_users_process_reads_what_its_token_opens_and_nothing_without(regions: tuple[Region, Region]) -> None:
    """A fork may become another user without being able to read this program's files."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    source, dest = regions
    server = PLANE.serve(source.buffers, Secret())
    child = os.fork()
    if child == 0:
        code = 3
        try:
            code = _read_as_another_user(server, source, dest)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert np.array_equal(source.bytes, Region(1).bytes)
    server.close()


def _read_as_another_user(server: ShmServer, source: Region, dest: Region) -> int:
    """The exit code: 0 when all is as it should be."""
    os.setgid(65534)
    os.setuid(65534)
    try:
        PLANE.connect(server.endpoint, b"guessed", dest.buffers)
    except PlaneUnavailable as reason:
        if "does not know this reader's token" not in str(reason):
            return 1
    else:
        return 2
    reader = PLANE.connect(server.endpoint, SECRET, dest.buffers)
    read_and_compare(reader, source, dest, random_runs(1, 500))
    reader.close()
    return 0


def test_a_run_outside_the_mapping_never_reaches_it(regions: tuple[Region, Region], server: ShmServer) -> None:
    """Offsets that a careless sum of address and offset would take for another buffer's, or for other memory."""
    reader = PLANE.connect(server.endpoint, b"", regions[1].buffers)
    for run in ((0, 4096, 0, 0, 1), (0, -64, 0, 0, 64), (-1, 0, 0, 0, 1), (0, 0, 5, 0, 2), (0, 1 << 62, 0, 0, 1 << 62)):
        before = regions[1].bytes.copy()
        with pytest.raises(PlaneError, match="of buffer"):
            reader.read("lease", runs_of((0, 0, 0, 0, 8), run), TIMEOUT_S)
        assert np.array_equal(regions[1].bytes, before)
    reader.close()
