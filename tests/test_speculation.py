"""Laws of speculative decoding: guesses never change the output, and right ones save steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pd_service.config import EngineConfig, EngineSettings, SpeculativeSettings
from pd_service.engine.batch import InputRow, make_batch
from pd_service.engine.execution_engine import ExecutionEngine
from pd_service.engine.messages import Submit
from pd_service.engine.ngram import NgramIndex
from pd_service.engine.speculation import accept
from pd_service.engine.step import SampledToken
from pd_service.request import EngineRequest, EngineSampling, RequestId
from tests.model_parity import save_random
from tests.test_models_deepseek import YARN, v3
from tests.test_models_deepseek_draft import add_layer

torch.set_num_threads(1)
REPEATED = [5, 6, 7, 8, 9] * 6


def test_a_guess_is_what_followed_the_longest_run_the_last_time() -> None:
    index = NgramIndex(2, 4)
    assert index.propose([1, 2, 3, 4, 5, 2, 3], 3) == (4, 5, 2)
    assert NgramIndex(2, 4).propose([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1) == (9,)  # 1 2 3 beats the later 2 3
    assert NgramIndex(2, 4).propose([1, 2, 3], 3) == ()
    assert NgramIndex(3, 4).propose([1, 2, 9, 1, 2], 3) == ()
    assert NgramIndex(1, 4).propose([7, 7], 3) == (7,)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 3), st.integers(0, 3), st.integers(1, 5))
def test_an_index_that_grew_with_its_request_says_what_a_fresh_one_says(
    tokens: list[int], shortest: int, more: int, most: int
) -> None:
    grown = NgramIndex(shortest, shortest + more)
    for end in range(1, len(tokens) + 1):
        guess = grown.propose(tokens[:end], most)
        assert guess == NgramIndex(shortest, shortest + more).propose(tokens[:end], most)
        assert guess == _brute_force(tokens[:end], shortest, shortest + more, most)


def _brute_force(tokens: list[int], shortest: int, longest: int, most: int) -> tuple[int, ...]:
    for length in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:] and length < len(tokens):
                return tuple(tokens[end : end + most])
    return ()


@given(st.lists(st.integers(0, 2), max_size=6), st.data())
def test_a_choice_stands_exactly_when_all_guesses_before_it_were_right(guesses: list[int], data: st.DataObject) -> None:
    size = len(guesses) + 1
    choices = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    stands = [t.token_id for t in accept(guesses, [SampledToken(c) for c in choices])]
    assert stands == choices[: len(stands)]
    assert all(choices[i] == guesses[i] for i in range(len(stands) - 1))
    assert len(stands) == size or choices[len(stands) - 1] != guesses[len(stands) - 1]


def test_no_choices_are_none_that_stand() -> None:
    assert accept((), ()) == ()


def test_each_position_with_guesses_is_a_line_of_its_own() -> None:
    """So that its attention is computed as plain decoding would, to the last bit."""
    blocks = {"FullAttention": [3, 1]}
    rows = [InputRow([9, 9, 9], 0, blocks), InputRow([9, 7, 8], 4, {"FullAttention": [2, 5]}, num_drafts=2)]
    batch = make_batch(rows, [row.token_ids for row in rows], [row.first for row in rows], 4, torch.device("cpu"))
    assert batch.metadata.query_lens == [3, 1, 1, 1]
    assert batch.metadata.kv_lens == [3, 5, 6, 7]
    assert batch.starts == [0, 3]
    assert batch.positions.tolist() == [0, 1, 2, 4, 5, 6]
    assert [row[:2] for row in batch.metadata.block_table["FullAttention"].tolist()] == [[3, 1], *[[2, 5]] * 3]


def outputs(
    model_dir: Path, speculative: SpeculativeSettings, samplings: list[EngineSampling], *, kv_cache_bytes: int = 2**22
) -> tuple[list[list[int]], ExecutionEngine]:
    """What every request gets, all run together, and the engine that did it."""
    settings = EngineSettings(
        block_size=4, speculative=speculative, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64
    )
    config = EngineConfig(role="mixed", model_dir=model_dir, settings=settings, kv_cache_bytes=kv_cache_bytes)  # type: ignore[arg-type]
    engine = ExecutionEngine(config)
    requests = [
        EngineRequest(
            request_id=RequestId(f"r{i}"),
            token_ids=tuple(REPEATED[i:]),
            num_prompt_tokens=len(REPEATED) - i,
            max_new_tokens=25 + i,
            sampling=sampling,
        )
        for i, sampling in enumerate(samplings)
    ]
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    output = engine.step([Submit(request) for request in requests])
    while output is not None:
        for event in output.events:
            assert event.error is None
            tokens[event.request_id] += event.token_ids
        engine.scheduler.check()
        output = engine.step()
    assert engine.kv_cache_manager.num_free_blocks() == engine.kv_cache_manager.num_usable_blocks()
    return list(tokens.values()), engine


FEW = ((5, 30.0), (6, 30.0), (7, 30.0))  # outputs of three tokens repeat themselves, so that guesses come true
SAMPLINGS = [
    EngineSampling(logit_bias=FEW),
    EngineSampling(logit_bias=FEW, temperature=0.7, seed=3),
    EngineSampling(logit_bias=FEW, temperature=1.2, seed=4, top_k=20, top_p=0.9),
    EngineSampling(logit_bias=FEW, frequency_penalty=0.1, presence_penalty=0.5),
    EngineSampling(logit_bias=FEW, temperature=0.9, seed=5, repetition_penalty=1.1),
    EngineSampling(stop_token_ids=frozenset(range(100, 140))),
]


@pytest.mark.parametrize("num_tokens", [1, 3, 7])
@pytest.mark.parametrize("kv_cache_bytes", [2**22, 60_000], ids=["roomy", "preempting"])
def test_guesses_from_the_prompt_change_no_output(tiny_model_dir: Path, num_tokens: int, kv_cache_bytes: int) -> None:
    plain, _ = outputs(tiny_model_dir, SpeculativeSettings(), SAMPLINGS)
    guessing = SpeculativeSettings(method="ngram", num_tokens=num_tokens, ngram_min=1)
    guessed, engine = outputs(tiny_model_dir, guessing, SAMPLINGS, kv_cache_bytes=kv_cache_bytes)
    assert guessed == plain
    assert [len(tokens) for tokens in guessed[:5]] == [25, 26, 27, 28, 29]
    counters = engine.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert (counters.preemptions > 0) == (kv_cache_bytes < 2**20)


@pytest.fixture(scope="module")
def drafting_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_layer(save_random(v3(rope_parameters=YARN), tmp_path_factory.mktemp("drafting")))


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
@pytest.mark.parametrize("kv_cache_bytes", [2**22, 130_000], ids=["roomy", "preempting"])
def test_guesses_of_a_draft_layer_change_no_output(drafting_dir: Path, num_tokens: int, kv_cache_bytes: int) -> None:
    plain, _ = outputs(drafting_dir, SpeculativeSettings(), SAMPLINGS)
    guessing = SpeculativeSettings(method="mtp", num_tokens=num_tokens)
    guessed, engine = outputs(drafting_dir, guessing, SAMPLINGS, kv_cache_bytes=kv_cache_bytes)
    assert guessed == plain
    counters = engine.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert (counters.preemptions > 0) == (kv_cache_bytes < 2**20)
    assert len(engine.worker.cache_info.layer_infos) == 4  # the draft layer's among them
