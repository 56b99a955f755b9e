"""Data plane over Mooncake's transfer engine, an optional package: RDMA where it finds an adapter, else its own TCP.

    engine of the holder: registers the buffers       engine of each reader: registers its own buffers
    session "host:port", addresses of buffers ──────► batch reads of at most 64 pieces, one after the other

What the library cannot offer is left to the confirm, and to the network it runs in:
- No guard and no token: whoever reaches the port can read, and even write, all registered memory. Use it on networks
  that belong to the cluster alone.
- A call cannot be interrupted. One to a dead holder fails at once; one to a holder that hangs ends after `STALL_S`
  without progress, so that a read may end that much after its deadline, and `close` may wait as long.
- A call that failed may leave transfers that still write into the reader's memory. So its engine is taken apart before
  the failure is told, and the next read starts another one.
- Taking an engine apart lasts up to a second, in which the library keeps Python's lock.

A reader learns whom it reached by reading the holder's mark, random bytes that its endpoint names.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from transfer.planes.base import (
    Buffers,
    Guard,
    PlaneError,
    PlaneUnavailable,
    Runs,
    check_destination,
    check_source,
    endpoint_field,
)
from transfer.planes.gate import Gate

MAX_PIECES = 64  # of one call: the library refuses tens of thousands
PIECE_BYTES = 2**20  # longer runs are cut, so that no call brings more than 64 MiB between two looks at the deadline
STALL_S = 5  # the least that the library's own limits allow
MARK_BYTES = 16

# Read by the library when it is loaded; what the operator has set stays.
_SETTINGS = {
    "MC_TRANSFER_TIMEOUT": str(STALL_S),
    "MC_TCP_PROGRESS_TIMEOUT_SEC": str(STALL_S),
    "MC_TCP_STATUS_TIMEOUT_SEC": str(STALL_S),
    "GLOG_minloglevel": "2",  # errors, to stderr like our own log
    "MC_LOG_LEVEL": "ERROR",
}


class _CallFailed(PlaneError):
    """Of the library; some of the call's transfers may still be on their way."""


class _Engine(Protocol):
    """What is used of the library; its calls answer 0 when all is well."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str, /) -> int: ...
    def batch_register_memory(self, addresses: Sequence[int], lens: Sequence[int], /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def batch_transfer_sync_read(
        self, session: str, dst: Sequence[int], src: Sequence[int], length: Sequence[int], /
    ) -> int: ...


def load_engine() -> Callable[[], _Engine]:
    """The library's class. Raises PlaneUnavailable, naming what to install, where it cannot be loaded."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise PlaneUnavailable(
            f"Mooncake's transfer engine cannot be loaded ({error}); it needs the package of "
            "`pip install 'pd-service[mooncake]'` and the system's libibverbs (Debian: libibverbs1)"
        ) from error
    engine: Callable[[], _Engine] = TransferEngine
    return engine


def _start_engine(host: str, ptrs: Sequence[int], lens: Sequence[int]) -> _Engine:
    """One that listens at a free port of `host` and may touch these buffers. Raises PlaneUnavailable."""
    engine = load_engine()()
    if status := engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
        raise PlaneUnavailable(f"Mooncake's transfer engine cannot start at {host!r}: it answered {status}")
    if status := engine.batch_register_memory(list(ptrs), list(lens)):
        raise PlaneUnavailable(f"Mooncake's transfer engine cannot register the buffers: it answered {status}")
    return engine


class MooncakePlane:
    """Serves at `host`, an address of this machine that the readers can reach."""

    name = "mooncake"

    def __init__(self, host: str) -> None:
        self._host = host

    def serve(self, buffers: Buffers, guard: Guard) -> MooncakeServer:
        return MooncakeServer(self._host, buffers)

    def connect(self, endpoint: Mapping[str, object], token: bytes, buffers: Buffers) -> MooncakeReader:
        session, mark = endpoint_field(endpoint, "session", str), endpoint_field(endpoint, "mark", bytes)
        ptrs, lens, mark_ptr = (_numbers(endpoint, name) for name in ("ptrs", "lens", "mark_ptr"))
        if len(ptrs) != len(lens) or len(mark_ptr) != 1:
            raise PlaneUnavailable("the endpoint's addresses and lengths of buffers do not fit together")
        holder = _Holder(session, mark, mark_ptr[0], Buffers(ptrs=ptrs, lens=lens))
        reader = MooncakeReader(self._host, holder, buffers)
        try:
            reader.probe()
        except PlaneError as error:
            reader.close()
            raise PlaneUnavailable(f"the holder cannot be reached: {error}") from error
        return reader


def _numbers(endpoint: Mapping[str, object], name: str) -> tuple[int, ...]:
    """Addresses or lengths. Raises PlaneUnavailable unless all are such."""
    values = endpoint_field(endpoint, name, list)
    if not all(isinstance(value, int) and 0 <= value < 2**63 for value in values):
        raise PlaneUnavailable(f"the endpoint's field {name!r} should hold addresses or lengths in bytes")
    return tuple(values)


