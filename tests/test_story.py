"""Laws of the story on real schedulers, KV managers and leases, under virtual time and every kind of fault.

Where R and a number stand, the law is the requirement of that number for systems of this kind.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from pd_service.request import FinishReason
from tests import simloop
from tests.sim_chaos import Answer, Plan, ask, run_seed
from tests.sim_cluster import SimCluster, attempts
from tests.sim_network import SimSettings, now

T = TypeVar("T")

ONE_EACH = SimSettings(num_prefill=1, num_decode=1, max_waiting=32)
PROMPT = (5, 80, 13, 7, 902, 44, 3, 611, 29)

# Courses in which the faults of a broken cluster show: pulls longer than a lease; a small decode engine and impatience.
LONG_PULLS: dict[str, Any] = {"num_prefill": 1, "block_copy_s": (0.05, 0.4), "lease_s": 0.3}
CANCELLED_PULLS: dict[str, Any] = {
    "impatience": 0.7,
    "num_prefill": 2,
    "num_decode": 1,
    "attn_types": ("FullAttention",),
    "block_size": 1,
    "prefill_blocks": 128,
    "decode_blocks": 32,
    "max_num_seqs": 4,
    "budget": 8,
    "max_waiting": 8,
    "local_prefill_max_tokens": 0,
    "lease_s": 3.0,
    "step_s": (0.002, 0.01),
    "block_copy_s": (0.01, 0.15),
}


def simulate(settings: SimSettings, script: Callable[[SimCluster], Awaitable[T]], seed: int = 0) -> T:
    """The script's result, after every engine was seen to be empty."""

    async def main() -> T:
        async with SimCluster(settings, seed) as cluster:
            async with asyncio.timeout(600):
                result = await script(cluster)
            await cluster.settle()
            return result

    return simloop.run(main(), seed)


async def ask_all(cluster: SimCluster, plans: Iterable[Plan]) -> list[Answer]:
    """All at the first gateway."""
    return await asyncio.gather(*(ask(cluster.gateways[0].story, plan) for plan in plans))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110  # time is virtual: looking often costs nothing and delays nobody
            await asyncio.sleep(0.001)


def plan(number: int = 0, max_new_tokens: int = 8, length: int = len(PROMPT), **changes: Any) -> Plan:
    """No two numbers have a token in common at the same place."""
    prompt = tuple((PROMPT * 4)[i] + number for i in range(length))
    return Plan(prompt=tuple(t % 1000 for t in prompt), max_new_tokens=max_new_tokens, **changes)


# ---- all laws at once, under all faults


@pytest.mark.parametrize("seed", range(400))
def test_every_law_holds_under_every_fault(seed: int) -> None:
    run_seed(seed)


def test_a_seed_gives_one_course() -> None:
    assert run_seed(17) == run_seed(17)


def test_the_courses_contain_what_they_are_for() -> None:
    total: Counter[str] = Counter()
    for seed in range(60):
        total += run_seed(seed)
    faults = {"crash", "cut", "stall"}
    results = {"retries", "preemptions", "early reads"}
    results |= {f"lease {end}" for end in ("confirmed", "released", "expired", "withdrawn")}
    ways_out = {"finished", "cancelled", "left", "DeadlineExceeded"}
    assert not (faults | results | ways_out) - total.keys()


def broken_seeds(seeds: range, **changes: Any) -> list[int]:
    """Those that give wrong tokens; whatever else goes wrong is raised."""
    broken = []
    for seed in seeds:
        try:
            run_seed(seed, **changes)
        except BaseExceptionGroup as errors:
            if errors.subgroup(lambda e: str(e).startswith("wrong tokens")) is None:
                raise
            broken.append(seed)
    return broken


@pytest.mark.parametrize(("fault", "changes"), [("skips_confirm", LONG_PULLS), ("frees_under_pull", CANCELLED_PULLS)])
def test_a_cluster_with_a_fault_of_its_own_gives_wrong_tokens_and_a_sound_one_never(
    fault: str, changes: dict[str, Any]
) -> None:
    seeds = range(60)
    assert broken_seeds(seeds, **changes, **{fault: True})
    assert not broken_seeds(seeds, **changes)


