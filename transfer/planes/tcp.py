"""Data plane over any network: the reader asks for runs, the holder answers with raw bytes.

No byte is copied in Python: the kernel takes them from the holder's cache and puts them into the reader's. Each read
has connections of its own from a pool, so reads run side by side; a long one is divided among several, each served by a
thread of the holder, and received by the one thread that reads. `tcp_wire` says what travels, `tcp_server` serves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from transfer.planes import tcp_wire as wire
from transfer.planes.base import (
    Buffers,
    Guard,
    PlaneError,
    PlaneUnavailable,
    Runs,
    check_destination,
    endpoint_field,
)
from transfer.planes.gate import Gate
from transfer.planes.tcp_connections import CONNECT_S, Connection, Connections
from transfer.planes.tcp_server import TcpServer
from transfer.planes.vectored import Pieces, receive

MAX_STREAMS = 2  # of one read
STREAM_BYTES = 4 * 2**20  # least share of a stream


class TcpPlane:
    """Serves at `host`, an address or a name of this machine that the readers can reach."""

    name = "tcp"

    def __init__(self, host: str) -> None:
        self._host = host

    def serve(self, buffers: Buffers, guard: Guard) -> TcpServer:
        return TcpServer(self._host, buffers, guard)

    def connect(self, endpoint: Mapping[str, object], token: bytes, buffers: Buffers) -> TcpReader:
        host, port = endpoint_field(endpoint, "host", str), endpoint_field(endpoint, "port", int)
        if not 0 < port < 65536:
            raise PlaneUnavailable(f"the endpoint's port should be 1 to 65535, given {port}")
        reader = TcpReader(host, port, token, buffers)
        try:
            reader.probe()
        except PlaneError as error:
            reader.close()
            raise PlaneUnavailable(f"the holder at {host}:{port} cannot be reached: {error}") from error
        return reader


class TcpReader:
    def __init__(self, host: str, port: int, token: bytes, buffers: Buffers) -> None:
        self._lens = buffers.lens
        self._ptrs = np.array(buffers.ptrs, np.uint64)
        self._gate = Gate("the reader")
        self._connections = Connections(host, port, token, self._gate)

    def probe(self) -> None:
        """Raises PlaneError unless a connection can be had; it is kept for the first read."""
        with self._gate.passing(), self._connections.using(1, time.monotonic() + CONNECT_S):
            pass

    def read(self, lease_id: str, runs: Runs, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._gate.passing():
            parts = _divide(runs)
            try:
                with self._connections.using(min(len(parts), MAX_STREAMS), deadline) as connections:
                    for first in range(0, len(parts), len(connections)):
                        wave = parts[first : first + len(connections)]
                        self._read_parts(list(zip(connections, wave, strict=False)), lease_id, runs, deadline)
            except PlaneError:
                self._gate.check()
                if time.monotonic() >= deadline:
                    raise PlaneError(f"the read of {runs.num_bytes} bytes did not end within {timeout_s} s") from None
                raise

    def close(self) -> None:
        self._gate.close(self._connections.interrupt)
        self._connections.close()

    def _read_parts(self, parts: list[tuple[Connection, slice]], lease_id: str, runs: Runs, deadline: float) -> None:
        for connection, part in parts:
            request = wire.Request(
                lease_id=lease_id,
                buffer=runs.src_buffer[part],
                offset=runs.src_offset[part],
                length=runs.length[part],
            )
            connection.ask(request, deadline)
        check_destination(runs, self._lens)  # while the holder checks the source
        streams = [
            (
                connection.sock,
                Pieces.of_runs(self._ptrs, runs.dst_buffer[part], runs.dst_offset[part], runs.length[part]),
            )
            for connection, part in parts
        ]
        for connection, _ in parts:
            connection.expect_ok(deadline)
        receive(streams, deadline)
        for connection, _ in parts:
            connection.is_clean = True


def _divide(runs: Runs) -> list[slice]:
    """Parts of at most MAX_RUNS runs; a long read's are about one stream's share of the bytes. At least one part."""
    num_bytes = runs.num_bytes
    num_streams = min(MAX_STREAMS, num_bytes // STREAM_BYTES)
    if num_streams <= 1 and len(runs) <= wire.MAX_RUNS:
        return [slice(0, len(runs))]
    ends = np.cumsum(runs.length)
    shares = ends.searchsorted([num_bytes * i // num_streams for i in range(1, num_streams)])
    cuts = sorted({0, len(runs), *shares.tolist(), *range(0, len(runs), wire.MAX_RUNS)})
    return [slice(start, end) for start, end in pairwise(cuts)]
