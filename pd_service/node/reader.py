"""The reader's side of every hand-over: claims on tickets, and pulls.

A claim opens its ticket when the request arrives and renews it while the request queues. A ticket that is lost then
ends its claim and fails the request at once; an order that is on its way finds no claim and reads nothing. The pull
reads what is ready, and while the holder still computes what becomes so. Of attention types that give blocks back on
the way it reads nothing before the end. When it has all it asks the holder to confirm, and only a yes makes the KV
usable. Reads run in threads, so that neither this loop nor the engine waits for them; no thread waits for the holder's
engine. Whatever goes wrong ends in TransferFailed; a broken channel fails all its claims at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from time import monotonic
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from pd_service.channels import end
from pd_service.engine.messages import KvArrived, KvFailed, PullOrder
from pd_service.engine.request_state import PullStats
from pd_service.errors import TransferFailed, TransferFailure
from pd_service.node.opened_ticket import OpenedTicket, Ready
from pd_service.node.peer import Peer
from pd_service.node.peer_probe import examine
from pd_service.node.transfer_counts import PullCounts
from pd_service.request import RequestId, Ticket
from pd_service.rpc.engine_pb2 import Choice, PeerReport
from transfer.digest import Digests, KvDigests
from transfer.layout import EngineLayout
from transfer.plan import BlockTables
from transfer.planes.base import Buffers, Plane, Runs

logger = logging.getLogger(__name__)

T = TypeVar("T")

MIN_RENEWAL_S = 0.01  # between two renewals, however short a lease a holder names
REFUSAL_PAUSE_S = 5.0  # until a ticket may try a holder again with which this engine cannot work

_HolderKey = tuple[str, str]  # address, incarnation


class _Refusal(NamedTuple):
    """Tickets of this holder fail with `reason` until the timer forgets it."""

    reason: str
    timer: asyncio.TimerHandle


class Claim:
    """A ticket in use by one request: opened at once, renewed until the claim ends, dropped if it was not used.

    `lost` hears each failure of the ticket before the claim ends, and of its opening.
    """

    def __init__(
        self,
        ticket: Ticket,
        opening: asyncio.Task[tuple[Peer, OpenedTicket]],
        lost: Callable[[TransferFailed], None],
    ) -> None:
        self.ticket = ticket
        self.opening = opening
        self._lost = lost
        self.opened_at = monotonic()
        self._renewal: asyncio.TimerHandle | None = None
        self._has_ended = False
        self._is_dropped = False
        self._is_abandoned = False
        opening.add_done_callback(self._opened)

    def end(self, *, dropped: bool) -> None:
        """No renewal follows. `dropped`: the holder is told that this reader will not use the ticket."""
        self._has_ended, self._is_dropped = True, dropped
        if self._renewal is not None:
            self._renewal.cancel()
        if self.opening.done():
            self._opened(self.opening)

    def abandon(self) -> None:
        """A pull under way gets nothing more to read."""
        self._is_abandoned = True
        if self.opening.done() and not self.opening.cancelled() and self.opening.exception() is None:
            self._fail(self.opening.result()[1])

    def _fail(self, opened: OpenedTicket) -> None:
        opened.fail(TransferFailed("the request was cancelled", TransferFailure.CANCELLED))

    def _opened(self, opening: asyncio.Task[tuple[Peer, OpenedTicket]]) -> None:
        if opening.cancelled():
            return
        if (error := opening.exception()) is not None:
            if isinstance(error, TransferFailed):
                self._lost(error)
            return
        peer, opened = opening.result()
        if self._is_abandoned:
            self._fail(opened)
        if not self._has_ended:
            self._keep(peer, opened)
            opened.tell_loss(self._lost)
        elif self._is_dropped:
            self._is_dropped = False  # said once
            peer.drop(opened)

    def _keep(self, peer: Peer, opened: OpenedTicket) -> None:
        # A third of the lease: two renewals may get lost or late before it ends.
        pause_s = max(MIN_RENEWAL_S, opened.lease_s / 3)
        self._renewal = asyncio.get_running_loop().call_later(pause_s, self._renew, peer, opened)

    def _renew(self, peer: Peer, opened: OpenedTicket) -> None:
        peer.renew(opened)
        self._keep(peer, opened)


class _Plan(NamedTuple):
    """What to read from the holder's blocks `tables`; `plan_s` is what it took to find out."""

    tables: BlockTables
    runs: Runs
    plan_s: float


