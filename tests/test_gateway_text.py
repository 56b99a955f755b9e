"""Laws of the gateway's text: tokenizer, detokenizer with stop strings, intake, and the core both doors use."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from pathlib import Path

import pytest
from gateway_fakes import (
    BEGIN_TEMPLATE,
    PLAIN_TEMPLATE,
    FakeStory,
    Step,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    collect,
    end,
    is_idle,
    make_generation,
    outcomes,
    tokens,
)
from hypothesis import given
from hypothesis import strategies as st

from pd_service.errors import (
    ConfigError,
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
from pd_service.gateway.detokenizer import IncrementalDetokenizer
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
from pd_service.request import ChatMessage, FinishReason, TokenLogprobs

BEGIN_ID, END_ID = 0, 1
CHAT = [ChatMessage(role="user", content="hello")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_fallback_tokenizer(tmp_path_factory.mktemp("byte_fallback"))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of `text` without the begin token."""
    return asyncio.run(tokenizer.encode_text(text))[1:]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte."""
    of_byte = {tokenizer.token_bytes(token_id): token_id for token_id in range(380)}
    return [of_byte[bytes([byte])] for byte in data]


# Tokenizer


@pytest.mark.parametrize("text", ["hello", "<s>hello", " hello", "日本"])
def test_raw_text_gets_exactly_one_begin_token(tokenizer: Tokenizer, text: str) -> None:
    token_ids = asyncio.run(tokenizer.encode_text(text))
    assert token_ids[0] == BEGIN_ID
    assert token_ids.count(BEGIN_ID) == 1
    assert tokenizer.decode(token_ids) == text.removeprefix("<s>")


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, BEGIN_TEMPLATE])
def test_chat_gets_exactly_one_begin_token_with_any_template(tmp_path: Path, template: str) -> None:
    token_ids = asyncio.run(byte_level_tokenizer(tmp_path, template=template).encode_chat(CHAT))
    assert token_ids[0] == BEGIN_ID
    assert token_ids.count(BEGIN_ID) == 1


def test_no_begin_token_is_invented_for_a_tokenizer_that_adds_none(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(tmp_path, adds_begin=False, template=PLAIN_TEMPLATE)
    assert BEGIN_ID not in asyncio.run(tokenizer.encode_text("hello"))
    assert BEGIN_ID not in asyncio.run(tokenizer.encode_chat(CHAT))


def test_chat_ends_where_the_assistant_begins(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(asyncio.run(tokenizer.encode_chat(CHAT))) == "[user]hello[assistant]"


def test_chat_without_a_template_is_refused_with_the_models_name(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(tmp_path / "plain-model", template=None)
    with pytest.raises(InvalidRequest, match="plain-model") as caught:
        asyncio.run(tokenizer.encode_chat(CHAT))
    assert caught.value.field == "messages"


def test_what_the_template_refuses_is_the_clients_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="unknown role robot") as caught:
        asyncio.run(tokenizer.encode_chat([ChatMessage(role="robot", content="")]))
    assert caught.value.field == "messages"


def test_text_that_is_not_unicode_is_the_clients_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogates"):
        asyncio.run(tokenizer.encode_text("a\ud800"))


def test_the_event_loop_runs_while_a_prompt_is_encoded(tmp_path: Path) -> None:
    loop_ran = threading.Event()

    class Waiting(Tokenizer):
        def _encode_text(self, text: str) -> list[int]:
            return [int(loop_ran.wait(timeout=60))]

    async def scenario() -> list[int]:
        tokenizer = Waiting(tmp_path)
        asyncio.get_running_loop().call_soon(loop_ran.set)
        return await tokenizer.encode_text("")

    byte_level_tokenizer(tmp_path)
    assert asyncio.run(scenario()) == [1]


def test_a_directory_without_a_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Tokenizer(tmp_path)


# Detokenizer


@given(data=st.data(), token_ids=st.lists(st.integers(0, 400), max_size=40))
def test_all_deltas_together_are_the_decoded_whole(
    tokenizer: Tokenizer, data: st.DataObject, token_ids: list[int]
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    text, rest = "", token_ids
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        text, rest = text + detokenizer.push(rest[:count]), rest[count:]
    text += detokenizer.flush()
    assert text == tokenizer.decode(token_ids) == tokenizer._backend.decode(token_ids, skip_special_tokens=True)


@given(
    raw=st.lists(st.sampled_from([0x41, 0xC3, 0xA9, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x99, 0x82, 0xFF, 0xED])).map(bytes)
)
def test_any_bytes_stream_as_they_decode(tokenizer: Tokenizer, spaced: Tokenizer, raw: bytes) -> None:
    for kind in (tokenizer, spaced):
        detokenizer = IncrementalDetokenizer(kind)
        text = "".join(detokenizer.push([token_id]) for token_id in byte_ids(kind, raw))
        assert text + detokenizer.flush() == raw.decode(errors="replace")


@given(text=st.text())
def test_no_part_of_a_character_is_sent(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    sent = ""
    for count, token_id in enumerate(token_ids := byte_ids(tokenizer, text.encode()), start=1):
        sent += detokenizer.push([token_id])
        assert sent == text.encode()[:count].decode(errors="ignore")
    assert len(token_ids) == detokenizer.num_tokens


def test_a_broken_character_is_replaced_as_soon_as_it_is_known_to_be_broken(tokenizer: Tokenizer) -> None:
    first, letter = byte_ids(tokenizer, b"\xe4A")
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([first]), detokenizer.push([letter]), detokenizer.push([first])] == ["", "\ufffdA", ""]
    assert [detokenizer.flush(), detokenizer.flush()] == ["\ufffd", ""]


def test_leading_and_repeated_spaces_survive(tokenizer: Tokenizer, spaced: Tokenizer) -> None:
    for kind, text in ((tokenizer, "  hello   world "), (spaced, " a  b   ab ")):
        ids = byte_ids(kind, b"") + encode(kind, text)
        detokenizer = IncrementalDetokenizer(kind)
        sent = [detokenizer.push([token_id]) for token_id in ids]
        assert "".join(sent).endswith(text)
        assert sent[0].startswith(" ")


def test_special_and_unknown_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    hello = encode(tokenizer, "hello")
    assert tokenizer.decode([BEGIN_ID, *hello, END_ID, 10**6]) == "hello"
    assert tokenizer.token_text(END_ID) == "</s>"


AB_TEXT = st.text("ab", max_size=24)
AB_STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(begin, end) of the stop string that ends first, the longest of these, by trying every end."""
    for stop_end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:stop_end].endswith(stop)]
        if lengths:
            return stop_end - max(lengths), stop_end
    return None


