"""One request, from what the client asked to the text it receives: the core behind both doors.

Owns the seam to the routing part (`Story`, what goes in: `Job`, what comes out: `StoryEvent`), the answer's text with
its stop strings, and the counting. Knows neither transports nor engines. Always true: a stream that ended without
`GenerationFinish` raised an error; every request counts in exactly one outcome; closing the generator closes the story.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, fields
from typing import Protocol

from pd_service.errors import DeadlineExceeded, PdError
from pd_service.gateway.detokenizer import IncrementalDetokenizer
from pd_service.gateway.intake import ClientRequest, Intake, Job
from pd_service.gateway.phases import Phases
from pd_service.metrics import GatewayMetrics, Outcome
from pd_service.request import FinishReason, RequestId, TokenLogprobs

__all__ = [
    "Generation",
    "GenerationDelta",
    "GenerationFinish",
    "Job",
    "Story",
    "StoryEnd",
    "StoryEvent",
    "StoryTokens",
]

# A client's own timer cancels its call when its deadline passes, and the two clocks do not agree to the millisecond:
# a call that is cancelled with less than this part of its time left has met its deadline.
_DEADLINE_SLACK = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryTokens:
    """New tokens, in order, at least one. The end or stop token that finishes a request is never among them.

    `logprobs` has one entry per token when the job asks for them and is empty otherwise.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryEnd:
    """The last event of a story that succeeded. `finish` is STOP (end or stop token) or LENGTH."""

    finish: FinishReason


StoryEvent = StoryTokens | StoryEnd


class Story(Protocol):
    """Runs a job on the engines, whatever happens to them."""

    def run(self, job: Job) -> AsyncGenerator[StoryEvent, None]:
        """Yields `StoryTokens` and then one `StoryEnd`; raises classes of `pd_service.errors`. Keeps `job.phases`.

        Closing the generator, or cancelling the task that waits in it, cancels the request everywhere.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDelta:
    """New tokens and the text that became certain with them, which may be empty."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFinish:
    """The end of a complete answer. `text` is what was held back until now and is certain with the end."""

    request_id: RequestId
    reason: FinishReason
    text: str
    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    phases: Phases


class Generation:
    """Answers requests for one served model."""

    def __init__(self, *, intake: Intake, story: Story, metrics: GatewayMetrics) -> None:
        self.intake = intake
        self.metrics = metrics
        self._story = story

    async def generate(
        self, request: ClientRequest, deadline: float | None = None
    ) -> AsyncGenerator[GenerationDelta | GenerationFinish, None]:
        """Yields deltas and then one finish. `deadline` is a time of the event loop's clock.

        Raises what `Intake.admit` and the story raise, and DeadlineExceeded. Closing it (`contextlib.aclosing`) cancels
        the request.
        """
        with self.metrics.live_requests.track_inprogress(), _counted(self.metrics, deadline) as progress:
            async with self.intake.admit(request, deadline) as job:
                progress.is_accepted = True
                self.metrics.count_prompt_tokens(len(job.prompt_token_ids))
                async with aclosing(self._answer(job, request.sampling.stop)) as events:
                    async for event in events:
                        progress.is_finished = isinstance(event, GenerationFinish)
                        yield event

    async def _answer(
        self, job: Job, stop_strings: tuple[str, ...]
    ) -> AsyncGenerator[GenerationDelta | GenerationFinish, None]:
        detokenizer = IncrementalDetokenizer(self.intake.tokenizer, stop_strings)
        timing = _TokenTiming(self.metrics, job.phases.mark)
        end: StoryEnd | None = None
        async with aclosing(self._story.run(job)) as events:
            while end is None and not detokenizer.stopped:
                event = await _next(events, job.deadline)
                if isinstance(event, StoryEnd):
                    end = event
                else:
                    delta = _delta(event, detokenizer)
                    timing.observe(len(delta.token_ids))
                    yield delta
        yield self._finish(job, detokenizer, end)

    def _finish(self, job: Job, detokenizer: IncrementalDetokenizer, end: StoryEnd | None) -> GenerationFinish:
        self._observe_phases(job.phases)
        text = detokenizer.flush()
        return GenerationFinish(
            request_id=job.request_id,
            reason=FinishReason.STOP if end is None or detokenizer.stopped else end.finish,
            text=text,
            prompt_token_ids=job.prompt_token_ids,
            num_output_tokens=detokenizer.num_tokens,
            phases=job.phases,
        )

    def _observe_phases(self, phases: Phases) -> None:
        for item in fields(phases):
            if item.name.endswith("_ms"):
                self.metrics.observe_phase(item.name.removesuffix("_ms"), getattr(phases, item.name) / 1e3)


def _delta(event: StoryTokens, detokenizer: IncrementalDetokenizer) -> GenerationDelta:
    """Tokens behind the one that completed a stop string are not part of the answer."""
    before = detokenizer.num_tokens
    text = detokenizer.push(event.token_ids)
    count = detokenizer.num_tokens - before
    return GenerationDelta(text=text, token_ids=event.token_ids[:count], logprobs=event.logprobs[:count])


async def _next(events: AsyncGenerator[StoryEvent, None], deadline: float | None) -> StoryEvent:
    """The next event, if it comes before the deadline. The timer runs only here, never in our consumer's code."""
    timer = asyncio.timeout_at(deadline)
    try:
        async with timer:
            return await anext(events)
    except StopAsyncIteration as error:
        raise PdError("the story of the request ended without a word") from error
    except TimeoutError as error:
        if not timer.expired():
            raise
        raise DeadlineExceeded("the deadline passed before the answer was complete") from error


class _TokenTiming:
    """Observes the time to the first token and between tokens; tokens that came together share their gap."""

    def __init__(self, metrics: GatewayMetrics, accepted_at: float) -> None:
        self._metrics = metrics
        self._last = accepted_at
        self._is_first = True

    def observe(self, num_tokens: int) -> None:
        now = asyncio.get_running_loop().time()
        gap_s, self._last = now - self._last, now
        self._metrics.count_output_tokens(num_tokens)
        if self._is_first:
            self._metrics.ttft_s.observe(gap_s)
            self._is_first = False
            return
        for _ in range(num_tokens):
            self._metrics.inter_token_s.observe(gap_s / num_tokens)


@dataclass(slots=True)
class _Progress:
    started_at: float
    deadline: float | None
    is_accepted: bool = False
    is_finished: bool = False

    def outcome(self, error: BaseException | None) -> Outcome:
        if self.is_finished:
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
def _counted(metrics: GatewayMetrics, deadline: float | None) -> Iterator[_Progress]:
    """Counts exactly one outcome, also when the consumer closes the generator or the task is cancelled."""
    progress = _Progress(asyncio.get_running_loop().time(), deadline)
    ended_by: BaseException | None = None
    try:
        yield progress
    except BaseException as error:
        ended_by = error
        raise
    finally:
        metrics.count_outcome(progress.outcome(ended_by))
