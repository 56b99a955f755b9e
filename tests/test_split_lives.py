"""Many requests at once through both engines, disturbed in every way: each gets the model's own tokens, no block leaks.

The seed of a life that fails is in the report; `PD_SOAK=n` in the environment makes everything here n times as long.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integer_model import VARIANTS, Attention, integer_models
from tests.split_engines import Split
from tests.split_lives import Lives, Stage
from tests.stepped_engine import Shape

SOAK = max(1, int(os.environ.get("PD_SOAK", "1")))
NUM_WORLDS = 16 * SOAK
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Attention, Path]]:
    with integer_models(tmp_path_factory.mktemp("integer")) as dirs:
        yield dirs


def new_split(draw: random.Random, model_dir: Path) -> Split:
    """Engines of different chunks, whose caches hold little more than one request of the greatest length."""
    block_size, num_drafts = draw.choice([1, 4, 16]), draw.choice([0, 0, 1, 3])

    def shape() -> Shape:
        return Shape(
            block_size=block_size,
            num_drafts=num_drafts,
            chunk=draw.choice([5, 8, 33]),
            max_requests=draw.choice([2, 5]),
            num_tokens=draw.choice([40, 48, 64]),
            max_model_len=MAX_TOKENS,
        )

    return Split(model_dir, shape(), shape())


def live(model_dir: Path, attention: Attention, seed: int) -> Counter[str]:
    draw = random.Random(seed)
    split = new_split(draw, model_dir)
    lives = Lives(draw, attention, split, num_lives=16, max_tokens=MAX_TOKENS)
    lives.run()
    assert len(lives.lives) == 16
    for life in lives.lives:
        is_cut = life.stage is Stage.CANCELLED
        assert life.output == (life.expected[: len(life.output)] if is_cut else life.expected), life
    for name, engine in (("prefill", split.prefill), ("decode", split.decode)):
        assert engine.is_empty, name
        counters = engine.core.scheduler.counters
        lives.seen["preempted"] += counters.preemptions
        lives.seen[f"found in the cache of {name}"] += counters.cached_tokens
        lives.seen["guesses that were right"] += counters.accepted_tokens
    return lives.seen


@pytest.mark.parametrize("attention", VARIANTS)
def test_whatever_happens_the_output_is_the_models_own_and_no_block_is_left(
    model_dirs: dict[Attention, Path], attention: Attention
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WORLDS):
        try:
            seen += live(model_dirs[attention], attention, seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    happened = {
        "cancelled: waiting",
        "cancelled: prompt",
        "cancelled: decode",
        "lease ended",
        "lease ended under a pull",
        "the ticket had ended",
        "the pull failed half-way",
        "the lease ended before the pull did",
        "pulled",
        "followed",
        "read early",
        "messages in mid-step",
        "found in the cache of prefill",
        "found in the cache of decode",
        "guesses that were right",
    }
    if attention == "window":
        happened.discard("read early")  # no type of its blocks stays
    else:  # its blocks are enough for every seat
        happened.add("preempted")
    assert happened <= seen.keys(), happened - seen.keys()
