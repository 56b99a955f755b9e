"""How fast KV moves between two processes, beside the bounds of this machine in the same run.

The cache is SmolLM2-135M's: 30 layers, key and value, 3 heads of 64 float32 values, blocks of 16 tokens: 60 buffers,
46,080 bytes per token. `shm` is held to one thread's memcpy of as many bytes between two mapped areas, `tcp` to one raw
loopback stream received into one prepared area. A round measures each plane right after its bound, since speeds of a
shared machine drift; a bar is the median of the rounds' ratios. Every destination is checked by bytes once.

`shm` with scattered blocks is observed without an aim: pieces of 12 KiB at random places pay for address translation
and start-up of each piece, which one long copy does not. How long the plans themselves take is in
`benchmarks/transfer_plan.py`.

    python -m benchmarks.transfer --json
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgpack
import numpy as np

from benchmarks.report import Bar, arguments, publish
from benchmarks.transfer_plan import plan_bars
from transfer.guard import ReadGuard
from transfer.layout import LAYOUT_VERSION, BufferLayout, EngineLayout
from transfer.plan import plan_read
from transfer.planes import make_plane
from transfer.planes.base import Buffers, PlaneReader, Runs, SharedMemory

ATTN_TYPE = "FullAttention"
BLOCK_SIZE = 16
NUM_LAYERS = 30
PROMPTS = (128, 1024, 8192)
ROUNDS = {128: 101, 1024: 25, 8192: 7}
AIM = 0.6
TOKEN = b"benchmark reader"
LEASE = "benchmark lease"
SEND_BYTES = 4 * 2**20  # the raw stream's send call
TIMEOUT_S = 60.0


def layout(num_blocks: int) -> EngineLayout:
    block_bytes = BLOCK_SIZE * 3 * 64 * 4
    return EngineLayout(
        version=LAYOUT_VERSION,
        model="SmolLM2-135M",
        buffers=tuple(
            BufferLayout(
                layer=layer,
                cache_name=name,
                attn_type=ATTN_TYPE,
                block_size=BLOCK_SIZE,
                first_head=0,
                num_heads=3,
                total_heads=3,
                dim=64,
                dtype="float32",
                num_bytes=num_blocks * block_bytes,
            )
            for layer in range(NUM_LAYERS)
            for name in ("k_cache", "v_cache")
        ),
    )


class Cache:
    """A cache in shared memory, every page touched."""

    def __init__(self, shape: EngineLayout) -> None:
        lens = [b.num_bytes for b in shape.buffers]
        fd = os.memfd_create("benchmark", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, sum(lens))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.bytes = np.frombuffer(mmap.mmap(fd, sum(lens)), np.uint8)
        self.bytes.fill(1)
        base = self.bytes.ctypes.data
        starts = np.concatenate(([0], np.cumsum(lens)[:-1]))
        self.buffers = Buffers(
            ptrs=tuple(base + int(start) for start in starts),
            lens=tuple(lens),
            shared=SharedMemory(fd=fd, base_ptr=base, num_bytes=sum(lens)),
        )


def hold(num_blocks: int) -> None:
    """The other process: serves a cache and a raw stream until its standard input ends."""
    shape = layout(num_blocks)
    cache = Cache(shape)
    view = cache.bytes.view(np.uint32)
    view[:] = np.arange(len(view), dtype=np.uint32)
    guard = ReadGuard(shape)
    guard.register_reader(TOKEN)
    guard.admit(LEASE, TOKEN, {ATTN_TYPE: range(num_blocks)})
    servers = {name: make_plane(name, host="127.0.0.1").serve(cache.buffers, guard) for name in ("shm", "tcp")}
    raw = socket.create_server(("127.0.0.1", 0))
    endpoints: dict[str, object] = {name: dict(server.endpoint) for name, server in servers.items()}
    endpoints["raw"] = raw.getsockname()[1]
    print(msgpack.packb(endpoints).hex(), flush=True)
    _serve_raw(raw, memoryview(cache.bytes))  # type: ignore[arg-type]
    for server in servers.values():
        server.close()


def _serve_raw(listener: socket.socket, data: memoryview) -> None:
    """Answers each 8-byte request with that many bytes; ends with the connection."""
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while request := sock.recv(8, socket.MSG_WAITALL):
        left = int.from_bytes(request, "little")
        while left:
            left -= sock.send(data[: min(left, SEND_BYTES)])


class RawStream:
    """The bound of `tcp`: one connection, received into one area."""

    def __init__(self, port: int, num_bytes: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._area = memoryview(bytearray(b"\1") * num_bytes)

    def read(self, num_bytes: int) -> None:
        self._sock.sendall(num_bytes.to_bytes(8, "little"))
        at = 0
        while at < num_bytes:
            at += self._sock.recv_into(self._area[at:num_bytes])

    def close(self) -> None:
        self._sock.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One prompt length and kind of block tables."""

    num_tokens: int
    tables: str
    runs: Runs


