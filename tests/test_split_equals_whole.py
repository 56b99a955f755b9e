"""Tokens through a prefill and a decode engine equal those of the model alone, whatever happens on the way.

The model is `integer_model`: what it says depends on every byte of KV it may look at, and it refuses to look at what
nobody has written. The expected tokens come from `integer_reference`, which has neither cache nor engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from pd_service.engine.messages import Submit
from pd_service.request import EngineSampling, RequestId
from tests.integer_model import VARIANTS, Attention, integer_models
from tests.integer_reference import GREEDY, continuation, right_guesses
from tests.split_engines import Split
from tests.stepped_engine import Shape, SteppedEngine, new_request

PROMPT = tuple((i * i * 31 + 7 * i + 3) % 900 for i in range(37))  # ends inside a block of any size but 1
OUTPUT = 20
SEEDED = EngineSampling(temperature=1.0, seed=11)
HIT_TOKENS = {"none": 0, "partial": 22, "full": len(PROMPT)}  # of the prompt, computed there before


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Attention, Path]]:
    with integer_models(tmp_path_factory.mktemp("integer")) as dirs:
        yield dirs


@cache
def expected(attention: Attention, prompt: tuple[int, ...], count: int, sampling: EngineSampling) -> list[int]:
    return continuation(attention, prompt, count, sampling)


@cache
def foreseen(attention: Attention, token_ids: tuple[int, ...], sampling: EngineSampling) -> list[bool]:
    return right_guesses(attention, token_ids, sampling)


def warm(engine: SteppedEngine, num_tokens: int) -> None:
    """Somebody else asks for the first `num_tokens` tokens of the prompt, then for something of their own."""
    if num_tokens:
        own = () if num_tokens == len(PROMPT) else tuple(range(900, 912))
        engine.run(new_request("before", PROMPT[:num_tokens] + own, 4))


def rival_prompt(block_size: int) -> tuple[int, ...]:
    return tuple(range(901, 902 + max(0, block_size - 7)))


def start_rival(engine: SteppedEngine, block_size: int) -> RequestId:
    """A decode that is first in order and will soon need a block."""
    rival = new_request("rival", rival_prompt(block_size), 40)
    engine.step(Submit(rival))
    engine.step_until(lambda: bool(engine.tokens[rival.request_id]))
    return rival.request_id


def num_hit(hit: str, block_size: int, num_tokens: int) -> int:
    """Of `num_tokens` tokens, one of which has to be computed or received in any case."""
    return min(HIT_TOKENS[hit], num_tokens - 1) // block_size * block_size


def check_guesses(split: Split, request_id: RequestId, attention: Attention) -> None:
    """Of the guesses the decode engine verified, those before the first wrong one have proved right, and no other.

    So the draft layer's own cache, which no output depends on, is right as well, whatever engine wrote it.
    """
    is_foreseen = foreseen(attention, (*PROMPT, *split.output(request_id)), SEEDED)
    position = len(PROMPT) + len(split.prefill.tokens[request_id])
    for num_drafted, num_tokens in split.decode.verified[request_id]:
        guesses = [*is_foreseen[position : position + num_drafted], False]
        assert num_tokens - 1 == guesses.index(False)
        position += num_tokens


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("is_preempted", [False, True], ids=["undisturbed", "preempted"])
@pytest.mark.parametrize("hit", HIT_TOKENS)
@pytest.mark.parametrize(("way", "chunk"), [("early", 1), ("early", 3), ("early", 64), ("late", 3)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("attention", VARIANTS)
def test_a_split_request_gets_the_models_own_tokens(
    model_dirs: dict[Attention, Path],
    attention: Attention,
    block_size: int,
    way: str,
    chunk: int,
    hit: str,
    is_preempted: bool,
    num_drafts: int,
) -> None:
    shape = Shape(block_size=block_size, chunk=chunk, num_drafts=num_drafts)
    split = Split(model_dirs[attention], shape, shape)
    for engine in (split.prefill, split.decode):
        warm(engine, HIT_TOKENS[hit])
    rival = start_rival(split.decode, block_size) if is_preempted else None
    counters = split.prefill.core.scheduler.counters, split.decode.core.scheduler.counters
    cached_before = [c.cached_tokens for c in counters]

    request = new_request("split", PROMPT, OUTPUT, SEEDED)
    if way == "early":
        split.hand_over_early(request)
    else:
        split.hand_over(request)
    cached = [c.cached_tokens - before for c, before in zip(counters, cached_before, strict=True)]
    assert cached == [num_hit(hit, block_size, len(PROMPT)), num_hit(hit, block_size, len(PROMPT) + 1)]
    if rival:
        split.decode.preempt(request.request_id)
    assert split.finish(request) == expected(attention, PROMPT, OUTPUT, SEEDED)
    if hit == "none":
        check_guesses(split, request.request_id, attention)

    if rival:
        split.decode.step_until(lambda: rival in split.decode.finish)
        assert split.decode.tokens[rival] == expected(attention, rival_prompt(block_size), 40, GREEDY)
    assert split.is_empty


def missing_bytes(engine: SteppedEngine, num_here: int) -> int:
    """Of the prompt's KV, what the token behind it sees and no block of the first `num_here` tokens holds."""
    num_bytes = 0
    for buffer in engine.layout.buffers:
        num_unseen = len(PROMPT) - buffer.sliding_window + 1 if buffer.sliding_window else 0
        first = max(num_here, num_unseen // buffer.block_size * buffer.block_size)
        num_bytes += (len(PROMPT) - first) * buffer.bytes_per_token
    return num_bytes


@pytest.mark.parametrize("decode_hit", HIT_TOKENS)
@pytest.mark.parametrize("prefill_hit", HIT_TOKENS)
@pytest.mark.parametrize("attention", VARIANTS)
def test_each_engine_uses_its_own_hit_and_only_what_is_missing_is_moved(
    model_dirs: dict[Attention, Path], attention: Attention, prefill_hit: str, decode_hit: str
) -> None:
    split = Split(model_dirs[attention], Shape(block_size=4), Shape(block_size=4))
    warm(split.prefill, HIT_TOKENS[prefill_hit])
    warm(split.decode, HIT_TOKENS[decode_hit])
    request = new_request("split", PROMPT, OUTPUT)
    assert split.run(request) == expected(attention, PROMPT, OUTPUT, GREEDY)
    num_here = num_hit(decode_hit, 4, len(PROMPT) + 1)
    assert split.pulled_bytes[request.request_id] == missing_bytes(split.decode, num_here)
    assert split.is_empty


@pytest.mark.parametrize("attention", VARIANTS)
def test_every_position_is_computed_once_by_one_of_the_engines(
    model_dirs: dict[Attention, Path], attention: Attention
) -> None:
    split = Split(model_dirs[attention], Shape(chunk=5), Shape())
    request = new_request("split", PROMPT, OUTPUT)
    split.hand_over(request)
    prefill, decode = split.prefill.core.scheduler.counters, split.decode.core.scheduler.counters
    assert (prefill.computed_tokens, decode.computed_tokens) == (len(PROMPT), 0)
    split.decode.step()
    assert decode.computed_tokens == 1
    split.finish(request)
    assert (prefill.computed_tokens, decode.computed_tokens) == (len(PROMPT), OUTPUT - 1)
    assert decode.received_tokens == len(PROMPT)


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("attention", VARIANTS)
def test_a_prompt_preempted_half_way_is_computed_again(
    model_dirs: dict[Attention, Path], attention: Attention, block_size: int, num_drafts: int
) -> None:
    split = Split(
        model_dirs[attention],
        Shape(block_size=block_size, chunk=4, num_drafts=num_drafts),
        Shape(block_size=block_size, num_drafts=num_drafts),
    )
    rival = start_rival(split.prefill, block_size)
    request = new_request("split", PROMPT, OUTPUT, SEEDED)
    split.start_prompt(request)
    split.prefill.preempt(request.request_id)
    split.accept(split.finish_prompt(request))
    assert split.finish(request) == expected(attention, PROMPT, OUTPUT, SEEDED)
    check_guesses(split, request.request_id, attention)
    split.prefill.step_until(lambda: rival in split.prefill.finish)
    assert split.prefill.tokens[rival] == expected(attention, rival_prompt(block_size), 40, GREEDY)
    assert split.is_empty


@pytest.mark.parametrize(("prefill_chunk", "decode_chunk"), [(1, 64), (3, 5), (64, 1)])
@pytest.mark.parametrize("attention", VARIANTS)
def test_prompts_of_any_length_greedy_between_engines_of_different_chunks(
    model_dirs: dict[Attention, Path], attention: Attention, prefill_chunk: int, decode_chunk: int
) -> None:
    split = Split(model_dirs[attention], Shape(chunk=prefill_chunk), Shape(chunk=decode_chunk))
    for length in (1, 2, 4, 5, 6, 7, 16, 17, 64):
        prompt = tuple(range(300 + length, 300 + 2 * length))
        assert split.run(new_request(f"{length}", prompt, 9)) == expected(attention, prompt, 9, GREEDY)
    assert split.is_empty


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(1, 4), (4, 1), (4, 16), (16, 4), (4, 6)])
@pytest.mark.parametrize("attention", VARIANTS)
def test_engines_of_different_block_sizes_mean_the_same_tokens(
    model_dirs: dict[Attention, Path], attention: Attention, prefill_size: int, decode_size: int
) -> None:
    split = Split(model_dirs[attention], Shape(block_size=prefill_size, chunk=5), Shape(block_size=decode_size))
    warm(split.decode, HIT_TOKENS["partial"])
    for name, hand_over in (("early", split.hand_over_early), ("late", split.hand_over)):
        request = new_request(name, (*PROMPT, len(name)), OUTPUT)
        hand_over(request)
        assert split.finish(request) == expected(attention, request.token_ids, OUTPUT, GREEDY)
    assert split.is_empty


@pytest.mark.parametrize("attention", VARIANTS)
def test_guesses_from_the_text_change_nothing(model_dirs: dict[Attention, Path], attention: Attention) -> None:
    likely = tuple((token, 23.5) for token in (5, 6, 7))  # about as likely as what the model itself may say
    sampling = EngineSampling(temperature=0.7, seed=2, logit_bias=likely)
    shape = Shape(num_drafts=3, drafter="ngram")
    split = Split(model_dirs[attention], shape, shape)
    assert split.run(new_request("split", PROMPT, 60, sampling)) == continuation(attention, PROMPT, 60, sampling)
    counters = split.decode.core.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert split.is_empty
