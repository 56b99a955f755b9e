"""Laws of how the overlap benchmark judges what it has measured; nothing is started or timed."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.overlap import AIM_BEYOND_SHARE, AIM_MS, Measured, at_least_one, bars, layerwise_bars


def measured(name: str, num_chunks: int, wire_ms: float, exposed_ms: float = 10.0) -> Measured:
    return Measured(
        name=name,
        num_chunks=num_chunks,
        prefill_ms=100.0,
        exposed_ms=exposed_ms,
        wire_ms=wire_ms,
        hidden_wire_ms=0.0,
        confirm_ms=1.0,
        plan_ms=0.5 * num_chunks,
        num_bytes=8e6,
        hidden_bytes=4e6,
    )


def test_each_number_of_chunks_is_held_to_its_last_chunks_share_of_the_bytes() -> None:
    figures = [measured("late", 1, 8.0, 20.0), measured("early", 1, 8.0), measured("early", 4, 4.0)]
    one, whole, four, *_ = bars(figures, num_layers=30)
    assert (whole.value, whole.aim) == (figures[1].exposed_ms, AIM_MS)
    assert (one.value, one.aim, one.ok) == (0.5, 1.0, True)
    assert (four.value, four.aim, four.ok) == (0.5, 0.25 + AIM_BEYOND_SHARE, True)
    assert not bars([*figures[:2], measured("early", 4, 4.1)], num_layers=30)[2].ok


def test_layer_by_layer_saves_no_more_than_the_wire_and_costs_a_message_and_a_plan_for_each_layer() -> None:
    saves, costs = layerwise_bars(measured("early", 8, 3.0), num_layers=30)
    assert saves.value == pytest.approx(3.0 * 29 / 30)
    assert costs.value == pytest.approx(30 * (0.5 + 0.5))


@pytest.mark.parametrize("text", ["0", "-1", "", "many", "1.5"])
def test_a_count_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="at least 1"):
        at_least_one(text)
