"""The requests this gateway has had lately, so that one that was slow can be explained when somebody asks.

Live ones and, in a ring of fixed size, the last that ended. A request that was refused before it was accepted leaves
nothing here: its error has said everything.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pd_service.gateway.accounting import Progress
from pd_service.gateway.job import Job
from pd_service.gateway.phases import Phases
from pd_service.gateway.timeline import Timeline
from pd_service.metrics import Outcome
from pd_service.request import RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentAnswer:
    """One answer's times; its story still writes into them while the request is live."""

    index: int
    phases: Phases
    timeline: Timeline


@dataclass(slots=True, kw_only=True)
class RecentRequest:
    """`accepted_at` is on the loop's clock, `accepted_unix` the same moment as others know it; both in seconds."""

    request_id: RequestId
    accepted_at: float
    accepted_unix: float
    num_prompt_tokens: int
    answers: tuple[RecentAnswer, ...]
    outcome: Outcome | None = None  # None: live
    error: str = ""

    def end(self, outcome: Outcome, error: BaseException | None) -> None:
        self.outcome = outcome
        if error is not None:
            self.error = f"{type(error).__name__}: {error}".rstrip(": ")
        now = asyncio.get_running_loop().time()
        for answer in self.answers:
            answer.timeline.note(now, outcome.value, detail=self.error)


class RecentRequests:
    def __init__(self, capacity: int) -> None:
        """`capacity`: how many that ended are kept."""
        self.capacity = capacity
        self._live: dict[RequestId, RecentRequest] = {}
        self._ended: deque[RecentRequest] = deque(maxlen=capacity)

    @contextmanager
    def following(self, jobs: Sequence[Job], progress: Progress) -> Iterator[None]:
        """Keeps the request of these answers while the body runs, and then among those that ended."""
        request = _request(jobs)
        self._live[request.request_id] = request
        ended_by: BaseException | None = None
        try:
            yield
        except BaseException as error:
            ended_by = error
            raise
        finally:
            request.end(progress.outcome(ended_by), ended_by)
            del self._live[request.request_id]
            self._ended.append(request)

    def find(self, request_id: str) -> RecentRequest | None:
        """The latest request with this id: clients may use one again."""
        return next((one for one in self.newest_first() if one.request_id == request_id), None)

    def newest_first(self) -> list[RecentRequest]:
        """By the time they were accepted."""
        return sorted((*self._live.values(), *self._ended), key=lambda one: one.accepted_at, reverse=True)

    def finished_answers(self) -> list[RecentAnswer]:
        """Those of complete requests: what is usual."""
        return [answer for one in self._ended if one.outcome is Outcome.FINISHED for answer in one.answers]

    def reach(self) -> str:
        """How far back the memory goes, in words."""
        if not self._ended:
            return "no request has ended yet"
        age_s = time.time() - min(one.accepted_unix for one in self._ended)
        return f"the last {len(self._ended)} of at most {self.capacity}, back to {age_s:.0f} s ago"


def _request(jobs: Sequence[Job]) -> RecentRequest:
    first, waited_s = jobs[0], asyncio.get_running_loop().time() - jobs[0].phases.mark
    return RecentRequest(
        request_id=first.request_id,
        accepted_at=first.phases.mark,
        accepted_unix=time.time() - waited_s,
        num_prompt_tokens=len(first.prompt_token_ids),
        answers=tuple(RecentAnswer(index=job.index, phases=job.phases, timeline=job.timeline) for job in jobs),
    )
