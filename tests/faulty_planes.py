"""Data planes that do their work wrong now and then, and fresh blocks that are poisoned, for tests on real nodes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from random import Random
from typing import cast

from kv_cache.block_pool import BlockPool
from pd_service.node.node import EngineNode
from transfer.planes.base import Buffers, Guard, Plane, PlaneError, PlaneReader, PlaneServer, Runs

Fault = Callable[[PlaneReader, str, Runs, float, Buffers, Random], None]  # a read that goes wrong


def flip_a_bit(
    reader: PlaneReader, lease_id: str, runs: Runs, timeout_s: float, buffers: Buffers, random: Random
) -> None:
    """All bytes arrive, and one bit of them is wrong."""
    reader.read(lease_id, runs, timeout_s)
    if len(runs):
        run = random.randrange(len(runs))
        offset = int(runs.dst_offset[run]) + random.randrange(int(runs.length[run]))
        byte = ctypes.c_ubyte.from_address(buffers.ptrs[int(runs.dst_buffer[run])] + offset)
        byte.value ^= 1 << random.randrange(8)


def break_half_way(
    reader: PlaneReader, lease_id: str, runs: Runs, timeout_s: float, buffers: Buffers, random: Random
) -> None:
    """Some of the bytes arrive, and the reader is told so."""
    half = {item.name: getattr(runs, item.name)[: len(runs) // 2] for item in fields(Runs)}
    reader.read(lease_id, Runs(**half), timeout_s)
    raise PlaneError("the wire broke")


@dataclass
class FaultyPlane:
    """As `inner`, but the first of every `period` reads has the fault."""

    inner: Plane
    fault: Fault
    period: int
    num_faults: int = 0
    _reads: itertools.count[int] = field(default_factory=itertools.count)
    _random: Random = field(default_factory=lambda: Random(0))

    @property
    def name(self) -> str:
        return self.inner.name

    def serve(self, buffers: Buffers, guard: Guard) -> PlaneServer:
        return self.inner.serve(buffers, guard)

    def connect(self, endpoint: Mapping[str, object], token: bytes, buffers: Buffers) -> PlaneReader:
        return _FaultyReader(self, self.inner.connect(endpoint, token, buffers), buffers)

    def read(self, reader: PlaneReader, buffers: Buffers, lease_id: str, runs: Runs, timeout_s: float) -> None:
        if next(self._reads) % self.period:
            reader.read(lease_id, runs, timeout_s)
        else:
            self.num_faults += 1
            self.fault(reader, lease_id, runs, timeout_s, buffers, self._random)


@dataclass
class _FaultyReader:
    plane: FaultyPlane
    inner: PlaneReader
    buffers: Buffers

    def read(self, lease_id: str, runs: Runs, timeout_s: float) -> None:
        self.plane.read(self.inner, self.buffers, lease_id, runs, timeout_s)

    def close(self) -> None:
        self.inner.close()


def poison_fresh_blocks(node: EngineNode) -> None:
    """From now on a block is filled with 0xFF when it is given out for new content: reading it before writing shows."""
    kv = node._engine.kv_cache_manager
    ptrs, _, item_lens, attn_types = kv.get_contiguous_buf_infos()
    for attn_type, manager in kv.managers.items():
        buffers = [(p, size) for p, size, key in zip(ptrs, item_lens, attn_types, strict=True) if key == attn_type]
        _poison_pool(manager.block_pool, buffers)


def _poison_pool(pool: BlockPool, buffers: Sequence[tuple[int, int]]) -> None:
    give_out = pool.get_new_blocks

    def get_new_blocks(n: int) -> list[int]:
        blocks = give_out(n)
        for ptr, size in buffers:
            for block in blocks:
                ctypes.memset(ptr + block * size, 0xFF, size)
        return blocks

    pool.get_new_blocks = cast(Callable[[int], list[int]], get_new_blocks)  # type: ignore[method-assign]
