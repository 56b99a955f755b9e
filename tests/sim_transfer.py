"""Holding and reading tickets in a simulated engine: the real lease table, fake channels, and a data plane that copies.

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

from pd_service.engine.messages import Hold, PullOrder
from pd_service.engine.request_state import PullStats
from pd_service.errors import TransferFailed
from pd_service.request import RequestId, Ticket
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
        self._pull_ids = itertools.count(1)
        self.is_broken = False
        connection.on_cut(self._break)
        connection.on_cut(lambda: holder.forget(self))

    async def open(self, lease_id: str) -> tuple[int, Hold]:
        """The number of the pull that begins, and what the holder has under the ticket."""
        pull_id = next(self._pull_ids)
        try:
            return pull_id, await self.ask("open", lease_id, pull_id)
        except (TransferFailed, asyncio.CancelledError):
            self.tell("drop", lease_id, pull_id)
            raise

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
        if answer is not None and not answer.done():
            answer.set_result(result)

    def ended(self, lease_id: str) -> None:
        self._fail(TransferFailed("the lease has ended"), lease_id)

    def _break(self) -> None:
        self.is_broken = True
        self._fail(TransferFailed("the channel broke"), None)

    def _fail(self, error: TransferFailed, lease_id: str | None) -> None:
        for (_, asked, _), answer in self._answers.items():
            if lease_id in (None, asked) and not answer.done():
                answer.set_exception(error)


@dataclass(slots=True, eq=False)
class _Held:
    hold: Hold
    owner: object
    opened_by: set[Channel] = field(default_factory=set)


class SimHolder:
    def __init__(self, engine: SimEngine, release_blocks: Callable[[RequestId], None]) -> None:
        self._engine = engine
        self._leases = LeaseTable(engine.settings.lease_s)
        self._release_blocks = release_blocks
        self._held: dict[str, _Held] = {}
        self._num_tickets = 0
        self._timer: asyncio.TimerHandle | None = None
        self.ends: list[str] = []  # how each lease ended

    @property
    def num_leases(self) -> int:
        assert len(self._leases) == len(self._held)
        return len(self._held)

    def hold(self, hold: Hold, owner: object) -> Ticket:
        self._num_tickets += 1
        lease_id = f"{self._engine.incarnation}-{self._num_tickets}"
        self._leases.open(lease_id, now())
        self._held[lease_id] = _Held(hold, owner)
        self._set_timer()
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
            held.opened_by.discard(channel)
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
        state = on_event[kind](lease_id, Pull(channel, pull_id), now())
        if state is not None and state in ENDED:
            self._end(lease_id, state)
        if kind == "confirm":
            channel.connection.down.send(channel.answered, kind, lease_id, pull_id, state is not None)
        elif kind == "open" and state is not None:
            self._held[lease_id].opened_by.add(channel)
            channel.connection.down.send(channel.answered, kind, lease_id, pull_id, self._held[lease_id].hold)
        elif kind in ("open", "renew") and not self._leases.is_live(lease_id, now()):
            channel.connection.down.send(channel.ended, lease_id)

    def _end(self, lease_id: str, state: LeaseState) -> None:
        held = self._held.pop(lease_id)
        self.ends.append(state.value)
        for channel in held.opened_by if state is not LeaseState.CONFIRMED else ():
            channel.connection.down.send(channel.ended, lease_id)
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

    def __init__(self, ticket: Ticket, opening: asyncio.Task[tuple[Channel, int, Hold]], lease_s: float) -> None:
        self.ticket = ticket
        self.opening = opening
        self._lease_s = lease_s
        self._renewal: asyncio.TimerHandle | None = None
        self._has_ended = False
        opening.add_done_callback(self._keep)

    def _keep(self, opening: asyncio.Task[tuple[Channel, int, Hold]]) -> None:
        if not opening.cancelled() and opening.exception() is None and not self._has_ended:
            self._schedule()

    def _schedule(self) -> None:
        self._renewal = asyncio.get_running_loop().call_later(self._lease_s / 3, self._renew)

    def _renew(self) -> None:
        self._tell("renew")
        self._schedule()

    def end(self, *, dropped: bool) -> None:
        self._has_ended = True
        if self._renewal is not None:
            self._renewal.cancel()
        if not self.opening.done():
            self.opening.cancel()
        elif dropped and not self.opening.cancelled() and self.opening.exception() is None:
            self._tell("drop")

    def _tell(self, kind: str) -> None:
        channel, pull_id, _ = self.opening.result()
        channel.tell(kind, self.ticket.lease_id, pull_id)


class SimReader:
    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._channels: dict[tuple[str, str], Channel] = {}
        self._claims: dict[RequestId, _Claim] = {}
        self._pulls: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        return len(self._claims) + len(self._pulls)

    @property
    def channels(self) -> list[Channel]:
        return list(self._channels.values())

    def claim(self, request_id: RequestId, ticket: Ticket) -> None:
        opening = self._engine.start(self._open(ticket))
        self._claims[request_id] = _Claim(ticket, opening, self._engine.settings.lease_s)

    def drop(self, request_id: RequestId) -> None:
        claim = self._claims.pop(request_id, None)
        if claim is not None:
            claim.end(dropped=True)

    def pull(self, order: PullOrder, done: Callable[[PullStats | Exception], None]) -> None:
        task = self._engine.start(self._pull_and_tell(order, done))
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)

    async def _pull_and_tell(self, order: PullOrder, done: Callable[[PullStats | Exception], None]) -> None:
        claim = self._claims.pop(order.request_id, None)
        result: PullStats | Exception = TransferFailed("the request was cancelled before its pull")
        try:
            if claim is not None:
                result = await self._pull(order, claim)
        except TransferFailed as error:
            result = error
        finally:
            if claim is not None:
                claim.end(dropped=isinstance(result, Exception))
        done(result)

    async def _pull(self, order: PullOrder, claim: _Claim) -> PullStats:
        started_at = now()
        channel, pull_id, hold = await asyncio.shield(claim.opening)
        if (hold.token_digest, hold.num_tokens) != (order.ticket.token_digest, order.ticket.num_tokens):
            raise TransferFailed("the holder has other tokens under this lease than the ticket names")
        reading_at = now()
        await self._read(order, hold)
        read_at = now()
        if not self._engine.settings.skips_confirm and not await channel.ask("confirm", claim.ticket.lease_id, pull_id):
            raise TransferFailed("the holder says that the lease ended before the pull did")
        return PullStats(
            received_ms=(read_at - started_at) * 1e3,
            wire_ms=(read_at - reading_at) * 1e3,
            confirm_ms=(now() - read_at) * 1e3,
            kv_bytes=hold.num_tokens,
            plane="sim",
        )

    async def _read(self, order: PullOrder, hold: Hold) -> None:
        """Copies block by block, paired by logical index; like a plane's own, its time limit ends it for good."""
        engine = self._engine
        deadline = now() + engine.settings.pull_timeout_s
        first = order.first_token // engine.settings.block_size
        for attn_type, table in order.tables.items():
            for source, target in zip(hold.tables[attn_type][first:], table[first:], strict=False):
                if not source or not target:
                    continue
                await asyncio.sleep(min(engine.cluster.copy_time_s(), deadline - now()))
                if now() >= deadline:
                    raise TransferFailed("the plane did not bring the blocks in time")
                holder = engine.cluster.engines.get(order.ticket.address)
                if holder is None:
                    raise TransferFailed("nothing answers at the holder's address")
                engine.cache.write_block(attn_type, target, holder.cache.read_block(attn_type, source))

    async def _open(self, ticket: Ticket) -> tuple[Channel, int, Hold]:
        channel = await self._channel(ticket)
        return channel, *await channel.open(ticket.lease_id)

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
