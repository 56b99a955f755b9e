"""Data plane between two engines of one process: the reference for the others, and what tests and one-process runs use.

The guard is not asked: both sides are one process, and the confirmation after the read is what protects.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping

from transfer.planes.base import (
    Buffers,
    Guard,
    PlaneError,
    PlaneUnavailable,
    Runs,
    endpoint_field,
)
from transfer.planes.copying import RunCopier
from transfer.planes.gate import Gate

_PROCESS = secrets.token_hex(16)
_servers: dict[str, MemoryServer] = {}
_servers_lock = threading.Lock()


def _process() -> str:
    """Unlike any other process, also unlike a fork of this one."""
    return f"{_PROCESS}-{os.getpid()}"


class MemoryPlane:
    name = "memory"

    def serve(self, buffers: Buffers, guard: Guard) -> MemoryServer:
        return MemoryServer(buffers)

    def connect(self, endpoint: Mapping[str, object], token: bytes, buffers: Buffers) -> MemoryReader:
        if endpoint_field(endpoint, "process", str) != _process():
            raise PlaneUnavailable("the holder is another process")
        with _servers_lock:
            server = _servers.get(endpoint_field(endpoint, "server", str))
        if server is None:
            raise PlaneUnavailable("the holder's memory server was closed")
        return MemoryReader(server, buffers)


class MemoryServer:
    """Stands for the holder's buffers; `close` waits for the copy step that is running in a reader."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.gate = Gate("the holder's memory server")
        self._key = secrets.token_hex(8)
        self._endpoint = {"process": _process(), "server": self._key}
        with _servers_lock:
            _servers[self._key] = self

    @property
    def endpoint(self) -> Mapping[str, object]:
        return self._endpoint

    def close(self) -> None:
        with _servers_lock:
            _servers.pop(self._key, None)
        self.gate.close()


class MemoryReader:
    def __init__(self, server: MemoryServer, buffers: Buffers) -> None:
        self._server = server
        self._gate = Gate("the reader")
        self._copier = RunCopier(server.buffers.ptrs, server.buffers.lens, buffers.ptrs, buffers.lens)

    def read(self, lease_id: str, runs: Runs, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s

        def check() -> None:
            self._gate.check()
            self._server.gate.check()
            if time.monotonic() >= deadline:
                raise PlaneError(f"the read of {runs.num_bytes} bytes did not end within {timeout_s} s")

        with self._gate.passing(), self._server.gate.passing():
            self._copier.copy(runs, check)
            check()

    def close(self) -> None:
        self._gate.close()