class _Read(NamedTuple):
    """One read of a pull; times in seconds on the monotonic clock."""

    num_bytes: int
    num_runs: int
    plan_s: float
    started_at: float
    ended_at: float
    digests: Digests = MappingProxyType({})  # of some of the whole pull, with the last read
    digest_s: float = 0.0

    def exposed_s(self, completed_at: float) -> float:
        """The part for which somebody waited: since all was known to be ready."""
        return max(0.0, self.ended_at - max(self.started_at, completed_at))


class Reader:
    """All claims and pulls of one engine."""

    def __init__(
        self,
        *,
        incarnation: str,
        layout: EngineLayout,
        planes: Sequence[Plane],
        buffers: Buffers,
        pull_timeout_s: float,
        digest_sample_rate: float = 0.0,
        observe: Callable[[PullStats], None] = lambda _: None,
        max_pulls: int = 4,
    ) -> None:
        self._incarnation = incarnation
        self._layout = layout
        self._planes = planes
        self._buffers = buffers
        self._pull_timeout_s = pull_timeout_s
        self._digest_sample_rate = digest_sample_rate
        self._kv_digests = KvDigests(layout.of_rank(0), buffers) if buffers.is_addressable else None
        self._random = Random()
        self._observe = observe  # told of each confirmed pull
        self.counts = PullCounts()
        self._threads = ThreadPoolExecutor(max_pulls, thread_name_prefix="pull")
        self._peers: dict[_HolderKey, asyncio.Task[Peer]] = {}
        self._refusals: dict[_HolderKey, _Refusal] = {}
        self._claims: dict[RequestId, Claim] = {}
        self._pulling: dict[RequestId, Claim] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self.num_pulls = 0  # into blocks of this engine, not ended

    def _background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that `close` waits for. Its outcome is looked at here, whoever else waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        task.add_done_callback(self._tasks.discard)
        return task

    def meet(self, address: str, incarnation: str) -> None:
        """Connects to a holder before anybody has a ticket for it. Failing is no harm: a ticket tries again.

        Said when the membership changes, so a holder with which this engine could not work gets another chance.
        """
        self._forget_refusal((address, incarnation))
        if incarnation != self._incarnation and (address, incarnation) not in self._peers:
            self._start_connecting(address, incarnation)

    def choices(self) -> list[Choice]:
        """Per connected holder the data plane in use, and why no better one."""
        connected = [task.result() for task in self._peers.values() if task.done() and not task.cancelled()]
        return [
            Choice(what="data plane", chosen=f"{peer.plane_name} from {peer.address}", reason=peer.plane_reason)
            for peer in connected
        ]

    async def examine(self, address: str, incarnation: str) -> PeerReport:
        """Whether this holder can be read from, and how fast; for operators."""
        try:
            peer = await self._peer(address, incarnation)
        except TransferFailed as error:
            return PeerReport(problem=str(error))
        return await examine(peer, self._planes, self._layout)

    def claim(self, request_id: RequestId, ticket: Ticket, tell: Callable[[KvFailed], None]) -> None:
        """The request has arrived: open its ticket now, whenever its blocks can be had.

        `tell` is called at most once, when the ticket is lost before its pull: an order on its way reads nothing then.
        """

        def lost(error: TransferFailed) -> None:
            if self._claims.get(request_id) is claim:  # else it was given up, or has a pull, which says so itself
                self.drop(request_id)
                self.counts.add(error)
                tell(KvFailed(request_id, error))

        claim = self._claims[request_id] = Claim(ticket, self._background(self._open(ticket)), lost)

    def drop(self, request_id: RequestId) -> None:
        """The request will not be pulled (any more); a pull that runs ends with the read it is at."""
        claim = self._claims.pop(request_id, None)
        if claim is not None:
            claim.end(dropped=True)
        if request_id in self._pulling:
            self._pulling[request_id].abandon()

    def pull(self, order: PullOrder, tell: Callable[[KvArrived | KvFailed], None]) -> None:
        """Fills the order's blocks; `tell` is called once, when nothing writes into them any more.

        Without a claim, which was given up or has lost its ticket, nothing is read or counted.
        """
        self.num_pulls += 1
        self._background(self._pull_and_tell(order, tell))

    async def _pull_and_tell(self, order: PullOrder, tell: Callable[[KvArrived | KvFailed], None]) -> None:
        claim = self._claims.pop(order.request_id, None)
        error = TransferFailed("the request had given up its ticket before its pull", TransferFailure.CANCELLED)
        result: KvArrived | None = None
        try:
            if claim is not None:
                self._pulling[order.request_id] = claim
                result = await self._pull(order, claim)
        except TransferFailed as failure:
            error = failure
        except asyncio.CancelledError:
            error = TransferFailed("the engine is stopping", TransferFailure.CANCELLED)
            raise
        finally:
            if claim is not None:
                del self._pulling[order.request_id]
                claim.end(dropped=result is None)
                self._count(error if result is None else result.stats)
            self.num_pulls -= 1
            tell(result or KvFailed(order.request_id, error))

    def _count(self, ended: PullStats | TransferFailed) -> None:
        self.counts.add(ended)
        if isinstance(ended, PullStats):
            self._observe(ended)

    async def _pull(self, order: PullOrder, claim: Claim) -> KvArrived:
        ordered_at = monotonic()
        peer, opened = await asyncio.shield(claim.opening)
        if opened.token_digest != order.ticket.token_digest or opened.num_tokens != order.ticket.num_tokens:
            text = "the holder has other tokens under this lease than the ticket names"
            raise TransferFailed(text, TransferFailure.WRONG_TOKENS)
        next_token, reads = await self._read_all(peer, opened, order)
        received_at = monotonic() - reads[-1].digest_s  # digesting belongs to the confirm
        await peer.confirm(opened, reads[-1].digests)
        assert opened.completed_at is not None
        completed_at = opened.completed_at
        exposed_s = sum(read.exposed_s(completed_at) for read in reads)
        stats = PullStats(
            queue_ms=(ordered_at - claim.opened_at) * 1e3,
            received_ms=(received_at - claim.opened_at) * 1e3,
            wire_ms=exposed_s * 1e3,
            confirm_ms=(monotonic() - received_at) * 1e3,
            kv_bytes=sum(read.num_bytes for read in reads),
            plane=peer.plane_name,
            hidden_wire_ms=(sum(read.ended_at - read.started_at for read in reads) - exposed_s) * 1e3,
            hidden_kv_bytes=sum(read.num_bytes for read in reads if read.started_at < completed_at),
            plan_ms=sum(read.plan_s for read in reads) * 1e3,
            num_runs=sum(read.num_runs for read in reads),
        )
        return KvArrived(order.request_id, stats, next_token)

    async def _read_all(self, peer: Peer, opened: OpenedTicket, order: PullOrder) -> tuple[int, list[_Read]]:
        """Reads as the holder comes on; returns the token it names after the last one."""
        loop = asyncio.get_running_loop()
        reads: list[_Read] = []
        num_read, first = order.first_token, dict.fromkeys(order.tables, order.first_token)
        plan: _Plan | None = None
        if opened.ready.next_token is None:
            plan = await loop.run_in_executor(self._threads, self._plan_ahead, peer, order, opened.ready.tables)
        while True:
            ready = await opened.more_than(num_read)
            part = {attn_type: token for attn_type, token in first.items() if attn_type in ready.tables}
            reads.append(await loop.run_in_executor(self._threads, self._read, peer, order, ready, part, plan))
            if ready.next_token is not None:
                return ready.next_token, reads
            num_read, plan = ready.num_tokens, None
            first |= dict.fromkeys(part, num_read)

    def _plan_ahead(self, peer: Peer, order: PullOrder, tables: BlockTables) -> _Plan | None:
        """In a thread: how all would be read at once, if the holder has all its blocks already; else None."""
        assert peer.planner is not None
        planned_at, num_tokens = monotonic(), order.ticket.num_tokens
        try:
            runs = peer.planner.plan(tables, order.tables, order.first_token, num_tokens)
        except ValueError:
            return None
        return _Plan(tables, runs, monotonic() - planned_at)

    def _plan(self, peer: Peer, order: PullOrder, ready: Ready, first: Mapping[str, int]) -> _Plan:
        """The tokens from `first`, by attention type, up to those that are ready."""
        assert peer.planner is not None
        planned_at, num_tokens = monotonic(), order.ticket.num_tokens
        end = num_tokens if ready.next_token is not None else ready.num_tokens
        try:
            runs = peer.planner.plan(ready.tables, order.tables, first, end, num_tokens)
        except ValueError as error:
            raise TransferFailed(f"what {peer.address} holds cannot be read: {error}") from error
        return _Plan(ready.tables, runs, monotonic() - planned_at)

    def _read(self, peer: Peer, order: PullOrder, ready: Ready, first: Mapping[str, int], plan: _Plan | None) -> _Read:
        """In a thread: reads the tokens from `first`, by attention type, up to those that are ready.

        A `plan` made ahead counts if it is for all of them and the blocks are those it was made for.
        """
        if plan is None or ready.next_token is None or plan.tables != ready.tables:
            plan = self._plan(peer, order, ready, first)
        runs, started_at = plan.runs, monotonic()
        peer.read(order.ticket.lease_id, runs)
        ended_at = monotonic()
        digests = self._digests(peer, order, ready.tables) if ready.next_token is not None else {}
        digest_s = monotonic() - ended_at
        return _Read(
            runs.num_bytes, len(runs), plan.plan_s, started_at, ended_at, digests, digest_s
        )  # fmt: skip

    def _digests(self, peer: Peer, order: PullOrder, source_tables: BlockTables) -> Digests:
        """Of some of what the pull has brought, drawn anew each time; none of memory that the host cannot read."""
        if self._kv_digests is None:
            return {}
        assert peer.sampler is not None
        num_tokens, rate = order.ticket.num_tokens, self._digest_sample_rate
        drawn = peer.sampler.draw(source_tables, order.tables, order.first_token, num_tokens, rate, self._random)
        return self._kv_digests.of(drawn.get(0, ()), order.tables)

    async def _open(self, ticket: Ticket) -> tuple[Peer, OpenedTicket]:
        peer = await self._peer(ticket.address, ticket.incarnation)
        return peer, await peer.open(ticket.lease_id)

    async def _peer(self, address: str, incarnation: str) -> Peer:
        """The channel to this life of this holder; made on first use, and again after it was lost."""
        refusal = self._refusals.get((address, incarnation))
        if refusal is not None:
            raise TransferFailed(refusal.reason, TransferFailure.LAYOUT_REFUSED)
        connecting = self._peers.get((address, incarnation)) or self._start_connecting(address, incarnation)
        return await asyncio.shield(connecting)

    def _start_connecting(self, address: str, incarnation: str) -> asyncio.Task[Peer]:
        connecting = self._background(self._connect(address, incarnation))
        self._peers[address, incarnation] = connecting
        return connecting

    async def _connect(self, address: str, incarnation: str) -> Peer:
        peer = Peer(address, incarnation, self._pull_timeout_s)
        try:
            await peer.connect(self._incarnation, self._layout, self._planes, self._buffers)
        except BaseException as error:
            logger.warning("cannot read from %s: %s", address, str(error))  # a record may live, the channel must not
            self._forget(peer)
            if peer.refusal is not None:
                self._remember_refusal((address, incarnation), peer.refusal)
            raise
        assert peer.reading is not None
        peer.reading.add_done_callback(lambda _: self._forget(peer))
        return peer

    def _remember_refusal(self, key: _HolderKey, reason: str) -> None:
        timer = asyncio.get_running_loop().call_later(REFUSAL_PAUSE_S, self._forget_refusal, key)
        self._refusals[key] = _Refusal(reason, timer)

    def _forget_refusal(self, key: _HolderKey) -> None:
        refusal = self._refusals.pop(key, None)
        if refusal is not None:
            refusal.timer.cancel()

    def _forget(self, peer: Peer) -> None:
        """The channel is gone: so are its connections, mappings and descriptors, before any successor comes."""
        self._peers.pop((peer.address, peer.incarnation), None)
        self._background(peer.close())

    async def close(self) -> None:
        """Ends every claim, pull and channel."""
        for request_id in list(self._claims):
            self.drop(request_id)
        for connecting in list(self._peers.values()):
            await end(connecting)
            if not connecting.cancelled() and connecting.exception() is None:
                await connecting.result().close()  # with it end the pulls that read from it
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for key in list(self._refusals):
            self._forget_refusal(key)
        self._threads.shutdown()
