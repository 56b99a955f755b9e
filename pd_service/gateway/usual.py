"""Which phase made a request slow: a comparison with what is usual. Pure.

The guilty hop is the phase that took longest beyond its median among the recent finished answers, if that is at least a
tenth of the answer's whole time; decode is compared per token after the second, the other phases as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from pd_service.gateway.recent import RecentAnswer

PHASES = ("queue", "prefill", "transfer", "confirm", "first_decode", "decode")  # together they are the total
_LEAST_PART = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Guilt:
    """`usual_ms` is what this phase would have taken; `excess_ms` what it took beyond that."""

    phase: str
    usual_ms: float
    excess_ms: float


def usual_ms(answers: Sequence[RecentAnswer]) -> dict[str, float]:
    """The median of each phase in milliseconds, of decode per token; empty without answers.

    An answer that never came to a phase says nothing about it.
    """
    medians = {}
    for phase in PHASES:
        if seen := [ms for answer in answers if (ms := phase_ms(answer, phase) / _unit(answer, phase)) > 0]:
            medians[phase] = median(seen)
    return medians


def guilty_hop(answer: RecentAnswer, usual: Mapping[str, float]) -> Guilt | None:
    """None when nothing took much longer than usual, or nothing is known of what is."""
    found = [
        Guilt(phase=phase, usual_ms=expected, excess_ms=phase_ms(answer, phase) - expected)
        for phase in PHASES
        if (expected := usual.get(phase, 0.0) * _unit(answer, phase)) > 0
    ]
    worst = max(found, key=lambda one: one.excess_ms, default=None)
    if worst is None or worst.excess_ms <= 0 or worst.excess_ms < _LEAST_PART * answer.phases.total_ms:
        return None
    return worst


def phase_ms(answer: RecentAnswer, phase: str) -> float:
    return float(getattr(answer.phases, f"{phase}_ms"))


def _unit(answer: RecentAnswer, phase: str) -> int:
    """What a phase's time is divided by: the tokens of decode are those after the second."""
    return max(1, answer.timeline.num_tokens - 2) if phase == "decode" else 1
