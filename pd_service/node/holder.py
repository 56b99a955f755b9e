"""The holder's side of every hand-over: tickets, their leases, and the channels of readers.

Owns the lease table, the guard of the data planes and nothing of the engine. A ticket begins when its request's first
step does, and its readers are told whenever more is ready. While the request computes its blocks are the engine's own;
once it is complete they go back by `release_blocks`, called exactly once per complete request, when its lease has
ended for whatever reason. Lives in one asyncio loop; the sweep of ended leases depends on its timer alone.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic

import grpc
import msgpack

from pd_service.channels import Context, beside, write_all
from pd_service.config import PROTOCOL_VERSION
from pd_service.engine.messages import Hold
from pd_service.node.digest_wire import digests_from_wire
from pd_service.node.handshake import reasons_against_reader
from pd_service.node.layout_wire import layout_to_wire
from pd_service.node.transfer_counts import HolderCounts
from pd_service.request import RequestId, Ticket
from pd_service.rpc import kv_transfer_pb2 as pb
from pd_service.rpc import kv_transfer_pb2_grpc
from transfer.digest import KvDigests, Piece, describe_places
from transfer.guard import ReadGuard
from transfer.layout import EngineLayout
from transfer.lease import ENDED, LeaseState, LeaseTable, Pull
from transfer.planes.base import Buffers, Plane, PlaneServer, PlaneUnavailable

logger = logging.getLogger(__name__)

FEW_DIGESTS = 16  # compared in less time than a thread takes to be woken


@dataclass(slots=True, kw_only=True, eq=False)
class _Channel:
    """One reader. `outbox` ends with None when the holder closes the channel."""

    reader: str
    token: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    probe_lease_id: str = field(default_factory=lambda: f"probe-{uuid.uuid4().hex}")
    outbox: asyncio.Queue[pb.HolderMessage | None] = field(default_factory=asyncio.Queue)


@dataclass(slots=True, kw_only=True, eq=False)
class _Held:
    hold: Hold
    owner: object  # the gateway session that got the ticket
    reading: dict[Pull, _Channel] = field(default_factory=dict)  # to be told what is ready, and of an end

    @property
    def readers(self) -> set[_Channel]:
        return set(self.reading.values())


class Holder(kv_transfer_pb2_grpc.KvTransferServicer):
    def __init__(
        self, *, incarnation: str, layout: EngineLayout, lease_s: float, release_blocks: Callable[[RequestId], None]
    ) -> None:
        self.incarnation = incarnation
        self.address = ""  # set once the server is bound
        self._layout = layout
        self._leases = LeaseTable(lease_s)
        self._lease_s = lease_s
        self._guard = ReadGuard(layout)
        self._release_blocks = release_blocks
        self._held: dict[str, _Held] = {}  # by lease id
        self._computing: dict[RequestId, str] = {}  # the lease of each that is not complete, also if it has ended
        self._servers: dict[str, PlaneServer] = {}
        self._channels: set[_Channel] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.refused_planes: dict[str, str] = {}
        self._comparing = ThreadPoolExecutor(1, thread_name_prefix="digest")
        self._kv_digests: KvDigests | None = None  # None: the cache is in memory that the host cannot read
        self.counts = HolderCounts()

    # ---- data planes

    def serve(self, planes: Sequence[Plane], buffers: Buffers) -> None:
        """Offers these planes, best first; one that cannot serve here is left out and its reason kept."""
        if buffers.is_addressable:
            self._kv_digests = KvDigests(self._layout.of_rank(0), buffers)
        for plane in planes:
            try:
                self._servers[plane.name] = plane.serve(buffers, self._guard)
            except PlaneUnavailable as reason:
                self.refused_planes[plane.name] = str(reason)
                logger.info("data plane %s is not offered: %s", plane.name, reason)

    @property
    def plane_names(self) -> list[str]:
        return list(self._servers)

    # ---- tickets

    @property
    def num_leases(self) -> int:
        return len(self._held)

    def follow(self, hold: Hold, owner: object | None) -> Ticket | None:
        """Takes over how far a request has come, and tells its readers.

        Returns its ticket with the first word and with the last. None for those between, and for a ticket that nobody
        wants: it was given back, or there is no owner to give it to.
        """
        is_new = hold.request_id not in self._computing
        if is_new and owner is not None:
            self._open_lease(hold, owner)
        lease_id = self._computing.get(hold.request_id, "")
        if hold.next_token is not None:
            self._computing.pop(hold.request_id, None)
        if lease_id not in self._held:
            if hold.next_token is not None:
                self._release_blocks(hold.request_id)
            return None
        self._advance(lease_id, hold)
        return self._ticket(lease_id, hold) if is_new or hold.next_token is not None else None

    def withdraw(self, request_id: RequestId) -> None:
        """The request has lost its blocks before it was complete."""
        lease_id = self._computing.pop(request_id, None)
        if lease_id is not None:
            self.release(lease_id)

    def _open_lease(self, hold: Hold, owner: object) -> None:
        lease_id = uuid.uuid4().hex
        self._leases.open(lease_id)
        self._held[lease_id] = _Held(hold=hold, owner=owner)
        self._computing[hold.request_id] = lease_id

    def _advance(self, lease_id: str, hold: Hold) -> None:
        held = self._held[lease_id]
        held.hold = hold
        if hold.next_token is not None:
            self._leases.complete(lease_id, monotonic())
            self._set_timer()
        progress = pb.HolderMessage(progress=pb.TicketProgress(lease_id=lease_id, ready=readiness(hold)))
        for channel in held.readers:
            self._guard.admit(lease_id, channel.token, hold.tables)
            channel.outbox.put_nowait(progress)

    def _ticket(self, lease_id: str, hold: Hold) -> Ticket:
        return Ticket(
            address=self.address,
            incarnation=self.incarnation,
            lease_id=lease_id,
            num_tokens=hold.num_tokens,
            token_digest=hold.token_digest,
        )

    def release(self, lease_id: str) -> None:
        """The owner gives the ticket back; unknown and ended ones are ignored."""
        if state := self._leases.release(lease_id, monotonic()):
            self._end(lease_id, state)

    def release_request(self, request_id: RequestId) -> None:
        for lease_id in [key for key, held in self._held.items() if held.hold.request_id == request_id]:
            self.release(lease_id)

    def release_owner(self, owner: object) -> None:
        """The gateway is gone: nobody is left who could use its tickets."""
        for lease_id in [key for key, held in self._held.items() if held.owner is owner]:
            self.release(lease_id)

    def _end(self, lease_id: str, state: LeaseState) -> None:
        """The one place where a lease ends, and where blocks go back that no request owns any more."""
        self._guard.revoke(lease_id)
        held = self._held.pop(lease_id)
        self.counts.leases_ended[state.value] += 1
        for channel in held.readers:
            message = pb.TicketEnded(lease_id=lease_id, reason=state.value)
            channel.outbox.put_nowait(pb.HolderMessage(ended=message))
        if held.hold.next_token is not None:
            self._release_blocks(held.hold.request_id)

    def _sweep(self) -> None:
        self._timer = None
        for lease_id in self._leases.sweep(monotonic()):
            logger.warning("the lease on %s has expired", self._held[lease_id].hold.request_id)
            self._end(lease_id, LeaseState.EXPIRED)
        self._set_timer()

    def _set_timer(self) -> None:
        """One timer stands for the earliest deadline; renewals only move deadlines later, so it never comes late."""
        deadline = self._leases.next_deadline()
        if self._timer is None and deadline is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - monotonic()), self._sweep)

    # ---- channels

    async def Channel(self, request_iterator: AsyncIterator[pb.ReaderMessage], context: Context) -> None:
        """One reader's stream, until either side ends it; tickets that nobody else reads end with it."""
        hello = await anext(aiter(request_iterator), None)
        reasons = self._refusal(hello)
        if hello is None or reasons:
            logger.warning("refused the reader at %s: %s", context.peer(), "; ".join(reasons))
            await context.write(pb.HolderMessage(refused=pb.Refused(reasons=reasons)))
            return
        channel = _Channel(reader=hello.hello.incarnation)
        self._channels.add(channel)
        self._guard.register_reader(channel.token)
        channel.outbox.put_nowait(pb.HolderMessage(hello=self._hello(channel)))
        try:
            async with beside(self._read(channel, request_iterator)):
                await write_all(channel.outbox, context)
        finally:
            self._forget(channel)

    def _refusal(self, first: pb.ReaderMessage | None) -> list[str]:
        if first is None or not first.HasField("hello"):
            return ["the first message must be a hello"]
        return reasons_against_reader(first.hello, self.incarnation, self._layout, self.plane_names)

    def _hello(self, channel: _Channel) -> pb.HolderHello:
        return pb.HolderHello(
            version=PROTOCOL_VERSION,
            incarnation=self.incarnation,
            layout=layout_to_wire(self._layout),
            planes=[
                pb.PlaneOffer(name=name, endpoint=msgpack.packb(dict(server.endpoint)))
                for name, server in self._servers.items()
            ],
            access_token=channel.token,
        )

    async def _read(self, channel: _Channel, messages: AsyncIterator[pb.ReaderMessage]) -> None:
        try:
            async for message in messages:
                answer = self._answer(channel, message)
                if answer is not None:
                    channel.outbox.put_nowait(answer)
        except grpc.aio.AioRpcError as error:
            logger.info("the channel of reader %s broke: %s", channel.reader, error.code())
        finally:
            channel.outbox.put_nowait(None)

    def _answer(self, channel: _Channel, message: pb.ReaderMessage) -> pb.HolderMessage | None:
        now = monotonic()
        match message.WhichOneof("message"):
            case "open":
                return self._open(channel, message.open, now)
            case "renew":
                return self._renew(channel, message.renew, now)
            case "confirm" if self._kv_digests and message.confirm.digests and message.confirm.lease_id in self._held:
                return self._compare_and_confirm(channel, message.confirm, self._kv_digests)
            case "confirm":
                return self._confirm(channel, message.confirm, num_compared=0)
            case "drop":
                pull = Pull(channel, message.drop.pull_id)
                self._left(message.drop.lease_id, pull, self._leases.drop(message.drop.lease_id, pull, now))
            case "probe":
                return self._probe(channel, message.probe)
            case kind:
                logger.warning("ignored a message of kind %s from reader %s", kind, channel.reader)
        return None

    def _left(self, lease_id: str, pull: Pull, state: LeaseState | None) -> None:
        """A pull is over, unless that was refused."""
        if state is not None:
            self._held[lease_id].reading.pop(pull, None)
            if state in ENDED:
                self._end(lease_id, state)

    def _open(self, channel: _Channel, asked: pb.OpenTicket, now: float) -> pb.HolderMessage | None:
        pull = Pull(channel, asked.pull_id)
        if not self._leases.read_opened(asked.lease_id, pull, now):
            return self._refused(asked.lease_id, now)
        held = self._held[asked.lease_id]
        held.reading[pull] = channel
        self._guard.admit(asked.lease_id, channel.token, held.hold.tables)
        return pb.HolderMessage(
            opened=pb.TicketOpened(
                lease_id=asked.lease_id,
                pull_id=asked.pull_id,
                ready=readiness(held.hold),
                num_tokens=held.hold.num_tokens,
                token_digest=held.hold.token_digest,
                lease_ms=int(self._lease_s * 1e3),
            )
        )

    def _renew(self, channel: _Channel, asked: pb.RenewTicket, now: float) -> pb.HolderMessage | None:
        if self._leases.renew(asked.lease_id, Pull(channel, asked.pull_id), now):
            return None
        return self._refused(asked.lease_id, now)

    def _refused(self, lease_id: str, now: float) -> pb.HolderMessage | None:
        """Nothing, if a late message of a pull that is over was refused: others may read under the lease."""
        self.counts.lease_refusals += 1
        return None if self._leases.is_live(lease_id, now) else _ended(lease_id)

    def _compare_and_confirm(
        self, channel: _Channel, asked: pb.ConfirmTicket, ours: KvDigests
    ) -> pb.HolderMessage | None:
        """The answer, or None: it comes later, since so much memory is read that others would wait."""
        theirs, tables = digests_from_wire(asked.digests), self._held[asked.lease_id].hold.tables
        if len(theirs) <= FEW_DIGESTS:
            differing = ours.differing(theirs, tables)
            return self._confirm(channel, asked, num_compared=len(theirs), differing=differing)
        comparing = asyncio.get_running_loop().run_in_executor(self._comparing, ours.differing, theirs, tables)

        def compared(done: asyncio.Future[list[Piece]]) -> None:
            if not done.cancelled():
                answer = self._confirm(channel, asked, num_compared=len(theirs), differing=done.result())
                channel.outbox.put_nowait(answer)

        comparing.add_done_callback(compared)
        return None

    def _confirm(
        self, channel: _Channel, asked: pb.ConfirmTicket, *, num_compared: int, differing: Sequence[Piece] = ()
    ) -> pb.HolderMessage:
        """Yes only if the lease has lived until now. Only then a difference means something: blocks have stayed."""
        pull, now = Pull(channel, asked.pull_id), monotonic()
        leave = self._leases.drop if differing else self._leases.confirm
        state = leave(asked.lease_id, pull, now)
        if state is None:
            self.counts.lease_refusals += 1
            answer = pb.TicketConfirmed(lease_id=asked.lease_id, pull_id=asked.pull_id, valid=False)
            return pb.HolderMessage(confirmed=answer)
        self.counts.digests_different += len(differing)
        self.counts.digests_same += num_compared - len(differing)
        places = describe_places(differing)
        if differing:
            request_id = self._held[asked.lease_id].hold.request_id
            logger.error("reader %s has other bytes of request %s: %s", channel.reader, request_id, places)
        self._left(asked.lease_id, pull, state)
        answer = pb.TicketConfirmed(
            lease_id=asked.lease_id, pull_id=asked.pull_id, valid=not differing, differing=places
        )  # fmt: skip
        return pb.HolderMessage(confirmed=answer)

    def _probe(self, channel: _Channel, asked: pb.ProbeHolder) -> pb.HolderMessage:
        self._guard.admit_null_blocks(channel.probe_lease_id, channel.token)
        probed = pb.HolderProbed(number=asked.number, lease_id=channel.probe_lease_id)
        return pb.HolderMessage(probed=probed)

    def _forget(self, channel: _Channel) -> None:
        self._channels.discard(channel)
        self._guard.forget_reader(channel.token)
        for held in self._held.values():
            held.reading = {pull: reader for pull, reader in held.reading.items() if reader is not channel}
        for lease_id, state in self._leases.lose(channel, monotonic()).items():
            self._end(lease_id, state)

    def close(self) -> None:
        """Ends every channel, lease and data plane."""
        if self._timer is not None:
            self._timer.cancel()
        for channel in self._channels:
            channel.outbox.put_nowait(None)
        for lease_id in list(self._held):
            self.release(lease_id)
        self._comparing.shutdown(cancel_futures=True)  # waits for the milliseconds in which memory is still read
        for server in self._servers.values():
            server.close()


def _ended(lease_id: str) -> pb.HolderMessage:
    return pb.HolderMessage(ended=pb.TicketEnded(lease_id=lease_id, reason="unknown"))


def readiness(hold: Hold) -> pb.Readiness:
    """What readers are told of how far a request has come."""
    tables = [pb.BlockTable(attn_type=attn_type, block_ids=ids) for attn_type, ids in hold.tables.items()]
    return pb.Readiness(tables=tables, num_tokens=hold.num_ready, next_token=hold.next_token)
