"""Laws of the phases: no millisecond is lost, none is counted twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_service.gateway.phases import Phases
from pd_service.request import EngineTimes

DURATIONS_S = st.floats(min_value=0.0, max_value=100.0)
MS = st.floats(min_value=0.0, max_value=200_000.0)  # more than can have passed: the two clocks differ
TIMES = st.builds(EngineTimes, queue_ms=MS, compute_ms=MS, received_ms=MS, wire_ms=MS, confirm_ms=MS)
EVENTS = st.lists(st.tuples(st.sampled_from(["prefilled", "handed_over", "decoded", "lost"]), DURATIONS_S, TIMES))


def parts(phases: Phases) -> list[float]:
    return [
        phases.queue_ms,
        phases.prefill_ms,
        phases.transfer_ms,
        phases.confirm_ms,
        phases.first_decode_ms,
        phases.decode_ms,
    ]


@given(EVENTS)
def test_phases_add_up_to_the_total_after_any_rounds(events: list[tuple[str, float, EngineTimes]]) -> None:
    """`wire_ms` is not one of them: it is a part of the transfer."""
    now = 1000.0
    phases = Phases(mark=now)
    for kind, elapsed_s, times in events:
        now += elapsed_s
        if kind in ("prefilled", "handed_over"):
            getattr(phases, kind)(now, times)
        else:
            getattr(phases, kind)(now)
        assert min(parts(phases)) >= 0
        assert sum(parts(phases)) == pytest.approx(phases.total_ms)
        assert phases.total_ms == pytest.approx((now - 1000.0) * 1e3)
    assert phases.retries == sum(kind == "lost" for kind, _, _ in events)


def test_each_moment_of_a_round_falls_into_its_phase() -> None:
    phases = Phases(mark=0.0)
    phases.prefilled(0.050, EngineTimes(compute_ms=30.0))
    phases.handed_over(0.090, EngineTimes(compute_ms=10.0, confirm_ms=2.0, wire_ms=5.0, kv_bytes=64, plane="shm"))
    phases.decoded(0.100)
    phases.decoded(0.115)
    assert parts(phases) == pytest.approx([20.0, 30.0, 28.0, 2.0, 10.0, 25.0])
    assert (phases.wire_ms, phases.kv_bytes, phases.plane, phases.retries) == (5.0, 64, "shm", 0)


def test_what_was_moved_while_the_prompt_was_computed_is_no_part_of_any_phase() -> None:
    phases = Phases(mark=0.0)
    phases.prefilled(0.050, EngineTimes(compute_ms=30.0))
    times = EngineTimes(wire_ms=3.0, hidden_wire_ms=9.0, kv_bytes=64, hidden_kv_bytes=48, plan_ms=1.5, num_runs=7)
    phases.handed_over(0.052, times)
    assert parts(phases) == pytest.approx([20.0, 30.0, 2.0, 0.0, 0.0, 0.0])
    assert phases.wire_ms == pytest.approx(2.0)  # never more than the transfer it is a part of
    assert (phases.hidden_wire_ms, phases.plan_ms) == (9.0, 1.5)
    assert (phases.kv_bytes, phases.hidden_kv_bytes, phases.num_runs) == (64, 48, 7)


def test_a_lost_round_is_waiting_and_the_next_one_adds_to_the_same_phases() -> None:
    phases = Phases(mark=0.0)
    phases.prefilled(0.010, EngineTimes(compute_ms=10.0))
    phases.lost(0.500)
    phases.prefilled(0.530, EngineTimes(compute_ms=20.0))
    phases.handed_over(0.560, EngineTimes(compute_ms=10.0, wire_ms=1.0))
    assert parts(phases) == pytest.approx([500.0, 30.0, 20.0, 0.0, 10.0, 0.0])
    assert (phases.total_ms, phases.retries) == (pytest.approx(560.0), 1)
