"""Byte runs moved by NIXL or Mooncake, for `benchmarks.transfer`: run by the Python of an environment that has them.

Imports nothing of this project. The only argument is JSON: `system` ("nixl", "mooncake"), `role` ("hold", "read"),
`memory` (path of a file to map as a whole), `tuned` (see below), and for the reader `holder`, the holder's first line.
The first line on stdout, unasked, is `{"version", "base", "endpoint"}`; `base` is the address the file is mapped at. A
holder then serves until its standard input ends. A reader answers each line: `{"runs": path}` loads an array [3, runs]
of offsets into the holder's file, offsets into its own, and lengths in bytes; `{"copy": true}` moves them once and
tells `seconds`.

Memory is registered as one region and the descriptors of the runs are made beforehand; the clock runs over making the
request from prepared descriptors, posting it, and waiting for its end, which NIXL's users do by asking without pause.
A tuned peer maps its memory in huge pages, and NIXL's reader has no progress thread besides the one that asks. (Its
holder always has one: over sockets nothing would answer without it.)
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import time
import weakref
from importlib.metadata import version
from typing import Any

import numpy as np

MAX_PIECES = 64  # of one Mooncake call; its queue refuses tens of thousands
PR_SET_PDEATHSIG = 1
HUGE_PAGE = 2 * 2**20
MAP_FIXED = 0x10


class Nixl:
    """UCX; which of its transports is chosen by UCX_TLS in the environment."""

    version_of = "nixl-cu12"

    def __init__(self, options: dict[str, Any], base: int, size: int) -> None:
        from nixl_cu12 import nixl_agent, nixl_agent_config

        has_thread = options["role"] == "hold" or not options["tuned"]
        config = nixl_agent_config(enable_prog_thread=has_thread, backends=["UCX"])
        self._agent = nixl_agent(f"{options['role']} {os.getpid()}", config)
        self._agent.register_memory([(base, size, 0, "")], "DRAM")

    def endpoint(self) -> str:
        return str(self._agent.get_agent_metadata().hex())

    def connect(self, endpoint: str) -> None:
        self._holder = self._agent.add_remote_agent(bytes.fromhex(endpoint))

    def prepare(self, theirs: np.ndarray, ours: np.ndarray, lengths: np.ndarray) -> None:
        self._lists = [
            self._agent.prep_xfer_dlist(
                name, np.stack((start, lengths, np.zeros_like(start)), axis=1).astype(np.uint64), "DRAM"
            )
            for name, start in (("NIXL_INIT_AGENT", ours), (self._holder, theirs))
        ]
        self._indices = np.arange(len(lengths), dtype=np.int32)

    def copy(self) -> None:
        ours, theirs = self._lists
        transfer = self._agent.make_prepped_xfer("READ", ours, self._indices, theirs, self._indices)
        state = self._agent.transfer(transfer)
        while state == "PROC":
            state = self._agent.check_xfer_state(transfer)
        transfer.release()
        if state != "DONE":
            raise RuntimeError(f"NIXL's transfer ended as {state}")


class Mooncake:
    """Its tcp transport; it has none for two processes of one host."""

    version_of = "mooncake-transfer-engine-non-cuda"

    def __init__(self, options: dict[str, Any], base: int, size: int) -> None:
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        for status in (
            self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""),
            self._engine.register_memory(base, size),
        ):
            if status:
                raise RuntimeError(f"Mooncake answered {status}")

    def endpoint(self) -> str:
        return f"127.0.0.1:{self._engine.get_rpc_port()}"

    def connect(self, endpoint: str) -> None:
        self._holder = endpoint

    def prepare(self, theirs: np.ndarray, ours: np.ndarray, lengths: np.ndarray) -> None:
        columns = [column.tolist() for column in (ours, theirs, lengths)]
        self._calls = [
            [column[first : first + MAX_PIECES] for column in columns] for first in range(0, len(lengths), MAX_PIECES)
        ]

    def copy(self) -> None:
        for ours, theirs, lengths in self._calls:
            if status := self._engine.batch_transfer_sync_read(self._holder, ours, theirs, lengths):
                raise RuntimeError(f"Mooncake answered {status}")


def map_file(path: str, *, writable: bool, huge: bool) -> np.ndarray:
    """The whole file, shared, as long as the array lives; if wished in huge pages, where the kernel has them.

    For these the address has to be a multiple of their size, so it is found within a larger reservation.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes, libc.madvise.argtypes = (
        (ctypes.c_void_p, ctypes.c_size_t),
        (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    )
    fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    size = os.fstat(fd).st_size
    reserved = libc.mmap(None, size + HUGE_PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    start = reserved + -reserved % HUGE_PAGE
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    found = libc.mmap(start, size, access, mmap.MAP_SHARED | MAP_FIXED, fd, 0)
    os.close(fd)
    if found != start:
        raise OSError(ctypes.get_errno(), f"{path} cannot be mapped: {os.strerror(ctypes.get_errno())}")
    libc.madvise(start, size, mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    memory = (ctypes.c_ubyte * size).from_address(start)
    weakref.finalize(memory, libc.munmap, reserved, size + HUGE_PAGE).atexit = False
    return np.frombuffer(memory, np.uint8)


def read(system: Nixl | Mooncake, holder: dict[str, Any], base: int, answers: Any) -> None:
    system.connect(holder["endpoint"])
    for line in sys.stdin:
        task = json.loads(line)
        seconds = 0.0
        if "runs" in task:
            src, dst, length = np.load(task["runs"])
            system.prepare(src + holder["base"], dst + base, length)
        else:
            start = time.perf_counter()
            system.copy()
            seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # threads that poll must not outlive the benchmark
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever the libraries print must not stand among the answers
    options = json.loads(sys.argv[1])
    memory = map_file(options["memory"], writable=options["role"] == "read", huge=options["tuned"])
    base = memory.ctypes.data
    system = {"nixl": Nixl, "mooncake": Mooncake}[options["system"]](options, base, len(memory))
    hello = {"version": version(system.version_of), "base": base, "endpoint": system.endpoint()}
    print(json.dumps(hello), file=answers, flush=True)
    if options["role"] == "hold":
        sys.stdin.read()
    else:
        read(system, options["holder"], base, answers)
    os._exit(0)  # NIXL's agents crash when the interpreter takes them apart


if __name__ == "__main__":
    main()
