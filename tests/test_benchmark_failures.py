"""Laws of the benchmark of failures: what it reports of what it has seen, and when it believes that blocks are free."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks.failures import CANCEL_AIM_MS, DEFAULT_STEP_TOKENS, SHORT_STEP_TOKENS, bars
from benchmarks.failures_scenes import LASTS_S, Watch
from tests.one_loop import run_async

FIGURES: dict[str, dict[str, Any]] = {
    "cancels": {
        f"cancel_{SHORT_STEP_TOKENS}_ms": [10.0] * 50 + [90.0],
        f"cancelled_{SHORT_STEP_TOKENS}_at": {"decode": 51},
        f"cancel_{DEFAULT_STEP_TOKENS}_ms": [500.0],
        f"cancelled_{DEFAULT_STEP_TOKENS}_at": {"hand-over": 1},
        "resolution_ms": 1.5,
    },
    "pulls": {"gaps_without_ms": [10.0] * 99 + [14.0], "gaps_beside_ms": [10.0] * 90 + [29.0] * 10},
    "losses": {f"{way}_{what}_ms": [1500.0, 2500.0] for way in ("killed", "silent") for what in ("holder", "reader")},
}


@pytest.mark.parametrize(("scene", "num_bars"), [("cancels", 2), ("pulls", 1), ("losses", 4)])
def test_only_what_was_played_is_reported(scene: str, num_bars: int) -> None:
    assert len(bars(FIGURES[scene])) == num_bars


def test_steps_of_any_length_are_held_to_the_aim_of_a_cancel() -> None:
    short, default = bars(FIGURES["cancels"])
    assert (short.aim, default.aim) == (CANCEL_AIM_MS, CANCEL_AIM_MS)
    assert 10 < short.value < 90
    assert short.ok
    assert default.value == 500
    assert "51 decode" in short.note


def test_a_loss_is_as_bad_as_its_worst() -> None:
    verdicts = {bar.name: (bar.value, bar.ok) for bar in bars(FIGURES["losses"])}
    assert verdicts["holder killed, to all blocks free"] == (2500, False)
    assert verdicts["reader silent, to all blocks free"] == (2500, True)


def test_a_pull_is_judged_by_what_it_adds_in_steps() -> None:
    (bar,) = bars(FIGURES["pulls"])
    assert bar.value == pytest.approx((29 - 10) / 10, abs=0.05)
    assert not bar.ok


class Engine:
    """Free or not, look by look; the last answer stays."""

    def __init__(self, *answers: bool) -> None:
        self._answers = list(answers)

    async def is_free(self) -> bool:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def test_a_state_that_does_not_last_is_not_the_end() -> None:
    async def scenario() -> None:
        start = time.perf_counter()
        watch = Watch()
        waited_ms = await watch.until_free(start, Engine(False, True, False, False, True), Engine(True))  # type: ignore[arg-type]
        assert waited_ms >= LASTS_S * 1e3  # the first look that showed both free was not believed
        assert len(watch.looks_ms) == 6

    run_async(scenario())
