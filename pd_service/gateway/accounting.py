"""What is counted of one request: its single outcome, and the times between its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pd_service.errors import DeadlineExceeded
from pd_service.gateway.job import Job
from pd_service.metrics import GatewayMetrics, Outcome

# A client's own timer cancels its call when its deadline passes, and the two clocks do not agree to the millisecond:
# a call that is cancelled with less than this part of its time left has met its deadline.
_DEADLINE_SLACK = 0.02


class TokenTiming:
    """Observes the time to a request's first token and between an answer's tokens; those that came together share
    their gap."""

    def __init__(self, metrics: GatewayMetrics, job: Job) -> None:
        self._metrics = metrics
        self._timeline = job.timeline
        self._last = job.phases.mark
        self._is_first = True
        self._is_first_answer = job.index == 0

    def observe(self, num_tokens: int) -> None:
        now = asyncio.get_running_loop().time()
        gap_s, self._last = now - self._last, now
        self._metrics.count_output_tokens(num_tokens)
        self._timeline.handed_out(now, num_tokens)
        if self._is_first:
            self._is_first = False
            if self._is_first_answer:
                self._metrics.ttft_s.observe(gap_s)
            return
        for _ in range(num_tokens):
            self._metrics.inter_token_s.observe(gap_s / num_tokens)


@dataclass(slots=True)
class Progress:
    """How far one request came."""

    started_at: float
    deadline: float | None
    num_missing: int  # answers that have not ended
    is_accepted: bool = False

    def outcome(self, error: BaseException | None) -> Outcome:
        if self.is_accepted and not self.num_missing:
            return Outcome.FINISHED
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            return Outcome.DEADLINE if self._is_at_deadline() else Outcome.ABORTED
        if isinstance(error, DeadlineExceeded):
            return Outcome.DEADLINE
        return Outcome.FAILED if self.is_accepted else Outcome.REFUSED

    def _is_at_deadline(self) -> bool:
        if self.deadline is None:
            return False
        slack_s = _DEADLINE_SLACK * (self.deadline - self.started_at)
        return asyncio.get_running_loop().time() >= self.deadline - slack_s


@contextmanager
def counted(metrics: GatewayMetrics, deadline: float | None, num_answers: int) -> Iterator[Progress]:
    """Counts exactly one outcome, also when the consumer closes the generator or the task is cancelled."""
    progress = Progress(asyncio.get_running_loop().time(), deadline, num_answers)
    ended_by: BaseException | None = None
    try:
        yield progress
    except BaseException as error:
        ended_by = error
        raise
    finally:
        metrics.count_outcome(progress.outcome(ended_by))
