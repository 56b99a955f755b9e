"""Random and damaged messages of the channel between engines: refused or ignored and logged; nobody else notices."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from time import monotonic

import grpc
import mutations
import numpy as np
import pytest
from google.protobuf.message import DecodeError, Message

from pd_service.channels import EOF, Context
from pd_service.config import PROTOCOL_VERSION
from pd_service.engine.messages import Hold
from pd_service.errors import TransferFailed
from pd_service.node.handshake import reasons_against_holder, reasons_against_reader
from pd_service.node.holder import Holder, _Channel
from pd_service.node.layout_wire import layout_from_wire, layout_to_wire
from pd_service.node.opened_ticket import OpenedTicket, Ready
from pd_service.node.peer import Peer
from pd_service.node.reader import MIN_RENEWAL_S, Claim
from pd_service.request import RequestId, Ticket
from pd_service.rpc import kv_transfer_pb2 as pb
from pd_service.rpc import kv_transfer_pb2_grpc
from tests.one_loop import run_async
from transfer.layout import LAYOUT_VERSION, BufferLayout, EngineLayout, compare
from transfer.plan import OneRankPlanner
from transfer.planes import MemoryPlane
from transfer.planes.base import Buffers

LAYOUT = EngineLayout(
    version=LAYOUT_VERSION, model="m", buffers=tuple(
        BufferLayout(layer=i, cache_name="k_cache", attn_type="FullAttention", block_size=4, first_head=0, num_heads=2,
                     total_heads=2, dim=4, dtype="int8", num_bytes=32 * 9) for i in range(2)
    ),
)  # fmt: skip
MEMORY = np.zeros((2, 32 * 9), np.uint8)
BUFFERS = Buffers(ptrs=tuple(row.ctypes.data for row in MEMORY), lens=(32 * 9, 32 * 9))
TABLES = {"FullAttention": [3, 4]}
READY = pb.Readiness(
    tables=[pb.BlockTable(attn_type="FullAttention", block_ids=[3, 4])], num_tokens=8, next_token=5
)  # fmt: skip
READER_HELLO = pb.ReaderMessage(
    hello=pb.ReaderHello(
        version=PROTOCOL_VERSION, incarnation="reader", holder_incarnation="holder", layout=layout_to_wire(LAYOUT),
        planes=["memory"],
    )
)  # fmt: skip
HOLDER_HELLO = pb.HolderMessage(
    hello=pb.HolderHello(
        version=PROTOCOL_VERSION, incarnation="holder", layout=layout_to_wire(LAYOUT), access_token=b"t" * 16,
        planes=[pb.PlaneOffer(name="memory", endpoint=b"\x82\xa7process\xa1p\xa6server\xa1s")],
    )
)  # fmt: skip


PIECE = pb.PieceDigest(
    layer=1, cache_name="k_cache", first_token=1, num_tokens=2, first_head=0, num_heads=2, digest=5
)  # fmt: skip


def of_reader(lease_id: str) -> list[Message]:
    return [
        READER_HELLO,
        *(pb.ReaderMessage(open=pb.OpenTicket(lease_id=lease_id, pull_id=i)) for i in range(3)),
        pb.ReaderMessage(renew=pb.RenewTicket(lease_id=lease_id, pull_id=1)),
        pb.ReaderMessage(confirm=pb.ConfirmTicket(lease_id=lease_id, pull_id=1)),
        pb.ReaderMessage(confirm=pb.ConfirmTicket(lease_id=lease_id, pull_id=2, digests=[PIECE])),
        pb.ReaderMessage(probe=pb.ProbeHolder(number=7)),
        pb.ReaderMessage(drop=pb.DropTicket(lease_id=lease_id, pull_id=2)),
    ]


def of_holder(lease_id: str) -> list[Message]:
    opened = pb.TicketOpened(
        lease_id=lease_id, pull_id=1, ready=READY, num_tokens=8, token_digest=b"d" * 16, lease_ms=9000
    )  # fmt: skip
    return [
        HOLDER_HELLO,
        pb.HolderMessage(refused=pb.Refused(reasons=["no", "never"])),
        pb.HolderMessage(opened=opened),
        pb.HolderMessage(progress=pb.TicketProgress(lease_id=lease_id, ready=READY)),
        pb.HolderMessage(confirmed=pb.TicketConfirmed(lease_id=lease_id, pull_id=1, valid=True)),
        pb.HolderMessage(ended=pb.TicketEnded(lease_id=lease_id, reason="expired")),
        pb.HolderMessage(probed=pb.HolderProbed(number=1, lease_id="probe")),
    ]


def damaged_bytes(messages: list[Message], num: int, seed: int) -> list[bytes]:
    rng = np.random.default_rng(seed)
    valid = [message.SerializeToString() for message in messages]
    return [mutations.damaged(rng, valid[i % len(valid)]) for i in range(num)]


def decoded(kind: type, data: list[bytes]) -> list:
    """Those that are a message of this kind at all."""
    found = []
    for one in data:
        try:
            found.append(kind.FromString(one))
        except DecodeError:
            continue
    assert len(found) > len(data) // 10
    return found


def test_a_damaged_layout_is_refused_or_compared_and_planned() -> None:
    num_layouts = num_planned = 0
    for message in decoded(pb.CacheLayout, damaged_bytes([layout_to_wire(LAYOUT)], 10_000, 1)):
        try:
            theirs = layout_from_wire(message)
        except ValueError:
            continue
        num_layouts += 1
        if compare(theirs, LAYOUT) or min(buffer.num_blocks for buffer in theirs.buffers) < 2:
            continue
        num_planned += 1
        planner = OneRankPlanner(theirs, LAYOUT)
        assert planner.plan({"FullAttention": [1]}, {"FullAttention": [1]}, 0, 4).num_bytes == 64
    assert num_layouts > 100
    assert num_planned > 10


def test_a_damaged_hello_is_refused_with_reasons_or_fits() -> None:
    for message in decoded(pb.ReaderMessage, damaged_bytes([READER_HELLO], 5_000, 2)):
        reasons_against_reader(message.hello, "holder", LAYOUT, ["memory"])
    for message in decoded(pb.HolderMessage, damaged_bytes([HOLDER_HELLO], 5_000, 3)):
        reasons_against_holder(message.hello, "holder", LAYOUT)


def test_what_a_damaged_ticket_says_is_ready_is_planned_or_refused() -> None:
    planner = OneRankPlanner(LAYOUT, LAYOUT)
    num_planned = 0
    for message in decoded(pb.Readiness, damaged_bytes([READY], 10_000, 4)):
        ready = Ready.from_wire(message)
        try:
            runs = planner.plan(ready.tables, TABLES, 0, ready.num_tokens, 8)
        except ValueError:
            continue
        num_planned += 1
        assert runs.num_bytes <= 2 * 64
        assert (runs.src_offset + runs.length <= LAYOUT.buffers[0].num_bytes).all()
    assert num_planned > 100


class Held:
    """A holder with one ticket for two blocks, and what it gave back."""

    def __init__(self) -> None:
        self.released: list[RequestId] = []
        self.holder = Holder(incarnation="holder", layout=LAYOUT, lease_s=60.0, release_blocks=self.released.append)
        self.holder.serve([MemoryPlane()], BUFFERS)
        self.num = 0

    def ticket(self) -> str:
        self.num += 1
        hold = Hold(
            request_id=RequestId(f"r{self.num}"), tables=TABLES, num_tokens=8, num_ready=8, token_digest=b"d" * 16,
            next_token=5,
        )  # fmt: skip
        ticket = self.holder.follow(hold, "owner")
        assert ticket is not None
        return ticket.lease_id

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = grpc.aio.server()
        kv_transfer_pb2_grpc.add_KvTransferServicer_to_server(self.holder, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            self.holder.close()
            await server.stop(None)


async def pull(address: str, lease_id: str) -> None:
    """Opens and confirms, as a reader does."""
    peer = Peer(address, "holder", timeout_s=20)
    await peer.connect("reader", LAYOUT, [MemoryPlane()], BUFFERS)
    opened = await peer.open(lease_id)
    ready = await opened.more_than(0)
    assert (ready.tables, ready.next_token) == (TABLES, 5)
    await peer.confirm(opened)
    await peer.close()


def test_damaged_messages_of_a_reader_change_no_lease_but_their_own() -> None:
    async def scenario() -> None:
        held = Held()
        async with held.serving() as address:
            others, theirs = held.ticket(), held.ticket()
            channel = _Channel(reader="reader")
            held.holder._guard.register_reader(channel.token)
            for message in decoded(pb.ReaderMessage, damaged_bytes(of_reader(theirs), 20_000, 5)):
                answer = held.holder._answer(channel, message)
                assert answer is None or answer.WhichOneof("message") in ("opened", "confirmed", "ended", "probed")
            assert "r1" not in held.released
            await pull(address, others)
            held.holder._forget(channel)
        assert sorted(held.released) == ["r1", "r2"]

    run_async(scenario())


def test_damaged_messages_of_a_holder_are_answers_ends_or_nothing() -> None:
    async def scenario() -> None:
        peer = Peer("nowhere", "holder", timeout_s=20)
        asking: asyncio.Task[OpenedTicket] | None = None
        num_ends = 0
        for message in decoded(pb.HolderMessage, damaged_bytes(of_holder("lease"), 20_000, 6)):
            if asking is None:
                peer._pull_ids = itertools.count(1)
                asking = asyncio.create_task(peer.open("lease"))
                await asyncio.sleep(0)
            peer._dispatch(message)
            if all(answer.done() for answer in peer._answers.values()):
                await asyncio.wait((asking,))
                assert asking.exception() is None or isinstance(asking.exception(), TransferFailed)
                asking, num_ends = None, num_ends + 1
        assert num_ends > 100
        await peer.close()

    run_async(scenario())


async def speak(channel: grpc.aio.Channel, messages: list[bytes]) -> grpc.StatusCode:
    """One reader's stream of raw bytes, read to its end."""
    stream = channel.stream_stream("/pd.v1.KvTransfer/Channel")()
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # refused while we spoke
        for message in messages:
            await stream.write(message)
        await stream.done_writing()
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # unread messages would hold up the call's end
        while await stream.read() is not EOF:
            pass
    return await stream.code()


