"""Data planes for a cache in memory that the host cannot address: bytes pass through a mirror of it on the host.

    holder: device ── runs of a read that the guard agreed to ──► mirror ──► plane
    reader:                                              plane ──► mirror ── runs that arrived ──► device

Always works and costs two copies. The mirror has the size of the cache, but takes memory only where bytes have passed.
Two reads of a block fetch the same bytes, because a block that is leased does not change; what a read of an ended lease
takes with it, its confirmation refuses.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence

import torch

from pd_service.device import Device
from transfer.planes.base import (
    Buffers,
    Guard,
    Int64Array,
    Plane,
    PlaneReader,
    PlaneServer,
    PlaneUnavailable,
    Runs,
)
from transfer.planes.gate import Gate

STAGED_PLANE = "tcp"  # the one whose holder asks the guard before each read, and whose bytes leave the host anyway


def reachable_planes(planes: Sequence[Plane], device: Device, cache_tensors: Sequence[torch.Tensor]) -> list[Plane]:
    """`planes` as they can serve and fill `cache_tensors`, which lie on `device`; the others say why they cannot."""
    if device.is_addressable:
        return list(planes)
    mirror = HostMirror(cache_tensors, device)
    return [
        StagedPlane(plane, mirror) if plane.name == STAGED_PLANE else OutOfReach(plane.name, str(device.torch_device))
        for plane in planes
    ]


class HostMirror:
    """Host memory for each of `tensors`, contiguous and on `device`: `buffers` describes it to a plane."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: Device) -> None:
        self._device = device
        self._on_device = [tensor.view(torch.uint8).view(-1) for tensor in tensors]
        self._on_host = [torch.frombuffer(mmap.mmap(-1, t.numel()), dtype=torch.uint8) for t in self._on_device]
        self.buffers = Buffers(
            ptrs=tuple(t.data_ptr() for t in self._on_host), lens=tuple(t.numel() for t in self._on_host)
        )

    def fetch(self, buffer: Int64Array, offset: Int64Array, length: Int64Array) -> None:
        """From the device. Runs lie inside their buffers."""
        self._copy(self._on_host, self._on_device, buffer, offset, length)

    def store(self, buffer: Int64Array, offset: Int64Array, length: Int64Array) -> None:
        """To the device. Runs lie inside their buffers."""
        self._copy(self._on_device, self._on_host, buffer, offset, length)

    def _copy(
        self,
        to: Sequence[torch.Tensor],
        source: Sequence[torch.Tensor],
        buffer: Int64Array,
        offset: Int64Array,
        length: Int64Array,
    ) -> None:
        self._device.enter_thread()
        with self._device.copying():
            for i, start, size in zip(buffer.tolist(), offset.tolist(), length.tolist(), strict=True):
                to[i][start : start + size].copy_(source[i][start : start + size])


class StagedPlane:
    def __init__(self, plane: Plane, mirror: HostMirror) -> None:
        self._plane = plane
        self._mirror = mirror
        self.name = plane.name

    def serve(self, buffers: Buffers, guard: Guard) -> PlaneServer:
        """`buffers` are the device's; the mirror's are served."""
        return self._plane.serve(self._mirror.buffers, _FetchingGuard(guard, self._mirror))

    def connect(self, endpoint: Mapping[str, object], token: bytes, buffers: Buffers) -> PlaneReader:
        """`buffers` are the device's, or memory of the host, which is filled without the mirror."""
        if buffers.is_addressable:
            return self._plane.connect(endpoint, token, buffers)
        return _StagedReader(self._plane.connect(endpoint, token, self._mirror.buffers), self._mirror)


class OutOfReach:
    """A plane that needs to address the cache and cannot."""

    def __init__(self, name: str, device: str) -> None:
        self.name = name
        self._reason = f"the cache is in memory of {device}, which the host cannot address"

    def serve(self, buffers: Buffers, guard: Guard) -> PlaneServer:
        raise PlaneUnavailable(self._reason)

    def connect(self, endpoint: Mapping[str, object], token: bytes, buffers: Buffers) -> PlaneReader:
        raise PlaneUnavailable(self._reason)


class _FetchingGuard:
    """What a guard agreed to is brought from the device before the plane looks at it."""

    def __init__(self, guard: Guard, mirror: HostMirror) -> None:
        self._guard = guard
        self._mirror = mirror

    def knows(self, token: bytes) -> bool:
        return self._guard.knows(token)

    def check(self, token: bytes, lease_id: str, buffer: Int64Array, offset: Int64Array, length: Int64Array) -> None:
        self._guard.check(token, lease_id, buffer, offset, length)
        self._mirror.fetch(buffer, offset, length)


class _StagedReader:
    def __init__(self, reader: PlaneReader, mirror: HostMirror) -> None:
        self._reader = reader
        self._mirror = mirror
        self._gate = Gate("the reader")

    def read(self, lease_id: str, runs: Runs, timeout_s: float) -> None:
        with self._gate.passing():
            self._reader.read(lease_id, runs, timeout_s)
            self._mirror.store(runs.dst_buffer, runs.dst_offset, runs.length)

    def close(self) -> None:
        self._reader.close()  # ends what waits; the gate then waits for copies to the device
        self._gate.close()
