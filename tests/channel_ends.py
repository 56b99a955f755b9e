"""The two ends of a channel without engines: a Holder and a Reader over plain memory, here or in a child process.

    python -m tests.channel_ends holder PORT PLANES TICKETS COMPLETE   prints its `Told` and holds until it is killed
    python -m tests.channel_ends reader PLANES TICKET                  opens the ticket, prints a line, and keeps it

A child ends when its standard input does, so that none outlives the test that started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass

import grpc
import numpy as np

from pd_service.channels import server_options
from pd_service.engine.messages import Hold, KvArrived, KvFailed, PullOrder
from pd_service.engine.request_state import PullStats
from pd_service.node.holder import Holder
from pd_service.node.reader import Claim, Reader
from pd_service.request import RequestId, Ticket
from pd_service.rpc import kv_transfer_pb2_grpc
from tests.plane_memory import Region
from transfer.layout import LAYOUT_VERSION, BufferLayout, EngineLayout
from transfer.planes import make_plane
from transfer.planes.base import Buffers, Plane, PlaneReader, PlaneServer, Runs

NETWORK_PLANES = ("shm", "tcp")
ATTN_TYPE = "FullAttention"
BLOCK_SIZE, NUM_BLOCKS, BLOCKS_PER_TICKET = 16, 65, 4
PATIENCE_S = 30.0  # a bound on what comes in milliseconds, or in two seconds where somebody has fallen silent
NUM_TOKENS = BLOCKS_PER_TICKET * BLOCK_SIZE
NEVER_S = 600.0  # leases and pulls that only a broken channel can end while a test runs


def _layout() -> EngineLayout:
    buffers = [
        BufferLayout(
            layer=0, cache_name=name, attn_type=ATTN_TYPE, block_size=BLOCK_SIZE, first_head=0, num_heads=2,
            total_heads=2, dim=16, dtype="float32", num_bytes=0,
        )
        for name in ("k_cache", "v_cache")
    ]  # fmt: skip
    sized = [{**asdict(b), "num_bytes": NUM_BLOCKS * b.bytes_per_block} for b in buffers]
    return EngineLayout(version=LAYOUT_VERSION, model="m", buffers=tuple(BufferLayout(**b) for b in sized))


LAYOUT = _layout()
LENS = [b.num_bytes for b in LAYOUT.buffers]
WHOLE = slice(None)
SEED_OF_HOLDERS, SEED_OF_READERS = 1, 2


async def until(condition: Callable[[], bool], what: str) -> None:
    """Fails the test, naming `what`, when the condition never comes to hold."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110  # the ends set no events for tests
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None


def blocks_of(region: Region, block_ids: Sequence[int]) -> list[bytes]:
    """What lies in these blocks, per buffer."""
    return [array.reshape(NUM_BLOCKS, -1)[list(block_ids)].tobytes() for array in region.arrays]


