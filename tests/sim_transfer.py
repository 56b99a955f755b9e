"""Holding and reading tickets in a simulated engine: real leases and tickets, fake channels, a data plane that copies.

Follows `pd_service.node.holder` and `pd_service.node.reader` step by step. The data plane is the meanest there can be:
it reads whatever memory lies at the holder's address, a block at a time, while others go on writing there; neither an
ended lease nor another incarnation stops it. Only the confirm can.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pd_service.engine.messages import Hold, KvArrived, KvFailed, PullOrder
from pd_service.engine.request_state import PullStats
from pd_service.errors import TransferFailed
from pd_service.node.holder import readiness
from pd_service.node.opened_ticket import OpenedTicket, Ready
from pd_service.request import RequestId, Ticket
from pd_service.rpc import kv_transfer_pb2 as pb
from tests.sim_network import Connection, now
from transfer.lease import ENDED, LeaseState, LeaseTable, Pull

if TYPE_CHECKING:
    from tests.sim_engine import SimEngine


class Channel:
    """The reader's connection to one life of one holder."""

    def __init__(self, connection: Connection, holder: SimHolder, timeout_s: float) -> None:
        self.connection = connection
        self._holder = holder
        self._timeout_s = timeout_s
        self._answers: dict[tuple[str, str, int], asyncio.Future[Any]] = {}
        self._opened: dict[tuple[str, int], OpenedTicket] = {}
        self._pull_ids = itertools.count(1)
        self.is_broken = False
        connection.on_cut(self._break)
        connection.on_cut(lambda: holder.forget(self))

    async def open(self, lease_id: str) -> OpenedTicket:
        pull_id = next(self._pull_ids)
        try:
            opened: OpenedTicket = await self.ask("open", lease_id, pull_id)
        except (TransferFailed, asyncio.CancelledError):
            self.drop(lease_id, pull_id)
            raise
        return opened

    async def confirm(self, opened: OpenedTicket) -> bool:
        opened.check()
        try:
            is_right: bool = await self.ask("confirm", opened.lease_id, opened.pull_id)
        finally:
            self._opened.pop((opened.lease_id, opened.pull_id), None)
        return is_right

    def drop(self, lease_id: str, pull_id: int) -> None:
        self._opened.pop((lease_id, pull_id), None)
        self.tell("drop", lease_id, pull_id)

    async def ask(self, kind: str, lease_id: str, pull_id: int) -> Any:
        if self.is_broken:
            raise TransferFailed("the channel broke")
        answer = self._answers[kind, lease_id, pull_id] = asyncio.get_running_loop().create_future()
        self.tell(kind, lease_id, pull_id)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError as error:
            raise TransferFailed("no answer in time") from error
        finally:
            self._answers.pop((kind, lease_id, pull_id), None)

    def tell(self, kind: str, lease_id: str, pull_id: int) -> None:
        self.connection.up.send(self._holder.receive, self, kind, lease_id, pull_id)

    def answered(self, kind: str, lease_id: str, pull_id: int, result: object) -> None:
        answer = self._answers.get((kind, lease_id, pull_id))
        if answer is None or answer.done():
            return
        if isinstance(result, Hold):
            message = pb.TicketOpened(
                lease_id=lease_id,
                pull_id=pull_id,
                ready=readiness(result),
                num_tokens=result.num_tokens,
                token_digest=result.token_digest,
            )
            result = self._opened[lease_id, pull_id] = OpenedTicket(message)
        answer.set_result(result)

    def progressed(self, lease_id: str, hold: Hold) -> None:
        for (asked, _), opened in self._opened.items():
            if asked == lease_id:
                opened.advance(readiness(hold))

    def ended(self, lease_id: str) -> None:
        self._fail(TransferFailed("the lease has ended"), lease_id)

    def _break(self) -> None:
        self.is_broken = True
        self._fail(TransferFailed("the channel broke"), None)

    def _fail(self, error: TransferFailed, lease_id: str | None) -> None:
        for (asked, _), opened in list(self._opened.items()):
            if lease_id in (None, asked):
                opened.fail(error)
        for (_, asked, _), answer in self._answers.items():
            if lease_id in (None, asked) and not answer.done():
                answer.set_exception(error)