def cells(shape: EngineLayout, num_blocks: int) -> list[Cell]:
    rng = np.random.default_rng(1)
    ordered = np.arange(1, num_blocks)
    made = []
    for num_tokens in PROMPTS:
        for name in ("contiguous", "scattered"):
            tables = [{ATTN_TYPE: ordered if name == "contiguous" else rng.permutation(ordered)} for _ in range(2)]
            runs = plan_read(shape, shape, tables[0], tables[1], 0, num_tokens)
            made.append(Cell(num_tokens=num_tokens, tables=name, runs=runs))
    return made


def measure(cell: Cell, copies: Mapping[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Seconds of each copy in each round, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in copies}
    for counts in [False, *([True] * ROUNDS[cell.num_tokens])]:
        for name, copy in copies.items():
            start = time.perf_counter()
            copy()
            if counts:
                times[name].append(time.perf_counter() - start)
    return times


def check(cell: Cell, cache: Cache, shape: EngineLayout) -> None:
    """The holder's bytes are a count of 32-bit words, so what should have arrived is known here."""
    starts = np.array(cache.buffers.ptrs) - cache.buffers.ptrs[0]
    for b, src, dst, at, n in zip(
        cell.runs.src_buffer, cell.runs.src_offset, cell.runs.dst_buffer, cell.runs.dst_offset, cell.runs.length,
        strict=True,
    ):  # fmt: skip
        first = (starts[b] + src) // 4
        got = cache.bytes[starts[dst] + at : starts[dst] + at + n].view(np.uint32)
        if not np.array_equal(got, np.arange(first, first + n // 4, dtype=np.uint32)):
            raise SystemExit(f"wrong bytes in buffer {dst} of {len(shape.buffers)} at {at}")


def bars_of(cell: Cell, times: Mapping[str, list[float]]) -> list[Bar]:
    num_bytes = cell.runs.num_bytes
    seconds = {name: statistics.median(taken) for name, taken in times.items()}
    rates = {name: num_bytes / taken / 1e9 for name, taken in seconds.items()}
    where = f"{cell.num_tokens} tokens, {cell.tables}"
    made = []
    for plane, bound in (("shm", "memcpy"), ("tcp", "raw")):
        note = f"{rates[plane]:.2f} of {rates[bound]:.2f} GB/s, {1e3 * seconds[plane]:.2f} ms, {len(cell.runs)} runs"
        value = round(statistics.median(b / p for b, p in zip(times[bound], times[plane], strict=True)), 3)
        aim = None if plane == "shm" and cell.tables == "scattered" else AIM
        made.append(Bar(name=f"{plane} / {bound}, {where}", value=value, aim=aim, note=note))
    return made


def run_cells(readers: Mapping[str, PlaneReader], raw: RawStream, cache: Cache, shape: EngineLayout,
              todo: Sequence[Cell]) -> list[Bar]:  # fmt: skip
    area = [np.ones(max(cell.runs.num_bytes for cell in todo), np.uint8) for _ in range(2)]
    bars: list[Bar] = []
    for cell in todo:
        num_bytes = cell.runs.num_bytes
        bounds: dict[str, Callable[[], None]] = {
            "memcpy": lambda n=num_bytes: ctypes.memmove(area[0].ctypes.data, area[1].ctypes.data, n),  # type: ignore[misc]
            "raw": lambda n=num_bytes: raw.read(n),  # type: ignore[misc]
        }
        copies: dict[str, Callable[[], None]] = {}
        for (bound, copy), (name, reader) in zip(bounds.items(), readers.items(), strict=True):
            copies[bound] = copy
            copies[name] = lambda r=reader, runs=cell.runs: r.read(LEASE, runs, TIMEOUT_S)  # type: ignore[misc]
        bars += bars_of(cell, measure(cell, copies))
        for reader in readers.values():
            cache.bytes.fill(0)
            reader.read(LEASE, cell.runs, TIMEOUT_S)
            check(cell, cache, shape)
    return bars


def main() -> int:
    parser = arguments("KV transfer between two processes: shm against memcpy, tcp against a raw loopback stream.")
    parser.add_argument("--hold", type=int, metavar="BLOCKS", help="serve a cache of so many blocks (used internally)")
    options = parser.parse_args()
    if options.hold is not None:
        hold(options.hold)
        return 0
    bars = plan_bars()
    num_blocks = 2 * max(PROMPTS) // BLOCK_SIZE
    shape = layout(num_blocks)
    command = [sys.executable, "-m", "benchmarks.transfer", "--hold", str(num_blocks)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        cache = Cache(shape)
        endpoints = msgpack.unpackb(bytes.fromhex(holder.stdout.readline().decode()))
        readers: dict[str, PlaneReader] = {
            name: make_plane(name, host="127.0.0.1").connect(endpoints[name], TOKEN, cache.buffers)
            for name in ("shm", "tcp")
        }
        todo = cells(shape, num_blocks)
        raw = RawStream(endpoints["raw"], max(cell.runs.num_bytes for cell in todo))
        gc.disable()
        bars += run_cells(readers, raw, cache, shape, todo)
        for end in (*readers.values(), raw):
            end.close()
    details = {"cpus": os.cpu_count(), "kernel": platform.release(), "buffers": 60, "bytes_per_token": 46080}
    return publish("KV transfer between two processes", bars, as_json=options.json, details=details)


if __name__ == "__main__":
    sys.exit(main())
