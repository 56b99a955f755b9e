"""One life of a simulated engine: the real scheduler and KV manager, stepped under virtual time.

The step loop follows `pd_service.engine.execution_engine.EngineLoop`: messages are handled while a step is in flight,
and the loop's thread and the network talk through queues. The sessions follow `pd_service.node.node`. A step reads and
writes the cache at its end, by the tables it was built with, so whoever takes its blocks meanwhile changes the output.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pd_service.engine.messages import (
    Cancel,
    Hold,
    KvArrived,
    KvFailed,
    Message,
    ReleaseHeld,
    StepOutput,
    Submit,
    Withdrawn,
)
from pd_service.engine.scheduler import Scheduler
from pd_service.engine.step import SampledToken, ScheduledRequest, SchedulerLimits, StepResult
from pd_service.errors import DeadlineExceeded, PdError, TransferFailed
from pd_service.request import EngineRequest, FinishReason, Load, RequestId, Ticket, TokenEvent
from tests.sim_kv import VOCAB, new_cache
from tests.sim_network import Connection, Link, SimSettings, now
from tests.sim_transfer import SimHolder, SimReader

if TYPE_CHECKING:
    from tests.sim_cluster import SimClient, SimCluster

T = TypeVar("T")


class _StepDone:
    pass


@dataclass(slots=True, eq=False)
class Session:
    """One gateway's stream; `requests` keeps their order."""

    connection: Connection
    client: SimClient
    requests: dict[RequestId, None] = field(default_factory=dict)

    def tell(self, events: list[TokenEvent], load: Load) -> None:
        self.connection.down.send(self.client.deliver, self.connection, events, load)