# ---- the hand-over


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
def test_max_tokens_is_exact_and_one_token_needs_no_decode_engine(max_new_tokens: int) -> None:
    """R61."""

    async def script(cluster: SimCluster) -> None:
        (answer,) = await ask_all(cluster, [plan(max_new_tokens=max_new_tokens)])
        assert (answer.how, answer.finish) == ("finished", FinishReason.LENGTH)
        assert len(answer.token_ids) == max_new_tokens
        assert len(cluster.counted("prefill")) == 1
        assert len(cluster.counted("decode")) == (max_new_tokens > 1)

    simulate(ONE_EACH, script)


def test_one_token_is_served_without_any_decode_engine() -> None:
    """R61."""

    async def script(cluster: SimCluster) -> None:
        (answer,) = await ask_all(cluster, [plan(max_new_tokens=1)])
        assert answer.how == "finished"

    simulate(replace(ONE_EACH, num_decode=0), script)


def test_a_stop_token_as_first_token_gives_an_empty_answer_and_no_decode_step() -> None:
    """R62."""

    async def script(cluster: SimCluster) -> None:
        (answer,) = await ask_all(cluster, [plan(stop_at=0)])
        assert (answer.how, answer.token_ids, answer.finish) == ("finished", [], FinishReason.STOP)
        assert not cluster.engines["decode-0"].scheduler.counters.steps
        assert cluster.engines["prefill-0"].holder.ends == ["withdrawn"], "a finished request keeps no lease"

    simulate(ONE_EACH, script)


@pytest.mark.parametrize("length", range(1, 18))
def test_the_prompts_kv_is_handed_over_and_only_the_new_positions_are_computed(length: int) -> None:
    """R63: the decode engine receives exactly the prompt, and computes each output token but the last once."""

    attn_types = ("FullAttention", "SlidingWindow")

    async def script(cluster: SimCluster) -> None:
        (answer,) = await ask_all(cluster, [plan(length=length, max_new_tokens=5, attn_types=attn_types)])
        assert answer.how == "finished"
        counters = cluster.engines["decode-0"].scheduler.counters
        assert (counters.received_tokens, counters.computed_tokens) == (length, 4)
        assert cluster.engines["prefill-0"].scheduler.counters.computed_tokens == length
        assert cluster.engines["prefill-0"].holder.ends == ["confirmed"]

    simulate(replace(ONE_EACH, attn_types=attn_types), script)


def test_a_short_prompt_goes_to_a_decode_engine_alone() -> None:
    async def script(cluster: SimCluster) -> None:
        short, long = await ask_all(cluster, [plan(1, length=8), plan(2, length=9)])
        assert (short.how, long.how) == ("finished", "finished")
        assert attempts(cluster.counted("decode"), ticket=None) == 1
        assert [len(r.token_ids) for r in cluster.counted("prefill")] == [9]

    simulate(replace(ONE_EACH, local_prefill_max_tokens=8), script)


# ---- full, empty and small pools


def test_a_full_decode_engine_costs_a_refused_call_and_no_second_prefill() -> None:
    """The second gateway does not know yet that the engine it likes best has been filled by the first."""

    async def script(cluster: SimCluster) -> None:
        first, second = cluster.gateways
        connection = second.clients["decode-0"].connection
        assert connection is not None
        connection.down.stall(1.0)
        answers = await asyncio.gather(
            ask(first.story, plan(1, max_new_tokens=30)), ask(second.story, plan(2, starts_s=0.3))
        )
        assert [(a.how, a.phases.retries) for a in answers] == [("finished", 0)] * 2
        assert [len(cluster.counted(name)) for name in ("prefill", "decode-0", "decode-1")] == [2, 2, 1]

    settings = SimSettings(num_prefill=1, num_gateways=2, max_num_seqs=1, max_waiting=0, lease_s=10.0)
    simulate(settings, script)


def test_no_prefill_is_wasted_while_there_is_no_decode_engine() -> None:
    async def script(cluster: SimCluster) -> None:
        asking = asyncio.ensure_future(ask_all(cluster, [plan(i) for i in range(3)]))
        await asyncio.sleep(20)
        assert not cluster.counted("prefill")
        cluster.start_engine("decode-0")
        answers = await asking
        assert [(a.how, a.phases.retries) for a in answers] == [("finished", 0)] * 3

    simulate(replace(ONE_EACH, num_decode=0), script)


