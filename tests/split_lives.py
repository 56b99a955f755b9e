"""Random lives of requests on two engines: arrivals, hand-overs, losses and cancels in any order, also in mid-step.

A `Life` is one request of a client; it goes round again after a failure with what it has so far, as the gateway's story
does. Messages reach an engine before its step or while that computes. Some lives have a follower: their request runs on
the decode engine while its prompt is computed on the other. A pull reads in two halves, or in as many parts as become
ready, between which anything may happen: its lease may end, its request may be cancelled, both engines may run steps.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from pd_service.engine.messages import Cancel, Hold, KvArrived, KvFailed, Message, PullOrder, ReleaseHeld, Submit
from pd_service.engine.request_state import PullStats
from pd_service.errors import TransferFailed
from pd_service.request import EngineRequest, EngineSampling, FinishReason, RequestId
from tests.integer_model import VOCAB, Attention
from tests.integer_reference import continuation
from tests.split_engines import Following, Split, check_same_kv, read
from tests.stepped_engine import SteppedEngine
from transfer.planes.base import Runs

MAX_TURNS = 20_000  # a bound against lives that never end


class Stage(Enum):
    WAITING = "waiting"  # at the gateway
    PROMPT = "prompt"  # on the prefill engine
    TICKET = "ticket"  # its first token known, on no engine
    DECODE = "decode"  # on the engine that computes all the rest
    ENDED = "ended"
    CANCELLED = "cancelled"


@dataclass(slots=True, kw_only=True, eq=False)
class Life:
    name: str
    prompt: tuple[int, ...]
    count: int
    sampling: EngineSampling
    salt: str
    priority: int
    expected: list[int]  # the model's own
    output: list[int] = field(default_factory=list)
    attempt: int = 0
    stage: Stage = Stage.WAITING
    engine: SteppedEngine | None = None  # that works on it now
    has_follower: bool = False  # the decode engine has its request while the prompt is computed

    @property
    def request_id(self) -> RequestId:
        """Of this attempt."""
        return RequestId(f"{self.name}/{self.attempt}")

    @property
    def is_over(self) -> bool:
        return self.stage in (Stage.ENDED, Stage.CANCELLED)

    def request(self) -> EngineRequest:
        """All that is missing."""
        return EngineRequest(
            request_id=self.request_id,
            token_ids=(*self.prompt, *self.output),
            num_prompt_tokens=len(self.prompt),
            max_new_tokens=self.count - len(self.output),
            sampling=self.sampling,
            priority=self.priority,
            cache_salt=self.salt,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Pull:
    """`runs` are what is still to be read of a complete `hold`, None before there is one."""

    order: PullOrder
    following: Following
    hold: Hold | None = None
    runs: Runs | None = None
    is_half_read: bool = False


class Lives:
    """`seen` counts what has happened, so that a test can tell whether it tested anything."""

    def __init__(
        self, draw: random.Random, attention: Attention, split: Split, *, num_lives: int, max_tokens: int
    ) -> None:
        self._draw = draw
        self._attention = attention
        self._split = split
        self._num_to_come = num_lives
        self._max_tokens = max_tokens  # of one request, prompt and output
        first, other, *rest = draw.sample(range(VOCAB), max_tokens + 1)
        self._texts = [(first, *rest), (other, *rest)]  # alike but for what stands before
        self._inbox: dict[SteppedEngine, list[Message]] = {split.prefill: [], split.decode: []}
        self._pulls: dict[RequestId, Pull] = {}
        self._of_attempt: dict[RequestId, Life] = {}
        self.lives: list[Life] = []
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        """Until every life is over, every pull ended and every lease given back."""
        for _ in range(MAX_TURNS):
            self._turn()
            if not self._num_to_come and all(life.is_over for life in self.lives) and self._is_quiet():
                return
        raise AssertionError(f"they never end: {[(life.request_id, life.stage) for life in self.lives]}")

    def _is_quiet(self) -> bool:
        return not (self._pulls or any(self._inbox.values()) or self._split.prefill.holds) and self._split.is_empty

    def _turn(self) -> None:
        chance = self._draw.random()
        if chance < 0.15 and self._num_to_come:
            self._arrive()
        elif chance < 0.27:
            self._go_on()
        elif chance < 0.35:
            self._follow()
        elif chance < 0.365:
            self._cancel()
        elif chance < 0.6:
            self._pull_on()
        elif chance < 0.61:
            self._end_lease()
        else:
            self._step(self._draw.choice([self._split.prefill, self._split.decode]))

    # ---- what clients and gateway do

    def _arrive(self) -> None:
        """A prompt that begins as others do, and goes on by itself; some output meets a token that ends it."""
        draw = self._draw
        self._num_to_come -= 1
        num_shared = draw.randrange(1, self._max_tokens * 2 // 3)
        prompt = draw.choice(self._texts)[:num_shared] + tuple(draw.sample(range(VOCAB), draw.randrange(4)))
        sampling = draw.choice([EngineSampling(), EngineSampling(temperature=1.0, seed=draw.randrange(100))])
        count = draw.randint(1, self._max_tokens - len(prompt))
        expected = continuation(self._attention, prompt, count, sampling)
        if draw.random() < 0.2:
            stop = draw.choice(expected)
            expected = expected[: expected.index(stop)]
            sampling = replace(sampling, stop_token_ids=frozenset({stop}))
        life = Life(
            name=f"life-{len(self.lives)}",
            prompt=prompt,
            count=count,
            sampling=sampling,
            salt=draw.choice(["", "", "other"]),
            priority=draw.choice([0, 0, 1]),
            expected=expected,
        )
        self.lives.append(life)

    def _pick(self, *stages: Stage) -> Life | None:
        candidates = [life for life in self.lives if life.stage in stages]
        return self._draw.choice(candidates) if candidates else None

    def _go_on(self) -> None:
        """A request is submitted where it has to go next; some stay with one engine for both phases."""
        life = self._pick(Stage.WAITING, Stage.TICKET)
        if life is None:
            return
        if life.stage is Stage.TICKET:
            self._go_on_with_ticket(life)
            return
        life.attempt += 1
        self._of_attempt[life.request_id] = life
        if self._draw.random() < 0.3:
            engine = self._draw.choice([self._split.prefill, self._split.decode])
            self._submit(life, Stage.DECODE, engine, life.request())
        else:
            self._submit(life, Stage.PROMPT, self._split.prefill, replace(life.request(), prefill_only=True))

    def _go_on_with_ticket(self, life: Life) -> None:
        if life.request_id not in self._split.prefill.holds:  # the lease has ended
            life.stage = Stage.WAITING
            return
        *before, _ = life.output  # as it was when its prompt was submitted
        onward = self._split.with_ticket(replace(life, output=before).request())
        assert onward.token_ids == life.request().token_ids
        self._submit(life, Stage.DECODE, self._split.decode, onward)

    def _follow(self) -> None:
        """The decode engine gets a request whose prompt is being computed."""
        life = self._pick(Stage.PROMPT)
        computing, pulls = self._split.prefill.computing, self._split.decode.pulls
        if life is None or life.has_follower or life.request_id not in computing:
            return
        request = life.request()
        if request.max_new_tokens < 2 or life.request_id in pulls or life.request_id in self._pulls:
            return
        self.seen["followed"] += 1
        life.has_follower = True
        self._inbox[self._split.decode].append(Submit(self._split.with_early_ticket(request)))
        self._step(self._split.decode)  # at once, or most prompts would be done before anybody reads
        if life.request_id in pulls:
            self._begin_pull(pulls.pop(life.request_id))

    def _submit(self, life: Life, stage: Stage, engine: SteppedEngine, request: EngineRequest) -> None:
        life.stage, life.engine = stage, engine
        self._inbox[engine].append(Submit(request))

    def _cancel(self) -> None:
        life = self._pick(*(stage for stage in Stage if stage not in (Stage.ENDED, Stage.CANCELLED)))
        if life is None:
            return
        self.seen[f"cancelled: {life.stage.value}"] += 1
        if life.engine is not None:
            if life.stage is Stage.DECODE:
                life.output += life.engine.tokens[life.request_id]
            self._inbox[life.engine].append(Cancel(life.request_id))
        if life.has_follower:
            self._inbox[self._split.decode].append(Cancel(life.request_id))
        life.stage = Stage.CANCELLED
        if life.request_id not in self._pulls:  # a pull asks for its lease itself, at its end
            self._give_back(life.request_id)

    def _end_lease(self) -> None:
        """The holder's timer has run out."""
        if self._split.prefill.holds:
            request_id = self._draw.choice(list(self._split.prefill.holds))
            self.seen["lease ended" + (" under a pull" if request_id in self._pulls else "")] += 1
            self._give_back(request_id)

    def _give_back(self, request_id: RequestId) -> None:
        if self._split.prefill.holds.pop(request_id, None) is not None:
            self._inbox[self._split.prefill].append(ReleaseHeld(request_id))

    # ---- pulls

    def _pull_on(self) -> None:
        orders, pulls = self._split.decode.pulls, self._pulls
        if not orders and not pulls:
            return
        request_id = self._draw.choice([*orders, *pulls])
        if request_id in orders:
            self._begin_pull(orders.pop(request_id))
        elif not pulls[request_id].is_half_read:
            self._read_half(pulls[request_id])
        else:
            self._end_pull(pulls.pop(request_id))

    def _begin_pull(self, order: PullOrder) -> None:
        if order.request_id in self._split.prefill.holds or order.request_id in self._split.prefill.computing:
            self._pulls[order.request_id] = Pull(order=order, following=Following(order))
        else:
            self._fail(order.request_id, "the ticket had ended")

    def _read_half(self, pull: Pull) -> None:
        """Half of what is left, or all that has become ready while the rest is computed."""
        request_id, source, dest = pull.order.request_id, self._split.prefill, self._split.decode
        if request_id in source.computing:
            runs = pull.following.plan(source, dest, source.computing[request_id])
            self.seen["read early"] += bool(len(runs))
            read(source, dest, runs)
        elif request_id in source.holds:
            pull.hold = source.holds[request_id]
            runs = pull.following.plan(source, dest, pull.hold)
            half = len(runs) // 2
            read(source, dest, part(runs, slice(0, half)))
            pull.runs, pull.is_half_read = part(runs, slice(half, None)), True
        else:
            self._fail(self._pulls.pop(request_id).order.request_id, "the ticket ended before the prompt was computed")

    def _end_pull(self, pull: Pull) -> None:
        """Reads the rest, and confirms: only what was leased until now may be used."""
        request_id = pull.order.request_id
        if self._draw.random() < 0.1:
            self._fail(request_id, "the pull failed half-way")
            self._give_back(request_id)
            return
        assert pull.runs is not None
        assert pull.hold is not None
        read(self._split.prefill, self._split.decode, pull.runs)
        if request_id not in self._split.prefill.holds:
            self._fail(request_id, "the lease ended before the pull did")
            return
        check_same_kv(self._split.prefill, self._split.decode, pull.hold, pull.order)
        self.seen["pulled"] += 1
        self._give_back(request_id)
        assert pull.hold.next_token is not None
        self._inbox[self._split.decode].append(KvArrived(request_id, PullStats(), pull.hold.next_token))

    def _fail(self, request_id: RequestId, why: str) -> None:
        self.seen[why] += 1
        self._inbox[self._split.decode].append(KvFailed(request_id, TransferFailed(why)))

    # ---- engines

    def _step(self, engine: SteppedEngine) -> None:
        messages = self._inbox[engine]
        self._inbox[engine] = []
        num_before = self._draw.randint(0, len(messages))
        self.seen["messages in mid-step"] += len(messages) - num_before
        engine.step(*messages[:num_before], during=messages[num_before:])
        for life in self.lives:
            if life.has_follower and engine is self._split.decode and not life.is_over:
                self._look_at_follower(life)
            elif life.engine is engine and not life.is_over:
                self._look_at(life, engine)
        for request_id in list(self._split.prefill.holds):
            if self._of_attempt[request_id].stage is Stage.CANCELLED and request_id not in self._pulls:
                self._give_back(request_id)  # the cancel came too late: nobody will take this ticket

    def _look_at_follower(self, life: Life) -> None:
        """It may fail while the prompt is computed; then the ticket is taken later, or followed by another."""
        if self._split.decode.errors.pop(life.request_id, None) is not None:
            life.has_follower = False

    def _look_at(self, life: Life, engine: SteppedEngine) -> None:
        request_id, error = life.request_id, engine.errors.get(life.request_id)
        if error is not None:
            assert isinstance(error, TransferFailed), error
            life.stage, life.engine = Stage.WAITING, None
        elif request_id in engine.finish:
            life.output += engine.tokens[request_id]
            is_ticket = engine.finish[request_id] is FinishReason.PREFILLED
            life.stage, life.engine = Stage.TICKET if is_ticket else Stage.ENDED, None
            self._look_at_decode(life, is_ticket=is_ticket)

    def _look_at_decode(self, life: Life, *, is_ticket: bool) -> None:
        """The prompt is done, or all of it: a follower goes on, or is not needed."""
        if life.has_follower and is_ticket:
            life.stage, life.engine = Stage.DECODE, self._split.decode
        elif life.has_follower:
            self._inbox[self._split.decode].append(Cancel(life.request_id))
        life.has_follower = False


def part(runs: Runs, which: slice) -> Runs:
    names: Sequence[str] = ("src_buffer", "src_offset", "dst_buffer", "dst_offset", "length")
    arrays: dict[str, np.ndarray] = {name: getattr(runs, name)[which] for name in names}  # type: ignore[type-arg]
    return Runs(**arrays)