def longest_beginning(text: str, stops: list[str]) -> int:
    lengths = range(len(text) + 1)
    return max(n for n in lengths if n == 0 or any(stop.startswith(text[-n:]) for stop in stops))


@given(text=AB_TEXT, stops=AB_STOPS)
def test_held_back_is_exactly_what_can_become_a_stop_string(spaced: Tokenizer, text: str, stops: list[str]) -> None:
    detokenizer = IncrementalDetokenizer(spaced, stops)
    found = first_stop(text, stops)
    sent = ""
    for count, token_id in enumerate(byte_ids(spaced, text.encode()), start=1):
        sent += detokenizer.push([token_id])
        seen = text[:count]
        if found and count >= found[1]:
            assert (detokenizer.stopped, sent) == (True, text[: found[0]])
        else:
            assert (detokenizer.stopped, sent) == (False, seen[: count - longest_beginning(seen, stops)])
    assert sent + detokenizer.flush() == (text[: found[0]] if found else text)
    assert detokenizer.num_tokens == (found[1] if found else len(text))


@given(text=AB_TEXT, stops=AB_STOPS, data=st.data())
def test_a_stop_string_does_not_depend_on_how_text_is_cut_into_tokens(
    tokenizer: Tokenizer, text: str, stops: list[str], data: st.DataObject
) -> None:
    results = set()
    for token_ids in (byte_ids(tokenizer, text.encode()), encode(tokenizer, text)):
        detokenizer = IncrementalDetokenizer(tokenizer, stops)
        cut = data.draw(st.integers(0, len(token_ids)))
        sent = detokenizer.push(token_ids[:cut]) + detokenizer.push(token_ids[cut:]) + detokenizer.flush()
        results.add((sent, detokenizer.stopped))
    assert len(results) == 1


def test_a_stop_string_inside_one_token_ends_the_answer_within_it(tokenizer: Tokenizer) -> None:
    hello = encode(tokenizer, " hello")
    assert len(hello) == 1  # or this test would not test what it says
    detokenizer = IncrementalDetokenizer(tokenizer, ["ell"])
    assert detokenizer.push([*hello, *hello]) == " h"
    assert (detokenizer.stopped, detokenizer.num_tokens, detokenizer.flush()) == (True, 1, "")


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