def test_raw_bytes_on_the_channel_of_a_holder_end_that_channel_alone() -> None:
    async def scenario() -> None:
        held = Held()
        async with held.serving() as address, grpc.aio.insecure_channel(address) as channel:
            others, theirs = held.ticket(), held.ticket()
            hello = READER_HELLO.SerializeToString()
            for i, one in enumerate(damaged_bytes(of_reader(theirs), 200, 7)):
                await speak(channel, [hello, one] if i % 4 else [one])
            assert not held.holder._channels
            await pull(address, others)
        assert sorted(held.released) == ["r1", "r2"]

    run_async(scenario())


class Raw(grpc.GenericRpcHandler):
    """A holder that says `first` and then `rest`, whatever it hears."""

    def __init__(self, first: bytes, rest: list[bytes]) -> None:
        self._says = [first, *rest]

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(self._channel)

    async def _channel(self, _: AsyncIterator[bytes], context: Context) -> None:
        await context.read()
        for message in self._says:
            await context.write(message)


@asynccontextmanager
async def raw_holder(first: bytes, rest: list[bytes]) -> AsyncIterator[str]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Raw(first, rest),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def fitting_hello(held: Held) -> bytes:
    return pb.HolderMessage(hello=held.holder._hello(_Channel(reader="r"))).SerializeToString()