@pytest.mark.parametrize("empty", ["prefill", "decode"])
def test_a_pool_that_stays_empty_ends_the_request_when_the_wait_is_over(empty: str) -> None:
    async def script(cluster: SimCluster) -> None:
        (answer,) = await ask_all(cluster, [plan()])
        assert (answer.how, answer.token_ids) == ("Unavailable", [])
        assert now() == pytest.approx(5.0)

    settings = replace(ONE_EACH, engine_wait_s=5.0)
    simulate(replace(settings, num_prefill=0) if empty == "prefill" else replace(settings, num_decode=0), script)


def test_twenty_requests_pass_through_a_prefill_engine_for_four_and_a_decode_engine_for_two() -> None:
    """R80: what waits for the decode engine keeps its lease, however long the queue."""

    async def script(cluster: SimCluster) -> None:
        answers = await ask_all(cluster, [plan(i, length=8, max_new_tokens=5) for i in range(20)])
        assert [(a.how, a.phases.retries) for a in answers] == [("finished", 0)] * 20
        assert len(cluster.counted("prefill")) == 20

    simulate(replace(ONE_EACH, prefill_blocks=8, decode_blocks=6, lease_s=0.3), script)


def test_a_decode_engine_admits_only_what_can_also_run() -> None:
    """R76: 7 blocks of 4 tokens, prompts of 16 and 12."""

    async def script(cluster: SimCluster) -> None:
        answers = await ask_all(cluster, [plan(1, length=16), plan(2, length=12)])
        assert [a.how for a in answers] == ["finished"] * 2

    simulate(replace(ONE_EACH, decode_blocks=7), script)


# ---- leases and transfers


def test_a_lease_is_extended_while_its_request_waits_for_a_decode_engine() -> None:
    """R40."""

    async def script(cluster: SimCluster) -> None:
        first, second = await ask_all(cluster, [plan(1, max_new_tokens=40), plan(2, starts_s=0.2)])
        assert (first.phases.retries, second.phases.retries) == (0, 0)
        assert second.phases.transfer_ms > 5 * 100, "it has waited for many leases"
        assert len(cluster.counted("prefill")) == 2

    simulate(replace(ONE_EACH, max_num_seqs=1, lease_s=0.1), script)


def test_a_lost_lease_costs_another_prefill_and_never_a_wrong_token() -> None:
    """R40: the reader's renewals do not arrive, the pull ends after the lease."""

    async def script(cluster: SimCluster) -> None:
        decode = cluster.engines["decode-0"]
        asking = asyncio.ensure_future(ask_all(cluster, [plan()]))
        await until(lambda: bool(decode.reader.channels))
        await asyncio.sleep(0.05)  # the ticket is open by now
        decode.reader.channels[0].connection.up.stall(1.0)
        (answer,) = await asking
        assert (answer.how, answer.phases.retries) == ("finished", 1)
        assert len(cluster.counted("prefill")) == 2
        assert cluster.engines["prefill-0"].holder.ends == ["expired", "confirmed"]

    simulate(replace(ONE_EACH, lease_s=0.5, block_copy_s=(0.3, 0.4)), script)


def test_three_poolfuls_of_lost_transfers_do_not_reduce_capacity() -> None:
    """R39: the plane brings nothing, each pull ends by its time limit, then the plane works again."""

    async def script(cluster: SimCluster) -> None:
        cluster.is_plane_dead = True
        asking = asyncio.ensure_future(ask_all(cluster, [plan(i, max_new_tokens=6) for i in range(9)]))
        await until(lambda: len(cluster.counted("decode")) >= 9)
        await asyncio.sleep(5)
        cluster.is_plane_dead = False
        assert all(answer.how == "finished" for answer in await asking)
        assert sum(answer.phases.retries for answer in asking.result()) >= 9
        await cluster.settle()
        answers = await ask_all(cluster, [plan(i, max_new_tokens=6) for i in range(3)])
        assert [(a.how, a.phases.retries) for a in answers] == [("finished", 0)] * 3

    simulate(replace(ONE_EACH, decode_blocks=12, pull_timeout_s=1.0), script)


