"""One request, from what the client asked to the text it receives: the core behind both doors.

Owns the seam to the routing part (`Story`, what goes in: `Job`, what comes out: `StoryEvent`), each answer's text with
its stop strings, and the counting. Knows neither transports nor engines. Always true: a stream that ended without a
`GenerationFinish` of each answer raised an error; every request counts in exactly one outcome, however many answers it
has; closing the generator closes all its stories.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, fields
from typing import Protocol

from pd_service.errors import DeadlineExceeded, PdError
from pd_service.gateway.accounting import TokenTiming, counted
from pd_service.gateway.detokenizer import IncrementalDetokenizer
from pd_service.gateway.intake import ClientRequest, Intake, TextPrompt
from pd_service.gateway.interleave import interleaved
from pd_service.gateway.job import Job
from pd_service.gateway.phases import Phases
from pd_service.gateway.recent import RecentRequests
from pd_service.metrics import GatewayMetrics
from pd_service.request import FinishReason, RequestId, TokenLogprobs

__all__ = [
    "Generation",
    "GenerationDelta",
    "GenerationEvent",
    "GenerationFinish",
    "GenerationPrompt",
    "Job",
    "Story",
    "StoryEnd",
    "StoryEvent",
    "StoryPrompt",
    "StoryTokens",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryPrompt:
    """What the model thought of the prompt, one entry for each token but the first: before all tokens, once."""

    logprobs: tuple[TokenLogprobs, ...]


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


StoryEvent = StoryPrompt | StoryTokens | StoryEnd


class Story(Protocol):
    """Runs a job on the engines, whatever happens to them."""

    def run(self, job: Job) -> AsyncGenerator[StoryEvent, None]:
        """Yields `StoryTokens` and then one `StoryEnd`; raises classes of `pd_service.errors`. Keeps `job.phases`.

        Before them comes a `StoryPrompt` if the job asks for it and its prompt has more than one token. Closing the
        generator, or cancelling the task that waits in it, cancels the request everywhere.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPrompt:
    """The prompt, when its echo or its log probabilities were asked for: once, before all answers.

    `text` is the client's own, or that of the token ids if it sent no raw text. `logprobs` has one entry for each
    token but the first if asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDelta:
    """New tokens of one answer and the text that became certain with them, which may be empty."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFinish:
    """The end of one complete answer. `text` is what was held back until now and is certain with the end."""

    request_id: RequestId
    reason: FinishReason
    text: str
    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    phases: Phases
    index: int = 0


GenerationEvent = GenerationPrompt | GenerationDelta | GenerationFinish


class Generation:
    """Answers requests for one served model."""

    def __init__(self, *, intake: Intake, story: Story, metrics: GatewayMetrics, recent: RecentRequests) -> None:
        self.intake = intake
        self.metrics = metrics
        self._recent = recent
        self._story = story

    async def generate(
        self, request: ClientRequest, deadline: float | None = None
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Yields deltas and then one finish of each answer. `deadline` is a time of the event loop's clock.

        Raises what `Intake.admit` and the story raise, and DeadlineExceeded. Closing it (`contextlib.aclosing`) cancels
        the request.
        """
        with self.metrics.live_requests.track_inprogress(), counted(self.metrics, deadline, request.n) as progress:
            async with self.intake.admit(request, deadline) as job:
                progress.is_accepted = True
                self.metrics.count_prompt_tokens(len(job.prompt_token_ids))
                jobs = [job.answer(index) for index in range(request.n)]
                with self._recent.following(jobs, progress):
                    async with aclosing(interleaved([self._answer(one, request) for one in jobs])) as events:
                        async for event in events:
                            progress.num_missing -= isinstance(event, GenerationFinish)
                            yield event

    async def _answer(self, job: Job, request: ClientRequest) -> AsyncGenerator[GenerationEvent, None]:
        detokenizer = IncrementalDetokenizer(self.intake.tokenizer, request.sampling.stop)
        timing = TokenTiming(self.metrics, job)
        async with aclosing(self._story.run(job)) as events:
            event = await _next(events, job.deadline)
            if job.index == 0 and (request.echo or request.sampling.prompt_logprobs is not None):
                yield self._prompt(job, request, event)
            if isinstance(event, StoryPrompt):
                event = await _next(events, job.deadline)
            while isinstance(event, StoryTokens):
                delta = _delta(event, detokenizer, job.index)
                timing.observe(len(delta.token_ids))
                yield delta
                if detokenizer.stopped:
                    break
                event = await _next(events, job.deadline)
        assert not isinstance(event, StoryPrompt), "a story tells of its prompt twice, or too late"
        yield self._finish(job, detokenizer, event)

    def _prompt(self, job: Job, request: ClientRequest, event: StoryEvent) -> GenerationPrompt:
        logprobs = event.logprobs if isinstance(event, StoryPrompt) else ()
        num_judged = 0 if job.sampling.prompt_logprobs is None else len(job.prompt_token_ids) - 1
        if len(logprobs) != num_judged:
            raise PdError(f"{len(logprobs)} log probabilities came for {num_judged} tokens of the prompt")
        given, token_ids = request.prompt, job.prompt_token_ids
        text = given.text if isinstance(given, TextPrompt) else self.intake.tokenizer.decode(token_ids)
        return GenerationPrompt(text=text, token_ids=token_ids, logprobs=logprobs)

    def _finish(self, job: Job, detokenizer: IncrementalDetokenizer, last: StoryTokens | StoryEnd) -> GenerationFinish:
        self._observe_phases(job.phases)
        text = detokenizer.flush()
        return GenerationFinish(
            request_id=job.request_id,
            reason=last.finish if isinstance(last, StoryEnd) and not detokenizer.stopped else FinishReason.STOP,
            text=text,
            prompt_token_ids=job.prompt_token_ids,
            num_output_tokens=detokenizer.num_tokens,
            phases=job.phases,
            index=job.index,
        )

    def _observe_phases(self, phases: Phases) -> None:
        for item in fields(phases):
            if item.name.endswith("_ms"):
                self.metrics.observe_phase(item.name.removesuffix("_ms"), getattr(phases, item.name) / 1e3)


def _delta(event: StoryTokens, detokenizer: IncrementalDetokenizer, index: int) -> GenerationDelta:
    """Tokens behind the one that completed a stop string are not part of the answer."""
    before = detokenizer.num_tokens
    text = detokenizer.push(event.token_ids)
    count = detokenizer.num_tokens - before
    return GenerationDelta(text=text, token_ids=event.token_ids[:count], logprobs=event.logprobs[:count], index=index)


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