def ticket_blocks(index: int) -> list[int]:
    """Of a holder's ticket with this index, and of the pull of it here; block 0 is the null block."""
    return [1 + index * BLOCKS_PER_TICKET + i for i in range(BLOCKS_PER_TICKET)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a holder tells of itself."""

    address: str
    incarnation: str
    tickets: tuple[Ticket, ...]


class HolderEnd:
    """All holders have the same bytes, so that everybody knows what a right pull brings."""

    def __init__(self, planes: Sequence[str]) -> None:
        self.region = Region(SEED_OF_HOLDERS, LENS)
        self.released: list[RequestId] = []
        self.holder = Holder(
            incarnation=uuid.uuid4().hex[:12], layout=LAYOUT, lease_s=NEVER_S, release_blocks=self.released.append
        )
        self.holder.serve([make_plane(name, host="127.0.0.1") for name in planes], self.region.buffers)

    async def start(self, port: int = 0) -> str:
        self._server = grpc.aio.server(options=server_options())
        kv_transfer_pb2_grpc.add_KvTransferServicer_to_server(self.holder, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.holder.address = f"127.0.0.1:{bound}"
        await self._server.start()
        return self.holder.address

    def hold(self, index: int, *, is_complete: bool = True) -> Ticket:
        """Of request `r<index>`; one that is not complete computes for ever and has one block ready."""
        hold = Hold(
            request_id=RequestId(f"r{index}"),
            tables={ATTN_TYPE: ticket_blocks(index)},
            num_ready=NUM_TOKENS if is_complete else BLOCK_SIZE,
            num_tokens=NUM_TOKENS,
            token_digest=b"digest",
            next_token=7 if is_complete else None,
        )
        ticket = self.holder.follow(hold, owner=self)
        assert ticket is not None
        return ticket

    def is_empty(self) -> bool:
        """No table knows any reader or lease."""
        holder = self.holder
        tables = (holder._channels, holder._held, holder._computing, holder._leases)
        return not any(len(table) for table in tables) and holder._guard.is_empty()

    async def close(self) -> None:
        self.holder.close()
        await self._server.stop(None)
        self.region.close()


class ReaderEnd:
    def __init__(self, planes: Sequence[Plane], timeout_s: float = NEVER_S) -> None:
        self.region = Region(SEED_OF_READERS, LENS)
        self.reader = Reader(
            incarnation=uuid.uuid4().hex[:12],
            layout=LAYOUT,
            planes=planes,
            buffers=self.region.buffers,
            pull_timeout_s=timeout_s,
        )
        self.lost: list[KvFailed] = []  # of claims

    def claim(self, ticket: Ticket, name: str = "r") -> Claim:
        """Of a request that only queues."""
        self.reader.claim(RequestId(name), ticket, self.lost.append)
        return self.reader._claims[RequestId(name)]

    async def pull(self, ticket: Ticket, index: int = 0) -> PullStats:
        """Claims and pulls into the blocks of `index`. Raises what the pull ends with."""
        name = uuid.uuid4().hex
        self.claim(ticket, name)
        result = await self.order(ticket, name, index)
        if isinstance(result, KvFailed):
            raise result.error
        return result.stats

    async def order(self, ticket: Ticket, name: str = "r", index: int = 0) -> KvArrived | KvFailed:
        """The pull of this request, claimed or not, into the blocks of `index`."""
        ended: asyncio.Future[KvArrived | KvFailed] = asyncio.get_running_loop().create_future()
        tables = {ATTN_TYPE: ticket_blocks(index)}
        order = PullOrder(request_id=RequestId(name), ticket=ticket, first_token=0, tables=tables)
        self.reader.pull(order, ended.set_result)
        return await ended

    def has_right_bytes(self, index: int, part: slice = WHOLE) -> bool:
        """The pull of `index` has brought what every holder has there, to this part of the bytes of each buffer."""
        expected = Region(SEED_OF_HOLDERS, LENS)
        there = [content[part] for content in blocks_of(expected, ticket_blocks(index))]
        expected.close()
        return [content[part] for content in blocks_of(self.region, ticket_blocks(index))] == there

    def is_forgotten(self) -> bool:
        """No table knows any peer or ticket."""
        reader = self.reader
        tables = (reader._peers, reader._claims, reader._pulling, reader._refusals, reader._tasks)
        return not any(tables) and not reader.num_pulls

    async def close(self) -> None:
        await self.reader.close()
        self.region.close()


@asynccontextmanager
async def reader_end(plane: str | HalfwayPlane, timeout_s: float = NEVER_S) -> AsyncIterator[ReaderEnd]:
    end = ReaderEnd([make_plane(plane, host="127.0.0.1") if isinstance(plane, str) else plane], timeout_s)
    try:
        yield end
    finally:
        await end.close()


@asynccontextmanager
async def holder_end() -> AsyncIterator[HolderEnd]:
    end = HolderEnd(NETWORK_PLANES)
    await end.start()
    try:
        yield end
    finally:
        await end.close()


class HalfwayPlane:
    """Reads half of the runs, then waits until it may go on. `halfway` counts the reads that have come so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.may_go_on = threading.Event()
        self.halfway = 0
        self._plane = make_plane(name, host="127.0.0.1")

    def serve(self, buffers: Buffers, guard: object) -> PlaneServer:
        raise NotImplementedError

    def connect(self, endpoint: Mapping[str, object], token: bytes, buffers: Buffers) -> PlaneReader:
        return _HalfwayReader(self, self._plane.connect(endpoint, token, buffers))


class _HalfwayReader:
    def __init__(self, plane: HalfwayPlane, inner: PlaneReader) -> None:
        self._plane = plane
        self._inner = inner

    def read(self, lease_id: str, runs: Runs, timeout_s: float) -> None:
        self._inner.read(lease_id, _part(runs, slice(0, len(runs) // 2)), timeout_s)
        self._plane.halfway += 1
        self._plane.may_go_on.wait(PATIENCE_S)
        self._inner.read(lease_id, _part(runs, slice(len(runs) // 2, None)), timeout_s)

    def close(self) -> None:
        self._inner.close()


def _part(runs: Runs, part: slice) -> Runs:
    fields = ("src_buffer", "src_offset", "dst_buffer", "dst_offset", "length")
    return Runs(**{name: np.ascontiguousarray(getattr(runs, name)[part]) for name in fields})


# ---- in a process of its own


@dataclass(slots=True)
class Child:
    """One end in a process of its own; `line` is what it has printed."""

    process: Process
    line: str

    def kill(self) -> None:
        self.process.kill()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    @property
    def told(self) -> Told:
        """Of a holder."""
        told = json.loads(self.line)
        tickets = tuple(_ticket_from_json(ticket) for ticket in told["tickets"])
        return Told(address=told["address"], incarnation=told["incarnation"], tickets=tickets)


@asynccontextmanager
async def holder_child(
    planes: Sequence[str], num_tickets: int = 1, *, num_complete: int = 99, port: int = 0
) -> AsyncIterator[Child]:
    """The first `num_complete` of its tickets are complete."""
    async with _child("holder", str(port), ",".join(planes), str(num_tickets), str(num_complete)) as child:
        yield child


@asynccontextmanager
async def reader_child(planes: Sequence[str], ticket: Ticket) -> AsyncIterator[Child]:
    """It has opened the ticket."""
    async with _child("reader", ",".join(planes), json.dumps(_ticket_to_json(ticket))) as child:
        yield child


@asynccontextmanager
async def _child(*arguments: str) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.channel_ends", *arguments, stdin=PIPE, stdout=PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            line = (await process.stdout.readline()).decode()
        assert line, "the child ended before it was ready"
        yield Child(process, line)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


def _ticket_to_json(ticket: Ticket) -> dict[str, object]:
    return {**asdict(ticket), "token_digest": ticket.token_digest.hex()}


def _ticket_from_json(fields: dict[str, str]) -> Ticket:
    return Ticket(**{**fields, "token_digest": bytes.fromhex(fields["token_digest"])})  # type: ignore[arg-type]


async def _hold(port: str, planes: str, num_tickets: str, num_complete: str) -> None:
    end = HolderEnd(planes.split(","))
    address = await end.start(int(port))
    tickets = [
        _ticket_to_json(end.hold(index, is_complete=index < int(num_complete))) for index in range(int(num_tickets))
    ]
    print(json.dumps({"address": address, "incarnation": end.holder.incarnation, "tickets": tickets}), flush=True)
    await _input_ends()


async def _keep_open(planes: str, ticket: str) -> None:
    end = ReaderEnd([make_plane(name, host="127.0.0.1") for name in planes.split(",")])
    await end.claim(_ticket_from_json(json.loads(ticket))).opening
    print("opened", flush=True)
    await _input_ends()


async def _input_ends() -> None:
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run({"holder": _hold, "reader": _keep_open}[sys.argv[1]](*sys.argv[2:]))
