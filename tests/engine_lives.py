"""Random lives of requests on one engine core, and the laws that hold for every one of them.

Scheduler, KV manager and the building of a step's rows are the product's; the model is `sim_kv`, whose next token
depends on every marker in sight, and which has no threads. A step reads and writes by the tables it was built with, at
its end; a pull writes at its end too, whatever has become of its request. So a block that was given away under a step,
a pull or a lease, or that two requests write into, changes an output.

`python -m tests.engine_lives 17` repeats one seed, `python -m tests.engine_lives 1000 5000` runs many.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from pd_service.config import SpeculativeSettings
from pd_service.engine.batch import InputRow
from pd_service.engine.execution_engine import ExecutionEngine
from pd_service.engine.messages import (
    Cancel,
    Hold,
    KvArrived,
    KvFailed,
    Message,
    PullOrder,
    ReleaseHeld,
    Submit,
    Withdrawn,
)
from pd_service.engine.request_state import PullStats, RequestState, Status, token_digest
from pd_service.engine.scheduler import Scheduler
from pd_service.engine.speculation import accept
from pd_service.engine.step import SampledToken, ScheduledRequest, SchedulerLimits, StepResult
from pd_service.errors import EngineFailed, Overloaded, TransferFailed
from pd_service.request import (
    EngineRequest,
    EngineSampling,
    FinishReason,
    RequestId,
    Ticket,
    TokenEvent,
    TokenLogprobs,
)
from tests.sim_kv import POISON, VOCAB, WINDOW, MarkedCache, continuation, new_cache

MAX_TOKENS = 32  # of prompt and output together, and the engine's limit
MAX_TURNS = 5000  # a bound against lives that never end
Tables = Mapping[str, Sequence[int]]


def markers(token_ids: Sequence[int], attn_types: Sequence[str]) -> list[int]:
    """What a right cache holds for each of the tokens."""
    chain: list[int] = []
    for position, token_id in enumerate(token_ids):
        chain.append(hash((position, token_id, *chain[-1:] * len(attn_types))))
    return chain


class MarkedWorker:
    """Runs rows as `ModelWorker` does. `foreseen` says, by the marker of a text's last token, how it goes on."""

    def __init__(self, cache: MarkedCache, draw: random.Random) -> None:
        self._cache = cache
        self._draw = draw
        self.foreseen: dict[int, Sequence[int]] = {}

    def run(self, rows: Sequence[InputRow]) -> list[StepResult]:
        return [self._run_row(row) for row in rows]

    def _run_row(self, row: InputRow) -> StepResult:
        if row.sampling is not None and row.sampling.needs_history:
            assert row.history[row.first :] == row.token_ids, "a history that does not end with the row"
        known, drafts = row.token_ids[: row.num_known], row.token_ids[row.num_known :]
        choices = [self._cache.run(row.block_ids, known, row.first)]
        last = row.first + row.num_known - 1
        for position, draft_id in enumerate(drafts, last + 1):
            choices.append(self._cache.run(row.block_ids, [draft_id], position))
        self._check_no_null_block_written(row)
        judged = [
            TokenLogprobs(float(token_id), rank=position)
            for position, token_id in enumerate(row.judged_ids, row.first + 1)
        ]
        if row.sampling is None:
            assert not drafts
            return StepResult(prompt_logprobs=tuple(judged))
        tokens = accept(drafts, [SampledToken(token_id) for token_id in choices])
        return StepResult(tokens, self._guess(row, tokens, last), tuple(judged))

    def _check_no_null_block_written(self, row: InputRow) -> None:
        for attn_type in row.block_ids:
            assert set(self._cache.read_block(attn_type, 0)) == {POISON}, "a step wrote into the null block"

    def _guess(self, row: InputRow, tokens: Sequence[SampledToken], last: int) -> tuple[int, ...]:
        """As a draft layer, which writes KV of its own for the tokens and for all but the last guess."""
        most = min(row.max_next_drafts, row.num_missing - len(tokens) - 1)
        if most < 1:
            return ()
        position = last + len(tokens) - 1
        for table in row.block_ids.values():
            block = table[(position + most - 1) // self._cache.block_size]
            assert block, "no slot for what the draft layer writes"
        marker = self._cache.marker(row.block_ids, position)
        guesses = list(self.foreseen.get(marker, ())[1 : most + 1])
        if guesses and self._draw.random() < 0.5:
            guesses[self._draw.randrange(len(guesses))] = self._draw.randrange(VOCAB)
        return tuple(guesses)


class MarkedEngine(ExecutionEngine):
    """The engine with another worker, and without a model's configuration."""

    def __init__(self, draw: random.Random, shape: Shape) -> None:
        self.kv_cache_manager, self.cache = new_cache(
            shape.attn_types,
            shape.num_blocks,
            block_size=shape.block_size,
            max_model_len=MAX_TOKENS,
            budget=shape.budget + (shape.num_drafts - 1 if shape.method == "mtp" else 0),
            has_prefix_cache=shape.has_prefix_cache,
        )
        self.marked_worker = MarkedWorker(self.cache, draw)
        self.worker = self.marked_worker  # type: ignore[assignment]
        limits = SchedulerLimits(
            max_model_len=MAX_TOKENS,
            vocab_size=VOCAB,
            max_num_batched_tokens=shape.budget,
            max_num_seqs=shape.max_num_seqs,
            max_waiting=shape.max_waiting,
            max_preemptions=shape.max_preemptions,
        )
        settings: dict[str, Any] = {"method": shape.method, "num_tokens": shape.num_drafts, "ngram_min": 1}
        self.scheduler = Scheduler(
            self.kv_cache_manager,
            limits,
            shape.block_size,
            has_prefix_cache=shape.has_prefix_cache,
            speculative=SpeculativeSettings(**settings),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    attn_types: tuple[str, ...]
    block_size: int
    num_blocks: int
    budget: int
    max_num_seqs: int
    max_waiting: int
    max_preemptions: int
    has_prefix_cache: bool
    method: str
    num_drafts: int


def draw_shape(draw: random.Random) -> Shape:
    """Pools that hold one request of the greatest length, and little more."""
    block_size = draw.choice([1, 2, 4])
    max_num_seqs = draw.choice([1, 3, 4, 5, 6])
    methods = get_args(SpeculativeSettings.model_fields["method"].annotation)
    return Shape(
        attn_types=draw.choice([("FullAttention",), ("FullAttention", "SlidingWindow"), ("SlidingWindow",)]),
        block_size=block_size,
        num_blocks=-(-MAX_TOKENS // block_size) + draw.randint(0, 12 // block_size),
        budget=draw.randint(max_num_seqs, max_num_seqs + draw.choice([0, 4, 12])),
        max_num_seqs=max_num_seqs,
        max_waiting=draw.choice([2, 20]),
        max_preemptions=draw.randint(0, 2),
        has_prefix_cache=draw.random() < 0.6,
        method=draw.choice(methods),
        num_drafts=draw.randint(1, 4),
    )


@dataclass(slots=True, kw_only=True)
class Life:
    """One request, what it must get, and what it got. `finish` or `error` when its last word has come."""

    request: EngineRequest
    expected: list[int]
    expected_finish: FinishReason
    next_token: int  # that comes with its KV, if one does
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: Exception | None = None
    is_cancelled: bool = False
    has_started: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_cancelled or self.finish is not None or self.error is not None

    def take(self, event: TokenEvent) -> None:
        assert self.finish is None, f"{event} after the end"
        assert self.error is None, f"{event} after an error"
        self.tokens += event.token_ids
        assert self.tokens == self.expected[: len(self.tokens)], f"{self.tokens} instead of {self.expected}"
        self.finish, self.error = event.finish, event.error
        if event.error is not None:
            return
        assert len(event.token_ids) <= event.num_drafted + 1
        assert event.token_ids or event.finish is FinishReason.STOP
        assert (event.times is not None) is not self.has_started
        judged = [(token.logprob, token.rank) for token in event.prompt_logprobs]
        assert judged == ([] if self.has_started else self.judged)
        self.has_started = True
        if event.finish is not None:
            assert event.finish is self.expected_finish
            assert self.tokens == self.expected

    @property
    def judged(self) -> list[tuple[float, int]]:
        """What the worker says of the prompt's tokens: id and position of each but the first."""
        if self.request.sampling.prompt_logprobs is None:
            return []
        return [(float(token_id), i) for i, token_id in enumerate(self.request.token_ids) if i]


class Lives:
    """`seen` counts what has happened, so that a test can tell whether it tested anything."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.shape = draw_shape(self._draw)
        self.engine = MarkedEngine(self._draw, self.shape)
        self.scheduler, self._kv = self.engine.scheduler, self.engine.kv_cache_manager
        self._texts = [[first, *self._draw.choices(range(VOCAB), k=MAX_TOKENS)] for first in range(2)]
        self._num_to_come = self._draw.randint(6, 20)
        self.lives: dict[RequestId, Life] = {}
        self._pulls: dict[RequestId, PullOrder] = {}
        self._computing: dict[RequestId, Hold] = {}  # what readers know of prompts that are not complete
        self._holds: dict[RequestId, Hold] = {}
        self.num_computed = 0
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        """Until every life is over, every pull ended and every lease given back."""
        for _ in range(MAX_TURNS):
            self._turn()
            if not (self._num_to_come or self._pulls or self._holds) and self._is_quiet():
                break
        else:
            raise AssertionError(f"they never end: {[i for i, life in self.lives.items() if not life.is_over]}")
        self._check_the_end()

    def _is_quiet(self) -> bool:
        return all(life.is_over for life in self.lives.values()) and not self.scheduler._requests

    def _turn(self) -> None:
        for message in self._messages():
            self._handle(message)
        batch = self.scheduler.schedule(0.0)
        self._collect()
        self._check_schedule(batch)
        if not batch:
            return
        rows = self.engine.build_model_inputs(batch)
        for message in self._messages():
            self._handle(message)
        results = self.engine.marked_worker.run(rows)
        if self._draw.random() < 0.01:
            self.seen["failed steps"] += 1
            self.scheduler.fail_step(batch, RuntimeError("planned"))
        else:
            self.num_computed += sum(s.num_positions for s in batch if not s.state.is_cancelled)
            self.scheduler.process_output(batch, results, 0.0)
            for scheduled, result in zip(batch, results, strict=True):
                if result.tokens and scheduled.state.status is Status.RUNNING and not scheduled.state.is_cancelled:
                    assert scheduled.state.num_pending <= 1, "KV that is right is computed again"
        self._collect()

    def _handle(self, message: Message) -> None:
        self.engine.handle(message, 0.0)
        self._collect()

    def _collect(self) -> None:
        self.scheduler.check()
        output = self.scheduler.take_output()
        if output is None:
            return
        for event in output.events:
            life = self.lives[event.request_id]
            assert not life.is_cancelled, f"{event} after a cancel"
            life.take(event)
            is_held = any(hold.request_id == event.request_id and is_complete(hold) for hold in output.holds)
            assert (event.finish is FinishReason.PREFILLED) is is_held
        for hold in output.holds:
            self._follow(hold)
        for hold in self._computing.values():
            self._check_readable(hold)
        self._pulls |= {order.request_id: order for order in output.pulls}

    def _follow(self, hold: Hold | Withdrawn) -> None:
        before = self._computing.pop(hold.request_id, None)
        if isinstance(hold, Withdrawn):
            assert before is not None, "withdrawn what nobody knew of"
            self.seen["withdrawn"] += 1
            return
        request = self.lives[hold.request_id].request
        assert (hold.num_tokens, hold.token_digest) == (len(request.token_ids), token_digest(request.token_ids))
        assert before is None or hold.num_ready > before.num_ready
        if is_complete(hold):
            assert before is not None, "a ticket that did not begin"
            assert hold.num_ready == hold.num_tokens
            self._holds[hold.request_id] = hold
        else:
            self.seen["followed"] += before is not None
            self._computing[hold.request_id] = hold

    def _check_readable(self, hold: Hold) -> None:
        """What readers were told stays true until they are told something else."""
        chain = markers(self.lives[hold.request_id].request.token_ids, self.shape.attn_types)
        assert "SlidingWindow" not in hold.tables
        for attn_type, table in hold.tables.items():
            for position in range(hold.num_ready):
                assert self.engine.cache.marker({attn_type: table}, position) == chain[position]

    # ---- what comes from outside

    def _messages(self) -> Iterator[Message]:
        """Each is handled before the next is thought of."""
        draw = self._draw
        if self._num_to_come and draw.random() < 0.4:
            yield self._submit()
        living = [life for life in self.lives.values() if not life.is_over]
        if living and draw.random() < 0.02:
            yield self._cancel(draw.choice(living))
        if self._pulls and draw.random() < 0.4:
            yield self._end_pull(self._pulls.pop(draw.choice(list(self._pulls))))
        if self._holds and draw.random() < 0.2:
            yield self._release(self._holds.pop(draw.choice(list(self._holds))))

    def _submit(self) -> Submit:
        """A prompt that begins as others do, and may go on by itself; some output meets a token that ends it."""
        draw = self._draw
        self._num_to_come -= 1
        text = draw.choice(self._texts)
        prompt = (*text[: draw.randint(1, draw.choice([3, 8, MAX_TOKENS - 2]))],)
        if draw.random() < 0.3:
            prompt = (*prompt[:-1], draw.randrange(VOCAB))
        count = draw.choice([1, 2, draw.randint(1, MAX_TOKENS - len(prompt)), MAX_TOKENS - len(prompt)])
        count = min(count, MAX_TOKENS - len(prompt))
        kind = draw.choice(["whole", "whole", "prefill", "ticket", "early ticket"])
        expected = continuation(prompt, count, self.shape.attn_types)
        self._foresee(prompt, expected)
        life = self._new_life(prompt, expected, kind)
        self.lives[life.request.request_id] = life
        return Submit(life.request)

    def _new_life(self, prompt: tuple[int, ...], expected: list[int], kind: str) -> Life:
        draw, stop, finish = self._draw, frozenset[int](), FinishReason.LENGTH
        count, is_prefill, is_ticket = len(expected), kind == "prefill", kind == "ticket" and len(prompt) > 1
        first, gets_token = expected[0], kind == "early ticket" and count > 1
        if gets_token:
            expected, count = expected[1:], count - 1
        if is_prefill and count > 1:
            expected, finish = expected[:1], FinishReason.PREFILLED
        if draw.random() < 0.3:
            stop, finish = frozenset({draw.choice(expected)}), FinishReason.STOP
            expected = expected[: next(i for i, token_id in enumerate(expected) if token_id in stop)]
        is_judged = not (is_ticket or gets_token) and draw.random() < 0.2
        num_held = len(prompt) if gets_token else len(prompt) - 1
        ticket = Ticket(
            address="holder:1",
            incarnation="i",
            lease_id="l",
            num_tokens=num_held,
            token_digest=token_digest(prompt[:num_held]),
        )
        request = EngineRequest(
            request_id=RequestId(f"life-{len(self.lives)}"),
            token_ids=prompt,
            num_prompt_tokens=len(prompt) if is_judged else draw.randint(1, len(prompt)),
            max_new_tokens=count,
            sampling=EngineSampling(
                stop_token_ids=stop,
                prompt_logprobs=0 if is_judged else None,
                presence_penalty=draw.choice([0.0, 0.0, 1.0]),  # the model here makes nothing of it
            ),
            prefill_only=is_prefill,
            ticket=ticket if is_ticket or gets_token else None,
            priority=draw.choice([0, 0, -1, 1]),
            cache_salt=draw.choice(["", "", "other"]),
        )
        return Life(request=request, expected=expected, expected_finish=finish, next_token=first)

    def _foresee(self, prompt: Sequence[int], expected: Sequence[int]) -> None:
        """After position i of the text comes text[i + 1], which the step chooses, and then what is guessed."""
        text = [*prompt, *expected]
        for position, marker in enumerate(markers(text, self.shape.attn_types)):
            self.engine.marked_worker.foreseen[marker] = text[position + 1 :]

    def _cancel(self, life: Life) -> Cancel:
        life.is_cancelled = True
        state = self.scheduler._requests[life.request.request_id]
        is_in_flight = state.request_id in self.scheduler._in_flight
        self.seen[f"cancelled {'in flight' if is_in_flight else state.status.value}"] += 1
        return Cancel(state.request_id)

    def _end_pull(self, order: PullOrder) -> Message:
        """It has written into its blocks, all or half of what is missing, even if nobody wants it any more."""
        life = self.lives[order.request_id]
        tokens = life.request.token_ids[: order.ticket.num_tokens]
        fails = self._draw.random() < 0.2
        end = self._draw.randint(order.first_token, len(tokens)) if fails else len(tokens)
        chain = markers(tokens, self.shape.attn_types)
        for position in range(order.first_token, end):
            self.engine.cache.write(order.tables, position, chain[position])
        self.seen["failed pulls" if fails else "early pulls" if life.request.gets_token else "pulls"] += 1
        if fails:
            return KvFailed(order.request_id, TransferFailed("planned"))
        return KvArrived(order.request_id, PullStats(), life.next_token)

    def _release(self, hold: Hold) -> ReleaseHeld:
        """Until now whoever had the ticket could read all that the next token sees."""
        chain = markers(self.lives[hold.request_id].request.token_ids, self.shape.attn_types)
        for attn_type, table in hold.tables.items():
            first = max(0, hold.num_tokens - WINDOW + 1) if attn_type == "SlidingWindow" else 0
            for position in range(first, hold.num_tokens):
                held = self.engine.cache.marker({attn_type: table}, position)
                assert held == chain[position], f"position {position} of a lease was overwritten"
        self.seen["leases"] += 1
        return ReleaseHeld(hold.request_id)

    # ---- laws

    def _check_schedule(self, batch: Sequence[ScheduledRequest]) -> None:
        states = [scheduled.state for scheduled in batch]
        assert len(set(map(id, states))) == len(states), "a request is in the step twice"
        num_spare = self.shape.budget - sum(scheduled.num_positions for scheduled in batch)
        assert num_spare >= 0, "a step of more tokens than its budget"
        for state in states:
            assert state.status is Status.RUNNING, "a step with a request that has no blocks"
            self._check_bounds(state)
        for state in self.scheduler._requests.values():
            assert state.preemptions <= self.shape.max_preemptions
        running = [s for s in self.scheduler._requests.values() if s.status is Status.RUNNING]
        left_out = [state for state in running if state not in states]
        for state in left_out:
            assert state.num_pending > 1 or not self._fits(state, 1), "a decode without its token"
        self._check_progress(batch, running)
        self.seen["left out"] += len(left_out)

    def _check_bounds(self, state: RequestState) -> None:
        num_blocks = -(-state.request.max_cached_tokens // self.shape.block_size)
        for table in self._kv.get_block_ids(state.request_id).values():
            assert len(table) <= num_blocks, "slots for tokens that will never be computed"

    def _fits(self, state: RequestState, num_tokens: int) -> bool:
        end, free = state.num_computed + num_tokens, self._kv.num_free_blocks()
        need = self._kv.num_blocks_needed(state.request_id, state.num_computed, end)
        return all(need[attn_type] <= free[attn_type] for attn_type in need)

    def _check_progress(self, batch: Sequence[ScheduledRequest], running: Sequence[RequestState]) -> None:
        """Nothing runs only while others outside the engine hold blocks, who will give them back."""
        if batch:
            return
        assert len(running) <= 1
        if not (self._pulls or self._holds):
            assert not self.scheduler._requests, "everybody waits for ever"

    def _check_the_end(self) -> None:
        self.scheduler.check()
        load = self.scheduler.load()
        assert (load.running, load.waiting, load.queued_tokens) == (0, 0, 0)
        assert self._kv.num_free_blocks() == self._kv.num_usable_blocks()
        for life in self.lives.values():
            errors = (TransferFailed, EngineFailed, Overloaded)
            assert life.is_cancelled or life.finish is not None or isinstance(life.error, errors), life
        counters = self.scheduler.counters
        assert counters.computed_tokens == self.num_computed
        self.seen["preemptions"] += counters.preemptions
        self.seen["cached"] += counters.cached_tokens
        self.seen["right guesses"] += counters.accepted_tokens
        self.seen["wrong guesses"] += counters.drafted_tokens - counters.accepted_tokens


def is_complete(hold: Hold | Withdrawn) -> bool:
    return isinstance(hold, Hold) and hold.next_token is not None


def run_seed(seed: int) -> Counter[str]:
    """A broken law names the command that shows it again."""
    lives = Lives(seed)
    try:
        lives.run()
    except BaseException as error:
        error.add_note(f"repeat it with: python -m tests.engine_lives {seed}; {lives.shape}")
        raise
    return lives.seen


def main() -> None:
    first = int(sys.argv[1])
    last = int(sys.argv[2]) if len(sys.argv) > 2 else first
    total: Counter[str] = Counter()
    for seed in range(first, last + 1):
        total += run_seed(seed)
    print(f"seeds {first} to {last} hold; {dict(sorted(total.items()))}")


if __name__ == "__main__":
    main()
