"""Several answers of one request, and what is told of its prompt: the core, and both doors' forms of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_fakes import (
    FakeStory,
    Step,
    byte_level_tokenizer,
    collect,
    end,
    is_idle,
    make_generation,
    outcomes,
    tokens,
)
from test_gateway_grpc import against as against_grpc
from test_gateway_grpc import answer as grpc_answer
from test_gateway_grpc import ids
from test_gateway_http import CHAT, COMPLETION, Json, choice_text, events, text_ids, with_openai
from test_gateway_http import against as against_http

from pd_service.errors import DeadlineExceeded, EngineFailed, Overloaded, PdError
from pd_service.gateway.generation import (
    Generation,
    GenerationDelta,
    GenerationFinish,
    GenerationPrompt,
    Job,
    StoryEvent,
    StoryPrompt,
    StoryTokens,
)
from pd_service.gateway.intake import ClientRequest, Prompt, TextPrompt, TokenPrompt, sampling_params
from pd_service.gateway.job import answer_seed
from pd_service.gateway.tokenizer import Tokenizer
from pd_service.request import FinishReason, TokenLogprobs
from pd_service.rpc import generation_pb2 as pb
from tests.one_loop import run_async
from tests.tokenizer_families import FAMILIES, family_tokenizer, token_id


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("byte_level"))


class AnswersStory(FakeStory):
    """A script for each answer; log probabilities of the prompt where the job asks for them."""

    def __init__(self, *scripts: tuple[Step, ...]) -> None:
        super().__init__()
        self.scripts = scripts

    async def run(self, job: Job) -> AsyncGenerator[StoryEvent, None]:
        self.script = self.scripts[job.index]
        if job.sampling.prompt_logprobs is not None and len(job.prompt_token_ids) > 1:
            judged = tuple(TokenLogprobs(-float(i), ((7, -0.5), (8, -1.5)), 3) for i in job.prompt_token_ids[1:])
            self.script = (StoryPrompt(logprobs=judged), *self.script)
        job.phases.cached_tokens = 2 + job.index
        async with aclosing(super().run(job)) as steps:
            async for step in steps:
                await asyncio.sleep(0)  # so that the answers alternate
                yield step


def request(n: int = 1, prompt: Prompt | None = None, *, echo: bool = False, **sampling: object) -> ClientRequest:
    return ClientRequest(prompt=prompt or TokenPrompt((5, 6)), sampling=sampling_params(**sampling), n=n, echo=echo)


def finishes(found: list[Any]) -> list[GenerationFinish]:
    return [event for event in found if isinstance(event, GenerationFinish)]


# ---- the core


def test_each_answer_has_its_own_tokens_text_and_end(tokenizer: Tokenizer) -> None:
    a, b, c = text_ids(tokenizer, "abc")
    story = AnswersStory(
        (tokens(a), tokens(b), end()), (tokens(b), tokens(c), end(FinishReason.STOP)), (end(FinishReason.STOP),)
    )
    found = asyncio.run(collect(generation := make_generation(tokenizer, story), request(3)))
    texts = ["", "", ""]
    for event in found:
        assert not isinstance(event, GenerationPrompt)
        texts[event.index] += event.text
    assert texts == ["ab", "bc", ""]
    ends = sorted(finishes(found), key=lambda finish: finish.index)
    assert [finish.num_output_tokens for finish in ends] == [2, 2, 0]
    assert [finish.reason for finish in ends] == [FinishReason.LENGTH, FinishReason.STOP, FinishReason.STOP]
    assert len({id(finish.phases) for finish in ends}) == 3
    assert is_idle(generation, story)


def test_the_first_answer_is_the_one_a_request_for_one_answer_gets(tokenizer: Tokenizer) -> None:
    """Its seed is the request's; the others' are made from it, alike on all machines and in all runs."""
    story = AnswersStory(*[(end(),)] * 3)
    generation = make_generation(tokenizer, story)
    asyncio.run(collect(generation, request(3, seed=7)))
    asyncio.run(collect(generation, request(3, seed=7)))
    seeds = [job.sampling.seed for job in story.jobs]
    assert seeds == [7, answer_seed(7, 1), answer_seed(7, 2)] * 2
    assert answer_seed(7, 1) == 0x8B693EBEA675D7AC
    assert len({answer_seed(seed, index) for seed in range(20) for index in range(20)}) == 400


def test_only_the_first_answer_asks_for_the_prompts_log_probabilities(tokenizer: Tokenizer) -> None:
    story = AnswersStory(*[(end(),)] * 2)
    found = asyncio.run(collect(make_generation(tokenizer, story), request(2, prompt_logprobs=1)))
    assert [job.sampling.prompt_logprobs for job in story.jobs] == [1, None]
    assert sum(isinstance(event, GenerationPrompt) for event in found) == 1
    assert isinstance(found[0], GenerationPrompt)


def test_the_answers_of_a_request_share_what_they_know_of_engines(tokenizer: Tokenizer) -> None:
    story = AnswersStory(*[(end(),)] * 3)
    generation = make_generation(tokenizer, story)
    asyncio.run(collect(generation, request(3)))
    asyncio.run(collect(generation, request(1)))
    first, second, third, other = [job.affinity for job in story.jobs]
    assert first is second is third
    assert other is not first


def test_the_others_wait_for_the_first_answers_first_token(tokenizer: Tokenizer) -> None:
    gate = asyncio.Event()
    story = AnswersStory((gate, tokens(5), end()), (end(),))

    async def scenario() -> None:
        asking = asyncio.create_task(collect(make_generation(tokenizer, story), request(2)))
        for _ in range(50):
            await asyncio.sleep(0)
        assert [job.index for job in story.jobs] == [0]
        gate.set()
        await asking
        assert [job.index for job in story.jobs] == [0, 1]

    run_async(scenario())


def test_a_stop_string_ends_its_own_answer_alone(tokenizer: Tokenizer) -> None:
    a, b, c, d = text_ids(tokenizer, "abcd")
    never = asyncio.Event()
    story = AnswersStory((tokens(a), tokens(b, c), never), (tokens(a), tokens(c), tokens(d), end()))
    found = asyncio.run(collect(make_generation(tokenizer, story), request(2, stop=["bc"])))
    texts = ["", ""]
    for event in found:
        assert not isinstance(event, GenerationPrompt)
        texts[event.index] += event.text
    assert texts == ["a", "acd"]
    assert {finish.index: finish.reason for finish in finishes(found)} == {
        0: FinishReason.STOP,
        1: FinishReason.LENGTH,
    }


def test_a_request_of_many_answers_counts_once_and_so_does_its_prompt(tokenizer: Tokenizer) -> None:
    story = AnswersStory((tokens(5), tokens(6), end()), (tokens(5), tokens(5), tokens(5), end()))
    generation = make_generation(tokenizer, story)
    asyncio.run(collect(generation, request(2)))
    value = generation.metrics.registry.get_sample_value
    assert outcomes(generation) == {"finished": 1}
    assert value("pd_tokens_total", {"kind": "prompt"}) == 2
    assert value("pd_tokens_total", {"kind": "output"}) == 5
    assert value("pd_ttft_seconds_count") == 1
    assert value("pd_inter_token_seconds_count") == 1 + 2


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_answer_ends_the_request_and_every_story(tokenizer: Tokenizer, failing: int) -> None:
    scripts: list[tuple[Step, ...]] = [(tokens(5), asyncio.Event()) for _ in range(3)]
    scripts[failing] = (tokens(5), EngineFailed("gone"))
    story = AnswersStory(*scripts)
    generation = make_generation(tokenizer, story)
    with pytest.raises(EngineFailed, match="gone"):
        asyncio.run(collect(generation, request(3)))
    assert outcomes(generation) == {"failed": 1}
    assert is_idle(generation, story)


def test_an_error_after_some_answers_have_ended_is_no_finished_request(tokenizer: Tokenizer) -> None:
    story = AnswersStory((tokens(5), end()), (tokens(5), tokens(5), tokens(5), EngineFailed("gone")))
    generation = make_generation(tokenizer, story)
    with pytest.raises(EngineFailed):
        asyncio.run(collect(generation, request(2)))
    assert outcomes(generation) == {"failed": 1}


@pytest.mark.parametrize("has_ended", [False, True])
def test_the_deadline_ends_all_answers(tokenizer: Tokenizer, has_ended: bool) -> None:
    first: tuple[Step, ...] = (tokens(5), end()) if has_ended else (tokens(5), asyncio.Event())
    story = AnswersStory(first, (tokens(5), asyncio.Event()))
    generation = make_generation(tokenizer, story)

    async def scenario() -> None:
        with pytest.raises(DeadlineExceeded):
            await collect(generation, request(2), asyncio.get_running_loop().time() + 0.01)

    run_async(scenario())
    assert outcomes(generation) == {"deadline": 1}
    assert is_idle(generation, story)


@pytest.mark.parametrize("num_events", [1, 2, 3])
def test_a_reader_that_leaves_ends_all_answers(tokenizer: Tokenizer, num_events: int) -> None:
    story = AnswersStory(*[(tokens(5), asyncio.Event())] * 3)
    generation = make_generation(tokenizer, story)

    async def scenario() -> None:
        async with aclosing(generation.generate(request(3))) as found:
            for _ in range(num_events):
                await anext(found)

    run_async(scenario())
    assert outcomes(generation) == {"aborted": 1}
    assert is_idle(generation, story)


def test_each_answer_takes_one_of_the_places_for_live_requests(tokenizer: Tokenizer) -> None:
    story = AnswersStory(*[(tokens(5), asyncio.Event())] * 3)
    generation = make_generation(tokenizer, story, max_requests=4)

    async def scenario() -> None:
        async with aclosing(generation.generate(request(3))) as found:
            await anext(found)
            with pytest.raises(Overloaded, match="3 requests are live"):
                await collect(generation, request(2))
            async with aclosing(generation.generate(request(1))) as fits:
                await anext(fits)

    run_async(scenario())
    assert is_idle(generation, story)


def test_an_engine_that_judges_too_few_tokens_of_a_prompt_gives_no_answer(tokenizer: Tokenizer) -> None:
    generation = make_generation(tokenizer, FakeStory(tokens(5), end()))
    with pytest.raises(PdError, match="0 log probabilities came for 1"):
        asyncio.run(collect(generation, request(prompt_logprobs=0)))
    assert outcomes(generation) == {"failed": 1}


@pytest.mark.parametrize("script", [(end(FinishReason.STOP),), (tokens(5), end())])
def test_the_prompt_comes_before_the_answer_even_when_that_is_empty(
    tokenizer: Tokenizer, script: tuple[Step, ...]
) -> None:
    generation = make_generation(tokenizer, AnswersStory(script))
    found = asyncio.run(collect(generation, request(prompt_logprobs=2, echo=True)))
    prompt = found[0]
    assert isinstance(prompt, GenerationPrompt)
    assert (prompt.token_ids, [entry.logprob for entry in prompt.logprobs]) == ((5, 6), [-6.0])
    assert isinstance(found[-1], GenerationFinish)


def test_an_echo_is_what_the_client_wrote_or_the_text_of_its_tokens(tokenizer: Tokenizer) -> None:
    generation = make_generation(tokenizer, AnswersStory((end(),)))
    written = asyncio.run(collect(generation, request(prompt=TextPrompt(" hello"), echo=True)))[0]
    token_ids = tuple(text_ids(tokenizer, "ůx"))
    spelled = asyncio.run(collect(generation, request(prompt=TokenPrompt(token_ids), echo=True)))[0]
    assert [prompt.text for prompt in (written, spelled) if isinstance(prompt, GenerationPrompt)] == [" hello", "ůx"]


# ---- HTTP


def ask(generation: Generation, body: Json, path: str = "/v1/completions") -> Any:
    """The body of an answer, or the events of a streamed one."""
    found: list[Any] = []

    async def scenario(client: Any) -> None:
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        found.append(events(response) if body.get("stream") else response.json())

    against_http(generation, scenario)
    return found[0]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_the_streams_of_all_choices_concatenated_are_the_whole_answer(
    tokenizer: Tokenizer, path: str, body: Json
) -> None:
    a, b, c = text_ids(tokenizer, "abc")
    story = AnswersStory((tokens(a), tokens(b), tokens(c), end()), (tokens(c), end(FinishReason.STOP)), (end(),))
    asked = {**body, "n": 3, "return_token_ids": True}
    generation = make_generation(tokenizer, story)
    whole = ask(generation, asked, path)
    *chunks, usage, done = ask(generation, {**asked, "stream": True, "stream_options": {"include_usage": True}}, path)
    assert done == "[DONE]"
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    for choice in whole["choices"]:
        mine = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(map(choice_text, mine)) == choice_text(choice)
        assert [token for part in mine for token in part["token_ids"]] == choice["token_ids"]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        if "chat" in path:
            assert [part["delta"].get("role") for part in mine] == ["assistant"] + [None] * (len(mine) - 1)
    assert usage["usage"] == whole["usage"]
    prompt_tokens = len(whole["choices"][0]["prompt_token_ids"])
    assert whole["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 4,
        "total_tokens": prompt_tokens + 4,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_choices_are_streamed_as_they_come(tokenizer: Tokenizer) -> None:
    """No choice waits for another one's end."""
    story = AnswersStory(*[(tokens(5), tokens(6), tokens(5), end())] * 2)
    *chunks, _ = ask(make_generation(tokenizer, story), {**COMPLETION, "n": 2, "stream": True})
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert sorted(order) != order


