"""Sampling through real engines: the same tokens alone, in a batch, through P and D, after a loss, after a preemption.

And the same as a plain loop over the `transformers` model with the penalties' formulas written out.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from pd_service.config import EngineSettings, GatewaySettings
from pd_service.gateway.generation import (
    Generation,
    GenerationDelta,
    GenerationFinish,
    GenerationPrompt,
    StoryEnd,
    StoryPrompt,
    StoryTokens,
)
from pd_service.gateway.intake import ClientRequest, Intake, TokenPrompt, sampling_params
from pd_service.gateway.job import Job, answer_seed
from pd_service.gateway.recent import RecentRequests
from pd_service.gateway.tokenizer import Tokenizer
from pd_service.request import EngineSampling, TokenLogprobs
from tests.local_cluster import LocalCluster, eventually, local_cluster, new_job
from tests.one_loop import run_async

PROMPT = list(range(3, 40))
PENALTIES = {"presence_penalty": 0.75, "frequency_penalty": 0.5, "repetition_penalty": 1.25}
LIKELY = ((5, 8.0), (9, 7.5))  # so likely that they come again and again, and first: how often they came matters
SAMPLINGS = {
    "greedy": EngineSampling(),
    "seeded": EngineSampling(temperature=1.0, top_p=0.875, seed=7),
    "presence": EngineSampling(presence_penalty=2.0, logit_bias=LIKELY),
    "frequency": EngineSampling(frequency_penalty=1.5, logit_bias=LIKELY),
    "repetition": EngineSampling(repetition_penalty=1.5, logit_bias=LIKELY),
    "bias": EngineSampling(logit_bias=(*LIKELY, (77, -100.0))),
    "all, greedy": EngineSampling(logit_bias=((5, 8.0),), **PENALTIES),
    "all, seeded": EngineSampling(temperature=0.75, top_k=50, seed=11, logit_bias=((5, 4.0),), **PENALTIES),
}
GREEDY = [name for name, sampling in SAMPLINGS.items() if not sampling.temperature]
LOCAL = GatewaySettings(local_prefill_max_tokens=10_000)


def reference(model_dir: Path, sampling: EngineSampling, num_tokens: int) -> list[int]:
    """The greedy continuation of PROMPT, one whole forward pass for each token, and plain numbers for the penalties."""
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    bias, tokens = dict(sampling.logit_bias), list(PROMPT)
    with torch.inference_mode():
        for _ in range(num_tokens):
            output = tokens[len(PROMPT) :]
            values = []
            for token, logit in enumerate(model(torch.tensor([tokens])).logits[0, -1].tolist()):
                value = logit + bias.get(token, 0.0)
                if token in tokens:
                    value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
                if token in output:
                    value -= sampling.presence_penalty + output.count(token) * sampling.frequency_penalty
                values.append(value)
            tokens.append(max(range(len(values)), key=values.__getitem__))
    return tokens[len(PROMPT) :]


async def all_alone(model_dir: Path, num_tokens: int) -> dict[str, list[int]]:
    """Of every sampling. One engine, one request at a time."""
    async with local_cluster(model_dir, prefill=0, decode=0, mixed=1, gateway=LOCAL) as cluster:
        return {name: await cluster.generate(PROMPT, num_tokens, sampling) for name, sampling in SAMPLINGS.items()}


async def at_once(cluster: LocalCluster, num_tokens: int) -> dict[str, list[int]]:
    answers = await asyncio.gather(*(cluster.generate(PROMPT, num_tokens, s) for s in SAMPLINGS.values()))
    return dict(zip(SAMPLINGS, answers, strict=True))


@pytest.mark.parametrize("name", GREEDY)
def test_the_first_token_counts_exactly_once_behind_a_hand_over(tiny_model_dir: Path, name: str) -> None:
    """R64, against a loop that knows nothing of engines."""
    expected = reference(tiny_model_dir, SAMPLINGS[name], 16)

    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            assert await cluster.generate(PROMPT, 16, SAMPLINGS[name]) == expected

    run_async(scenario())


def test_options_change_the_answer(tiny_model_dir: Path) -> None:
    """So that the other laws compare answers that differ."""
    answers = run_async(all_alone(tiny_model_dir, 80))
    assert len({tuple(answer) for answer in answers.values()}) == len(SAMPLINGS)


def test_tokens_are_the_same_in_a_batch_and_through_both_pools(tiny_model_dir: Path) -> None:
    """R106."""

    async def scenario() -> None:
        expected = await all_alone(tiny_model_dir, 24)
        async with local_cluster(tiny_model_dir, prefill=0, decode=0, mixed=1, gateway=LOCAL) as cluster:
            assert await at_once(cluster, 24) == expected
        settings = EngineSettings(max_num_batched_tokens=16)  # chunks of the prompt, between the others' decodes
        async with local_cluster(tiny_model_dir, settings=settings) as cluster:
            assert await at_once(cluster, 24) == expected
            assert await at_once(cluster, 24) == expected  # now with a prefix cache that knows the prompt

    run_async(scenario())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_tokens_are_the_same_after_the_loss_of_an_engine(tiny_model_dir: Path, role: str) -> None:
    """Penalties go on from the output so far, wherever the request goes round again."""

    async def decodes_run(cluster: LocalCluster) -> bool:
        return sum(client.load.running for client in cluster.directory.ready("decode")) > 2

    async def scenario() -> None:
        expected = await all_alone(tiny_model_dir, 80)
        async with local_cluster(tiny_model_dir, prefill=2, decode=2) as cluster:
            asking = asyncio.ensure_future(at_once(cluster, 80))
            await eventually(lambda: decodes_run(cluster), "streams are decoded")
            await cluster.remove(next(name for name in cluster.nodes if name.startswith(role)))
            assert await asking == expected

    run_async(scenario())


def test_tokens_are_the_same_after_preemptions(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        expected = await all_alone(tiny_model_dir, 80)
        num_bytes = 2**18  # 2 layers, keys and values, 2 heads of 16 float32: 512 tokens, where 8 × 117 are wanted
        async with local_cluster(tiny_model_dir, kv_cache_bytes=num_bytes) as cluster:
            assert await at_once(cluster, 80) == expected
            assert sum([(await cluster.status(name)).preemptions for name in cluster.nodes]) > 0

    run_async(scenario())


# ---- log probabilities


async def judged(cluster: LocalCluster, job: Job) -> tuple[list[TokenLogprobs], list[int], list[TokenLogprobs]]:
    """Of the prompt, told once and before all tokens; the output; and of the output."""
    async with aclosing(cluster.story.run(job)) as story:
        events = [event async for event in story]
    prompts = [event for event in events if isinstance(event, StoryPrompt)]
    assert prompts == events[: len(prompts)]
    assert len(prompts) <= 1
    assert isinstance(events[-1], StoryEnd)
    tokens = [event for event in events if isinstance(event, StoryTokens)]
    return (
        [entry for prompt in prompts for entry in prompt.logprobs],
        [token for event in tokens for token in event.token_ids],
        [entry for event in tokens for entry in event.logprobs],
    )


@pytest.mark.parametrize("length", [1, 2, 16, 17, 37])
def test_a_prompt_is_judged_alike_by_one_engine_and_through_both_pools(tiny_model_dir: Path, length: int) -> None:
    """R66: one entry for each prompt token but the first, computed even where a prefix cache knows the prompt."""
    sampling = EngineSampling(prompt_logprobs=3, logprobs=2)

    async def scenario() -> None:
        async with local_cluster(tiny_model_dir, prefill=0, decode=0, mixed=1, gateway=LOCAL) as cluster:
            expected = await judged(cluster, new_job(PROMPT[:length], 5, sampling))
        settings = EngineSettings(max_num_batched_tokens=10)
        async with local_cluster(tiny_model_dir, settings=settings) as cluster:
            for _ in range(2):
                found = await judged(cluster, new_job(PROMPT[:length], 5, sampling))
                assert found[1] == expected[1]
                for ours, theirs in zip(found[0] + found[2], expected[0] + expected[2], strict=True):
                    assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
                    assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
                    assert ours.rank == theirs.rank
        assert (len(expected[0]), len(expected[2])) == (length - 1, 5)

    run_async(scenario())


def test_a_text_is_judged_alike_as_output_and_as_prompt(tiny_model_dir: Path) -> None:
    """Whatever options chose the output: log probabilities are those of the model."""
    sampling = replace(SAMPLINGS["all, seeded"], logprobs=1)

    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            _, output, as_output = await judged(cluster, new_job(PROMPT, 20, sampling))
            whole = new_job(PROMPT + output, 1, EngineSampling(prompt_logprobs=1))
            as_prompt = (await judged(cluster, whole))[0][len(PROMPT) - 1 :]
        for ours, theirs in zip(as_output, as_prompt, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert (ours.rank, ours.top[0][0]) == (theirs.rank, theirs.top[0][0])

    run_async(scenario())


def test_a_retry_after_the_first_token_judges_the_prompt_no_second_time(tiny_model_dir: Path) -> None:
    sampling = EngineSampling(prompt_logprobs=0, logprobs=0)

    async def decodes_run(cluster: LocalCluster) -> bool:
        return sum(client.load.running for client in cluster.directory.ready("decode")) > 0

    async def scenario() -> None:
        async with local_cluster(tiny_model_dir, decode=2) as cluster:
            job = new_job(PROMPT, 200, sampling)
            asking = asyncio.ensure_future(judged(cluster, job))
            await eventually(lambda: decodes_run(cluster), "the stream is decoded")
            await cluster.remove(job.affinity.decode)
            of_prompt, output, of_output = await asking
        assert job.phases.retries >= 1
        assert job.phases.cached_tokens == 0  # what the retry finds in a cache was computed for this request
        assert (len(of_prompt), len(output), len(of_output)) == (len(PROMPT) - 1, 200, 200)

    run_async(scenario())


# ---- several answers of one request


def make_generation(cluster: LocalCluster, model_dir: Path) -> Generation:
    intake = Intake(
        model_name="tiny",
        max_model_len=512,
        vocab_size=512,
        eos_token_ids=[],
        tokenizer=Tokenizer(model_dir),
        max_requests=16,
    )
    return Generation(intake=intake, story=cluster.story, metrics=cluster.metrics, recent=RecentRequests(8))


async def ask_for(
    generation: Generation, n: int, num_tokens: int, **sampling: object
) -> tuple[list[GenerationFinish], list[list[int]]]:
    """The ends and the tokens of all answers, by index."""
    params = sampling_params(**({"max_tokens": num_tokens, "seed": 7} | sampling))
    request = ClientRequest(prompt=TokenPrompt(tuple(PROMPT)), sampling=params, n=n)
    ends: dict[int, GenerationFinish] = {}
    tokens: list[list[int]] = [[] for _ in range(n)]
    async with aclosing(generation.generate(request)) as events:
        async for event in events:
            if isinstance(event, GenerationFinish):
                ends[event.index] = event
            elif isinstance(event, GenerationDelta):
                tokens[event.index] += event.token_ids
            else:
                assert isinstance(event, GenerationPrompt)
    return [ends[index] for index in range(n)], tokens


@pytest.mark.parametrize("options", [{}, PENALTIES])
def test_each_of_n_answers_is_what_its_seed_gives_alone(tiny_model_dir: Path, options: dict[str, float]) -> None:
    async def scenario() -> None:
        expected = []
        async with local_cluster(tiny_model_dir, prefill=0, decode=0, mixed=1, gateway=LOCAL) as cluster:
            for index in range(4):
                sampling = EngineSampling(temperature=1.0, seed=answer_seed(7, index), **options)
                expected.append(await cluster.generate(PROMPT, 20, sampling))
        async with local_cluster(tiny_model_dir, prefill=2, decode=2) as cluster:
            generation = make_generation(cluster, tiny_model_dir)
            _, tokens = await ask_for(generation, 4, 20, **options)
        assert tokens == expected
        assert len({tuple(answer) for answer in tokens}) == 4

    run_async(scenario())


def test_the_answers_go_where_the_first_went_and_find_its_prompt_there(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir, prefill=2, decode=2) as cluster:
            ends, _ = await ask_for(make_generation(cluster, tiny_model_dir), 4, 30)
            statuses = {name: await cluster.status(name) for name in cluster.nodes}
        for role in ("prefill", "decode"):
            steps = [status.steps for name, status in statuses.items() if name.startswith(role)]
            assert sorted(count > 0 for count in steps) == [False, True], (role, steps)
        assert ends[0].phases.cached_tokens == 0
        assert all(end.phases.cached_tokens >= 32 for end in ends[1:])  # whole blocks of 16 of the 37
        prefill = next(status for name, status in statuses.items() if name.startswith("prefill") and status.steps)
        assert prefill.computed_tokens < 2 * len(PROMPT)

    run_async(scenario())


def test_the_loss_of_an_engine_under_n_answers_changes_none(tiny_model_dir: Path) -> None:
    async def decodes_run(cluster: LocalCluster) -> bool:
        return any(client.load.running > 2 for client in cluster.directory.ready("decode"))

    async def scenario() -> None:
        async with local_cluster(tiny_model_dir, prefill=2, decode=2) as cluster:
            generation = make_generation(cluster, tiny_model_dir)
            _, expected = await ask_for(generation, 4, 150)
            asking = asyncio.ensure_future(ask_for(generation, 4, 150))
            await eventually(lambda: decodes_run(cluster), "several answers are decoded")
            decodes = cluster.directory.ready("decode")
            await cluster.remove(max(decodes, key=lambda client: client.load.running).engine_id)
            ends, tokens = await asking
            assert tokens == expected
            assert sum(end.phases.retries for end in ends) > 0

    run_async(scenario())


@pytest.mark.parametrize("num_events", [1, 2, 6])
def test_a_client_that_leaves_n_answers_frees_everything(tiny_model_dir: Path, num_events: int) -> None:
    """R60. The cluster's context waits until every block, lease and pull is gone."""

    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            generation = make_generation(cluster, tiny_model_dir)
            request = ClientRequest(prompt=TokenPrompt(tuple(PROMPT)), sampling=sampling_params(), n=5)
            for _ in range(5):
                async with aclosing(generation.generate(request)) as events:
                    for _ in range(num_events):
                        await anext(events)
            await cluster.wait_until_empty()

    run_async(scenario())
