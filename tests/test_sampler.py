"""Laws of sampling: what the filters keep, what the seed decides, and that the draw follows the distribution."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pd_service.engine.sampler import SampleRow, _adjusted, _kept, prompt_logprobs, sample, uniform
from pd_service.engine.step import SampledToken
from pd_service.request import EngineSampling

PROBS = (0.5, 0.25, 0.15, 0.07, 0.03)
LOGITS = torch.tensor([[math.log(p) for p in PROBS]])


def draw(count: int, **params: object) -> list[int]:
    """Tokens that `count` positions of one seed get from LOGITS."""
    sampling = EngineSampling(**({"temperature": 1.0, "seed": 1} | params))  # type: ignore[arg-type]
    return [sample_one(LOGITS, sampling, position=position).token_id for position in range(count)]


def sample_one(logits: torch.Tensor, sampling: EngineSampling, **row: object) -> SampledToken:
    """The token of a batch of one; `logits` [1, vocab]."""
    (token,) = sample(logits, [SampleRow(sampling=sampling, **({"position": 0} | row))])  # type: ignore[arg-type]
    return token


def test_greedy_takes_the_most_likely_whatever_the_filters() -> None:
    assert set(draw(50, temperature=0.0, top_k=3, top_p=0.1, seed=9)) == {0}


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.76}, {0, 1, 2}),
        ({"top_p": 1e-6}, {0}),
        ({"min_p": 0.29}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "min_p": 0.4}, {0, 1}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # of the 0.75 that top-k left, 0.5 is two thirds
    ],
)
def test_filters_keep_exactly_these(params: dict[str, object], kept: set[int]) -> None:
    assert set(draw(600, **params)) == kept


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"temperature": 0.5}, {"temperature": 2.0, "min_p": 1e-9}])
def test_draws_follow_the_distribution(params: dict[str, float]) -> None:
    temperature = params.get("temperature", 1.0)
    weights = [p ** (1 / temperature) for p in PROBS]
    tokens = draw(4000, **params)
    for token, weight in enumerate(weights):
        expected = weight / sum(weights)
        deviation = math.sqrt(expected * (1 - expected) / len(tokens))
        assert abs(tokens.count(token) / len(tokens) - expected) < 5 * deviation


def test_ties_and_equal_seeds_are_the_same_with_and_without_a_sort() -> None:
    """Filters that keep everything change nothing but the order of the walk, so the mass per token stays."""
    for token in range(5):
        plain, sorted_ = draw(3000).count(token), draw(3000, top_k=5).count(token)
        assert abs(plain - sorted_) < 5 * math.sqrt(3000 * PROBS[token])


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_uniform_depends_on_seed_and_position_alone(seed: int, position: int) -> None:
    assert uniform(seed, position) == uniform(seed, position)
    assert 0.0 <= uniform(seed, position) < 1.0
    assert uniform(seed, position) != uniform(seed, position + 1)


def active_rows(num_rows: int, vocab: int) -> list[SampleRow]:
    """Rows of every kind: plain, filtered, biased, penalized, greedy, with log probabilities."""
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.8, "logprobs": 2},
        {"top_k": 5, "presence_penalty": 0.7},
        {"temperature": 0.0, "frequency_penalty": 0.5, "logprobs": 0},
        {"repetition_penalty": 1.3, "logit_bias": ((1, 4.0), (7, -100.0))},
        {"temperature": 0.0, "repetition_penalty": 0.7, "presence_penalty": -1.0},
    ]
    return [
        SampleRow(
            sampling=EngineSampling(**({"temperature": 0.9, "seed": i} | kinds[i % len(kinds)])),  # type: ignore[arg-type]
            position=i + 4,
            token_ids=[(i * 7 + k * k) % vocab for k in range(i + 4)],
            num_prompt_tokens=i // 2,
        )
        for i in range(num_rows)
    ]


def test_a_row_does_not_depend_on_its_neighbours_to_the_last_bit() -> None:
    """R106. Log probabilities are compared exactly as well."""
    logits = torch.randn(14, 257, generator=torch.Generator().manual_seed(0))
    rows = active_rows(14, 257)
    together = sample(logits, rows)
    for i in range(14):
        assert sample(logits[i : i + 1].clone(), [rows[i]]) == [together[i]]
    order = torch.randperm(14, generator=torch.Generator().manual_seed(1)).tolist()
    assert sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 2.0])
def test_extreme_temperatures_give_a_token(temperature: float) -> None:
    logits = torch.tensor([[1e4, -1e4, 3.0e38, -3.0e38]])
    token = sample_one(logits, EngineSampling(temperature=temperature, top_p=0.5, seed=3), position=7)
    assert token.token_id == 2


def test_logprobs_are_of_the_model_before_temperature_and_filters() -> None:
    sampling = EngineSampling(temperature=0.1, top_k=1, logprobs=2)
    token = sample_one(LOGITS, sampling)
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(math.log(0.5), abs=1e-6)
    assert [one for one, _ in token.logprobs.top] == [0, 1]
    assert token.logprobs.top[1][1] == pytest.approx(math.log(0.25), abs=1e-6)
    none_asked = sample_one(LOGITS, EngineSampling(logprobs=0))
    assert none_asked.logprobs is not None
    assert none_asked.logprobs.top == ()
    assert sample_one(LOGITS, EngineSampling()).logprobs is None


@given(
    st.lists(st.sampled_from([0.0, 0.0, 1.0, 1.5, -3.0, -20.0, -300.0, 8.0]), min_size=1, max_size=40),
    st.sampled_from([1e-3, 0.5, 1.0, 2.0]),
    st.integers(0, 45),
    st.sampled_from([1e-6, 0.3, 0.9, 0.999999, 1.0]),
    st.sampled_from([0.0, 1e-200, 1e-9, 0.1, 1.0]),
)
def test_filters_keep_what_a_sort_of_the_whole_vocabulary_keeps(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """With many ties, and probabilities that underflow."""
    probs = torch.softmax(torch.tensor(logits, dtype=torch.float64) / temperature, dim=-1)
    order = sorted(range(len(logits)), key=lambda i: -float(probs[i]))
    expected = order[:top_k] if top_k else order
    mass, left = 0.0, math.fsum(float(probs[i]) for i in expected)
    if top_p < 1.0:
        nucleus = []
        for i in expected:
            if mass < top_p * left or not nucleus:
                nucleus.append(i)
            mass += float(probs[i])
        expected = nucleus
    expected = [i for i in expected if probs[i] >= min_p * probs[order[0]]]
    values, ids = _kept(probs, EngineSampling(top_k=top_k, top_p=top_p, min_p=min_p))
    assert ids.tolist() == expected
    assert values.tolist() == [float(probs[i]) for i in expected]


# ---- bias and penalties


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
    st.data(),
    *[st.floats(-2.0, 2.0, width=32) for _ in range(2)],
    st.floats(0.125, 2.0, width=32),
    st.dictionaries(st.integers(0, 9), st.floats(-100.0, 100.0, width=32)),
)
def test_bias_and_penalties_follow_their_formulas(
    history: list[int],
    data: st.DataObject,
    presence: float,
    frequency: float,
    repetition: float,
    bias: dict[int, float],
) -> None:
    """Against the formulas, token by token in plain numbers."""
    num_prompt_tokens = data.draw(st.integers(0, len(history)))
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(len(history)))
    sampling = EngineSampling(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=tuple(sorted(bias.items())),
    )
    row = SampleRow(sampling=sampling, position=len(history), token_ids=history, num_prompt_tokens=num_prompt_tokens)
    expected = []
    for token, logit in enumerate(logits[0].tolist()):
        value = logit + bias.get(token, 0.0)
        if token in history:
            value = value / repetition if value > 0 else value * repetition
        count = history[num_prompt_tokens:].count(token)
        expected.append(value - count * frequency - (presence if count else 0.0))
    assert _adjusted(logits[0], row).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_greedy_obeys_bias_and_penalties() -> None:
    assert sample_one(LOGITS, EngineSampling(logit_bias=((3, 100.0),))).token_id == 3
    assert sample_one(LOGITS, EngineSampling(logit_bias=((0, -100.0),))).token_id == 1
    presence = EngineSampling(presence_penalty=1.0)
    assert sample_one(LOGITS, presence, token_ids=[4, 0], num_prompt_tokens=1).token_id == 1
    assert sample_one(LOGITS, presence, token_ids=[0, 4], num_prompt_tokens=1).token_id == 0  # it is in the prompt
    frequency = EngineSampling(frequency_penalty=0.4)
    assert sample_one(LOGITS, frequency, token_ids=[0]).token_id == 0
    assert sample_one(LOGITS, frequency, token_ids=[0, 0]).token_id == 1
    repetition = EngineSampling(repetition_penalty=2.0)
    prompt_only = sample_one(torch.tensor([[1.0, 0.9, -5.0]]), repetition, token_ids=[0], num_prompt_tokens=1)
    assert prompt_only.token_id == 1


def test_draws_follow_the_biased_distribution() -> None:
    """Bias adds to the logit: a token with ln 2 more is twice as likely beside the others."""
    weights = [0.5, 0.25, 0.15 * 2, 0.07, 0.03]
    tokens = draw(4000, logit_bias=((2, math.log(2.0)),))
    for token, weight in enumerate(weights):
        expected = weight / sum(weights)
        assert abs(tokens.count(token) / 4000 - expected) < 5 * math.sqrt(expected * (1 - expected) / 4000)


def test_logits_stay_as_they_are_and_logprobs_are_before_bias_and_penalties() -> None:
    before = LOGITS.clone()
    sampling = EngineSampling(logprobs=1, logit_bias=((4, 100.0),), repetition_penalty=2.0)
    token = sample_one(LOGITS, sampling, token_ids=[0, 1])
    assert torch.equal(before, LOGITS)
    assert token.token_id == 4
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(math.log(0.03), abs=1e-6)
    assert (token.logprobs.rank, token.logprobs.top[0][0]) == (5, 0)


# ---- log probabilities of the prompt


@pytest.mark.parametrize("num_rows", [0, 1, 63, 64, 65, 200])
def test_each_row_judges_its_own_prompt_token(num_rows: int) -> None:
    logits = torch.randn(num_rows, 41, generator=torch.Generator().manual_seed(num_rows))
    token_ids = [i * 17 % 41 for i in range(num_rows)]
    judged = prompt_logprobs(logits, token_ids, 3)
    assert len(judged) == num_rows
    reference = torch.log_softmax(logits.double(), dim=-1)
    for row, token, found in zip(reference, token_ids, judged, strict=True):
        order = row.argsort(descending=True).tolist()
        assert found.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert found.rank == order.index(token) + 1
        assert [top for top, _ in found.top] == order[:3]
        assert [value for _, value in found.top] == pytest.approx([float(row[top]) for top in order[:3]], abs=1e-5)


def test_a_prompt_judged_in_pieces_is_judged_alike_to_the_last_bit() -> None:
    logits = torch.randn(150, 97, generator=torch.Generator().manual_seed(5))
    token_ids = [i % 97 for i in range(150)]
    pieces = [
        one
        for begin, end in [(0, 1), (1, 70), (70, 71), (71, 150)]
        for one in prompt_logprobs(logits[begin:end], token_ids[begin:end], 2)
    ]
    assert pieces == prompt_logprobs(logits, token_ids, 2)


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    (judged,) = prompt_logprobs(LOGITS, [2], 20)
    assert [token for token, _ in judged.top] == [0, 1, 2, 3, 4]