def test_best_of_may_repeat_n(tokenizer: Tokenizer) -> None:
    story = AnswersStory(*[(end(),)] * 2)
    for best_of in (1, 2, None):
        answer = ask(make_generation(tokenizer, story), {**COMPLETION, "n": 2, "best_of": best_of})
        assert len(answer["choices"]) == 2


def merged(choices: list[Json], index: int) -> Json:
    """The streamed parts of one choice put together."""
    mine = [choice for choice in choices if choice["index"] == index]
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in mine:
        for name, entries in (part["logprobs"] or {}).items():
            lists[name] += entries
    return {"text": "".join(part["text"] for part in mine), "logprobs": lists}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", ["hello ů", "token ids"])
def test_echo_puts_the_prompt_before_each_answer_also_in_a_stream(tokenizer: Tokenizer, n: int, prompt: str) -> None:
    a, b = text_ids(tokenizer, "ab")
    story = AnswersStory(*[(tokens(a), tokens(b), end())] * n)
    given = text_ids(tokenizer, "hello ů") if prompt == "token ids" else prompt
    asked = {"prompt": given, "echo": True, "n": n, "return_token_ids": True}
    whole = ask(make_generation(tokenizer, story), asked)
    assert [choice["text"] for choice in whole["choices"]] == ["hello ůab"] * n
    assert [choice["token_ids"] for choice in whole["choices"]] == [[a, b]] * n
    assert whole["usage"]["completion_tokens"] == 2 * n
    chunks = ask(make_generation(tokenizer, story), {**asked, "stream": True})[:-1]
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [merged(parts, index)["text"] for index in range(n)] == ["hello ůab"] * n
    assert all(choice["logprobs"] is None for choice in parts + whole["choices"])


