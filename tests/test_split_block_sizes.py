"""A prompt computed in blocks of one size and decoded in blocks of another: the tokens are the model's own.

The planner cuts by any two sizes; the handshake refuses unequal ones for now. A window's edge is right too where the
reader's size divides the holder's: then each of the reader's blocks is filled as a whole, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integer_model import VARIANTS, Attention, integer_models
from tests.integer_reference import GREEDY, continuation
from tests.split_engines import Split
from tests.stepped_engine import Shape, new_request

PROMPT = tuple((i * i * 17 + 5 * i + 2) % 900 for i in range(41))
SIZES = [(1, 16), (4, 16), (16, 4), (3, 8), (8, 3), (8, 2), (5, 1)]
CASES = [
    (attention, sizes) for attention in VARIANTS for sizes in SIZES
    if attention in ("full", "mla") or sizes[0] % sizes[1] == 0
]  # fmt: skip


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Attention, Path]]:
    with integer_models(tmp_path_factory.mktemp("integer")) as dirs:
        yield dirs


@pytest.mark.parametrize(("attention", "sizes"), CASES)
def test_tokens_are_the_models_own_also_those_that_reuse_what_was_received(
    model_dirs: dict[Attention, Path], attention: Attention, sizes: tuple[int, int]
) -> None:
    split = Split(model_dirs[attention], Shape(block_size=sizes[0], chunk=3), Shape(block_size=sizes[1]))
    for num_tokens in (1, 15, 16, 34, 41):
        request = new_request(f"split {num_tokens}", PROMPT[:num_tokens], 4)
        assert split.run(request) == continuation(attention, PROMPT[:num_tokens], 4, GREEDY)
        again = new_request(f"again {num_tokens}", PROMPT[: max(1, num_tokens - 1)], 4)
        assert split.decode.run(again) == continuation(attention, again.token_ids, 4, GREEDY)
    assert split.is_empty
