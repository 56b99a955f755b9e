"""Decides which tokens of which requests run in the next step. Plain code: no clock, no I/O, no tensors.

There are no phases: each request's computed count chases its token count. A step has a token budget; requests that
need one token (decodes, and requests whose KV has just arrived) come first, then chunks of longer ones, first in order
first. A request's order is its time of arrival, moved by its priority, and never changes: whoever comes later or waits
behind can be overtaken for a bounded time only.

Always true between calls:
- WAITING requests own no blocks; RECEIVING, RUNNING and HELD ones own theirs and nobody else frees them.
- A request is admitted only when what `Admission` promises it fits beside what is promised to those admitted before.
  When growth beyond that does not fit, the last running request in order that is not secured is preempted: it gives
  its blocks back and is recomputed later. Each is preempted a bounded number of times.
- While a step is in flight (between `schedule` and `process_output`) no block of a request in it is freed.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Iterable, Sequence

from kv_cache import FIXED_BLOCK_ATTN_TYPES, KVCacheManager
from pd_service.config import SpeculativeSettings
from pd_service.engine.admission import Admission
from pd_service.engine.messages import Hold, PullOrder, StepOutput, Withdrawn
from pd_service.engine.outbox import Outbox
from pd_service.engine.request_check import check_request
from pd_service.engine.request_state import PullStats, RequestState, Status, token_digest
from pd_service.engine.speculation import DraftPlan, Speculation
from pd_service.engine.step import Counters, ScheduledRequest, SchedulerLimits, StepResult
from pd_service.errors import EngineFailed, InvalidRequest, Overloaded, PdError, TransferFailed
from pd_service.request import EngineRequest, FinishReason, Load, RequestId, TokenEvent

logger = logging.getLogger(__name__)


def _order(state: RequestState) -> tuple[float, int]:
    return state.order


class Scheduler:
    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        limits: SchedulerLimits,
        block_size: int,
        *,
        has_prefix_cache: bool = False,
        speculative: SpeculativeSettings | None = None,
    ) -> None:
        self._kv = kv_cache_manager
        self._limits = limits
        self._block_size = block_size
        self._has_prefix_cache = has_prefix_cache
        self._admission = Admission(
            kv_cache_manager,
            block_size,
            max_preemptions=limits.max_preemptions,
            has_prefix_cache=has_prefix_cache,
        )
        self._speculation = Speculation(speculative or SpeculativeSettings())
        managers = kv_cache_manager.managers
        self._growing = {key for key, manager in managers.items() if manager.attn_type not in FIXED_BLOCK_ATTN_TYPES}
        self._requests: dict[RequestId, RequestState] = {}
        self._waiting: list[RequestState] = []  # in order, as is the next
        self._running: list[RequestState] = []
        self._num_receiving = 0
        self._num_added = 0
        self._in_flight: frozenset[RequestId] = frozenset()
        self.counters = Counters()
        self._outbox = Outbox(self.load())

    # ---- events from outside

    def add(self, request: EngineRequest, now: float) -> None:
        """Queues the request, or answers it with an error event. A refusal changes nothing else."""
        try:
            check_request(request, self._limits, self._kv)
            if request.request_id in self._requests:
                raise InvalidRequest(f"request_id {request.request_id!r} is live on this engine", "request_id")
        except PdError as error:
            self._outbox.events.append(TokenEvent(request_id=request.request_id, error=error))
            return
        self._num_added += 1
        state = RequestState(
            request=request,
            token_ids=list(request.token_ids),
            arrived_at=now,
            order=(now + request.priority * self._limits.priority_step_s, self._num_added),
        )
        self._requests[request.request_id] = state
        insort(self._waiting, state, key=_order)
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

    def kv_arrived(self, request_id: RequestId, stats: PullStats, next_token: int, now: float) -> None:
        """The blocks of a RECEIVING request hold the KV its ticket is for; `next_token` is the one after that."""
        if not 0 <= next_token < self._limits.vocab_size:
            self.kv_failed(request_id, TransferFailed(f"the holder names a token that is none: {next_token}"))
            return
        state = self._received(request_id)
        if state is None:
            return
        if state.request.gets_token:
            state.give(next_token)
        self.counters.received_tokens += state.num_received - state.cached_tokens
        self._note_computed(state, state.num_received)
        state.pull = stats
        state.started_at = now
        insort(self._running, state, key=_order)

    def kv_failed(self, request_id: RequestId, error: Exception) -> None:
        """No KV comes, whether a pull has ended or not even begun: the request fails, and may go round elsewhere."""
        state = self._requests.get(request_id)
        if state is None or state.status is not Status.WAITING or not state.takes_ticket:
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
            victim = self._victim()
            assert victim is not None, "secured requests wait for each other"
            self._preempt(victim)
            batch = self._schedule_batch()
        for scheduled in batch:
            if scheduled.state.started_at is None:
                scheduled.state.started_at = now
            if scheduled.state.request.prefill_only and not scheduled.state.token_digest:
                self._open_hold(scheduled.state)
        self._in_flight = frozenset([s.state.request_id for s in batch])
        return batch

    def process_output(self, batch: Sequence[ScheduledRequest], results: Sequence[StepResult], now: float) -> None:
        """Commits a step: what it gave each of its requests."""
        self._in_flight = frozenset()
        self.counters.steps += 1
        self._log_step(batch)
        self._process_batch_output(batch, results, now)
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
        return self._outbox.take(self.load())

    # ---- questions

    def load(self) -> Load:
        free, usable = self._kv.num_free_blocks(), self._kv.num_usable_blocks()
        shortest = min(free, key=lambda attn_type: free[attn_type] / usable[attn_type])
        return Load(
            running=len(self._running) + self._num_receiving,
            waiting=len(self._waiting),
            queued_tokens=sum([len(s.token_ids) - s.num_computed for s in (*self._running, *self._waiting)]),
            free_blocks=free[shortest],
            total_blocks=usable[shortest],
        )

    def check(self) -> None:
        """Recounts everything; called after each operation by the tests, and by an idle engine."""
        self._kv.check()
        for state in self._requests.values():
            owns_blocks = self._kv.owns_blocks(state.request_id)
            assert not (owns_blocks and state.status is Status.WAITING), f"{state.request_id} waits and owns blocks"
            assert owns_blocks or state.status in (Status.WAITING, Status.HELD), f"{state.request_id} lost its blocks"
        receiving = sum(s.status is Status.RECEIVING for s in self._requests.values())
        assert receiving == self._num_receiving

    # ---- admission

    def _admit(self) -> None:
        """Admits from the head of the queue while the head fits; a queue in order of arrival starves nobody."""
        while self._waiting and self._has_seat() and self._admission.admit(self._waiting[0], self._admitted()):
            state = self._waiting.pop(0)
            self.counters.cached_tokens += state.cached_tokens
            if state.takes_ticket:
                self._start_pull(state)
            else:
                state.status = Status.RUNNING
                insort(self._running, state, key=_order)

    def _has_seat(self) -> bool:
        return len(self._running) + self._num_receiving < self._limits.max_num_seqs

    def _admitted(self) -> Iterable[RequestState]:
        yield from self._running
        if self._num_receiving:
            yield from (s for s in self._requests.values() if s.status is Status.RECEIVING)

    def _start_pull(self, state: RequestState) -> None:
        self._kv.begin_pull(state.request_id, state.request_id)
        state.status = Status.RECEIVING
        self._num_receiving += 1
        ticket = state.request.ticket
        assert ticket is not None
        tables = self._kv.get_block_ids(state.request_id)
        self._outbox.pulls.append(
            PullOrder(request_id=state.request_id, ticket=ticket, first_token=state.cached_tokens, tables=tables)
        )

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
        if len(batch) == len(self._running):  # nobody has more than one token to compute
            return batch
        return batch + self._schedule_prefill_batch(budget - sum([s.num_positions for s in batch]))

    def _schedule_decode_batch(self, budget: int) -> list[ScheduledRequest]:
        """One token for every running request that needs just one; preempts from the last when blocks run out.

        Guesses get what the budget leaves then, at most half of it while a prompt waits for its next chunk. Secured
        requests come first, because the others are those whose blocks may be taken.
        """
        decodes = [s for s in self._running if len(s.token_ids) - s.num_computed == 1]
        num_spare = max(0, budget - len(decodes)) // (1 if len(decodes) == len(self._running) else 2)
        batch: list[ScheduledRequest] = []
        if self.counters.preemptions:  # else nobody is secured for having been preempted
            decodes.sort(key=self._admission.is_secured, reverse=True)
        guesses = self._speculation.is_on
        for state in decodes:
            if state.status is Status.RUNNING and len(batch) < budget:
                if not guesses and self._kv.allocate_slots(state.request_id, state.num_computed, 1):
                    batch.append(ScheduledRequest(state, 1))
                    continue
                scheduled = self._schedule_decode(state, num_spare)
                if scheduled is not None:
                    batch.append(scheduled)
                    num_spare -= len(scheduled.draft_ids)
        return batch

    def _schedule_decode(self, state: RequestState, num_spare: int) -> ScheduledRequest | None:
        if (scheduled := self._with_drafts(state, 1, num_spare)) is not None:
            return scheduled
        return ScheduledRequest(state, 1) if self._allocate_or_preempt(state, 1) else None

    def _with_drafts(self, state: RequestState, num_tokens: int, num_spare: int) -> ScheduledRequest | None:
        """The request's last known tokens and guesses behind them; None without guesses, or without room for them."""
        plan = self._speculation.plan(state, num_spare)
        num_new = num_tokens + len(plan.draft_ids)
        if plan == DraftPlan() or not self._kv.allocate_slots(
            state.request_id, state.num_computed, num_new, plan.num_lookahead
        ):
            return None
        return ScheduledRequest(state, num_tokens, plan.draft_ids, plan.max_next_drafts)

    def _schedule_prefill_batch(self, budget: int) -> list[ScheduledRequest]:
        """Chunks of the requests with more to compute, in order, as the budget allows."""
        batch: list[ScheduledRequest] = []
        for state in self._running:
            if budget < 1:
                break
            if state.num_pending == 1:
                continue
            chunk = min(state.num_pending, budget)
            scheduled = self._schedule_chunk(state, chunk)
            if scheduled is not None:
                batch.append(scheduled)
                budget -= chunk
        return batch

    def _schedule_chunk(self, state: RequestState, chunk: int) -> ScheduledRequest | None:
        if chunk == state.num_pending and (scheduled := self._with_drafts(state, chunk, 0)):
            return scheduled
        fits = self._kv.allocate_slots(state.request_id, state.num_computed, chunk)
        return ScheduledRequest(state, chunk) if fits else None

    def _allocate_or_preempt(self, state: RequestState, num_tokens: int) -> bool:
        """False when the request has to sit this step out: nobody behind it has blocks to give."""
        while not self._kv.allocate_slots(state.request_id, state.num_computed, num_tokens):
            victim = self._victim()
            if victim is None or victim is state:
                return False
            self._preempt(victim)
        return True

    def _victim(self) -> RequestState | None:
        """Who gives its blocks back next: the last in order that may be asked to."""
        return next((s for s in reversed(self._running) if not self._admission.is_secured(s)), None)

    def _preempt(self, state: RequestState) -> None:
        self._running.remove(state)
        self._withdraw_hold(state)
        self._free_blocks(state)
        state.num_computed = 0
        state.num_borrowed = {}
        state.prompt_logprobs.clear()
        state.status = Status.WAITING
        state.preemptions += 1
        self.counters.preemptions += 1
        insort(self._waiting, state, key=_order)
        logger.info("preempted %s at %d tokens", state.request_id, len(state.token_ids))

    # ---- results of a step

    def _process_batch_output(
        self, batch: Sequence[ScheduledRequest], results: Sequence[StepResult], now: float
    ) -> None:
        for scheduled, result in zip(batch, results, strict=True):
            if scheduled.state.is_cancelled:
                self._remove(scheduled.state)
            else:
                self._process_result(scheduled, result, now)

    def _process_result(self, scheduled: ScheduledRequest, result: StepResult, now: float) -> None:
        """Everything a step computed for a request: its tokens, their KV, then its end if that has come."""
        state = scheduled.state
        self._count(scheduled, result)
        if result.prompt_logprobs:
            state.prompt_logprobs += result.prompt_logprobs
        if not result.tokens:
            self._note_computed(state, state.num_computed + scheduled.num_tokens)
            if state.token_digest:
                self._tell_hold(state)
            return
        state.draft_ids = result.draft_ids
        is_first = len(state.token_ids) == state.num_given
        tokens, finish = state.append(result.tokens)
        self._note_computed(state, state.num_computed + scheduled.num_tokens + len(result.tokens) - 1)
        event = TokenEvent(state.request_id, tuple([token.token_id for token in tokens]))
        if is_first or finish is not None or scheduled.draft_ids or result.tokens[0].logprobs is not None:
            event = event._replace(
                logprobs=tuple([token.logprobs for token in tokens if token.logprobs is not None]),
                finish=finish,
                num_drafted=len(scheduled.draft_ids),
                times=state.times(now) if is_first else None,
                prompt_logprobs=tuple(state.prompt_logprobs),
            )
            state.prompt_logprobs = []
        self._outbox.events.append(event)
        if finish is FinishReason.PREFILLED:
            self._hold(state)
        elif finish is not None:
            self._remove(state)

    def _count(self, scheduled: ScheduledRequest, result: StepResult) -> None:
        self.counters.computed_tokens += scheduled.num_tokens
        if num_drafts := len(scheduled.draft_ids):
            self.counters.computed_tokens += num_drafts
            self.counters.drafted_tokens += num_drafts
            self.counters.accepted_tokens += len(result.tokens) - 1

    def _note_computed(self, state: RequestState, num_computed: int) -> None:
        """The KV of the first `num_computed` tokens is right; those behind a stop token are none of the request's."""
        num_full_before = state.num_computed // self._block_size
        state.num_computed = min(num_computed, len(state.token_ids))
        if self._has_prefix_cache and state.num_computed // self._block_size > num_full_before:
            self._kv.commit(state.request_id, state.token_ids, state.num_computed)

    def _log_step(self, batch: Sequence[ScheduledRequest]) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "step %d: %d requests, %d tokens, %d waiting, blocks %s",
                self.counters.steps,
                len(batch),
                sum(s.num_positions for s in batch),
                len(self._waiting),
                self._kv.format_usage(),
            )

    # ---- blocks that others may read

    def _open_hold(self, state: RequestState) -> None:
        """Readers may follow from the first step on, so that all they have to do before a read is done by then."""
        state.token_digest = token_digest(state.request.token_ids)
        self._tell_hold(state)

    def _tell_hold(self, state: RequestState, next_token: int | None = None) -> None:
        tables = self._kv.get_block_ids(state.request_id)
        if next_token is None:
            tables = {key: table for key, table in tables.items() if key in self._growing}
        hold = Hold(
            request_id=state.request_id,
            tables=tables,
            num_ready=state.num_computed,
            num_tokens=state.num_given,
            token_digest=state.token_digest,
            next_token=next_token,
        )
        self._outbox.holds.append(hold)

    def _hold(self, state: RequestState) -> None:
        self._running.remove(state)
        state.status = Status.HELD
        self._tell_hold(state, state.token_ids[-1])
        self._kv.lease(state.request_id, state.request_id)

    def _withdraw_hold(self, state: RequestState) -> None:
        if state.token_digest and state.status is not Status.HELD:
            self._outbox.holds.append(Withdrawn(state.request_id))
            state.token_digest = b""

    # ---- endings

    def _fail(self, state: RequestState, error: PdError) -> None:
        self._outbox.events.append(TokenEvent(request_id=state.request_id, error=error))
        self._remove(state)

    def _remove(self, state: RequestState) -> None:
        """The one place where a request ends."""
        if state.status is Status.WAITING:
            self._waiting.remove(state)
        elif state in self._running:
            self._running.remove(state)
        self._withdraw_hold(state)
        self._free_blocks(state)
        del self._requests[state.request_id]

    def _free_blocks(self, state: RequestState) -> None:
        if state.status is Status.HELD:
            self._kv.release_lease(state.request_id)
        elif self._kv.owns_blocks(state.request_id):
            self._kv.free(state.request_id)