# ---- deaths


def test_a_prefill_engines_death_ends_its_transfers_at_once_and_nothing_else() -> None:
    """R44: no transfer waits for its time limit, and what has arrived goes on."""

    async def script(cluster: SimCluster) -> None:
        decode = cluster.engines["decode-0"]
        asking = asyncio.ensure_future(ask_all(cluster, [plan(1, max_new_tokens=40), plan(2, starts_s=1.0)]))
        await until(lambda: attempts(decode.submissions) == 2 and decode.reader.num_open > 0)
        await asyncio.sleep(0.1)
        await cluster.crash("prefill-0")
        cluster.start_engine("prefill-0")
        decoding, pulling = await asking
        assert [a.how for a in (decoding, pulling)] == ["finished"] * 2
        assert (decoding.phases.retries, pulling.phases.retries > 0) == (0, True)
        assert now() < 10

    simulate(replace(ONE_EACH, pull_timeout_s=100.0, block_copy_s=(0.2, 0.2)), script)


@pytest.mark.parametrize("num_tokens", range(8))
def test_a_decode_engines_death_in_mid_stream_gives_a_true_continuation(num_tokens: int) -> None:
    """R88: after each token once. `ask` compares every token with the undisturbed run."""

    async def script(cluster: SimCluster) -> None:
        decode = cluster.engines["decode-0"]
        asking = asyncio.ensure_future(ask_all(cluster, [plan(max_new_tokens=9)]))
        await until(lambda: decode.scheduler.counters.computed_tokens >= num_tokens and bool(decode.submissions))
        await cluster.crash("decode-0")
        cluster.start_engine("decode-0")
        (answer,) = await asking
        assert (answer.how, len(answer.token_ids)) == ("finished", 9)
        assert answer.phases.retries >= 1

    simulate(ONE_EACH, script)


def test_a_client_gets_an_error_and_no_more_tokens_when_every_engine_is_gone() -> None:
    """R88."""

    async def script(cluster: SimCluster) -> None:
        decode = cluster.engines["decode-0"]
        asking = asyncio.ensure_future(ask_all(cluster, [plan(max_new_tokens=30)]))
        await until(lambda: decode.scheduler.counters.computed_tokens >= 3)
        await cluster.crash("decode-0")
        await cluster.crash("prefill-0")
        (answer,) = await asking
        assert (answer.how, answer.finish) == ("Unavailable", None)
        assert 1 <= len(answer.token_ids) < 30

    simulate(replace(ONE_EACH, engine_wait_s=5.0), script)


# ---- clients that do not wait


@pytest.mark.parametrize("blocked", ["no engine", "prefill", "pull", "decode"])
def test_the_deadline_ends_the_request_whichever_stage_it_is_in(blocked: str) -> None:
    settings = {
        "no engine": replace(ONE_EACH, num_decode=0),
        "prefill": replace(ONE_EACH, step_s=(5.0, 5.0)),
        "pull": replace(ONE_EACH, block_copy_s=(2.0, 2.0), pull_timeout_s=20.0),
        "decode": ONE_EACH,
    }[blocked]

    async def script(cluster: SimCluster) -> None:
        (answer,) = await ask_all(cluster, [plan(max_new_tokens=50, deadline_s=1.0)])
        assert answer.how in ("DeadlineExceeded", "cancelled")
        assert now() == pytest.approx(1.2, abs=0.2)

    simulate(settings, script)


@pytest.mark.parametrize("num_tokens", range(1, 8))
def test_a_client_that_leaves_takes_its_request_out_of_every_engine_at_once(num_tokens: int) -> None:
    """Well before any lease or time limit could do it."""

    async def script(cluster: SimCluster) -> None:
        (answer,) = await ask_all(cluster, [plan(leaves_after_tokens=num_tokens)])
        assert answer.how == "left"
        await asyncio.sleep(1.0)
        for engine in cluster.engines.values():
            engine.check_idle()

    simulate(replace(ONE_EACH, lease_s=1000.0, pull_timeout_s=1000.0), script)