class SimEngine:
    def __init__(self, cluster: SimCluster, settings: SimSettings, engine_id: str, role: str, incarnation: str) -> None:
        self.cluster = cluster
        self.settings = settings
        self.engine_id, self.role, self.incarnation = engine_id, role, incarnation
        self.kv, self.cache = new_cache(
            settings.attn_types,
            settings.prefill_blocks if role == "prefill" else settings.decode_blocks,
            block_size=settings.block_size,
            max_model_len=settings.max_model_len,
            budget=settings.budget,
            has_prefix_cache=settings.has_prefix_cache,
        )
        limits = SchedulerLimits(
            max_model_len=settings.max_model_len,
            vocab_size=VOCAB,
            max_num_batched_tokens=settings.budget,
            max_num_seqs=settings.max_num_seqs,
            max_waiting=settings.max_waiting,
        )
        self.scheduler = Scheduler(self.kv, limits, settings.block_size, has_prefix_cache=settings.has_prefix_cache)
        self.load = self.scheduler.load()
        self.submissions: list[EngineRequest] = []
        self.holder = SimHolder(self, lambda request_id: self._put(ReleaseHeld(request_id)))
        self.reader = SimReader(self)
        self._inbox: asyncio.Queue[Message | _StepDone] = asyncio.Queue()
        self._from_loop = Link(cluster.rng, (0.0, 0.001))
        self._sessions: list[Session] = []
        self._owners: dict[RequestId, Session] = {}
        self._deadlines: dict[RequestId, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_dead = False
        self.start(self._run())

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that dies with this engine."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self.incarnation} {work.__qualname__}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """Errors of the service have somebody who handles them; any other is a bug and ends the simulation."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, PdError):
            raise error

    async def die(self) -> None:
        """Everything of this engine is gone; whoever talked to it notices by itself."""
        self._is_dead = True
        self._from_loop.cut()
        self.holder.close()
        for timer in self._deadlines.values():
            timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check_idle(self) -> None:
        """Nothing of any request is left and every block is free."""
        self.scheduler.check()
        load = self.scheduler.load()
        where = f"{self.incarnation} at {now():g} s"
        assert (load.running, load.waiting) == (0, 0), f"{where}: requests are left: {load}"
        assert self.kv.num_free_blocks() == self.kv.num_usable_blocks(), f"{where}: {self.kv.format_usage()}"
        assert not self.holder.num_leases, f"{where}: {self.holder.num_leases} leases are left"
        assert not self.reader.num_open, f"{where}: {self.reader.num_open} claims and pulls are left"
        assert not self._owners, f"{where}: these have an owner: {list(self._owners)}"
        assert not self._deadlines, f"{where}: these have a timer: {list(self._deadlines)}"

    # ---- the step loop

    def _put(self, message: Message) -> None:
        self._inbox.put_nowait(message)

    async def _run(self) -> None:
        while True:
            while not self._inbox.empty():
                self._handle(self._inbox.get_nowait())
            batch = self.scheduler.schedule(now())
            self._flush()
            if batch:
                await self._step(batch)
            else:
                self._handle(await self._inbox.get())

    async def _step(self, batch: list[ScheduledRequest]) -> None:
        tables = [self.kv.get_block_ids(s.state.request_id) for s in batch]
        chunks = [s.state.token_ids[s.state.num_computed :][: s.num_tokens] for s in batch]
        asyncio.get_running_loop().call_later(self.cluster.step_time_s(), self._inbox.put_nowait, _StepDone())
        while not isinstance(message := await self._inbox.get(), _StepDone):
            self._handle(message)
            self._flush()
        results = []
        for scheduled, table, chunk in zip(batch, tables, chunks, strict=True):
            token = SampledToken(self.cache.run(table, chunk, scheduled.state.num_computed))
            results.append(StepResult((token,)) if scheduled.is_sampled else StepResult())
        self.scheduler.process_output(batch, results, now())
        self._flush()

    def _handle(self, message: Message | _StepDone) -> None:
        match message:
            case Submit(request):
                self.scheduler.add(request, now())
            case Cancel(request_id):
                self.scheduler.cancel(request_id)
                if self.settings.frees_under_pull:
                    self.scheduler.kv_failed(request_id, TransferFailed("cancelled"))
            case KvArrived(request_id, stats, next_token):
                self.scheduler.kv_arrived(request_id, stats, next_token, now())
            case KvFailed(request_id, error):
                self.scheduler.kv_failed(request_id, error)
            case ReleaseHeld(request_id):
                self.scheduler.release_held(request_id)

    def _flush(self) -> None:
        self.scheduler.check()
        output = self.scheduler.take_output()
        if output is not None:
            self._from_loop.send(self._deliver, output)

    # ---- what the step loop says

    def _deliver(self, output: StepOutput) -> None:
        self.load = output.load
        for order in output.pulls:
            self.reader.pull(order, self._put)
        messages: dict[Session, list[TokenEvent]] = {session: [] for session in self._sessions}
        tickets = self._follow(output.holds, messages)
        for event in output.events:
            session = self._owners.get(event.request_id)
            if session is None:
                continue
            if event.finish is FinishReason.PREFILLED:
                event = event._replace(ticket=tickets[event.request_id])
            if event.finish is not None or event.error is not None:
                self._forget(event.request_id)
            messages[session].append(event)
        for session, events in messages.items():
            session.tell(events, output.load)

    def _follow(
        self, holds: Sequence[Hold | Withdrawn], messages: dict[Session, list[TokenEvent]]
    ) -> dict[RequestId, Ticket]:
        complete: dict[RequestId, Ticket] = {}
        for hold in holds:
            if isinstance(hold, Withdrawn):
                self.holder.withdraw(hold.request_id)
                continue
            session = self._owners.get(hold.request_id)
            ticket = self.holder.follow(hold, session)
            if ticket is not None and hold.next_token is not None:
                complete[hold.request_id] = ticket
            elif ticket is not None and session is not None:
                messages[session].append(TokenEvent(request_id=hold.request_id, ticket=ticket))
        return complete

    # ---- what gateways say

    def open_session(self, connection: Connection, client: SimClient) -> Session:
        session = Session(connection, client)
        self._sessions.append(session)
        connection.on_cut(lambda: self._end_session(session))
        return session

    def submit(self, session: Session, request: EngineRequest, remaining_s: float | None) -> None:
        self.submissions.append(request)
        self._owners[request.request_id] = session
        session.requests[request.request_id] = None
        if remaining_s is not None:
            timer = asyncio.get_running_loop().call_later(remaining_s, self._expire, request.request_id)
            self._deadlines[request.request_id] = timer
        if request.ticket is not None:
            self.reader.claim(request.request_id, request.ticket, self._put)
        self._put(Submit(request))

    def cancel(self, session: Session, request_id: RequestId) -> None:
        if self._owners.get(request_id) is session:
            self._stop_request(request_id)
        else:
            self.holder.release_request(request_id)

    def release(self, lease_id: str) -> None:
        self.holder.release(lease_id)

    def _stop_request(self, request_id: RequestId) -> None:
        self._forget(request_id)
        self.holder.release_request(request_id)
        self._put(Cancel(request_id))

    def _expire(self, request_id: RequestId) -> None:
        session = self._owners[request_id]
        self._stop_request(request_id)
        session.tell([TokenEvent(request_id=request_id, error=DeadlineExceeded("on the engine"))], self.load)

    def _forget(self, request_id: RequestId) -> None:
        self._owners.pop(request_id).requests.pop(request_id, None)
        self.reader.drop(request_id)
        timer = self._deadlines.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def _end_session(self, session: Session) -> None:
        if self._is_dead:
            return
        self._sessions.remove(session)
        for request_id in list(session.requests):
            self._stop_request(request_id)
        self.holder.release_owner(session)
