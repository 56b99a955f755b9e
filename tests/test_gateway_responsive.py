"""The event loop stays free while long prompts are tokenized: twenty of 30,000 tokens at once."""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from gateway_fakes import PLAIN_TEMPLATE, FakeStory, end, make_generation
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pd_service.gateway.generation import Generation
from pd_service.gateway.grpc_door import SERVICE_NAME, GenerationServicer, add_standard_services
from pd_service.gateway.http_door import make_app
from pd_service.gateway.tokenizer import Tokenizer
from pd_service.request import ChatMessage
from pd_service.rpc import generation_pb2, generation_pb2_grpc
from tests.one_loop import run_async
from tests.tokenizer_families import family_tokenizer

NUM_PROMPTS = 20
NUM_TOKENS = 30_000
TEXT = " b" * NUM_TOKENS  # one token each

# ---- a backend's work seen from the loop


class WatchedBackend:
    """Writes into `log` when a call of the backend begins and ends.

    The three steps run in one C loop, where Python's lock changes hands only if the backend itself lets it go: what
    the event loop has written between begin and end, it wrote while the backend was at work.
    """

    def __init__(self, backend: Any, log: list[str]) -> None:
        self._backend = backend
        self._log = log

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, getattr(self._backend, name))

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = threading.current_thread().name
        steps = [
            partial(self._log.append, f"begin {name}"),
            partial(method, *args, **kwargs),
            partial(self._log.append, f"end {name}"),
        ]
        _, result, _ = map(operator.call, steps)
        return result


def turns_within_calls(log: list[str]) -> list[int]:
    """For each call, the turns of the loop between its begin and its end."""
    turns: list[int] = []
    begun: dict[str, int] = {}
    num_turns = 0
    for entry in log:
        what, _, name = entry.partition(" ")
        if what == "turn":
            num_turns += 1
        elif what == "begin":
            begun[name] = num_turns
        else:
            turns.append(num_turns - begun.pop(name))
    return turns


@pytest.mark.parametrize("kind", ["raw", "chat"])
def test_the_loop_turns_while_each_of_twenty_long_prompts_is_tokenized(tmp_path: Path, kind: str) -> None:
    tokenizer = family_tokenizer("byte_level", tmp_path, template=PLAIN_TEMPLATE)
    log: list[str] = []
    tokenizer._backend = WatchedBackend(tokenizer._backend, log)

    async def encode() -> list[int]:
        if kind == "raw":
            return await tokenizer.encode_text(TEXT)
        return await tokenizer.encode_chat([ChatMessage(role="user", content=TEXT)])

    async def scenario() -> list[list[int]]:
        encoding = asyncio.gather(*(encode() for _ in range(NUM_PROMPTS)))
        while not encoding.done():  # each turn of the loop is what is counted
            log.append("turn")
            await asyncio.sleep(0)
        return await encoding

    prompts = asyncio.run(scenario())
    assert all(len(token_ids) >= NUM_TOKENS for token_ids in prompts)
    turns = turns_within_calls(
        [entry for entry in log if entry.startswith(("turn", "begin tokenizer", "end tokenizer"))]
    )
    assert len(turns) >= NUM_PROMPTS
    assert sum(count > 0 for count in turns) >= NUM_PROMPTS, turns


# ---- answers while nothing is tokenized


class StuckTokenizer(Tokenizer):
    """Every prompt blocks its thread until `released`."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        self.released = threading.Event()
        self.num_begun = 0

    def _encode(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        self.num_begun += 1
        assert self.released.wait(timeout=60)
        return super()._encode(text[:9], field, add_special_tokens=add_special_tokens)


@pytest.fixture
def stuck(tmp_path: Path) -> StuckTokenizer:
    family_tokenizer("byte_level", tmp_path, template=PLAIN_TEMPLATE)
    return StuckTokenizer(tmp_path)


async def until_begun(tokenizer: StuckTokenizer, prompts: list[asyncio.Future[Any]]) -> None:
    """Every thread of the tokenizer is at work, and every prompt on its way."""
    async with asyncio.timeout(60):
        while tokenizer.num_begun < 2:  # noqa: ASYNC110  # threads set no event of this loop
            await asyncio.sleep(0.001)
    assert not any(prompt.done() for prompt in prompts)


def test_http_health_answers_while_every_prompt_waits_for_the_tokenizer(stuck: StuckTokenizer) -> None:
    generation = make_generation(stuck, FakeStory(end()))

    async def scenario() -> None:
        transport = httpx.ASGITransport(make_app(generation, lambda: None))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            body = {"prompt": TEXT}
            prompts = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(8)]
            await until_begun(stuck, prompts)
            assert (await client.get("/health")).status_code == 200
            assert not any(prompt.done() for prompt in prompts)
            stuck.released.set()
            assert {answer.status_code for answer in await asyncio.gather(*prompts)} == {200}

    run_async(scenario())


@asynccontextmanager
async def grpc_door(generation: Generation) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServicer_to_server(GenerationServicer(generation), server)
    health = await add_standard_services(server, [SERVICE_NAME])
    await health.report(is_serving=True)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


def test_grpc_health_answers_while_every_prompt_waits_for_the_tokenizer(stuck: StuckTokenizer) -> None:
    generation = make_generation(stuck, FakeStory(end()))

    async def answer(channel: grpc.aio.Channel) -> list[str]:
        call = generation_pb2_grpc.GenerationStub(channel).Generate(generation_pb2.GenerateRequest(text=TEXT))
        return [message.WhichOneof("event") async for message in call]

    async def scenario() -> None:
        async with grpc_door(generation) as channel:
            prompts = [asyncio.ensure_future(answer(channel)) for _ in range(8)]
            await until_begun(stuck, prompts)
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
            assert (await check).status == health_pb2.HealthCheckResponse.SERVING
            assert not any(prompt.done() for prompt in prompts)
            stuck.released.set()
            assert await asyncio.gather(*prompts) == [["finish"]] * 8

    run_async(scenario())