@pytest.mark.parametrize("n", [1, 2])
def test_echo_with_logprobs_judges_the_prompt_too_with_null_first(tokenizer: Tokenizer, n: int) -> None:
    """R67."""
    a, b = text_ids(tokenizer, "ab")
    entry = TokenLogprobs(-0.25, ((a, -0.25), (b, -2.0)))
    story = AnswersStory(*[(StoryTokens(token_ids=(a,), logprobs=(entry,)), end())] * n)
    given = text_ids(tokenizer, "ůx")
    asked = {"prompt": given, "echo": True, "logprobs": 1, "n": n}
    whole = ask(make_generation(tokenizer, story), asked)
    chunks = ask(make_generation(tokenizer, story), {**asked, "stream": True})[:-1]
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    for index, choice in enumerate(whole["choices"]):
        found = choice["logprobs"]
        assert found["tokens"] == [tokenizer.token_text(token) for token in [*given, a]]
        assert found["token_logprobs"] == [None, *(-float(token) for token in given[1:]), -0.25]
        top = {tokenizer.token_text(7): -0.5}
        assert found["top_logprobs"] == [None, *[top] * (len(given) - 1), {"a": -0.25}]
        assert found["text_offset"][-1] == len("ůx")
        assert found["text_offset"] == sorted(found["text_offset"])
        assert merged(parts, index) == {"text": choice["text"], "logprobs": found}
        assert "prompt_logprobs" not in choice


