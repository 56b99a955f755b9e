"""The doors over real engines: several answers with echo and log probabilities, whole and streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from test_gateway_answers import merged
from test_gateway_http import events

from pd_service.config import GatewaySettings
from pd_service.gateway.generation import Generation
from pd_service.gateway.http_door import make_app
from pd_service.gateway.intake import Intake
from pd_service.gateway.recent import RecentRequests
from pd_service.gateway.tokenizer import Tokenizer
from tests.local_cluster import LocalCluster, local_cluster
from tests.one_loop import run_async

Json = dict[str, Any]
ASKED: Json = {"prompt": "The quick brown fox", "echo": True, "logprobs": 2, "max_tokens": 6, "seed": 3}


def client(cluster: LocalCluster, model_dir: Path) -> httpx.AsyncClient:
    intake = Intake(
        model_name="tiny",
        max_model_len=512,
        vocab_size=512,
        eos_token_ids=[2],
        tokenizer=Tokenizer(model_dir),
        max_requests=16,
    )
    recent = RecentRequests(8)
    generation = Generation(intake=intake, story=cluster.story, metrics=cluster.metrics, recent=recent)
    app = make_app(generation, lambda: None)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


async def ask(cluster: LocalCluster, model_dir: Path, body: Json) -> Any:
    async with client(cluster, model_dir) as http:
        response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return events(response) if body.get("stream") else response.json()


def close_to(choice: Json, other: Json) -> bool:
    """Equal but for the last digits: prefill and decode add up in different orders."""
    ours, theirs = choice["logprobs"], other["logprobs"]
    values = [value for value in ours["token_logprobs"] if value is not None]
    return (
        choice["text"] == other["text"]
        and ours["tokens"] == theirs["tokens"]
        and ours["text_offset"] == theirs["text_offset"]
        and ours["token_logprobs"][0] is theirs["token_logprobs"][0] is None
        and values == pytest.approx(theirs["token_logprobs"][1:], abs=1e-4)
    )


@pytest.mark.parametrize("n", [1, 3])
def test_echo_with_logprobs_is_the_same_from_one_engine_and_through_both_pools(tiny_model_dir: Path, n: int) -> None:
    """R67, R66."""

    async def scenario() -> None:
        body = {**ASKED, "n": n}
        gateway = GatewaySettings(local_prefill_max_tokens=10_000)
        async with local_cluster(tiny_model_dir, prefill=0, decode=0, mixed=1, gateway=gateway) as cluster:
            expected = (await ask(cluster, tiny_model_dir, body))["choices"]
        async with local_cluster(tiny_model_dir, decode=2) as cluster:
            whole = await ask(cluster, tiny_model_dir, body)
            *chunks, done = await ask(cluster, tiny_model_dir, {**body, "stream": True})
        assert done == "[DONE]"
        parts = [choice for chunk in chunks for choice in chunk["choices"]]
        assert [choice["index"] for choice in whole["choices"]] == list(range(n))
        for index, choice in enumerate(whole["choices"]):
            assert choice["text"].startswith(ASKED["prompt"])
            assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"])
            assert close_to(choice, expected[index])
            assert close_to(merged(parts, index), expected[index])

    run_async(scenario())


def test_a_prompt_of_one_token_is_judged_by_nobody(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            answer = await ask(
                cluster, tiny_model_dir, {"prompt": [5], "prompt_logprobs": 3, "max_tokens": 2, "seed": 1}
            )
        (choice,) = answer["choices"]
        assert choice["prompt_logprobs"] == [None]

    run_async(scenario())


def test_the_usage_tells_what_was_cached(tiny_model_dir: Path) -> None:
    """Of the first answer: what the others find, it has put there."""

    async def scenario() -> None:
        body = {"prompt": [7] * 40, "max_tokens": 3, "seed": 1, "n": 2}
        cached = []
        async with local_cluster(tiny_model_dir) as cluster:
            for salt in ("", "", "other"):
                usage = (await ask(cluster, tiny_model_dir, {**body, "cache_salt": salt}))["usage"]
                assert usage["prompt_tokens"] == 40
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == cached[2] == 0
        assert 0 < cached[1] < 40

    run_async(scenario())
