"""Laws of sampling: what the filters keep, what the seed decides, and that the draw follows the distribution."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pd_service.engine.sampler import sample, uniform
from pd_service.request import EngineSampling

PROBS = (0.5, 0.25, 0.15, 0.07, 0.03)
LOGITS = torch.tensor([[math.log(p) for p in PROBS]])


def draw(count: int, **params: object) -> list[int]:
    """Tokens that `count` positions of one seed get from LOGITS."""
    sampling = EngineSampling(**({"temperature": 1.0, "seed": 1} | params))  # type: ignore[arg-type]
    return [sample(LOGITS, [sampling], [position])[0].token_id for position in range(count)]


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


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows = torch.randn(6, 50)
    params = [EngineSampling(temperature=0.9, top_p=0.8, seed=i, logprobs=2) for i in range(6)]
    together = sample(rows, params, range(6))
    alone = [sample(rows[i : i + 1], params[i : i + 1], [i])[0] for i in range(6)]
    assert together == alone


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 2.0])
def test_extreme_temperatures_give_a_token(temperature: float) -> None:
    logits = torch.tensor([[1e4, -1e4, 3.0e38, -3.0e38]])
    (token,) = sample(logits, [EngineSampling(temperature=temperature, top_p=0.5, seed=3)], [7])
    assert token.token_id == 2


def test_logprobs_are_of_the_model_before_temperature_and_filters() -> None:
    sampling = EngineSampling(temperature=0.1, top_k=1, logprobs=2)
    (token,) = sample(LOGITS, [sampling], [0])
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(math.log(0.5), abs=1e-6)
    assert [one for one, _ in token.logprobs.top] == [0, 1]
    assert token.logprobs.top[1][1] == pytest.approx(math.log(0.25), abs=1e-6)
    (none_asked,) = sample(LOGITS, [EngineSampling(logprobs=0)], [0])
    assert none_asked.logprobs is not None
    assert none_asked.logprobs.top == ()
    assert sample(LOGITS, [EngineSampling()], [0])[0].logprobs is None
