"""Random requests on a random cluster under random faults, and the laws that hold for every one of them.

A client gets a beginning of the undisturbed continuation, each token once. A story that ends well has given all of it,
one end, and phases that add up. Afterwards nothing is left in any engine. `python -m tests.sim_chaos 17` repeats one
seed, `python -m tests.sim_chaos 1000 5000` runs many.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from pd_service.errors import DeadlineExceeded, Overloaded, Unavailable
from pd_service.gateway.generation import Job, StoryEnd
from pd_service.gateway.phases import Phases
from pd_service.gateway.story import RequestStory
from pd_service.request import EngineSampling, FinishReason, RequestId
from tests import simloop
from tests.sim_cluster import SimCluster
from tests.sim_kv import VOCAB, continuation
from tests.sim_network import SimSettings, now

_MAX_TOKENS = 32  # of prompt and output together; every pool can hold one such request
_PATIENCE_S = 900.0  # of virtual time, until every client must have come to an end
_LATE_TIMER_S = 0.2  # a gateway's own timer is this late, so that the engines' deadlines are seen to work


@dataclass(slots=True, kw_only=True)
class Plan:
    """What one client asks and when it gives up; what it must get is computed here."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    attn_types: tuple[str, ...] = ("FullAttention",)
    stop_at: int | None = None  # the output token of this index is made the stop token
    starts_s: float = 0.0
    cancels_after_s: float | None = None
    leaves_after_tokens: int | None = None
    deadline_s: float | None = None
    expected: list[int] = field(init=False)
    stop: frozenset[int] = frozenset()
    finish: FinishReason = FinishReason.LENGTH

    def __post_init__(self) -> None:
        self.expected = continuation(self.prompt, self.max_new_tokens, self.attn_types)
        if self.stop_at is not None:
            stop_token = self.expected[self.stop_at]
            self.stop, self.finish = frozenset({stop_token}), FinishReason.STOP
            self.expected = self.expected[: self.expected.index(stop_token)]


@dataclass(slots=True)
class Answer:
    """What one client got. `how` is "finished", "left", "cancelled" or the name of an error class."""

    token_ids: list[int]
    how: str
    finish: FinishReason | None
    phases: Phases


async def ask(story: RequestStory, plan: Plan) -> Answer:
    """One client from its first to its last moment. Raises AssertionError for whatever no client may see."""
    await asyncio.sleep(plan.starts_s)
    accepted_at = now()
    job = Job(
        request_id=RequestId("the client's"),
        prompt_token_ids=plan.prompt,
        sampling=EngineSampling(stop_token_ids=plan.stop),
        max_new_tokens=plan.max_new_tokens,
        deadline=None if plan.deadline_s is None else accepted_at + plan.deadline_s,
        phases=Phases(mark=accepted_at),
    )
    answer = Answer([], "finished", None, job.phases)
    try:
        async with asyncio.timeout(plan.cancels_after_s), asyncio.timeout_at(_last_moment(job)):
            await _listen(story, job, plan, answer)
    except TimeoutError:
        answer.how = "cancelled"
    except (Unavailable, Overloaded, DeadlineExceeded) as error:
        answer.how = type(error).__name__
    _check(answer, plan, accepted_at)
    return answer


def _last_moment(job: Job) -> float | None:
    return None if job.deadline is None else job.deadline + _LATE_TIMER_S


async def _listen(story: RequestStory, job: Job, plan: Plan, answer: Answer) -> None:
    async with aclosing(story.run(job)) as events:
        async for event in events:
            assert answer.finish is None, f"{event} after the end"
            if isinstance(event, StoryEnd):
                answer.finish = event.finish
                continue
            assert event.token_ids, "an event without tokens"
            answer.token_ids.extend(event.token_ids)
            if len(answer.token_ids) == plan.leaves_after_tokens:
                answer.how = "left"
                return
    assert answer.finish is not None, "the story ended without a word"


def _check(answer: Answer, plan: Plan, accepted_at: float) -> None:
    got, expected = answer.token_ids, plan.expected
    assert got == expected[: len(got)], f"wrong tokens: {got} instead of {expected}"
    phases = answer.phases
    parts = (phases.queue_ms, phases.prefill_ms, phases.transfer_ms, phases.confirm_ms, phases.first_decode_ms)
    assert abs(sum(parts) + phases.decode_ms - phases.total_ms) < 1e-6, f"the phases do not add up: {phases}"
    assert abs(phases.total_ms - (phases.mark - accepted_at) * 1e3) < 1e-6, f"time is missing: {phases}"
    assert min(parts) >= 0, f"time below zero: {phases}"
    if answer.how == "finished":
        assert (got, answer.finish) == (expected, plan.finish), f"an answer that only looks complete: {answer}"
    if answer.how == "DeadlineExceeded":
        assert plan.deadline_s is not None, "a deadline that nobody set"


# ---- random courses


