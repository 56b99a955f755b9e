"""Random lives on one engine core: the model's own tokens, no block left, and everybody comes to an end."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.engine_lives import run_seed

NUM_LIVES = 160
HAPPENS = {
    "cached": 100,
    "cancelled in flight": 5,
    "cancelled receiving": 1,
    "cancelled running": 5,
    "cancelled waiting": 5,
    "early pulls": 10,
    "failed pulls": 10,
    "failed steps": 10,
    "followed": 10,
    "leases": 10,
    "left out": 10,
    "preemptions": 10,
    "pulls": 10,
    "right guesses": 100,
    "withdrawn": 10,
    "wrong guesses": 100,
}  # at least so often, so that the laws were tried


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("first", range(0, NUM_LIVES, 20))
def test_whatever_happens_no_output_differs_and_nothing_is_left(first: int, seen: Counter[str]) -> None:
    for seed in range(first, first + 20):
        seen.update(run_seed(seed))


def test_in_these_lives_everything_happens(seen: Counter[str]) -> None:
    if not seen:
        pytest.skip("the lives were not run")
    assert {event: seen[event] for event, least in HAPPENS.items() if seen[event] < least} == {}