@pytest.mark.parametrize("family", FAMILIES)
def test_offsets_are_places_in_the_text_that_was_sent(family: str, tmp_path: Path) -> None:
    """Also where the tokenizer puts a begin token and a space before every text."""
    spoken = family_tokenizer(family, tmp_path)
    entry = TokenLogprobs(-0.25)
    story = AnswersStory((StoryTokens(token_ids=(token_id(spoken, "a"),), logprobs=(entry,)), end()))
    generation = make_generation(spoken, story)
    (choice,) = ask(generation, {"prompt": "ab ab", "echo": True, "logprobs": 0})["choices"]
    tokens_, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert choice["text"] == "ab aba"
    assert tokens_[0] == "<s>"
    for token, begin, stop in zip(tokens_[1:], offsets[1:], [*offsets[2:], len(choice["text"])], strict=True):
        assert choice["text"][begin:stop] in (token, token.removeprefix(" "))


def test_prompt_logprobs_have_vllms_form(tokenizer: Tokenizer) -> None:
    story = AnswersStory(*[(tokens(5), end())] * 2)
    asked = {"prompt": [5, 7, 9], "prompt_logprobs": 2, "n": 2}
    expected = [
        None,
        {
            "7": {"logprob": -7.0, "rank": 3, "decoded_token": tokenizer.token_text(7)},
            "8": {"logprob": -1.5, "rank": 2, "decoded_token": tokenizer.token_text(8)},
        },
        {
            "9": {"logprob": -9.0, "rank": 3, "decoded_token": tokenizer.token_text(9)},
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.token_text(7)},
            "8": {"logprob": -1.5, "rank": 2, "decoded_token": tokenizer.token_text(8)},
        },
    ]
    whole = ask(make_generation(tokenizer, story), asked)
    assert [choice["prompt_logprobs"] for choice in whole["choices"]] == [expected] * 2
    assert [choice["logprobs"] for choice in whole["choices"]] == [None] * 2
    chunks = ask(make_generation(tokenizer, story), {**asked, "stream": True})[:-1]
    told = [choice for chunk in chunks for choice in chunk["choices"] if "prompt_logprobs" in choice]
    assert {choice["index"]: choice["prompt_logprobs"] for choice in told} == {0: expected, 1: expected}
    assert len(told) == 2