@dataclass(slots=True, eq=False)
class _Held:
    hold: Hold
    owner: object
    reading: dict[Pull, Channel] = field(default_factory=dict)

    @property
    def readers(self) -> list[Channel]:
        return list(dict.fromkeys(self.reading.values()))


class SimHolder:
    def __init__(self, engine: SimEngine, release_blocks: Callable[[RequestId], None]) -> None:
        self._engine = engine
        self._leases = LeaseTable(engine.settings.lease_s)
        self._release_blocks = release_blocks
        self._held: dict[str, _Held] = {}
        self._computing: dict[RequestId, str] = {}
        self._num_tickets = 0
        self._timer: asyncio.TimerHandle | None = None
        self.ends: list[str] = []  # how each lease ended

    @property
    def num_leases(self) -> int:
        assert len(self._leases) == len(self._held)
        return len(self._held) + len(self._computing)

    def follow(self, hold: Hold, owner: object | None) -> Ticket | None:
        is_new, is_complete = hold.request_id not in self._computing, hold.next_token is not None
        if is_new and owner is not None:
            self._open_lease(hold, owner)
        lease_id = self._computing.get(hold.request_id, "")
        if is_complete:
            self._computing.pop(hold.request_id, None)
        if lease_id not in self._held:
            if is_complete:
                self._release_blocks(hold.request_id)
            return None
        self._advance(lease_id, hold)
        return self._ticket(lease_id, hold) if is_new or is_complete else None

    def withdraw(self, request_id: RequestId) -> None:
        lease_id = self._computing.pop(request_id, None)
        if lease_id is not None:
            self.release(lease_id)

    def _open_lease(self, hold: Hold, owner: object) -> None:
        self._num_tickets += 1
        lease_id = f"{self._engine.incarnation}-{self._num_tickets}"
        self._leases.open(lease_id)
        self._held[lease_id] = _Held(hold, owner)
        self._computing[hold.request_id] = lease_id

    def _advance(self, lease_id: str, hold: Hold) -> None:
        held = self._held[lease_id]
        held.hold = hold
        if hold.next_token is not None:
            self._leases.complete(lease_id, now())
            self._set_timer()
        for channel in held.readers:
            channel.connection.down.send(channel.progressed, lease_id, hold)

    def _ticket(self, lease_id: str, hold: Hold) -> Ticket:
        return Ticket(
            address=self._engine.engine_id,
            incarnation=self._engine.incarnation,
            lease_id=lease_id,
            num_tokens=hold.num_tokens,
            token_digest=hold.token_digest,
        )

    def release(self, lease_id: str) -> None:
        if state := self._leases.release(lease_id, now()):
            self._end(lease_id, state)

    def release_request(self, request_id: RequestId) -> None:
        self._release_if(lambda held: held.hold.request_id == request_id)

    def release_owner(self, owner: object) -> None:
        self._release_if(lambda held: held.owner is owner)

    def forget(self, channel: Channel) -> None:
        for held in self._held.values():
            held.reading = {pull: reader for pull, reader in held.reading.items() if reader is not channel}
        for lease_id, state in self._leases.lose(channel, now()).items():
            self._end(lease_id, state)

    def _release_if(self, condition: Callable[[_Held], bool]) -> None:
        for lease_id in [key for key, held in self._held.items() if condition(held)]:
            self.release(lease_id)

    def receive(self, channel: Channel, kind: str, lease_id: str, pull_id: int) -> None:
        on_event = {
            "open": self._leases.read_opened,
            "renew": self._leases.renew,
            "confirm": self._leases.confirm,
            "drop": self._leases.drop,
        }
        pull = Pull(channel, pull_id)
        state = on_event[kind](lease_id, pull, now())
        if state is not None and kind in ("confirm", "drop"):
            self._held[lease_id].reading.pop(pull, None)
        if state is not None and state in ENDED:
            self._end(lease_id, state)
        if kind == "confirm":
            channel.connection.down.send(channel.answered, kind, lease_id, pull_id, state is not None)
        elif kind == "open" and state is not None:
            self._held[lease_id].reading[pull] = channel
            channel.connection.down.send(channel.answered, kind, lease_id, pull_id, self._held[lease_id].hold)
        elif kind in ("open", "renew") and not self._leases.is_live(lease_id, now()):
            channel.connection.down.send(channel.ended, lease_id)

    def _end(self, lease_id: str, state: LeaseState) -> None:
        held = self._held.pop(lease_id)
        self.ends.append(state.value if held.hold.next_token is not None else "withdrawn")
        for channel in held.readers:
            channel.connection.down.send(channel.ended, lease_id)
        if held.hold.next_token is not None:
            self._release_blocks(held.hold.request_id)

    def _set_timer(self) -> None:
        deadline = self._leases.next_deadline()
        if self._timer is None and deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        for lease_id in self._leases.sweep(now()):
            self._end(lease_id, LeaseState.EXPIRED)
        self._set_timer()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Claim:
    """A ticket in use by one request: opened at once, renewed until the pull has ended."""

    def __init__(
        self,
        ticket: Ticket,
        opening: asyncio.Task[tuple[Channel, OpenedTicket]],
        lease_s: float,
        lost: Callable[[TransferFailed], None],
    ) -> None:
        self.ticket = ticket
        self.opening = opening
        self._lost = lost
        self._lease_s = lease_s
        self._renewal: asyncio.TimerHandle | None = None
        self._has_ended = False
        self._is_abandoned = False
        opening.add_done_callback(self._keep)

    def _keep(self, opening: asyncio.Task[tuple[Channel, OpenedTicket]]) -> None:
        if opening.cancelled():
            return
        if (error := opening.exception()) is not None:
            if isinstance(error, TransferFailed):
                self._lost(error)
            return
        if self._is_abandoned:
            self._fail()
        if not self._has_ended:
            self._schedule()
            opening.result()[1].tell_loss(self._lost)

    def abandon(self) -> None:
        self._is_abandoned = True
        if self.opening.done() and not self.opening.cancelled() and self.opening.exception() is None:
            self._fail()

    def _fail(self) -> None:
        self.opening.result()[1].fail(TransferFailed("the request was cancelled"))

    def _schedule(self) -> None:
        self._renewal = asyncio.get_running_loop().call_later(self._lease_s / 3, self._renew)

    def _renew(self) -> None:
        channel, opened = self.opening.result()
        channel.tell("renew", opened.lease_id, opened.pull_id)
        self._schedule()

    def end(self, *, dropped: bool) -> None:
        self._has_ended = True
        if self._renewal is not None:
            self._renewal.cancel()
        if not self.opening.done():
            self.opening.cancel()
        elif dropped and not self.opening.cancelled() and self.opening.exception() is None:
            channel, opened = self.opening.result()
            channel.drop(opened.lease_id, opened.pull_id)


