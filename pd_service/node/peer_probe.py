"""How far away a holder is, and how fast its data plane brings bytes, without reading any request's KV.

What is read is the null block of every buffer, again and again, into memory of its own: the guard stays strict, the
cache is not touched. The figure is that of scattered blocks whose source lies in the processor's cache: a pull of
neighbouring blocks moves longer runs and can be faster, one of a large cache has to fetch them and can be slower.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import median
from time import monotonic

import numpy as np

from pd_service.errors import TransferFailed
from pd_service.node.peer import Peer
from pd_service.rpc.engine_pb2 import PeerReport
from transfer.layout import EngineLayout
from transfer.planes.base import Buffers, Plane, PlaneError, Runs

_NUM_PINGS = 20
_READ_BYTES = 16 * 2**20  # of one read
_MAX_RUNS = 4096  # of one read: blocks may be small
_MEASURE_S = 0.2  # for all reads together, at least
_TIMEOUT_S = 5.0  # of one read


async def examine(peer: Peer, planes: Sequence[Plane], layout: EngineLayout) -> PeerReport:
    """`layout` is the reader's, `planes` are those it reads with. Never raises for what it finds."""
    report = PeerReport(plane=peer.plane_name, plane_reason=peer.plane_reason, buffers=len(layout.buffers))
    try:
        round_trips_s = []
        for _ in range(_NUM_PINGS):
            asked_at = monotonic()
            lease_id = await peer.probe()
            round_trips_s.append(monotonic() - asked_at)
        report.round_trip_ms = median(round_trips_s) * 1e3
        report.bytes_per_second = await asyncio.to_thread(_bandwidth, peer, planes, layout, lease_id)
    except (TransferFailed, PlaneError) as error:
        report.problem = str(error)
    return report


def _bandwidth(peer: Peer, planes: Sequence[Plane], layout: EngineLayout, lease_id: str) -> float:
    """Bytes per second, the median of several reads. In a thread."""
    runs = null_block_runs(layout)
    scratch = np.empty(runs.num_bytes, np.uint8)
    reader = peer.join_again(planes, Buffers(ptrs=(scratch.ctypes.data,), lens=(len(scratch),)))
    try:
        times_s: list[float] = []
        reader.read(lease_id, runs, _TIMEOUT_S)  # the first one meets pages that are missing
        while sum(times_s) < _MEASURE_S:
            started_at = monotonic()
            reader.read(lease_id, runs, _TIMEOUT_S)
            times_s.append(monotonic() - started_at)
    finally:
        reader.close()
    return runs.num_bytes / median(times_s)


def null_block_runs(layout: EngineLayout) -> Runs:
    """The null block of every buffer in turn, often enough to measure, into one buffer from its beginning on."""
    sizes = np.array([b.bytes_per_block for b in layout.of_rank(0)], np.int64)
    num_runs = int(min(_MAX_RUNS, max(1, _READ_BYTES // max(1, sizes.sum())) * len(sizes)))
    index = np.arange(num_runs) % len(sizes)
    length = sizes[index]
    zeros = np.zeros(num_runs, np.int64)
    dst_offset = np.cumsum(length) - length
    return Runs(src_buffer=index, src_offset=zeros, dst_buffer=zeros, dst_offset=dst_offset, length=length)