def test_a_prompt_of_one_token_is_judged_by_nobody(tokenizer: Tokenizer) -> None:
    for asked in ({"prompt_logprobs": 0}, {"prompt_logprobs": 3}):
        story = AnswersStory((tokens(5), end()))
        (choice,) = ask(make_generation(tokenizer, story), {"prompt": [5], **asked})["choices"]
        assert choice["prompt_logprobs"] == [None]


def test_a_chat_tells_of_its_prompt_once_beside_the_choices(tokenizer: Tokenizer) -> None:
    story = AnswersStory(*[(tokens(5), end())] * 2)
    asked = {**CHAT, "prompt_logprobs": 0, "n": 2}
    whole = ask(make_generation(tokenizer, story), asked, "/v1/chat/completions")
    assert whole["prompt_logprobs"][0] is None
    assert all(len(entry) == 1 for entry in whole["prompt_logprobs"][1:])
    assert not any("prompt_logprobs" in choice for choice in whole["choices"])
    *chunks, _ = ask(make_generation(tokenizer, story), {**asked, "stream": True}, "/v1/chat/completions")
    told = [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk]
    assert told == [whole["prompt_logprobs"]]


def test_echo_takes_more_alternatives_than_the_prompt_alone_shows(tokenizer: Tokenizer) -> None:
    """Both may be asked for; each shows as many as it asked for."""
    story = AnswersStory((tokens(5), end()))
    asked = {"prompt": [5, 7], "echo": True, "logprobs": 2, "prompt_logprobs": 0}
    generation = make_generation(tokenizer, story)
    (choice,) = ask(generation, asked)["choices"]
    assert story.jobs[0].sampling.prompt_logprobs == 2
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2
    assert choice["prompt_logprobs"][1].keys() == {"7"}