@pytest.mark.parametrize("first", [*damaged_bytes([HOLDER_HELLO], 20, 8), b"", b"\xff"])
def test_raw_bytes_for_a_handshake_are_a_failed_transfer(first: bytes) -> None:
    async def scenario() -> None:
        async with raw_holder(first, []) as address:
            peer = Peer(address, "holder", timeout_s=20)
            with pytest.raises(TransferFailed):
                await peer.connect("reader", LAYOUT, [MemoryPlane()], BUFFERS)
            await peer.close()

    run_async(scenario())


def test_raw_bytes_of_a_holder_do_not_end_the_reading_of_what_follows() -> None:
    async def scenario() -> None:
        held = Held()
        rest = [b"\xff", *damaged_bytes(of_holder("other"), 300, 9)]
        async with raw_holder(fitting_hello(held), rest) as address:
            peer = Peer(address, "holder", timeout_s=20)
            await peer.connect("reader", LAYOUT, [MemoryPlane()], BUFFERS)
            assert peer.reading is not None
            await asyncio.wait((peer.reading,))
            assert peer.reading.exception() is None
            assert peer.broken == "the holder closed the channel"
            await peer.close()
        held.holder.close()

    run_async(scenario())


def test_a_holder_that_names_no_time_is_not_flooded_with_renewals() -> None:
    class Counting(Peer):
        num_renewals = 0

        def renew(self, opened: OpenedTicket) -> None:
            self.num_renewals += 1

    async def scenario() -> None:
        peer = Counting("nowhere", "holder", timeout_s=20)

        async def opening() -> tuple[Peer, OpenedTicket]:
            return peer, OpenedTicket(pb.TicketOpened(lease_id="lease", lease_ms=0))

        ticket = Ticket(address="nowhere", incarnation="holder", lease_id="lease", num_tokens=8, token_digest=b"d" * 16)
        began_at = monotonic()
        claim = Claim(ticket, asyncio.create_task(opening()), lambda _: None)
        for _ in range(1_000):
            await asyncio.sleep(0)
        claim.end(dropped=False)
        assert peer.num_renewals <= (monotonic() - began_at) / MIN_RENEWAL_S
        await peer.close()

    run_async(scenario())
