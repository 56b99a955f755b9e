"""Laws of the intake, and of the core both doors use."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

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

from pd_service.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineLost,
    InvalidRequest,
    Overloaded,
    PdError,
    PromptTooLong,
    Unavailable,
    UnknownModel,
)
from pd_service.gateway.generation import GenerationDelta, GenerationFinish, StoryTokens
from pd_service.gateway.intake import (
    ChatPrompt,
    ClientRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
    sampling_params,
)
from pd_service.gateway.tokenizer import Tokenizer
from pd_service.request import FinishReason, TokenLogprobs

END_ID = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("byte_level"))


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte."""
    of_byte = {tokenizer.token_bytes(token_id): token_id for token_id in range(380)}
    return [of_byte[bytes([byte])] for byte in data]


# Intake


def request(
    prompt: Prompt | None = None, *, model: str = "", request_id: str = "", **sampling: object
) -> ClientRequest:
    params = sampling_params(**sampling)
    return ClientRequest(prompt=prompt or TokenPrompt((5, 6)), sampling=params, model=model, request_id=request_id)


REFUSALS = [
    (request(model="other"), UnknownModel, "model", "'other'.*'tiny'"),
    (request(TokenPrompt(())), InvalidRequest, "prompt", "empty"),
    (request(TextPrompt("")), InvalidRequest, "prompt", "empty"),
    (request(ChatPrompt(())), InvalidRequest, "messages", "at least one"),
    (request(TokenPrompt((5, 380))), InvalidRequest, "prompt", "380; allowed: 0 to 379"),
    (request(TokenPrompt((-1, 5))), InvalidRequest, "prompt", "-1; allowed: 0 to 379"),
    (request(TokenPrompt((5,) * 64)), PromptTooLong, "prompt", "64 tokens.*at most 63"),
    (request(TokenPrompt((5,) * 60), max_tokens=5), InvalidRequest, "max_tokens", "5 do not fit.*60 tokens.*at most 4"),
    (request(stop_token_ids=[380]), InvalidRequest, "stop_token_ids", "380; allowed: 0 to 379"),
    (request(stop=["x" * 1025]), InvalidRequest, "stop", "1025.*1024"),
    (request(request_id="x" * 129), InvalidRequest, "request_id", "129.*128"),
]


@pytest.mark.parametrize(("refused", "error", "field", "message"), REFUSALS)
def test_refusals_name_the_field_and_what_is_allowed(
    tokenizer: Tokenizer, refused: ClientRequest, error: type[InvalidRequest], field: str, message: str
) -> None:
    story = FakeStory(end())
    generation = make_generation(tokenizer, story)
    with pytest.raises(error, match=message) as caught:
        asyncio.run(collect(generation, refused))
    assert type(caught.value) is error
    assert caught.value.field == field
    assert not story.jobs
    assert outcomes(generation) == {"refused": 1}
    assert is_idle(generation, story)


@pytest.mark.parametrize("num_tokens", [1, 62, 63])
def test_prompts_up_to_one_less_than_the_models_length_are_taken(tokenizer: Tokenizer, num_tokens: int) -> None:
    story = FakeStory(end())
    asyncio.run(collect(make_generation(tokenizer, story), request(TokenPrompt((5,) * num_tokens))))
    assert story.jobs[0].max_new_tokens == 64 - num_tokens


def test_sampling_out_of_range_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"temperature.*less than or equal to 2.*given: 3") as caught:
        sampling_params(temperature=3)
    assert caught.value.field == "temperature"


def test_a_refusal_is_short_whatever_was_given() -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampling_params(stop=["x" * 10**6] * 10**3, stop_token_ids=["y"] * 10**3)
    assert len(str(caught.value)) < 1000


def test_a_job_ends_at_the_models_and_the_clients_stop_tokens(tokenizer: Tokenizer) -> None:
    story = FakeStory(end())
    generation = make_generation(tokenizer, story)
    asyncio.run(collect(generation, request(stop_token_ids=[7])))
    asyncio.run(collect(generation, request(stop_token_ids=[7], ignore_eos=True)))
    assert [job.sampling.stop_token_ids for job in story.jobs] == [{END_ID, 7}, {7}]


