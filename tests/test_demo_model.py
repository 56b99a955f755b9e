"""Real weights: SmolLM2 through a prefill and a decode engine against transformers, greedy, float32."""

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from pd_service.config import EngineSettings, GatewaySettings
from pd_service.demo import demo_model_dir
from pd_service.request import EngineSampling
from pd_service.rpc import generation_pb2, generation_pb2_grpc
from tests.local_cluster import local_cluster
from tests.one_loop import run_async
from tests.served import Served, served

MAX_TOKENS = 12
BLOCK_SIZE = 16
TEXTS = (
    "A",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Es war einmal ein König, der hatte",
    "1, 1, 2, 3, 5, 8,",
    "  Two spaces, then: 日本語 and 🙂.",
)
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "The opposite of hot?"}],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
)
LENGTHS = (1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 64, 255, 256, 257, 700, 1500)


@dataclass(frozen=True)
class Case:
    """What the client sends, and the ids that transformers makes of it and answers."""

    name: str
    prompt: str | list[int] | list[dict[str, str]]
    expected: list[int]

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, list) and isinstance(self.prompt[0], dict)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return demo_model_dir(print)


@pytest.fixture(scope="module")
def cases(model_dir: Path) -> list[Case]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    eos = model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])

    def answer(ids: list[int]) -> list[int]:
        with torch.inference_mode():
            whole = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=MAX_TOKENS)[0].tolist()
        return [token for token in whole[len(ids) :] if token not in ends]

    draw = random.Random(5)
    words = [token for token in range(1000, 20000) if tokenizer.decode([token]).strip().isalpha()]
    made = [Case(f"text {text!r}", text, answer(tokenizer(text)["input_ids"])) for text in TEXTS]
    for messages in CHATS:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        made.append(Case(f"chat {messages[-1]['content']!r}", messages, answer(ids)))
    for length in LENGTHS:
        ids = draw.choices(words, k=length)
        made.append(Case(f"{length} ids", ids, answer(ids)))
    return made


@pytest.fixture(scope="module")
def service() -> Iterator[Served]:
    with served("--model", "demo") as running:
        yield running


def test_twenty_prompts_over_grpc_equal_transformers(service: Served, cases: list[Case]) -> None:
    async def answer(case: Case) -> list[int]:
        request = generation_pb2.GenerateRequest(
            sampling=generation_pb2.Sampling(max_tokens=MAX_TOKENS, temperature=0.0)
        )
        if isinstance(case.prompt, str):
            request.text = case.prompt
        elif case.is_chat:
            request.chat.messages.extend(generation_pb2.ChatMessage(**message) for message in case.prompt)  # type: ignore[arg-type]
        else:
            request.token_ids.ids.extend(case.prompt)  # type: ignore[arg-type]
        async with service.channel() as channel:
            stream = generation_pb2_grpc.GenerationStub(channel).Generate(request)
            return [token async for response in stream for token in response.delta.token_ids]

    async def all_answers() -> dict[str, list[int]]:
        return {case.name: await answer(case) for case in cases}

    assert len(cases) == 20
    assert any(case.expected for case in cases)
    assert run_async(all_answers()) == {case.name: case.expected for case in cases}


@pytest.mark.parametrize("streamed", [False, True])
def test_twenty_prompts_over_http_equal_transformers(service: Served, cases: list[Case], streamed: bool) -> None:
    def answer(case: Case) -> list[int]:
        path, field = ("chat/completions", "messages") if case.is_chat else ("completions", "prompt")
        body: dict[str, Any] = {
            field: case.prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": streamed,
            "return_token_ids": True,
        }
        response = httpx.post(f"{service.base_url}/v1/{path}", json=body, timeout=120)
        assert response.status_code == 200, response.text
        if not streamed:
            return list(response.json()["choices"][0]["token_ids"])
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert events[-1] == "[DONE]"
        choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
        return [token for choice in choices for token in choice.get("token_ids") or []]

    assert {case.name: answer(case) for case in cases} == {case.name: case.expected for case in cases}


def test_after_all_that_nothing_is_held(service: Served) -> None:
    assert run_async(service.is_empty())


def test_with_a_seed_the_split_equals_one_engine_doing_both(model_dir: Path) -> None:
    draw = random.Random(9)
    jobs = [
        (
            [draw.randrange(1000, 20000) for _ in range(length)],
            24,
            EngineSampling(temperature=t, top_p=p, top_k=k, seed=s),
        )
        for length, t, p, k, s in ((5, 0.7, 0.9, 0, 1), (48, 1.0, 1.0, 0, 2), (200, 1.3, 0.95, 50, 3))
    ]
    memory = 2**28

    async def scenario() -> None:
        alone = GatewaySettings(local_prefill_max_tokens=10_000)
        async with local_cluster(
            model_dir, prefill=0, decode=0, mixed=1, gateway=alone, settings=ENGINE, kv_cache_bytes=memory
        ) as cluster:
            whole = [await cluster.generate(*job) for job in jobs]
        async with local_cluster(model_dir, settings=ENGINE, kv_cache_bytes=memory) as cluster:
            split = [await cluster.generate(*job) for job in jobs]
            at_once = await asyncio.gather(*(cluster.generate(*job) for job in jobs))
        assert split == whole
        assert list(at_once) == whole

    run_async(scenario())


ENGINE = EngineSettings(max_model_len=2048)
