"""What only the `shm` plane promises: it maps the very file the holder meant, and cannot write to it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from plane_memory import NAME, Open, Region

from transfer.planes.base import PlaneUnavailable
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
    assert permissions() == ["rw-s", "rw-s"]


def vanished_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("host", "elsewhere", "the holder runs on another host"),
        ("pid_namespace", 1, "the holder runs in another pid namespace"),
        ("pid", vanished_pid, "cannot be opened"),
        ("fd", 999_999, "cannot be opened"),
        ("inode", 4_242_424_242, "is not the file the holder described"),
        ("device", 4_242_424_242, "is not the file the holder described"),
        ("num_bytes", 1 << 40, "the holder said 1099511627776"),
        ("offsets", [1 << 40], "do not lie in its file"),
        ("lens", [1 << 40] * 6, "do not lie in its file"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    regions: tuple[Region, Region], server: ShmServer, field: str, value: object, reason: str
) -> None:
    endpoint = {**server.endpoint, field: value() if callable(value) else value}
    with pytest.raises(PlaneUnavailable, match=reason):
        PLANE.connect(endpoint, b"", regions[1].buffers)


def test_a_descriptor_that_names_another_file_now_is_refused(regions: tuple[Region, Region], server: ShmServer) -> None:
    fd = server.endpoint["fd"]
    assert isinstance(fd, int)
    os.dup2(regions[1].fd, fd)
    with pytest.raises(PlaneUnavailable, match="is not the file the holder described"):
        PLANE.connect(server.endpoint, b"", regions[1].buffers)


def test_a_pipe_is_not_mapped_nor_waited_for(regions: tuple[Region, Region], server: ShmServer) -> None:
    read_end, write_end = os.pipe()
    status = os.fstat(read_end)
    endpoint = {**server.endpoint, "fd": read_end, "device": status.st_dev, "inode": status.st_ino}
    with pytest.raises(PlaneUnavailable, match="is not the file the holder described"):
        PLANE.connect(endpoint, b"", regions[1].buffers)
    os.close(read_end)
    os.close(write_end)


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