class MooncakeServer:
    """Holds an engine; while it lives, others can read the buffers."""

    def __init__(self, host: str, buffers: Buffers) -> None:
        self._mark = ctypes.create_string_buffer(secrets.token_bytes(MARK_BYTES), MARK_BYTES)
        mark_ptr = ctypes.addressof(self._mark)
        self._engine: _Engine | None = _start_engine(host, (*buffers.ptrs, mark_ptr), (*buffers.lens, MARK_BYTES))
        self._endpoint: dict[str, object] = {
            "session": f"{host}:{self._engine.get_rpc_port()}",
            "mark": self._mark.raw,
            "mark_ptr": [mark_ptr],
            "ptrs": list(buffers.ptrs),
            "lens": list(buffers.lens),
        }

    @property
    def endpoint(self) -> Mapping[str, object]:
        return self._endpoint

    def close(self) -> None:
        self._engine = None  # its end waits for its threads


@dataclass(frozen=True, slots=True)
class _Holder:
    """The holder as its endpoint describes it."""

    session: str
    mark: bytes
    mark_ptr: int
    buffers: Buffers


class _Line:
    """One engine that reads from one holder, until a call of it fails."""

    def __init__(self, host: str, holder: _Holder, buffers: Buffers) -> None:
        """Raises PlaneError unless the holder answers with its mark; the engine is then gone."""
        self._session = holder.session
        self.gate = Gate("the engine that another read failed on")
        self._mark = ctypes.create_string_buffer(MARK_BYTES)
        mark_ptr = ctypes.addressof(self._mark)
        self._engine: _Engine | None = _start_engine(host, (*buffers.ptrs, mark_ptr), (*buffers.lens, MARK_BYTES))
        with self.using():
            self.read([mark_ptr], [holder.mark_ptr], [MARK_BYTES])
        if self._mark.raw != holder.mark:
            self.close()
            raise PlaneError(f"another process answers at {holder.session}")

    @contextmanager
    def using(self) -> Iterator[None]:
        """What is told of a failed call is told when no byte of it can arrive any more."""
        try:
            with self.gate.passing():
                yield
        except _CallFailed:
            self.close()
            raise

    def read(self, dst: Sequence[int], src: Sequence[int], length: Sequence[int]) -> None:
        """One call, between addresses. Raises PlaneError."""
        self.gate.check()
        assert self._engine is not None  # it is dropped when the gate is closed and nobody is inside
        if status := self._engine.batch_transfer_sync_read(self._session, dst, src, length):
            raise _CallFailed(f"Mooncake's transfer engine answered {status} to a read from {self._session}")

    def close(self) -> None:
        self.gate.close()
        self._engine = None  # its end waits for its threads


class MooncakeReader:
    """Reads from one holder, by an engine of its own: the end of one pair does not touch another."""

    def __init__(self, host: str, holder: _Holder, buffers: Buffers) -> None:
        self._host, self._holder, self._buffers = host, holder, buffers
        self._src, self._dst = (np.array(side.ptrs, np.int64) for side in (holder.buffers, buffers))
        self._gate = Gate("the reader")
        self._lock = threading.Lock()
        self._line: _Line | None = None

    def probe(self) -> None:
        """Raises PlaneError unless the holder can be read from."""
        with self._gate.passing():
            self._open_line()

    def read(self, lease_id: str, runs: Runs, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s

        def check() -> None:
            self._gate.check()
            if time.monotonic() >= deadline:
                raise PlaneError(f"the read of {runs.num_bytes} bytes did not end within {timeout_s} s")

        with self._gate.passing():
            check_source(runs, self._holder.buffers.lens)
            check_destination(runs, self._buffers.lens)
            check()
            line = self._open_line()
            with line.using():
                for dst, src, length in self._calls(runs):
                    check()
                    line.read(dst, src, length)
            check()

    def close(self) -> None:
        self._gate.close()
        with self._lock:
            if self._line is not None:
                self._line.close()

    def _open_line(self) -> _Line:
        """The present one, or another one after a failure."""
        with self._lock:
            if self._line is None or self._line.gate.closed:
                self._line = _Line(self._host, self._holder, self._buffers)
            return self._line

    def _calls(self, runs: Runs) -> Iterator[tuple[list[int], list[int], list[int]]]:
        """Destinations, sources and lengths of each call. Runs must have been checked."""
        num_pieces = -(-runs.length // PIECE_BYTES)  # a run without bytes has none
        run = np.repeat(np.arange(len(runs)), num_pieces)
        skipped = PIECE_BYTES * (np.arange(len(run)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces))
        dst = self._dst[runs.dst_buffer[run]] + runs.dst_offset[run] + skipped
        src = self._src[runs.src_buffer[run]] + runs.src_offset[run] + skipped
        length = np.minimum(runs.length[run] - skipped, PIECE_BYTES)
        for first in range(0, len(run), MAX_PIECES):
            part = slice(first, first + MAX_PIECES)
            yield dst[part].tolist(), src[part].tolist(), length[part].tolist()
