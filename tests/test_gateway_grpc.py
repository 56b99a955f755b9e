"""The gRPC door on a real server: every refusal by name, cancellation, deadlines, large messages, standard services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from gateway_fakes import FakeStory, byte_level_tokenizer, end, is_idle, make_generation, outcomes, tokens
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pd_service.channels import server_options
from pd_service.errors import EngineFailed, Unavailable
from pd_service.gateway.generation import Generation, StoryTokens
from pd_service.gateway.grpc_door import (
    SERVICE_NAME,
    GenerationServicer,
    Health,
    add_standard_services,
)
from pd_service.gateway.tokenizer import Tokenizer
from pd_service.request import FinishReason, TokenLogprobs
from pd_service.rpc import generation_pb2 as pb
from pd_service.rpc import generation_pb2_grpc
from tests.one_loop import run_async

HEALTH = health_pb2.HealthCheckResponse


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("byte_level"))


@asynccontextmanager
async def serving(generation: Generation) -> AsyncIterator[tuple[grpc.aio.Channel, Health]]:
    server = grpc.aio.server(options=server_options())
    generation_pb2_grpc.add_GenerationServicer_to_server(GenerationServicer(generation), server)
    health = await add_standard_services(server, [SERVICE_NAME])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=server_options()) as channel:
            yield channel, health
    finally:
        await server.stop(None)


def against(generation: Generation, scenario: Callable[[grpc.aio.Channel], Awaitable[None]]) -> None:
    async def run() -> None:
        async with serving(generation) as (channel, _):
            await scenario(channel)

    run_async(run())


def ids(*token_ids: int, **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids), **fields)


def generate(channel: grpc.aio.Channel, request: pb.GenerateRequest, timeout_s: float | None = None) -> grpc.aio.Call:
    return generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=timeout_s)


async def answer(channel: grpc.aio.Channel, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in generate(channel, request)]


def test_one_delta_per_story_event_and_one_finish(tokenizer: Tokenizer) -> None:
    entry = TokenLogprobs(-0.5, ((9, -0.5), (8, -1.5)))
    a, b = run_async(tokenizer.encode_text("ab"))[1:]
    story = FakeStory(StoryTokens(token_ids=(a,), logprobs=(entry,)), tokens(b, b), end(), retries=3)

    async def scenario(channel: grpc.aio.Channel) -> None:
        request = ids(5, 6, request_id="mine", sampling=pb.Sampling(logprobs=2, temperature=0, seed=7, max_tokens=3))
        first, second, last = await answer(channel, request)
        assert (first.delta.text, list(first.delta.token_ids)) == ("a", [a])
        assert [top.token_id for top in first.delta.logprobs[0].top] == [9, 8]
        assert (second.delta.text, list(second.delta.token_ids)) == ("bb", [b, b])
        finish = last.finish
        assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == ("length", 2, 3)
        assert (finish.request_id, finish.retries) == ("mine", 3)
        assert (finish.phases.queue_ms, finish.phases.kv_bytes, finish.phases.plane) == (1.5, 64, "shm")

    against(make_generation(tokenizer, story), scenario)
    (job,) = story.jobs
    assert (job.prompt_token_ids, job.max_new_tokens, job.deadline) == ((5, 6), 3, None)
    assert (job.sampling.temperature, job.sampling.seed, job.sampling.logprobs) == (0, 7, 2)


def test_unset_sampling_has_the_documented_defaults(tokenizer: Tokenizer) -> None:
    story = FakeStory(end())

    async def scenario(channel: grpc.aio.Channel) -> None:
        await answer(channel, ids(5))

    against(make_generation(tokenizer, story), scenario)
    sampling = story.jobs[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.logit_bias) == (None, None, ())
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0, 0, 1)
    assert [(job.index, job.priority, job.cache_salt) for job in story.jobs] == [(0, 0, "")]


def test_penalties_bias_priority_and_salt_reach_the_story(tokenizer: Tokenizer) -> None:
    story = FakeStory(end())

    async def scenario(channel: grpc.aio.Channel) -> None:
        penalties = {"presence_penalty": -2, "frequency_penalty": 0.5, "repetition_penalty": 1.5}
        sampling = pb.Sampling(logit_bias={7: -100, 5: 2.5}, **penalties)
        await answer(channel, ids(5, sampling=sampling, priority=-100, cache_salt="mine"))

    against(make_generation(tokenizer, story), scenario)
    (job,) = story.jobs
    given = job.sampling
    assert (given.presence_penalty, given.frequency_penalty, given.repetition_penalty) == (-2, 0.5, 1.5)
    assert given.logit_bias == ((5, 2.5), (7, -100))
    assert (job.priority, job.cache_salt) == (-100, "mine")


def test_held_back_text_is_a_delta_before_the_finish(tokenizer: Tokenizer) -> None:
    a = run_async(tokenizer.encode_text("a"))[1]

    async def scenario(channel: grpc.aio.Channel) -> None:
        first, rest, last = await answer(channel, ids(5, stop=["ab"]))
        assert (first.delta.text, list(first.delta.token_ids)) == ("", [a])
        assert (rest.delta.text, list(rest.delta.token_ids)) == ("a", [])
        assert last.finish.completion_tokens == 1

    against(make_generation(tokenizer, FakeStory(tokens(a), end())), scenario)


@pytest.mark.parametrize("prompt", [{"text": "hi"}, {"chat": pb.ChatPrompt(messages=[pb.ChatMessage(role="user")])}])
def test_text_and_chat_have_one_begin_token(tokenizer: Tokenizer, prompt: dict[str, object]) -> None:
    story = FakeStory(end(FinishReason.STOP))

    async def scenario(channel: grpc.aio.Channel) -> None:
        (last,) = await answer(channel, pb.GenerateRequest(**prompt))
        assert last.finish.reason == "stop"

    against(make_generation(tokenizer, story), scenario)
    assert story.jobs[0].prompt_token_ids.count(0) == 1


REFUSALS = [
    (pb.GenerateRequest(), "INVALID_ARGUMENT", "prompt"),
    (pb.GenerateRequest(text=""), "INVALID_ARGUMENT", "prompt"),
    (ids(), "INVALID_ARGUMENT", "prompt"),
    (ids(380), "INVALID_ARGUMENT", "prompt"),
    (ids(*[5] * 64), "INVALID_ARGUMENT", "64 tokens, but at most 63"),
    (pb.GenerateRequest(chat=pb.ChatPrompt()), "INVALID_ARGUMENT", "messages"),
    (pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="x")])), "INVALID_ARGUMENT", "messages"),
    (ids(5, model="other"), "NOT_FOUND", "model"),
    (ids(5, request_id="x" * 129), "INVALID_ARGUMENT", "request_id"),
    (ids(5, stop=[""]), "INVALID_ARGUMENT", "stop"),
    (ids(5, stop=["x"] * 17), "INVALID_ARGUMENT", "stop"),
    (ids(5, sampling=pb.Sampling(temperature=2.5)), "INVALID_ARGUMENT", "temperature"),
    (ids(5, sampling=pb.Sampling(temperature=float("nan"))), "INVALID_ARGUMENT", "temperature"),
    (ids(5, sampling=pb.Sampling(top_p=0)), "INVALID_ARGUMENT", "top_p"),
    (ids(5, sampling=pb.Sampling(min_p=1.5)), "INVALID_ARGUMENT", "min_p"),
    (ids(5, sampling=pb.Sampling(max_tokens=0)), "INVALID_ARGUMENT", "max_tokens"),
    (ids(5, sampling=pb.Sampling(max_tokens=64)), "INVALID_ARGUMENT", "max_tokens"),
    (ids(5, sampling=pb.Sampling(logprobs=21)), "INVALID_ARGUMENT", "logprobs"),
    (ids(5, sampling=pb.Sampling(stop_token_ids=[400])), "INVALID_ARGUMENT", "stop_token_ids"),
    (ids(5, sampling=pb.Sampling(prompt_logprobs=21)), "INVALID_ARGUMENT", "prompt_logprobs"),
    (ids(5, sampling=pb.Sampling(presence_penalty=2.5)), "INVALID_ARGUMENT", "presence_penalty"),
    (ids(5, sampling=pb.Sampling(frequency_penalty=-2.5)), "INVALID_ARGUMENT", "frequency_penalty"),
    (ids(5, sampling=pb.Sampling(frequency_penalty=float("nan"))), "INVALID_ARGUMENT", "frequency_penalty"),
    (ids(5, sampling=pb.Sampling(repetition_penalty=0)), "INVALID_ARGUMENT", "repetition_penalty"),
    (ids(5, sampling=pb.Sampling(repetition_penalty=2.5)), "INVALID_ARGUMENT", "repetition_penalty"),
    (ids(5, sampling=pb.Sampling(repetition_penalty=float("nan"))), "INVALID_ARGUMENT", "repetition_penalty"),
    (ids(5, sampling=pb.Sampling(logit_bias={380: 1})), "INVALID_ARGUMENT", "logit_bias: no token has the id 380"),
    (ids(5, sampling=pb.Sampling(logit_bias={5: -101})), "INVALID_ARGUMENT", "logit_bias.5"),
    (ids(5, sampling=pb.Sampling(logit_bias={5: float("nan")})), "INVALID_ARGUMENT", "logit_bias.5"),
    (ids(5, sampling=pb.Sampling(logit_bias=dict.fromkeys(range(1025), 0))), "INVALID_ARGUMENT", "at most 1024"),
    (ids(5, n=0), "INVALID_ARGUMENT", "n: 1 to 8"),
    (ids(5, n=9), "INVALID_ARGUMENT", "n: 1 to 8"),
    (ids(5, priority=101), "INVALID_ARGUMENT", "priority: -100 to 100"),
    (ids(5, cache_salt="x" * 129), "INVALID_ARGUMENT", "cache_salt"),
]


def test_every_refusal_has_its_status_and_names_the_field(tokenizer: Tokenizer) -> None:
    generation = make_generation(tokenizer, story := FakeStory(end()))

    async def scenario(channel: grpc.aio.Channel) -> None:
        for request, status, detail in REFUSALS:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer(channel, request)
            assert caught.value.code().name == status, request
            assert detail in (caught.value.details() or ""), request

    against(generation, scenario)
    assert not story.jobs
    assert outcomes(generation) == {"refused": len(REFUSALS)}


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (Unavailable("no engine came"), "UNAVAILABLE", "no engine came"),
        (EngineFailed("step failed"), "UNAVAILABLE", "step failed"),
        (ValueError("secret"), "INTERNAL", "internal error"),
    ],
)
def test_a_failure_in_mid_stream_is_a_status_and_no_finish(
    tokenizer: Tokenizer, error: Exception, status: str, detail: str
) -> None:
    generation = make_generation(tokenizer, story := FakeStory(tokens(5), error))

    async def scenario(channel: grpc.aio.Channel) -> None:
        call = generate(channel, ids(5))
        assert (await call.read()).HasField("delta")
        with pytest.raises(grpc.aio.AioRpcError, match=detail) as caught:
            await call.read()
        assert caught.value.code().name == status

    against(generation, scenario)
    assert outcomes(generation) == {"failed": 1}
    assert is_idle(generation, story)


async def until_idle(generation: Generation, story: FakeStory) -> None:
    """The server hears of a cancellation through the network; there is no event on our side to wait for."""
    async with asyncio.timeout(60):
        while not is_idle(generation, story):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def test_a_cancelled_call_ends_its_story(tokenizer: Tokenizer) -> None:
    generation = make_generation(tokenizer, story := FakeStory(tokens(5), asyncio.Event()))

    async def scenario(channel: grpc.aio.Channel) -> None:
        for _ in range(20):
            call = generate(channel, ids(5))
            await call.read()
            call.cancel()
            await until_idle(generation, story)

    against(generation, scenario)
    assert outcomes(generation) == {"aborted": 20}


def test_a_deadline_ends_the_call_and_its_story(tokenizer: Tokenizer) -> None:
    generation = make_generation(tokenizer, story := FakeStory(tokens(5), asyncio.Event()))

    async def scenario(channel: grpc.aio.Channel) -> None:
        call = generate(channel, ids(5), timeout_s=0.3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_idle(generation, story)

    against(generation, scenario)
    assert outcomes(generation) == {"deadline": 1}
    assert story.jobs[0].deadline is not None


def test_a_live_id_is_refused_and_usable_again_after_its_end(tokenizer: Tokenizer) -> None:
    gate = asyncio.Event()
    generation = make_generation(tokenizer, FakeStory(tokens(5), gate, end()))

    async def scenario(channel: grpc.aio.Channel) -> None:
        first = generate(channel, ids(5, request_id="a"))
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError, match="'a'") as caught:
            await answer(channel, ids(5, request_id="a"))
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        gate.set()
        assert (await first.read()).HasField("finish")
        assert (await answer(channel, ids(5, request_id="a")))[-1].HasField("finish")

    against(generation, scenario)


def test_one_request_too_many_is_resource_exhausted(tokenizer: Tokenizer) -> None:
    generation = make_generation(tokenizer, FakeStory(tokens(5), asyncio.Event()), max_requests=1)

    async def scenario(channel: grpc.aio.Channel) -> None:
        live = generate(channel, ids(5))
        await live.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(channel, ids(5))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        live.cancel()

    against(generation, scenario)


def test_messages_over_four_megabytes_pass(tokenizer: Tokenizer) -> None:
    num_tokens = 5 * 2**20
    story = FakeStory(end())

    async def scenario(channel: grpc.aio.Channel) -> None:
        request = ids(*[5] * num_tokens)
        assert request.ByteSize() > 4 * 2**20
        (last,) = await answer(channel, request)
        assert last.finish.prompt_tokens == num_tokens

    against(make_generation(tokenizer, story, max_model_len=num_tokens + 1), scenario)


def test_health_follows_what_is_reported(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with serving(make_generation(tokenizer, FakeStory())) as (channel, health):
            stub = health_pb2_grpc.HealthStub(channel)
            for is_serving, status in ((False, HEALTH.NOT_SERVING), (True, HEALTH.SERVING)):
                await health.report(is_serving=is_serving)
                for name in ("", SERVICE_NAME):
                    assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == status

    run_async(scenario())


def test_a_server_is_not_serving_before_anything_was_reported(tokenizer: Tokenizer) -> None:
    async def scenario(channel: grpc.aio.Channel) -> None:
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == HEALTH.NOT_SERVING

    against(make_generation(tokenizer, FakeStory()), scenario)


def test_reflection_lists_the_services(tokenizer: Tokenizer) -> None:
    async def scenario(channel: grpc.aio.Channel) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        query = reflection_pb2.ServerReflectionRequest(list_services="")
        async for response in stub.ServerReflectionInfo(iter([query])):
            names = {service.name for service in response.list_services_response.service}
        assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names

    against(make_generation(tokenizer, FakeStory()), scenario)
