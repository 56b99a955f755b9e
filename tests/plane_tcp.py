"""Both ends of a tcp plane's connection, spoken by hand."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import numpy as np
from plane_memory import Region

from transfer.planes import tcp_wire as wire
from transfer.planes.tcp import TcpPlane, TcpReader
from transfer.planes.tcp_server import TcpServer

HOST = "127.0.0.1"
TIMEOUT_S = 30.0
WAIT_S = 60.0  # for things that happen at once; only a fault makes a test wait so long
OK = wire.encode_status(wire.Status())


@contextlib.contextmanager
def reading(server: TcpServer, region: Region, token: bytes = b"token") -> Iterator[TcpReader]:
    reader = TcpPlane(HOST).connect(server.endpoint, token, region.buffers)
    try:
        yield reader
    finally:
        reader.close()


def join_connections() -> None:
    for thread in threading.enumerate():
        if thread.name == "kv-tcp-serve":
            thread.join(WAIT_S)
            assert not thread.is_alive()


@contextlib.contextmanager
def connected(server: TcpServer) -> Iterator[socket.socket]:
    """A connection that has been told there is room, and has not said who it is."""
    with socket.create_connection((server.endpoint["host"], server.endpoint["port"]), timeout=WAIT_S) as sock:
        sock.settimeout(None)  # MSG_WAITALL needs a blocking socket
        assert sock.recv(len(OK), socket.MSG_WAITALL) == OK
        yield sock


@contextlib.contextmanager
def welcomed(server: TcpServer, token: bytes = b"token") -> Iterator[socket.socket]:
    """A connection that may ask."""
    with connected(server) as sock:
        sock.sendall(wire.encode_hello(token))
        assert sock.recv(len(OK), socket.MSG_WAITALL) == OK
        yield sock


def say(sock: socket.socket, data: bytes) -> bytes:
    """Sends `data`, ends, and returns what came back until the server hung up."""
    answer = bytearray()
    with contextlib.suppress(OSError):  # hung up on while we spoke
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while piece := sock.recv(65536):
            answer += piece
    return bytes(answer)


def request_of(*runs: tuple[int, int, int], lease_id: str = "lease") -> bytes:
    """A request's frame; each run is buffer, offset, length."""
    columns = np.array(runs, np.int64).reshape(-1, 3)
    request = wire.Request(lease_id=lease_id, buffer=columns[:, 0], offset=columns[:, 1], length=columns[:, 2])
    return wire.encode_request(request)


def take_frame(sock: socket.socket) -> bytes:
    (length,) = struct.unpack("<I", sock.recv(4, socket.MSG_WAITALL))
    return sock.recv(length, socket.MSG_WAITALL)


def fake_holder(run: Callable[[socket.socket], None]) -> tuple[dict[str, object], threading.Thread]:
    """Accepts one connection, lets `run` have it, and hangs up."""
    listener = socket.create_server((HOST, 0))

    def serve() -> None:
        with listener, listener.accept()[0] as sock:
            run(sock)

    thread = threading.Thread(target=serve)
    thread.start()
    return {"host": HOST, "port": listener.getsockname()[1]}, thread


def welcome(sock: socket.socket) -> None:
    sock.sendall(OK)
    take_frame(sock)
    sock.sendall(OK)


def answering(answer: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    """Of a holder that welcomes, takes one request, and lets `answer` go on."""

    def run(sock: socket.socket) -> None:
        welcome(sock)
        take_frame(sock)
        answer(sock)

    return run