def test_a_seed_is_kept_if_given_and_drawn_if_not(tokenizer: Tokenizer) -> None:
    story = FakeStory(end())
    generation = make_generation(tokenizer, story)
    for seed in (0, 2**64 - 1, None, None):
        asyncio.run(collect(generation, request(seed=seed)))
    seeds = [job.sampling.seed for job in story.jobs]
    assert seeds[:2] == [0, 2**64 - 1]
    assert seeds[2] != seeds[3]


def test_a_second_live_request_with_an_id_is_refused_and_the_first_untouched(tokenizer: Tokenizer) -> None:
    gate = asyncio.Event()
    story = FakeStory(gate, tokens(5), end())
    generation = make_generation(tokenizer, story)

    async def scenario() -> None:
        first = asyncio.create_task(collect(generation, request(request_id="a")))
        await story.started.get()
        with pytest.raises(DuplicateRequest, match="'a'"):
            await collect(generation, request(request_id="a"))
        gate.set()
        assert isinstance((await first)[-1], GenerationFinish)
        await collect(generation, request(request_id="a"))

    asyncio.run(scenario())
    assert outcomes(generation) == {"finished": 2, "refused": 1}
    assert is_idle(generation, story)


def test_one_request_more_than_may_be_live_is_refused(tokenizer: Tokenizer) -> None:
    gate = asyncio.Event()
    story = FakeStory(gate, end())
    generation = make_generation(tokenizer, story, max_requests=2)

    async def scenario() -> None:
        live = [asyncio.create_task(collect(generation, request())) for _ in range(2)]
        await story.started.get()
        await story.started.get()
        with pytest.raises(Overloaded, match="2 requests"):
            await collect(generation, request())
        gate.set()
        await asyncio.gather(*live)

    asyncio.run(scenario())
    assert outcomes(generation) == {"finished": 2, "refused": 1}


def test_requests_without_an_id_get_different_ones(tokenizer: Tokenizer) -> None:
    story = FakeStory(end())
    generation = make_generation(tokenizer, story)
    finishes = [asyncio.run(collect(generation, request()))[-1] for _ in range(2)]
    ids = [finish.request_id for finish in finishes if isinstance(finish, GenerationFinish)]
    assert ids[0] != ids[1]
    assert all(request_id.startswith("req-") for request_id in ids)


# Generation


def test_the_answer_is_the_storys_tokens_as_text_with_logprobs_per_token(tokenizer: Tokenizer) -> None:
    a, b = byte_ids(tokenizer, "é".encode())
    entry = TokenLogprobs(-0.5, ((a, -0.5),))
    script = [StoryTokens(token_ids=(token_id,), logprobs=(entry,)) for token_id in (a, b)]
    generation = make_generation(tokenizer, story := FakeStory(*script, end(), retries=2))
    *deltas, finish = asyncio.run(collect(generation, request(logprobs=1, request_id="x")))
    assert deltas == [
        GenerationDelta(text="", token_ids=(a,), logprobs=(entry,)),
        GenerationDelta(text="é", token_ids=(b,), logprobs=(entry,)),
    ]
    assert isinstance(finish, GenerationFinish)
    assert (finish.reason, finish.num_output_tokens, finish.phases.retries, finish.text) == (
        FinishReason.LENGTH,
        2,
        2,
        "",
    )
    assert finish.prompt_token_ids == (5, 6)
    assert is_idle(generation, story)


def test_a_stop_string_over_two_story_events_closes_the_story(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, b"abcdef")
    never = asyncio.Event()
    story = FakeStory(tokens(*ids[:3]), tokens(*ids[3:]), never)
    generation = make_generation(tokenizer, story)

    async def scenario() -> list[object]:
        seen: list[object] = []
        async with aclosing(generation.generate(request(stop=["cd"]))) as events:
            async for event in events:
                seen.append(event)
                assert story.num_open == (0 if isinstance(event, GenerationFinish) else 1)
        return seen

    first, second, finish = asyncio.run(scenario())
    assert first == GenerationDelta(text="ab", token_ids=tuple(ids[:3]))
    assert second == GenerationDelta(text="", token_ids=(ids[3],))
    assert isinstance(finish, GenerationFinish)
    assert (finish.reason, finish.num_output_tokens, finish.text) == (FinishReason.STOP, 4, "")
    assert outcomes(generation) == {"finished": 1}


