"""The holder's side of the transfer benchmark: an engine's cache, served from a process of its own.

    python -m benchmarks.transfer_holder MODEL BLOCK_SIZE NUM_TOKENS PLANE...

The process serves the cache by the planes and by a raw stream, and tells in its first line how to reach it. It holds a
count of 32-bit words, so that bytes from a wrong place show.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgpack
import numpy as np

from benchmarks.transfer_cells import ATTN_TYPE, MODELS, ByteArray, layout
from benchmarks.transfer_peer import map_file
from kv_cache.cache_storage import SharedStorage, align_up
from transfer.guard import ReadGuard
from transfer.layout import EngineLayout
from transfer.planes import make_plane
from transfer.planes.base import Buffers, PlaneUnavailable, SharedMemory

TOKEN = b"benchmark reader"
LEASE = "benchmark lease"
SEND_BYTES = 4 * 2**20  # the raw stream's send call
STOP_TIMEOUT_S = 10.0


class Cache:
    """An engine's cache as engines allocate it: 2 MiB-aligned buffers in one shared storage, every page touched."""

    def __init__(self, shape: EngineLayout) -> None:
        lens = [b.num_bytes for b in shape.buffers]
        self.storage = SharedStorage(sum(map(align_up, lens)))
        for thread in threading.enumerate():
            if thread.name == "commit":  # pages are made huge meanwhile, which would disturb what is measured
                thread.join()
        self._pieces = [self.storage.allocate(n) for n in lens]
        for piece in self._pieces:
            piece.fill_(1)
        ptrs = tuple(piece.data_ptr() for piece in self._pieces)
        base, size = self.storage.base_ptr, self.storage.num_bytes
        shared = SharedMemory(fd=self.storage.fd, base_ptr=base, num_bytes=size)
        self.buffers = Buffers(ptrs=ptrs, lens=tuple(lens), shared=shared)
        self.starts = np.array(ptrs, np.int64) - base  # of the buffers in `region`
        self.region: ByteArray = np.frombuffer((ctypes.c_ubyte * size).from_address(base), np.uint8)

    def close(self) -> None:
        self.storage.close()

    def count_up(self) -> None:
        """Fills it with 1, 2, 3, ... as 32-bit words, so that no two places are alike."""
        words = self.region.view(np.uint32)
        words[:] = np.arange(1, len(words) + 1, dtype=np.uint32)


def hold(shape: EngineLayout, planes: Sequence[str]) -> None:
    """Serves a cache by these planes, and a raw stream of it, until the raw connection ends."""
    cache = Cache(shape)
    cache.count_up()
    guard = ReadGuard(shape)
    guard.register_reader(TOKEN)
    guard.admit(LEASE, TOKEN, {ATTN_TYPE: range(shape.buffers[0].num_blocks)})
    servers, refused = {}, {}
    for name in planes:
        try:
            servers[name] = make_plane(name, host="127.0.0.1").serve(cache.buffers, guard)
        except PlaneUnavailable as reason:
            refused[name] = str(reason)
    raw = socket.create_server(("127.0.0.1", 0))
    hello = {
        "endpoints": {name: dict(server.endpoint) for name, server in servers.items()},
        "refused": refused,
        "raw": raw.getsockname()[1],
        "memory": f"/proc/{os.getpid()}/fd/{cache.storage.fd}",
        "starts": cache.starts.tolist(),
    }
    print(msgpack.packb(hello).hex(), flush=True)
    _serve_raw(raw, memoryview(cache.region))  # type: ignore[arg-type]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What the holder's process says of itself."""

    endpoints: Mapping[str, Mapping[str, object]]
    refused: Mapping[str, str]  # plane → why it cannot serve here
    raw: int  # port
    memory: str  # path of its cache, to be mapped
    starts: list[int]  # of the buffers in it


class Holder:
    """The holder's process; ends when our raw connection to it does."""

    def __init__(self, model: str, block_size: int, num_tokens: int, planes: Sequence[str]) -> None:
        command = [sys.executable, "-m", "benchmarks.transfer_holder", model, str(block_size), str(num_tokens), *planes]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the holder ended with exit code {self._process.wait()}")
        self.hello = Hello(**msgpack.unpackb(bytes.fromhex(line.decode())))
        self.starts = np.array(self.hello.starts, np.int64)
        self.region = map_file(self.hello.memory, writable=False, huge=True)

    def close(self) -> None:
        try:
            self._process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


if __name__ == "__main__":
    hold(layout(MODELS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])), sys.argv[4:])
