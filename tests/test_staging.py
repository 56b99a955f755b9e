"""Planes for memory that the host cannot address, on a device that says so: its tensors are touched by copies alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kv_cache import CacheStorage, HeapStorage
from pd_service.node.staging import HostMirror, StagedPlane, reachable_planes
from tests.plane_memory import Ended, Open, runs_of
from transfer.planes import make_plane
from transfer.planes.base import Buffers, Guard, PlaneError, PlaneUnavailable, ReadRefused, Runs
from transfer.planes.tcp import TcpPlane

torch.set_num_threads(1)

NOWHERE = Buffers(ptrs=(8, 8), lens=(400, 200), is_addressable=False)  # addresses that must not be touched
RUNS = runs_of((0, 10, 1, 20, 30), (1, 100, 0, 0, 100), (0, 399, 0, 399, 1))


class FarDevice:
    """Counts the threads that entered and the copies that ended."""

    process_group = "gloo"
    is_addressable = False
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_entered = 0
        self.num_copied = 0

    def free_bytes(self) -> int:
        return 2**30

    def allocate_cache(self, num_bytes: int, *, is_mapped: bool) -> CacheStorage:
        return HeapStorage(num_bytes)

    def enter_thread(self) -> None:
        self.num_entered += 1

    def synchronize(self) -> None:
        pass

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        yield
        self.num_copied += 1


class Side:
    """One engine's cache of two tensors, 400 and 200 bytes, and its planes."""

    def __init__(self, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.device = FarDevice()
        self.tensors = [torch.randn(2, 5, 5, 4, generator=made).bfloat16(), torch.randn(10, 5, 1, generator=made)]
        self.mirror = HostMirror(self.tensors, self.device)
        self.plane = StagedPlane(TcpPlane("127.0.0.1"), self.mirror)

    def bytes(self) -> list[np.ndarray]:
        return [tensor.view(torch.uint8).flatten().numpy().copy() for tensor in self.tensors]


@contextlib.contextmanager
def read(holder: Side, reader: Side, runs: Runs, guard: Guard) -> Iterator[None]:
    server = holder.plane.serve(NOWHERE, guard)
    joined = reader.plane.connect(server.endpoint, b"token", NOWHERE)
    try:
        joined.read("lease", runs, 10.0)
        yield
        joined.close()
        with pytest.raises(PlaneError, match="closed"):
            joined.read("lease", runs, 10.0)
    finally:
        joined.close()
        server.close()


def test_the_runs_of_a_read_arrive_on_the_device_and_nothing_else() -> None:
    holder, reader = Side(1), Side(2)
    source, expected = holder.bytes(), reader.bytes()
    expected[1][20:50] = source[0][10:40]
    expected[0][:100] = source[1][100:200]
    expected[0][399] = source[0][399]
    with read(holder, reader, RUNS, Open()):
        for ours, theirs in zip(reader.bytes(), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    for before, after in zip(source, holder.bytes(), strict=True):
        np.testing.assert_array_equal(before, after)
    assert (holder.device.num_entered, holder.device.num_copied) == (1, 1)
    assert (reader.device.num_entered, reader.device.num_copied) == (1, 1)


def test_a_second_read_brings_what_the_device_holds_by_then() -> None:
    holder, reader = Side(1), Side(2)
    with read(holder, reader, RUNS, Open()):
        pass
    holder.tensors[0].fill_(3.0)
    with read(holder, reader, RUNS, Open()):
        np.testing.assert_array_equal(reader.bytes()[1][20:50], holder.bytes()[0][10:40])


def test_what_the_guard_refuses_leaves_no_device() -> None:
    holder, reader = Side(1), Side(2)
    before = reader.bytes()
    with pytest.raises(ReadRefused), read(holder, reader, RUNS, Ended()):
        pass
    assert holder.device.num_copied == reader.device.num_copied == 0
    for ours, theirs in zip(before, reader.bytes(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_planes_that_would_address_the_memory_say_why_they_cannot() -> None:
    side = Side(1)
    planes = [make_plane(name, host="127.0.0.1") for name in ("memory", "shm", "tcp")]
    memory, shm, tcp = reachable_planes(planes, side.device, side.tensors)
    assert [plane.name for plane in (memory, shm, tcp)] == ["memory", "shm", "tcp"]
    for plane in (memory, shm):
        with pytest.raises(PlaneUnavailable, match="cannot address"):
            plane.serve(NOWHERE, Open())
        with pytest.raises(PlaneUnavailable, match="cannot address"):
            plane.connect({}, b"token", NOWHERE)
    assert isinstance(tcp, StagedPlane)


def test_a_device_that_the_host_can_address_keeps_its_planes() -> None:
    side = Side(1)
    side.device.is_addressable = True
    planes = [make_plane(name, host="127.0.0.1") for name in ("memory", "tcp")]
    assert reachable_planes(planes, side.device, side.tensors) == planes


def test_memory_of_the_host_is_filled_without_the_device() -> None:
    """As when a plane is measured: whatever is read goes there and nowhere else."""
    holder, reader = Side(1), Side(2)
    before, scratch = reader.bytes(), np.zeros(2000, np.uint8)
    tcp = make_plane("tcp", host="127.0.0.1")
    (served,) = reachable_planes([tcp], holder.device, holder.tensors)
    (joining,) = reachable_planes([tcp], reader.device, reader.tensors)
    server = served.serve(NOWHERE, Open())
    buffers = Buffers(ptrs=(scratch.ctypes.data,), lens=(len(scratch),))
    joined = joining.connect(server.endpoint, b"token", buffers)
    try:
        run = {"src_buffer": 0, "src_offset": 10, "dst_buffer": 0, "dst_offset": 5, "length": 30}
        joined.read("lease", Runs(**{name: np.array([number]) for name, number in run.items()}), 10.0)
    finally:
        joined.close()
        server.close()
    np.testing.assert_array_equal(scratch[5:35], holder.bytes()[0][10:40])
    assert reader.device.num_copied == 0
    for ours, theirs in zip(before, reader.bytes(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
