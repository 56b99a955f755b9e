"""Who moves bytes in the transfer benchmark: our planes, their bounds, and peers in processes of their own.

    this process                         holder's process
    our cache  ◄── shm, tcp, mooncake ── cache
    one area   ◄── raw stream ─────────┘   ▲
                                           │ mapped read-only
    peer's reader process                  │
    its own cache ◄─── NIXL, Mooncake ── peer's holder process

Peers are stopped by signal except in their turn: NIXL's threads poll without pause and would take a core from others.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.transfer_cells import ByteArray, Cell, flat
from benchmarks.transfer_holder import LEASE, Cache, Holder
from benchmarks.transfer_peer import map_file
from transfer.planes.base import Int64Array, PlaneReader

TIMEOUT_S = 60.0
PEER_SCRIPT = Path(__file__).with_name("transfer_peer.py")


class Side(Protocol):
    """One way to move the bytes of a cell. `dest` is where they arrive, None for a bound that moves others."""

    dest: ByteArray | None
    dest_starts: Int64Array

    def prepare(self, cell: Cell) -> None: ...

    def copy(self) -> float:
        """Moves them once; the seconds it took."""

    def close(self) -> None: ...


class Ours:
    """A plane, read into our cache."""

    def __init__(self, reader: PlaneReader, cache: Cache) -> None:
        self._reader = reader
        self.dest: ByteArray | None = cache.region
        self.dest_starts = cache.starts

    def prepare(self, cell: Cell) -> None:
        self._runs = cell.runs

    def copy(self) -> float:
        return seconds(lambda: self._reader.read(LEASE, self._runs, TIMEOUT_S))

    def close(self) -> None:
        self._reader.close()


class Memcpy:
    """The bound of `shm`: as many bytes by one thread between two mapped areas."""

    dest: ByteArray | None = None
    dest_starts = np.empty(0, np.int64)

    def __init__(self, num_bytes: int) -> None:
        self._areas = [np.ones(num_bytes, np.uint8) for _ in range(2)]

    def prepare(self, cell: Cell) -> None:
        self._num_bytes = cell.runs.num_bytes

    def copy(self) -> float:
        to, source = (area.ctypes.data for area in self._areas)
        return seconds(lambda: ctypes.memmove(to, source, self._num_bytes))

    def close(self) -> None:
        self._areas.clear()


class RawStream:
    """The bound of `tcp`: one loopback connection, received into one area."""

    dest: ByteArray | None = None
    dest_starts = np.empty(0, np.int64)

    def __init__(self, port: int, num_bytes: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._area = memoryview(bytearray(b"\1") * num_bytes)

    def prepare(self, cell: Cell) -> None:
        self._num_bytes = cell.runs.num_bytes

    def copy(self) -> float:
        return seconds(self._receive)

    def _receive(self) -> None:
        self._sock.sendall(self._num_bytes.to_bytes(8, "little"))
        at = 0
        while at < self._num_bytes:
            at += self._sock.recv_into(self._area[at : self._num_bytes])

    def close(self) -> None:
        self._sock.close()


class PeerMemory:
    """What peers read, and what they read into, one after the other; sizes and places are the holder's.

    Ordinary memory by itself, as a tensor of torch has it. For tuned peers the source is the holder's own memory, and
    the destination lies in huge pages.
    """

    def __init__(self, holder: Holder, *, tuned: bool) -> None:
        self._fds: list[int] = []
        size = len(holder.region)
        self.tuned, self.starts = tuned, holder.starts
        self.dest_path, self.dest = self._make(size)
        self.dest.fill(1)
        if tuned:
            self.source_path = holder.hello.memory
        else:
            self.source_path, source = self._make(size)
            source[:] = holder.region

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def _make(self, size: int) -> tuple[str, ByteArray]:
        fd = os.memfd_create("benchmark-peer", os.MFD_CLOEXEC)
        self._fds.append(fd)
        os.ftruncate(fd, size)
        path = f"/proc/{os.getpid()}/fd/{fd}"
        return path, map_file(path, writable=True, huge=self.tuned)


class Peer:
    """NIXL or Mooncake, see `transfer_peer.py`: two processes of another Python. `folder` is for the runs' arrays."""

    def __init__(self, python: str, system: str, env: Mapping[str, str], memory: PeerMemory, folder: Path) -> None:
        self._runs, self._src_starts = folder / "runs.npy", memory.starts
        self.dest: ByteArray | None = memory.dest
        self.dest_starts = memory.starts
        self._processes: list[_PeerProcess] = []
        try:
            for role, path in (("hold", memory.source_path), ("read", memory.dest_path)):
                told = {"holder": self._processes[0].hello} if role == "read" else {}
                options = {"system": system, "tuned": memory.tuned, "role": role, "memory": path, **told}
                self._processes.append(_PeerProcess(python, options, env))
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    @property
    def version(self) -> str:
        return str(self._processes[0].hello["version"])

    def prepare(self, cell: Cell) -> None:
        np.save(self._runs, flat(cell.runs, self._src_starts, self.dest_starts))
        self._ask({"runs": str(self._runs)})

    def copy(self) -> float:
        return float(self._ask({"copy": True})["seconds"])

    def close(self) -> None:
        for process in self._processes:
            process.kill()

    def _ask(self, task: Mapping[str, object]) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        try:
            return self._processes[1].ask(task)
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.signal(number)


class _PeerProcess:
    def __init__(self, python: str, options: Mapping[str, object], env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [python, "-I", str(PEER_SCRIPT), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        try:
            self.hello = self._answer()
        except BaseException:
            self.kill()
            raise

    def ask(self, task: Mapping[str, object]) -> dict[str, Any]:
        """Raises RuntimeError when the process ends instead of answering, or takes too long."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], TIMEOUT_S)[0]:
            raise RuntimeError(f"a peer did not answer within {TIMEOUT_S} s")
        if line := self._process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            return answer
        raise RuntimeError(f"a peer ended with exit code {self._process.wait()}; its last words are on stderr")


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
