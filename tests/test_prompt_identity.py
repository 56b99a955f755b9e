"""A prompt becomes token ids once, at the gateway, and every engine gets the same ones: begin token and template."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import grpc
import httpx
import pytest
from gateway_fakes import PLAIN_TEMPLATE, FakeStory, collect, end, make_generation

from pd_service.gateway.engines import EngineClient
from pd_service.gateway.generation import Generation, GenerationDelta, GenerationFinish
from pd_service.gateway.grpc_door import GenerationServicer
from pd_service.gateway.http_door import make_app
from pd_service.gateway.intake import ChatPrompt, ClientRequest, Intake, TextPrompt, sampling_params
from pd_service.gateway.recent import RecentRequests
from pd_service.gateway.tokenizer import Tokenizer
from pd_service.request import ChatMessage, EngineRequest, FinishReason, TokenEvent
from pd_service.rpc import generation_pb2 as pb
from pd_service.rpc import generation_pb2_grpc
from tests.local_cluster import LocalCluster, local_cluster
from tests.one_loop import run_async
from tests.tokenizer_families import BEGIN, family_tokenizer, token_id

# ---- exactly one begin token, at both doors

TEMPLATES = {"written": "{{ bos_token }}" + PLAIN_TEMPLATE, "left to the tokenizer": PLAIN_TEMPLATE}
TEXTS = ["ab", BEGIN + "ab"]


@pytest.fixture(params=TEMPLATES.values(), ids=TEMPLATES)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return family_tokenizer("llama2", tmp_path, template=request.param)


def assert_begun_once(tokenizer: Tokenizer, story: FakeStory) -> None:
    begin = token_id(tokenizer, BEGIN)
    for job in story.jobs:
        assert job.prompt_token_ids[0] == begin
        assert job.prompt_token_ids.count(begin) == 1


def test_over_http_chat_and_raw_prompts_begin_once(tokenizer: Tokenizer) -> None:
    generation = make_generation(tokenizer, story := FakeStory(end()))
    chat = {"messages": [{"role": "user", "content": "ab"}]}

    async def scenario() -> None:
        transport = httpx.ASGITransport(make_app(generation, lambda: None))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            answers = [await client.post("/v1/chat/completions", json=chat)]
            answers += [await client.post("/v1/completions", json={"prompt": text}) for text in TEXTS]
        assert [answer.status_code for answer in answers] == [200] * 3

    run_async(scenario())
    assert len(story.jobs) == 3
    assert_begun_once(tokenizer, story)


def test_over_grpc_chat_and_raw_prompts_begin_once(tokenizer: Tokenizer) -> None:
    generation = make_generation(tokenizer, story := FakeStory(end()))
    chat = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="ab")]))
    requests = [chat, *(pb.GenerateRequest(text=text) for text in TEXTS)]

    async def scenario() -> None:
        server = grpc.aio.server()
        generation_pb2_grpc.add_GenerationServicer_to_server(GenerationServicer(generation), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            for request in requests:
                assert [answer.WhichOneof("event") async for answer in stub.Generate(request)] == ["finish"]
        await server.stop(None)

    run_async(scenario())
    assert len(story.jobs) == 3
    assert_begun_once(tokenizer, story)


# ---- through prefill and decode engine


class CountingTokenizer(Tokenizer):
    """Remembers what was rendered and encoded."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        self.rendered: list[str] = []
        self.encoded: list[str] = []

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        self.rendered.append(super()._render(messages))
        return self.rendered[-1]

    def _encode(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        self.encoded.append(text)
        return super()._encode(text, field, add_special_tokens=add_special_tokens)


def over(cluster: LocalCluster, tokenizer: Tokenizer) -> Generation:
    """The gateway's core before the engines of `cluster`."""
    intake = Intake(
        model_name="tiny",
        max_model_len=512,
        vocab_size=512,
        eos_token_ids=(),
        tokenizer=tokenizer,
        max_requests=8,
    )
    return Generation(intake=intake, story=cluster.story, metrics=cluster.metrics, recent=RecentRequests(8))


CHANGING = "{{ strftime_now('%H%M%S%f') }} {{ range(10**5) | random }}\n{{ messages[0].content }}"


def test_a_template_that_renders_differently_each_time_cannot_make_engines_differ(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model_dir)
    (model_dir / "chat_template.jinja").write_text(CHANGING)
    seen: list[EngineRequest] = []
    run = EngineClient.run

    def watched(
        client: EngineClient, request: EngineRequest, deadline: float | None
    ) -> AsyncGenerator[TokenEvent, None]:
        seen.append(request)
        return run(client, request, deadline)

    monkeypatch.setattr(EngineClient, "run", watched)
    tokenizer = CountingTokenizer(model_dir)
    request = ClientRequest(
        prompt=ChatPrompt((ChatMessage(role="user", content="a b c d" * 8),)),
        sampling=sampling_params(max_tokens=4, temperature=0),
    )

    async def scenario() -> None:
        async with local_cluster(model_dir) as cluster:
            for _ in range(2):
                await collect(over(cluster, tokenizer), request)

    run_async(scenario())
    assert len(tokenizer.rendered) == 2  # once per request
    assert tokenizer.rendered[0] != tokenizer.rendered[1]
    assert tokenizer.encoded == tokenizer.rendered
    assert [one.prefill_only for one in seen] == [True, False] * 2
    for prefill, decode in (seen[:2], seen[2:]):
        num_prompt = prefill.num_prompt_tokens
        assert decode.num_prompt_tokens == num_prompt == len(prefill.token_ids)
        assert decode.token_ids == prefill.token_ids
        assert decode.gets_token  # the first one comes with the KV
    assert seen[0].token_ids != seen[2].token_ids


def test_text_and_stop_strings_are_the_same_across_the_hand_over(tiny_model_dir: Path) -> None:
    """A stop string that begins in the prefill engine's token and ends in the decode engine's."""
    tokenizer = Tokenizer(tiny_model_dir)
    prompt = TextPrompt("The quick brown fox jumps over the lazy dog; then the dog jumps over the fox.")

    async def answer(
        cluster: LocalCluster, seed: int, stop: tuple[str, ...]
    ) -> tuple[list[str], list[int], FinishReason]:
        sampling = sampling_params(max_tokens=6, temperature=1, seed=seed, ignore_eos=True, stop=stop)
        events = await collect(over(cluster, tokenizer), ClientRequest(prompt=prompt, sampling=sampling))
        *deltas, finish = events
        assert isinstance(finish, GenerationFinish)
        texts = [delta.text for delta in deltas if isinstance(delta, GenerationDelta)]
        token_ids = [one for delta in deltas if isinstance(delta, GenerationDelta) for one in delta.token_ids]
        return [*texts, finish.text], token_ids, finish.reason

    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            num_tried = 0
            for seed in range(40):
                texts, token_ids, reason = await answer(cluster, seed, ())
                assert ("".join(texts), reason) == (tokenizer.decode(token_ids), FinishReason.LENGTH)
                first, second = map(tokenizer.token_bytes, token_ids[:2])
                if not (first + second).isascii() or not first or not second:
                    continue
                num_tried += 1
                stop = first[-1:].decode() + second.decode()
                whole = "".join(texts)
                texts, stopped_ids, reason = await answer(cluster, seed, (stop,))
                assert "".join(texts) == whole[: whole.index(stop)]
                assert (stopped_ids, reason) == (token_ids[:2], FinishReason.STOP)
            assert num_tried  # or this test would not test what it says

    run_async(scenario())