class SimReader:
    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._channels: dict[tuple[str, str], Channel] = {}
        self.num_early_reads = 0  # that ended while the holder still computed, or may have
        self.num_lost_claims = 0  # whose ticket failed before its pull
        self._claims: dict[RequestId, _Claim] = {}
        self._pulls: set[asyncio.Task[None]] = set()
        self._pulling: dict[RequestId, _Claim] = {}

    @property
    def num_open(self) -> int:
        return len(self._claims) + len(self._pulls)

    @property
    def channels(self) -> list[Channel]:
        return list(self._channels.values())

    def claim(self, request_id: RequestId, ticket: Ticket, tell: Callable[[KvFailed], None]) -> None:
        def lost(error: TransferFailed) -> None:
            if self._claims.get(request_id) is claim:
                self.drop(request_id)
                self.num_lost_claims += 1
                tell(KvFailed(request_id, error))

        opening = self._engine.start(self._open(ticket))
        claim = self._claims[request_id] = _Claim(ticket, opening, self._engine.settings.lease_s, lost)

    def drop(self, request_id: RequestId) -> None:
        claim = self._claims.pop(request_id, None)
        if claim is not None:
            claim.end(dropped=True)
        if request_id in self._pulling:
            self._pulling[request_id].abandon()

    def pull(self, order: PullOrder, tell: Callable[[KvArrived | KvFailed], None]) -> None:
        task = self._engine.start(self._pull_and_tell(order, tell))
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)

    async def _pull_and_tell(self, order: PullOrder, tell: Callable[[KvArrived | KvFailed], None]) -> None:
        claim = self._claims.pop(order.request_id, None)
        result: KvArrived | None = None
        error = TransferFailed("the request had given up its ticket before its pull")
        try:
            if claim is not None:
                self._pulling[order.request_id] = claim
                result = await self._pull(order, claim)
        except TransferFailed as failure:
            error = failure
        finally:
            if claim is not None:
                del self._pulling[order.request_id]
                claim.end(dropped=result is None)
        tell(result or KvFailed(order.request_id, error))

    async def _pull(self, order: PullOrder, claim: _Claim) -> KvArrived:
        started_at = now()
        channel, opened = await asyncio.shield(claim.opening)
        if (opened.token_digest, opened.num_tokens) != (order.ticket.token_digest, order.ticket.num_tokens):
            raise TransferFailed("the holder has other tokens under this lease than the ticket names")
        reading_at = now()
        next_token = await self._read_all(order, opened)
        read_at = now()
        if not self._engine.settings.skips_confirm and not await channel.confirm(opened):
            raise TransferFailed("the holder says that the lease ended before the pull did")
        stats = PullStats(
            received_ms=(read_at - started_at) * 1e3,
            wire_ms=(read_at - reading_at) * 1e3,
            confirm_ms=(now() - read_at) * 1e3,
            kv_bytes=opened.num_tokens,
            plane="sim",
        )
        return KvArrived(order.request_id, stats, next_token)

    async def _read_all(self, order: PullOrder, opened: OpenedTicket) -> int:
        num_read, first = order.first_token, dict.fromkeys(order.tables, order.first_token)
        while True:
            ready = await opened.more_than(num_read)
            await self._read(order, ready, first)
            if ready.next_token is not None:
                return ready.next_token
            self.num_early_reads += 1
            num_read = ready.num_tokens
            first |= dict.fromkeys(ready.tables, num_read)

    async def _read(self, order: PullOrder, ready: Ready, first: dict[str, int]) -> None:
        """Copies block by block, paired by logical index; like a plane's own, its time limit ends it for good."""
        engine, size = self._engine, self._engine.settings.block_size
        deadline = now() + engine.settings.pull_timeout_s
        for attn_type, table in ready.tables.items():
            blocks = slice(first[attn_type] // size, -(-ready.num_tokens // size))
            for source, target in zip(table[blocks], order.tables[attn_type][blocks], strict=True):
                if not source or not target:
                    continue
                await asyncio.sleep(min(engine.cluster.copy_time_s(), deadline - now()))
                if now() >= deadline:
                    raise TransferFailed("the plane did not bring the blocks in time")
                holder = engine.cluster.engines.get(order.ticket.address)
                if holder is None:
                    raise TransferFailed("nothing answers at the holder's address")
                engine.cache.write_block(attn_type, target, holder.cache.read_block(attn_type, source))

    async def _open(self, ticket: Ticket) -> tuple[Channel, OpenedTicket]:
        channel = await self._channel(ticket)
        return channel, await channel.open(ticket.lease_id)

    async def _channel(self, ticket: Ticket) -> Channel:
        """The channel to this life of the holder, made on first use and again after it was lost."""
        key = ticket.address, ticket.incarnation
        await asyncio.sleep(self._engine.cluster.delay_s())
        channel = self._channels.get(key)
        if channel is None or channel.is_broken:
            holder = self._engine.cluster.engines.get(ticket.address)
            if holder is None or holder.incarnation != ticket.incarnation:
                raise TransferFailed(f"{ticket.address} refused the handshake: it is not {ticket.incarnation}")
            connection = self._engine.cluster.connect(self._engine, holder)
            channel = self._channels[key] = Channel(connection, holder.holder, self._engine.settings.pull_timeout_s)
        return channel
