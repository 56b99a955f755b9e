"""Decides which tokens of which requests run in the next step. Plain code: no clock, no I/O, no tensors.

There are no phases: each request's computed count chases its token count. A step has a token budget; requests that
need one token (decodes, and requests whose KV has just arrived) come first, then chunks of longer ones, oldest first.

Always true between calls:
- WAITING requests own no blocks; RECEIVING, RUNNING and HELD ones own theirs and nobody else frees them.
- A request is admitted only when the blocks for all its tokens, one block of growth, and what is promised to those
  admitted before fit together. When growth beyond that does not fit, the youngest running request is preempted: it
  gives its blocks back and is recomputed later. The oldest is never preempted, so it ends, and so does everybody.
- While a step is in flight (between `schedule` and `process_output`) no block of a request in it is freed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping

from kv_cache import KVCacheManager
from pd_service.engine.messages import Hold, PullOrder, StepOutput
from pd_service.engine.request_check import check_request
from pd_service.engine.request_state import PullStats, RequestState, Status, token_digest
from pd_service.engine.step import Counters, SampledToken, ScheduledRequest, SchedulerLimits
from pd_service.errors import EngineFailed, InvalidRequest, Overloaded, PdError, TransferFailed
from pd_service.request import EngineRequest, EngineTimes, FinishReason, Load, RequestId, TokenEvent

logger = logging.getLogger(__name__)


class Scheduler:
    def __init__(self, kv_cache_manager: KVCacheManager, limits: SchedulerLimits, block_size: int) -> None:
        self._kv = kv_cache_manager
        self._limits = limits
        self._block_size = block_size
        self._requests: dict[RequestId, RequestState] = {}
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []  # in order of admission
        self._num_receiving = 0
        self._in_flight: frozenset[RequestId] = frozenset()
        self._events: list[TokenEvent] = []
        self._pulls: list[PullOrder] = []
        self._holds: dict[RequestId, Hold] = {}
        self.counters = Counters()
        self._published_load = self.load()

    # ---- events from outside

    def add(self, request: EngineRequest, now: float) -> None:
        """Queues the request, or answers it with an error event. A refusal changes nothing else."""
        try:
            check_request(request, self._limits, self._kv)
            if request.request_id in self._requests:
                raise InvalidRequest(f"request_id {request.request_id!r} is live on this engine", "request_id")
        except PdError as error:
            self._events.append(TokenEvent(request_id=request.request_id, error=error))
            return
        state = RequestState(request=request, token_ids=list(request.token_ids), arrived_at=now)
        self._requests[request.request_id] = state
        self._waiting.append(state)
        self._admit()
        if len(self._waiting) > self._limits.max_waiting and state.status is Status.WAITING:
            self._fail(
                state, Overloaded(f"the engine's queue is full: {self._limits.max_waiting} requests wait for blocks")
            )

    def cancel(self, request_id: RequestId) -> None:
        """Ends the request without an event. Blocks that a pull or a step still uses are freed when that has ended."""
        state = self._requests.get(request_id)
        if state is None or state.status is Status.HELD:
            self.counters.ignored_messages += 1
            return
        state.is_cancelled = True
        if state.status is not Status.RECEIVING and request_id not in self._in_flight:
            self._remove(state)
            self._admit()

    def kv_arrived(self, request_id: RequestId, stats: PullStats, now: float) -> None:
        """The blocks of a RECEIVING request hold the KV of all its tokens but the last."""
        state = self._received(request_id)
        if state is None:
            return
        state.num_computed = len(state.token_ids) - 1
        state.pull = stats
        state.started_at = now
        self.counters.received_tokens += state.num_computed
        state.status = Status.RUNNING
        self._running.append(state)

    def kv_failed(self, request_id: RequestId, error: Exception) -> None:
        """The pull has ended without usable KV: the request fails, and may go round again elsewhere."""
        state = self._received(request_id)
        if state is not None:
            self._fail(state, error if isinstance(error, PdError) else TransferFailed(str(error)))
            self._admit()

    def release_held(self, request_id: RequestId) -> None:
        """The lease on a prefilled request's blocks has ended."""
        state = self._requests.get(request_id)
        if state is None or state.status is not Status.HELD:
            self.counters.ignored_messages += 1
            return
        self._remove(state)
        self._admit()

    # ---- a step

    def schedule(self, now: float) -> list[ScheduledRequest]:
        """The requests of the next step, with their blocks allocated; empty when there is nothing to run."""
        assert not self._in_flight
        batch = self._schedule_batch()
        while not batch and len(self._running) > 1:  # everybody waits for blocks, a long prompt among them
            self._preempt(self._running[-1])
            batch = self._schedule_batch()
        for scheduled in batch:
            if scheduled.state.started_at is None:
                scheduled.state.started_at = now
        self._in_flight = frozenset(s.state.request_id for s in batch)
        return batch

    def process_output(
        self, batch: list[ScheduledRequest], tokens: Mapping[RequestId, SampledToken], now: float
    ) -> None:
        """Commits a step: `tokens` holds the sampled token of every request whose last known token was computed."""
        self._in_flight = frozenset()
        self.counters.steps += 1
        for scheduled in batch:
            state = scheduled.state
            is_sampled = scheduled.is_sampled
            state.num_computed += scheduled.num_tokens
            self.counters.computed_tokens += scheduled.num_tokens
            if state.is_cancelled:
                self._remove(state)
            elif is_sampled:
                self._process_token(state, tokens[state.request_id], now)
        self._admit()

    def fail_step(self, batch: list[ScheduledRequest], error: Exception) -> None:
        """The step itself failed: its requests end with an error, everybody else goes on."""
        self._in_flight = frozenset()
        for scheduled in batch:
            if scheduled.state.is_cancelled:
                self._remove(scheduled.state)
            else:
                self._fail(scheduled.state, EngineFailed(f"a step of the engine failed: {error!r}"))
        self._admit()

    def take_output(self) -> StepOutput | None:
        """Everything since the last call; None when nothing happened and the load is the same."""
        load = self.load()
        if not (self._events or self._pulls or self._holds) and load == self._published_load:
            return None
        output = StepOutput(events=self._events, pulls=self._pulls, holds=self._holds, load=load)
        self._events, self._pulls, self._holds, self._published_load = [], [], {}, load
        return output

    # ---- questions

    def load(self) -> Load:
        free, usable = self._kv.num_free_blocks(), self._kv.num_usable_blocks()
        shortest = min(free, key=lambda attn_type: free[attn_type] / usable[attn_type])
        return Load(
            running=len(self._running) + self._num_receiving,
            waiting=len(self._waiting),
            queued_tokens=sum(s.num_pending for s in self._running) + sum(s.num_pending for s in self._waiting),
            free_blocks=free[shortest],
            total_blocks=usable[shortest],
        )

    def check(self) -> None:
        """Recounts everything; called after each operation by the tests, and by an idle engine."""
        self._kv.check()
        for state in self._requests.values():
            owns_blocks = self._kv.owns_blocks(state.request_id)
            assert not (owns_blocks and state.status is Status.WAITING), f"{state.request_id} waits and owns blocks"
            assert owns_blocks or state.status is not Status.RECEIVING, f"{state.request_id} lost its blocks"
        receiving = sum(s.status is Status.RECEIVING for s in self._requests.values())
        assert receiving == self._num_receiving

    # ---- admission

    def _admit(self) -> None:
        """Admits from the head of the queue while the head fits; a queue in order of arrival starves nobody."""
        while self._waiting and self._has_seat() and self._fits(self._waiting[0]):
            state = self._waiting.popleft()
            if state.takes_ticket:
                self._start_pull(state)
            else:
                state.status = Status.RUNNING
                self._running.append(state)

    def _has_seat(self) -> bool:
        return len(self._running) + self._num_receiving < self._limits.max_num_seqs

    def _fits(self, state: RequestState) -> bool:
        need = self._need_with_growth(state)
        for other in self._admitted():
            for attn_type, blocks in self._need_with_growth(other).items():
                need[attn_type] += blocks
        free = self._kv.num_free_blocks()
        return all(need[attn_type] <= free[attn_type] for attn_type in need)

    def _admitted(self) -> Iterable[RequestState]:
        yield from self._running
        if self._num_receiving:
            yield from (s for s in self._requests.values() if s.status is Status.RECEIVING)

    def _need_with_growth(self, state: RequestState) -> dict[str, int]:
        """Blocks this request still lacks for all its tokens and one block of growth, if it will grow."""
        tokens = min(len(state.token_ids) + self._block_size, state.request.max_cached_tokens)
        computed = len(state.token_ids) - 1 if state.takes_ticket else state.num_computed
        owner = state.request_id if state.status is not Status.WAITING else None
        return self._kv.num_blocks_lacking(owner, computed, max(tokens, computed + 1))

    def _start_pull(self, state: RequestState) -> None:
        received = len(state.token_ids) - 1
        fits = self._kv.allocate_received_slots(state.request_id, received, 1)
        assert fits, "admission and allocation disagree"
        self._kv.begin_pull(state.request_id, state.request_id)
        state.status = Status.RECEIVING
        self._num_receiving += 1
        ticket = state.request.ticket
        assert ticket is not None
        tables = self._kv.get_block_ids(state.request_id)
        self._pulls.append(PullOrder(request_id=state.request_id, ticket=ticket, tables=tables))

    def _received(self, request_id: RequestId) -> RequestState | None:
        """The request whose pull has ended, or None when it has no use for the answer."""
        state = self._requests.get(request_id)
        if state is None or state.status is not Status.RECEIVING:
            self.counters.ignored_messages += 1
            return None
        self._num_receiving -= 1
        self._kv.end_pull(request_id)
        state.takes_ticket = False  # from here on its KV is its own; a preemption recomputes it
        state.status = Status.RUNNING
        if state.is_cancelled:
            self._remove(state)
            self._admit()
            return None
        return state

    # ---- parts of a step

    def _schedule_batch(self) -> list[ScheduledRequest]:
        budget = self._limits.max_num_batched_tokens
        batch = self._schedule_decode_batch(budget)
        return batch + self._schedule_prefill_batch(budget - len(batch))

    def _schedule_decode_batch(self, budget: int) -> list[ScheduledRequest]:
        """One token for every running request that needs just one; preempts from the youngest when blocks run out."""
        batch: list[ScheduledRequest] = []
        for state in list(self._running):
            is_decode = state.status is Status.RUNNING and state.num_pending == 1
            if is_decode and len(batch) < budget and self._allocate_or_preempt(state, 1):
                batch.append(ScheduledRequest(state, 1))
        return batch

    def _schedule_prefill_batch(self, budget: int) -> list[ScheduledRequest]:
        """Chunks of the requests with more to compute, oldest first, as the budget allows."""
        batch: list[ScheduledRequest] = []
        for state in list(self._running):
            if budget < 1:
                break
            if state.status is not Status.RUNNING or state.num_pending == 1:
                continue
            chunk = min(state.num_pending, budget)
            if self._kv.allocate_slots(state.request_id, state.num_computed, chunk):
                batch.append(ScheduledRequest(state, chunk))
                budget -= chunk
        return batch

    def _allocate_or_preempt(self, state: RequestState, num_tokens: int) -> bool:
        """False when the request has to sit this step out: nobody younger has blocks to give."""
        while not self._kv.allocate_slots(state.request_id, state.num_computed, num_tokens):
            victim = self._running[-1]
            if victim is state:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, state: RequestState) -> None:
        self._running.remove(state)
        self._free_blocks(state)
        state.num_computed = 0
        state.status = Status.WAITING
        state.preemptions += 1
        self.counters.preemptions += 1
        self._waiting.appendleft(state)
        logger.info("preempted %s at %d tokens", state.request_id, len(state.token_ids))

    def _process_token(self, state: RequestState, token: SampledToken, now: float) -> None:
        request = state.request
        is_first = state.num_generated == 0
        is_stop = token.token_id in request.sampling.stop_token_ids
        if not is_stop:
            state.token_ids.append(token.token_id)
        finish: FinishReason | None = None
        if is_stop:
            finish = FinishReason.STOP
        elif state.num_generated == request.max_new_tokens:
            finish = FinishReason.LENGTH
        elif request.prefill_only:
            finish = FinishReason.PREFILLED
        self._events.append(
            TokenEvent(
                request_id=state.request_id,
                token_ids=() if is_stop else (token.token_id,),
                logprobs=() if is_stop or token.logprobs is None else (token.logprobs,),
                finish=finish,
                times=_times(state, now) if is_first else None,
            )
        )
        if finish is FinishReason.PREFILLED:
            self._hold(state)
        elif finish is not None:
            self._remove(state)

    def _hold(self, state: RequestState) -> None:
        self._running.remove(state)
        state.status = Status.HELD
        tables = self._kv.get_block_ids(state.request_id)
        self._kv.lease(state.request_id, state.request_id)
        tokens = state.request.token_ids
        self._holds[state.request_id] = Hold(
            request_id=state.request_id, tables=tables, num_tokens=len(tokens), token_digest=token_digest(tokens)
        )

    # ---- endings

    def _fail(self, state: RequestState, error: PdError) -> None:
        self._events.append(TokenEvent(request_id=state.request_id, error=error))
        self._remove(state)

    def _remove(self, state: RequestState) -> None:
        """The one place where a request ends."""
        if state.status is Status.WAITING:
            self._waiting.remove(state)
        elif state in self._running:
            self._running.remove(state)
        self._free_blocks(state)
        del self._requests[state.request_id]

    def _free_blocks(self, state: RequestState) -> None:
        if state.status is Status.HELD:
            self._kv.release_lease(state.request_id)
        elif self._kv.owns_blocks(state.request_id):
            self._kv.free(state.request_id)


def _times(state: RequestState, now: float) -> EngineTimes:
    """Where the time to this engine's first token of the request went."""
    started = state.started_at if state.started_at is not None else now
    compute_ms = (now - started) * 1e3
    if state.pull is None:
        return EngineTimes(queue_ms=(started - state.arrived_at) * 1e3, compute_ms=compute_ms)
    pull = state.pull
    return EngineTimes(
        queue_ms=pull.queue_ms,
        compute_ms=compute_ms,
        received_ms=pull.received_ms,
        wire_ms=pull.wire_ms,
        confirm_ms=pull.confirm_ms,
        kv_bytes=pull.kv_bytes,
        plane=pull.plane,
    )