def test_the_official_client_reads_several_choices_with_echo(tokenizer: Tokenizer) -> None:
    a, b = text_ids(tokenizer, "ab")
    story = AnswersStory((tokens(a), end()), (tokens(b), tokens(b), end()))

    async def scenario(client: openai.AsyncOpenAI) -> None:
        options: Any = {"model": "tiny", "prompt": "x", "n": 2, "echo": True, "logit_bias": {"5": 1}}
        whole = await client.completions.create(**options)
        assert [choice.text for choice in whole.choices] == ["xa", "xbb"]
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 2
        texts = {0: "", 1: ""}
        async for chunk in await client.completions.create(**options, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == {0: "xa", 1: "xbb"}

    with_openai(make_generation(tokenizer, story), scenario)


# ---- gRPC


def test_deltas_and_finishes_name_their_answer(tokenizer: Tokenizer) -> None:
    a, b = text_ids(tokenizer, "ab")
    story = AnswersStory((tokens(a), end()), (tokens(b), tokens(b), end(FinishReason.STOP)))
    found: list[pb.GenerateResponse] = []

    async def scenario(channel: Any) -> None:
        found.extend(await grpc_answer(channel, ids(5, 6, n=2)))

    against_grpc(make_generation(tokenizer, story), scenario)
    texts = {0: "", 1: ""}
    for response in found:
        texts[response.delta.index] += response.delta.text
    assert texts == {0: "a", 1: "bb"}
    ends = {r.finish.index: r.finish for r in found if r.HasField("finish")}
    assert [ends[i].completion_tokens for i in (0, 1)] == [1, 2]
    assert [ends[i].prompt_tokens for i in (0, 1)] == [2, 2]
    assert [ends[i].cached_tokens for i in (0, 1)] == [2, 3]
    assert [ends[i].reason for i in (0, 1)] == ["length", "stop"]


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_the_prompts_log_probabilities_are_the_first_message(tokenizer: Tokenizer, num_tokens: int) -> None:
    story = AnswersStory((tokens(5), end()))

    async def scenario(channel: Any) -> None:
        prompt = range(5, 5 + num_tokens)
        first, second, _ = await grpc_answer(channel, ids(*prompt, sampling=pb.Sampling(prompt_logprobs=2)))
        assert list(first.prompt.token_ids) == list(prompt)
        assert [entry.logprob for entry in first.prompt.logprobs] == [-float(token) for token in prompt[1:]]
        assert [(entry.rank, len(entry.top)) for entry in first.prompt.logprobs] == [(3, 2)] * (num_tokens - 1)
        assert second.HasField("delta")

    against_grpc(make_generation(tokenizer, story), scenario)


def test_held_back_text_goes_to_its_own_answer(tokenizer: Tokenizer) -> None:
    a = text_ids(tokenizer, "a")[0]
    story = AnswersStory((end(),), (tokens(a), end()))

    async def scenario(channel: Any) -> None:
        found = await grpc_answer(channel, ids(5, n=2, stop=["ab"]))
        assert [(r.delta.index, r.delta.text) for r in found if r.delta.text] == [(1, "a")]

    against_grpc(make_generation(tokenizer, story), scenario)


def test_deltas_of_one_answer_have_index_zero(tokenizer: Tokenizer) -> None:
    found = asyncio.run(collect(make_generation(tokenizer, AnswersStory((tokens(5), end()))), request()))
    assert [event.index for event in found if isinstance(event, GenerationDelta | GenerationFinish)] == [0, 0]