def test_held_back_text_is_sent_with_the_end(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, b"abc\xe4")
    generation = make_generation(tokenizer, FakeStory(tokens(*ids), end()))
    delta, finish = asyncio.run(collect(generation, request(stop=["cd"])))
    assert isinstance(finish, GenerationFinish)
    assert (delta.text, finish.text, finish.reason) == ("ab", "c\ufffd", FinishReason.LENGTH)


def test_an_end_token_first_gives_an_empty_complete_answer(tokenizer: Tokenizer) -> None:
    generation = make_generation(tokenizer, FakeStory(end(FinishReason.STOP)))
    (finish,) = asyncio.run(collect(generation, request()))
    assert isinstance(finish, GenerationFinish)
    assert (finish.reason, finish.num_output_tokens) == (FinishReason.STOP, 0)


def test_every_submission_has_exactly_one_outcome(tokenizer: Tokenizer) -> None:
    """All ways a request can end, one after another, on one gateway."""
    story = FakeStory()
    generation = make_generation(tokenizer, story)

    async def ends(*script: Step, error: type[Exception] | None = None, deadline_s: float | None = None) -> None:
        story.script = script
        deadline = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        if error is None:
            await collect(generation, request(), deadline)
        else:
            with pytest.raises(error):
                await collect(generation, request(), deadline)

    async def aborts() -> None:
        story.script = (tokens(5), asyncio.Event())
        async with aclosing(generation.generate(request())) as events:
            await anext(events)
        await story.started.get()
        task = asyncio.create_task(collect(generation, request()))
        await story.started.get()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def scenario() -> None:
        await ends(tokens(5), end())
        await ends(tokens(5), asyncio.Event(), error=DeadlineExceeded, deadline_s=0.0)
        await ends(tokens(5), asyncio.Event(), error=DeadlineExceeded, deadline_s=0.01)
        await ends(DeadlineExceeded("in the story"), error=DeadlineExceeded)
        await ends(tokens(5), Unavailable("no engine"), error=Unavailable)
        await ends(EngineLost("gone"), error=EngineLost)
        await ends(TimeoutError("not the client's deadline"), error=TimeoutError)
        await ends(tokens(5), error=PdError)
        while not story.started.empty():
            story.started.get_nowait()
        await aborts()

    asyncio.run(scenario())
    assert outcomes(generation) == {"finished": 1, "deadline": 3, "failed": 4, "aborted": 2}
    assert is_idle(generation, story)


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be put forward."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


@pytest.mark.parametrize(("cancelled_after_s", "outcome"), [(3590.0, "deadline"), (1800.0, "aborted")])
def test_a_call_cancelled_just_before_its_deadline_met_it(
    tokenizer: Tokenizer, cancelled_after_s: float, outcome: str
) -> None:
    generation = make_generation(tokenizer, story := FakeStory(asyncio.Event()))
    loop = SteppedLoop()

    async def scenario() -> None:
        task = asyncio.create_task(collect(generation, request(), loop.time() + 3600.0))
        await story.started.get()
        loop.ahead_s = cancelled_after_s
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(scenario())
    assert outcomes(generation) == {outcome: 1}


def test_a_reader_that_leaves_after_the_finish_did_not_abort(tokenizer: Tokenizer) -> None:
    generation = make_generation(tokenizer, FakeStory(tokens(5), end()))

    async def scenario() -> None:
        async with aclosing(generation.generate(request())) as events:
            async for event in events:
                if isinstance(event, GenerationFinish):
                    break

    asyncio.run(scenario())
    assert outcomes(generation) == {"finished": 1}


def test_tokens_and_times_are_counted_once(tokenizer: Tokenizer) -> None:
    generation = make_generation(tokenizer, FakeStory(tokens(5), tokens(6, 7), end()))
    asyncio.run(collect(generation, request()))
    value = generation.metrics.registry.get_sample_value
    assert value("pd_tokens_total", {"kind": "prompt"}) == 2
    assert value("pd_tokens_total", {"kind": "output"}) == 3
    assert value("pd_ttft_seconds_count") == 1
    assert value("pd_inter_token_seconds_count") == 2
    assert value("pd_phase_seconds_sum", {"phase": "queue"}) == pytest.approx(0.0015)


def test_two_gateways_in_one_process_count_apart(tokenizer: Tokenizer) -> None:
    first, second = (make_generation(tokenizer, FakeStory(end())) for _ in range(2))
    asyncio.run(collect(first, request()))
    assert (outcomes(first), outcomes(second)) == ({"finished": 1}, {})