def draw_settings(rng: random.Random) -> SimSettings:
    max_num_seqs = rng.randint(1, 6)
    step_s = rng.choice([0.005, 0.03, 0.1])
    block_size = rng.choice([1, 2, 4])
    least_blocks = -(-_MAX_TOKENS // block_size)
    return SimSettings(
        num_prefill=rng.choice([1, 2, 3]),
        num_decode=rng.choice([1, 1, 2, 3]),
        num_gateways=rng.randint(1, 2),
        attn_types=rng.choice([("FullAttention",), ("FullAttention", "SlidingWindow"), ("SlidingWindow",)]),
        block_size=block_size,
        prefill_blocks=least_blocks + rng.randint(0, 8),
        decode_blocks=least_blocks + rng.randint(0, 8),
        budget=rng.randint(max_num_seqs, 16),
        max_num_seqs=max_num_seqs,
        max_waiting=rng.choice([0, 2, 8]),
        local_prefill_max_tokens=rng.choice([0, 0, 8]),
        has_prefix_cache=rng.random() < 0.5,
        lease_s=rng.choice([0.3, 1.0]),
        step_s=(step_s / 5, step_s),
        block_copy_s=(0.0, rng.choice([0.001, 0.05, 0.2])),
        delay_s=(0.0, rng.choice([0.001, 0.02])),
    )


def _draw_prompt(rng: random.Random) -> tuple[int, ...]:
    """Half of the prompts begin alike, for as many tokens as chance says."""
    length = rng.randint(1, _MAX_TOKENS - 12)
    num_alike = rng.choice([0, rng.randint(0, length)])
    return (*range(num_alike), *(rng.randrange(VOCAB) for _ in range(length - num_alike)))


def draw_plan(rng: random.Random, attn_types: tuple[str, ...], impatience: float) -> Plan:
    """`impatience` is the share of clients that do not wait for their answer to be complete."""
    max_new_tokens = rng.choice([1, 2, 3, 12, rng.randint(4, 12)])
    way_out = rng.choice(["cancel", "leave", "deadline"]) if rng.random() < impatience else ""
    return Plan(
        prompt=_draw_prompt(rng),
        max_new_tokens=max_new_tokens,
        attn_types=attn_types,
        stop_at=rng.choice([None, None, None, None, 0, rng.randrange(max_new_tokens)]),
        starts_s=rng.choice([0.1, rng.uniform(0.0, 2.0)]),
        cancels_after_s=rng.uniform(0.0, 2.0) if way_out == "cancel" else None,
        leaves_after_tokens=rng.randint(1, max_new_tokens) if way_out == "leave" else None,
        deadline_s=rng.uniform(0.0, 2.0) if way_out == "deadline" else None,
    )


async def disturb(cluster: SimCluster, rng: random.Random, counts: Counter[str]) -> None:
    """A few faults, one after the other; engines that crashed come back under their old address."""

    async def crash(engine_id: str) -> None:
        await cluster.crash(engine_id)
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        cluster.start_engine(engine_id)

    async with asyncio.TaskGroup() as group:
        for _ in range(rng.randint(0, 8)):
            await asyncio.sleep(rng.uniform(0.0, 0.8))
            fault = rng.choice(["crash", "crash", "cut", "stall", "stall"])
            targets: list[Any] = list(cluster.engines) if fault == "crash" else cluster.connections
            if not targets:
                continue
            counts[fault] += 1
            target = rng.choice(targets)
            if fault == "crash":
                group.create_task(crash(target))
                await asyncio.sleep(0)
            elif fault == "cut":
                cluster.cut(target)
            else:
                rng.choice([target.up, target.down]).stall(rng.uniform(0.0, 3.0) * cluster.settings.lease_s)


async def course(seed: int, impatience: float, changes: dict[str, Any]) -> Counter[str]:
    """One whole run. Returns what happened how often; raises AssertionError when a law is broken."""
    rng = random.Random(seed)
    settings = replace(draw_settings(rng), **changes)
    plans = [draw_plan(rng, settings.attn_types, impatience) for _ in range(rng.randint(4, 20))]
    counts: Counter[str] = Counter()
    async with SimCluster(settings, seed) as cluster:
        async with asyncio.timeout(_PATIENCE_S), asyncio.TaskGroup() as group:
            clients = [group.create_task(ask(rng.choice(cluster.gateways).story, plan)) for plan in plans]
            group.create_task(disturb(cluster, rng, counts))
        await cluster.settle()
        for client in clients:
            counts[client.result().how] += 1
            counts["retries"] += client.result().phases.retries
        for engine in cluster.engines.values():
            counts["cached tokens"] += engine.scheduler.counters.cached_tokens
            counts["preemptions"] += engine.scheduler.counters.preemptions
            counts["early reads"] += engine.reader.num_early_reads
            counts["lost claims"] += engine.reader.num_lost_claims
            counts.update(f"lease {end}" for end in engine.holder.ends)
    return counts


def run_seed(seed: int, impatience: float = 0.4, **changes: Any) -> Counter[str]:
    """`changes` override the drawn settings. A broken law names the command that shows it again."""
    try:
        return simloop.run(course(seed, impatience, changes), seed)
    except BaseException as error:
        error.add_note(f"repeat it with: {_command(seed, impatience, changes)}")
        raise


def _command(seed: int, impatience: float, changes: dict[str, Any]) -> str:
    if not changes:
        return f"python -m tests.sim_chaos {seed}"
    call = f"run_seed({seed}, {impatience}, **{changes!r})"
    return f'python -c "from tests.sim_chaos import run_seed; {call}"'


def main() -> None:
    first = int(sys.argv[1])
    last = int(sys.argv[2]) if len(sys.argv) > 2 else first
    total: Counter[str] = Counter()
    for seed in range(first, last + 1):
        total += run_seed(seed)
    print(f"seeds {first} to {last} hold; {dict(sorted(total.items()))}")


if __name__ == "__main__":
    main()
