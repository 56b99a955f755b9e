"""The HTTP door: against raw ASGI, httpx, and a real server with the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI
from gateway_fakes import FakeStory, Step, byte_level_tokenizer, end, is_idle, make_generation, outcomes, tokens

from pd_service.errors import EngineFailed, Overloaded, Unavailable
from pd_service.gateway.generation import Generation, StoryTokens
from pd_service.gateway.http_door import MAX_BODY_BYTES, make_app
from pd_service.gateway.tokenizer import Tokenizer
from pd_service.request import FinishReason, TokenLogprobs
from tests.one_loop import run_async

Json = dict[str, Any]
COMPLETION: Json = {"model": "tiny", "prompt": [5, 6]}
CHAT: Json = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
DOORS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("byte_level"))


def ready() -> None:
    """The service can always answer."""


def against(generation: Generation, scenario: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        transport = httpx.ASGITransport(make_app(generation, ready), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            await scenario(client)

    run_async(run())


def post(tokenizer: Tokenizer, path: str, body: Json, *script: Step) -> httpx.Response:
    """The answer of a gateway whose story follows `script`."""
    generation = make_generation(tokenizer, story := FakeStory(*script))
    responses: list[httpx.Response] = []

    async def scenario(client: httpx.AsyncClient) -> None:
        responses.append(await client.post(path, json=body))

    against(generation, scenario)
    assert is_idle(generation, story)
    return responses[0]


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream of server-sent events; the end marker as it is."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    data = [line.removeprefix("data: ") for line in lines]
    assert len(data) == len(lines)
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return run_async(tokenizer.encode_text(text))[1:]


def choice_text(choice: Json) -> str:
    part = choice.get("delta") or choice.get("message") or choice
    text: str = part["content"] if "content" in part else part["text"]
    return text


@pytest.mark.parametrize(("path", "body"), DOORS)
@pytest.mark.parametrize("stop", [None, "quick", ["w", "lo wo"], "d fo"])
def test_the_stream_concatenated_is_the_whole_answer(tokenizer: Tokenizer, path: str, body: Json, stop: object) -> None:
    script = [tokens(token_id) for token_id in text_ids(tokenizer, " hello world ů d")]
    asked = {**body, "stop": stop, "return_token_ids": True}
    whole = post(tokenizer, path, asked, *script, end()).json()
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(post(tokenizer, path, streamed, *script, end()))
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    (choice,) = whole["choices"]
    assert "".join(map(choice_text, choices)) == choice_text(choice)
    assert [token_id for part in choices for token_id in part["token_ids"]] == choice["token_ids"]
    assert [part["finish_reason"] for part in choices] == [None] * (len(choices) - 1) + [choice["finish_reason"]]
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert choices[-1]["prompt_token_ids"] == choice["prompt_token_ids"]


def test_usage_and_token_ids_are_sent_only_when_asked_for(tokenizer: Tokenizer) -> None:
    response = post(tokenizer, "/v1/completions", {**COMPLETION, "stream": True}, tokens(5), end())
    *chunks, _ = events(response)
    assert len(chunks) == 2
    assert all("usage" not in chunk and "token_ids" not in chunk["choices"][0] for chunk in chunks)


def test_an_answer_carries_the_clients_id_and_the_served_model(tokenizer: Tokenizer) -> None:
    generation = make_generation(tokenizer, story := FakeStory(end(FinishReason.STOP)))

    async def scenario(client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "mine"})
        assert (response.json()["id"], response.json()["model"]) == ("cmpl-mine", "tiny")
        assert response.headers["x-request-id"] == "mine"

    against(generation, scenario)
    assert story.jobs[0].request_id == "mine"


@pytest.mark.parametrize(("path", "body"), DOORS)
def test_supported_options_reach_the_story(tokenizer: Tokenizer, path: str, body: Json) -> None:
    options = {"temperature": 0, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "seed": 3, "max_tokens": 7}
    penalties = {"presence_penalty": -2, "frequency_penalty": 0.5, "repetition_penalty": 1.5}
    asked = {**body, **options, **penalties, "stop_token_ids": [9], "ignore_eos": True}
    asked |= {"logit_bias": {"7": -100, "5": 2.5}, "priority": -3, "cache_salt": "mine"}
    generation = make_generation(tokenizer, story := FakeStory(end()))

    async def scenario(client: httpx.AsyncClient) -> None:
        assert (await client.post(path, json=asked)).status_code == 200

    against(generation, scenario)
    (job,) = story.jobs
    given = job.sampling
    assert (given.temperature, given.top_p, given.top_k, given.min_p, given.seed) == (0, 0.5, 4, 0.1, 3)
    assert (given.stop_token_ids, job.max_new_tokens) == ({9}, 7)
    assert (given.presence_penalty, given.frequency_penalty, given.repetition_penalty) == (-2, 0.5, 1.5)
    assert given.logit_bias == ((5, 2.5), (7, -100))
    assert (job.priority, job.cache_salt, given.prompt_logprobs) == (-3, "mine", None)


def test_max_completion_tokens_limits_a_chat(tokenizer: Tokenizer) -> None:
    generation = make_generation(tokenizer, story := FakeStory(end()))

    async def scenario(client: httpx.AsyncClient) -> None:
        await client.post("/v1/chat/completions", json={**CHAT, "max_completion_tokens": 3})

    against(generation, scenario)
    assert story.jobs[0].max_new_tokens == 3


def test_parts_of_a_message_are_one_text(tokenizer: Tokenizer) -> None:
    prompts = []
    for content in ("hello world", [{"type": "text", "text": "hello"}, {"type": "text", "text": " world"}]):
        body = {"messages": [{"role": "user", "content": content}], "return_token_ids": True}
        response = post(tokenizer, "/v1/chat/completions", body, end())
        prompts.append(response.json()["choices"][0]["prompt_token_ids"])
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("prompt", ["hello", ["hello"], [0, 5], [[0, 5]]])
def test_one_prompt_is_taken_in_every_form(tokenizer: Tokenizer, prompt: object) -> None:
    body = {"prompt": prompt, "return_token_ids": True}
    (choice,) = post(tokenizer, "/v1/completions", body, end()).json()["choices"]
    assert choice["prompt_token_ids"].count(0) == 1


def test_log_probabilities_have_one_entry_per_token(tokenizer: Tokenizer) -> None:
    a, b = text_ids(tokenizer, "ab")
    half = text_ids(tokenizer, "日")[0]
    script = [
        StoryTokens(token_ids=(a,), logprobs=(TokenLogprobs(-0.5, ((a, -0.5), (1, -2.0))),)),
        StoryTokens(token_ids=(b, half), logprobs=(TokenLogprobs(-1.0, ((a, -0.1),)), TokenLogprobs(-3.0))),
        end(),
    ]
    body = {**COMPLETION, "logprobs": 2}
    found = post(tokenizer, "/v1/completions", body, *script).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "b", tokenizer.token_text(half)]
    assert found["token_logprobs"] == [-0.5, -1.0, -3.0]
    assert found["top_logprobs"] == [{"a": -0.5, "</s>": -2.0}, {"a": -0.1}, {}]
    assert found["text_offset"] == [0, 1, 2]
    streamed = events(post(tokenizer, "/v1/completions", {**body, "stream": True}, *script))
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in streamed[:2]] == [[0], [1, 2]]
    chat = {**CHAT, "logprobs": True, "top_logprobs": 2}
    entries = post(tokenizer, "/v1/chat/completions", chat, *script).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[97], [98], list(tokenizer.token_bytes(half))]
    assert [top["token"] for top in entries[0]["top_logprobs"]] == ["a", "</s>"]


NEUTRAL = {"user": None, "n": None, "logit_bias": None, "prompt_logprobs": None, "priority": None, "cache_salt": None}
NEUTRAL_COMPLETION = {"best_of": 1, "suffix": None}
NEUTRAL_CHAT = {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "store": False, "metadata": {}}


def test_options_we_do_not_have_are_taken_with_the_value_that_asks_for_nothing(tokenizer: Tokenizer) -> None:
    completion = {**COMPLETION, **NEUTRAL, **NEUTRAL_COMPLETION}
    assert post(tokenizer, "/v1/completions", completion, end()).status_code == 200
    assert post(tokenizer, "/v1/chat/completions", {**CHAT, **NEUTRAL, **NEUTRAL_CHAT}, end()).status_code == 200


BOTH_REFUSE: list[tuple[Json, str]] = [
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.5}, "n"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"presence_penalty": "1"}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 2.1}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"380": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"priority": 101}, "priority"),
    ({"priority": -101}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"user": "u"}, "user"),
    ({"surprise": 1}, "surprise"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": -1}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 64}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop_token_ids": [400]}, "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"more": True}}, "stream_options"),
    ({"model": "other"}, "model"),
]
COMPLETIONS_REFUSE: list[tuple[Json, str]] = [
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [380]}, "prompt"),
    ({"prompt": [5] * 64}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"echo": 1}, "echo"),
    ({"echo": True, "logprobs": 21}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"messages": []}, "messages"),
]
CHATS_REFUSE: list[tuple[Json, str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": ""}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "", "name": "x"}]}, "messages"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_tokens": 2, "max_completion_tokens": 2}, "max_tokens"),
    ({"echo": True}, "echo"),
    ({"best_of": 1}, "best_of"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"store": True}, "store"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"prompt": "x"}, "prompt"),
]


def refusals() -> list[tuple[str, Json, str]]:
    completions = [("/v1/completions", COMPLETION | change, name) for change, name in BOTH_REFUSE + COMPLETIONS_REFUSE]
    chats = [("/v1/chat/completions", CHAT | change, name) for change, name in BOTH_REFUSE + CHATS_REFUSE]
    return completions + chats


def test_every_refusal_names_the_field_in_the_documented_form(tokenizer: Tokenizer) -> None:
    generation = make_generation(tokenizer, story := FakeStory(end()))

    async def scenario(client: httpx.AsyncClient) -> None:
        for path, body, name in refusals():
            response = await client.post(path, json=body)
            assert response.status_code == (404 if name == "model" else 400), (path, body, response.text)
            error = response.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["param"] == name, (path, body, error)
            assert name in error["message"]
            assert error["type"] == "invalid_request_error"

    against(generation, scenario)
    assert not story.jobs
    assert outcomes(generation) == {"refused": len(refusals())}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user": "u"}, "user: not supported; allowed: None (given: 'u')"),
        ({"n": 9}, "n: 1 to 8 are allowed (given: 9)"),
        ({"presence_penalty": 3}, "presence_penalty: Input should be less than or equal to 2 (given: 3.0)"),
        ({"repetition_penalty": 0}, "repetition_penalty: Input should be greater than 0 (given: 0.0)"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5: Input should be less than or equal to 100 (given: 101.0)"),
        ({"logit_bias": {"400": 1}}, "logit_bias: no token has the id 400; allowed: 0 to 379"),
        ({"priority": 101}, "priority: -100 to 100 are allowed (given: 101)"),
        ({"cache_salt": "x" * 129}, "cache_salt: 129 characters, at most 128 are allowed"),
        ({"n": 2, "best_of": 3}, "best_of: answers are not ranked; allowed: 1 and n, which is 2 (given: 3)"),
    ],
)
def test_what_is_allowed_instead_is_told(tokenizer: Tokenizer, change: Json, message: str) -> None:
    assert post(tokenizer, "/v1/completions", COMPLETION | change).json()["error"]["message"] == message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"prompt": "\\ud800"}'])
def test_a_body_that_is_no_json_object_is_refused(tokenizer: Tokenizer, content: bytes) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/completions", content=content)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_request"

    against(make_generation(tokenizer, FakeStory(end())), scenario)


def test_a_body_over_the_limit_is_refused_before_it_is_read_to_its_end(tokenizer: Tokenizer) -> None:
    chunk = bytes(2**20)
    num_read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_read
        while True:
            num_read += 1
            yield chunk

    async def scenario(client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/completions", content=endless())
        assert response.status_code == 413
        assert str(MAX_BODY_BYTES) in response.json()["error"]["message"]

    against(make_generation(tokenizer, FakeStory(end())), scenario)
    assert num_read == MAX_BODY_BYTES // len(chunk) + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (Unavailable("no engine"), 503, "1"),
        (Overloaded("full"), 429, "1"),
        (EngineFailed("step failed"), 503, "1"),
        (ValueError("not foreseen"), 500, None),
    ],
)
def test_a_failure_before_the_first_token_is_a_status(
    tokenizer: Tokenizer, stream: bool, error: Exception, status: int, retry_after: str | None
) -> None:
    response = post(tokenizer, "/v1/completions", {**COMPLETION, "stream": stream}, error)
    assert (response.status_code, response.headers.get("retry-after")) == (status, retry_after)
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("path", "body"), DOORS)
@pytest.mark.parametrize(("error", "code"), [(EngineFailed("gone"), "engine_failed"), (ValueError(), "internal_error")])
def test_a_failure_in_mid_stream_looks_like_no_answer(
    tokenizer: Tokenizer, path: str, body: Json, error: Exception, code: str
) -> None:
    *chunks, last = events(post(tokenizer, path, {**body, "stream": True}, tokens(5), tokens(6), error))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None]
    assert last.keys() == {"error"}
    assert last["error"]["code"] == code


def test_a_failure_in_the_middle_of_a_whole_answer_is_a_status(tokenizer: Tokenizer) -> None:
    assert post(tokenizer, "/v1/completions", COMPLETION, tokens(5), EngineFailed("gone")).status_code == 503


def test_duplicates_and_one_too_many_have_their_status(tokenizer: Tokenizer) -> None:
    gate = asyncio.Event()
    generation = make_generation(tokenizer, story := FakeStory(gate, end()), max_requests=1)
    mine = {"X-Request-Id": "mine"}

    async def scenario(client: httpx.AsyncClient) -> None:
        first = asyncio.create_task(client.post("/v1/completions", json=COMPLETION, headers=mine))
        await story.started.get()
        assert (await client.post("/v1/completions", json=COMPLETION, headers=mine)).status_code == 409
        full = await client.post("/v1/completions", json=COMPLETION)
        assert (full.status_code, full.json()["error"]["type"]) == (429, "overloaded_error")
        gate.set()
        assert (await first).status_code == 200

    against(generation, scenario)


def test_models_are_listed_and_found(tokenizer: Tokenizer) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (await client.get(f"/v1/models/{model['id']}")).json() == model
        missing = await client.get("/v1/models/org/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")

    against(make_generation(tokenizer, FakeStory()), scenario)


def test_unknown_paths_and_methods_have_the_documented_form(tokenizer: Tokenizer) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        missing, wrong = await client.get("/v2"), await client.get("/v1/completions")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")

    against(make_generation(tokenizer, FakeStory()), scenario)


def test_health_tells_why_the_service_cannot_answer(tokenizer: Tokenizer) -> None:
    reasons: list[str | None] = ["the decode pool has no engine", None]
    app = make_app(make_generation(tokenizer, FakeStory()), lambda: reasons.pop(0))

    async def scenario() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            starting, healthy = await client.get("/health"), await client.get("/health")
        assert (starting.status_code, starting.json()["error"]["message"]) == (503, "the decode pool has no engine")
        assert (healthy.status_code, healthy.json()) == (200, {"status": "ok"})

    run_async(scenario())


def test_metrics_show_what_happened(tokenizer: Tokenizer) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        await client.post("/v1/completions", json=COMPLETION)
        text = (await client.get("/metrics")).text
        assert 'pd_requests_total{outcome="finished"} 1.0' in text
        assert "pd_live_requests 0.0" in text

    against(make_generation(tokenizer, FakeStory(tokens(5), end())), scenario)


# A client that goes away, on the bare protocol: nothing but the event loop lies between its going and the story's end.


class BareClient:
    """One request on the application's own interface."""

    def __init__(self, app: FastAPI, body: Json) -> None:
        self._app = app
        self._inbox: asyncio.Queue[Json] = asyncio.Queue()
        self.sent: asyncio.Queue[Json] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})

    async def run(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        await self._app(scope, self._inbox.get, self.sent.put)

    def leave(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_client_that_leaves_ends_its_story_at_once(tokenizer: Tokenizer, stream: bool, num_tokens: int) -> None:
    generation = make_generation(tokenizer, story := FakeStory(*[tokens(5)] * num_tokens, asyncio.Event()))

    async def scenario() -> None:
        client = BareClient(make_app(generation, ready), {**COMPLETION, "stream": stream})
        call = asyncio.create_task(client.run())
        await story.started.get()
        if stream and num_tokens:
            assert (await client.sent.get())["status"] == 200
            assert b"token" not in (await client.sent.get())["body"]
        client.leave()
        for _ in range(20):  # turns of the loop
            await asyncio.sleep(0)
        assert is_idle(generation, story)
        await call

    run_async(scenario())
    assert outcomes(generation) == {"aborted": 1}


def test_a_client_that_leaves_before_its_body_is_complete_harms_nobody(tokenizer: Tokenizer) -> None:
    generation = make_generation(tokenizer, story := FakeStory(end()))

    async def scenario() -> None:
        client = BareClient(make_app(generation, ready), COMPLETION)
        request = client._inbox.get_nowait()
        client._inbox.put_nowait({**request, "more_body": True})
        client.leave()
        await client.run()

    run_async(scenario())
    assert not story.jobs
    assert is_idle(generation, story)


def test_a_server_that_stops_ends_the_story_of_an_open_stream(tokenizer: Tokenizer) -> None:
    generation = make_generation(tokenizer, story := FakeStory(tokens(5), asyncio.Event()))

    async def scenario() -> None:
        client = BareClient(make_app(generation, ready), {**COMPLETION, "stream": True})
        call = asyncio.create_task(client.run())
        await client.sent.get()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert is_idle(generation, story)

    run_async(scenario())


# The official client and a real server.


@asynccontextmanager
async def serving(generation: Generation) -> AsyncIterator[str]:
    """A real server on a free port; its base URL."""
    config = uvicorn.Config(make_app(generation, ready), host="127.0.0.1", port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    sock = config.bind_socket()
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        sock.close()


def with_openai(generation: Generation, scenario: Callable[[openai.AsyncOpenAI], Awaitable[None]]) -> None:
    async def run() -> None:
        async with (
            serving(generation) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            await scenario(client)

    run_async(run())


def test_the_official_client_completes(tokenizer: Tokenizer) -> None:
    script = [tokens(token_id) for token_id in text_ids(tokenizer, " hello")] + [end()]

    async def scenario(client: openai.AsyncOpenAI) -> None:
        whole = await client.completions.create(model="tiny", prompt="x", max_tokens=5)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (" hello", "length")
        stream = await client.completions.create(
            model="tiny", prompt="x", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == " hello"
        assert chunks[-1].usage == whole.usage

    with_openai(make_generation(tokenizer, FakeStory(*script)), scenario)


def test_the_official_client_chats_and_sends_our_answer_back(tokenizer: Tokenizer) -> None:
    script = [tokens(token_id) for token_id in text_ids(tokenizer, "hello")] + [end(FinishReason.STOP)]

    async def scenario(client: openai.AsyncOpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": "x"}]
        whole = await client.chat.completions.create(model="tiny", messages=messages)
        message = whole.choices[0].message
        assert (message.role, message.content, whole.choices[0].finish_reason) == ("assistant", "hello", "stop")
        messages += [message.model_dump(), {"role": "user", "content": "y"}]
        stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(delta.content or "" for delta in deltas) == "hello"
        assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)

    with_openai(make_generation(tokenizer, FakeStory(*script)), scenario)


def test_the_official_client_sees_errors_as_what_they_are(tokenizer: Tokenizer) -> None:
    generation = make_generation(tokenizer, FakeStory(tokens(5), EngineFailed("gone")))

    async def scenario(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="served: 'tiny'"):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="tiny", prompt="x", n=0)
        assert refused.value.param == "n"
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="gone"):
            async for _ in stream:
                pass

    with_openai(generation, scenario)


def test_a_stream_closed_by_a_real_client_ends_its_story(tokenizer: Tokenizer) -> None:
    generation = make_generation(tokenizer, story := FakeStory(tokens(5), asyncio.Event()))

    async def scenario(client: openai.AsyncOpenAI) -> None:
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        await anext(aiter(stream))
        await stream.close()
        async with asyncio.timeout(60):
            while not is_idle(generation, story):  # noqa: ASYNC110 - the network tells the server, not us
                await asyncio.sleep(0.001)

    with_openai(generation, scenario)
    assert outcomes(generation) == {"aborted": 1}
