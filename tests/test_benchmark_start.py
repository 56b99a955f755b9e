"""Laws of the benchmark of starts: how lines become moments and moments become bars; nothing is started."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.start import AIM_S, bars, median_timeline, phases


def test_a_phase_begins_when_it_is_first_told() -> None:
    lines = ["100.5 imported", "101.0 loading weights 3%", "101.5 loading weights 90%", "102.0 ready"]
    assert phases(lines, 100.0) == {"imported": 0.5, "loading weights": 1.0, "ready": 2.0}


@given(moments=st.lists(st.floats(0, 100), min_size=1, max_size=7))
def test_medians_are_of_what_every_run_told(moments: list[float]) -> None:
    runs = [{"ready": at, f"only run {i}": at} for i, at in enumerate(moments)]
    if len(runs) > 1:
        assert median_timeline(runs).keys() == {"ready"}
    assert min(moments) <= median_timeline(runs)["ready"] <= max(moments)


@pytest.mark.parametrize(("own_s", "is_ok"), [(AIM_S, True), (AIM_S + 0.01, False)])
def test_the_service_is_held_to_the_aim_without_the_part_of_ray(own_s: float, is_ok: bool) -> None:
    made = {bar.name: bar for bar in bars({"ready": 1.0}, {"ready": 4.0}, {"Ray: starting": 0.1, "ready": 4.0 + own_s})}
    assert made["service without Ray's part"].value == pytest.approx(own_s)
    assert made["service without Ray's part"].ok is is_ok
    assert made["engine alone"].ok
    assert made["service"].ok
    assert made["service: Ray: starting"].value == 0.1
