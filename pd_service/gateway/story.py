"""The story of a request, readable top to bottom.

While tokens are missing: prefill what we have so far somewhere, hand out the token, decode it somewhere with the
ticket. On an error that another round can mend, go round again; resuming after any failure is the first line again,
with prompt and output so far. Whatever happens, the ticket is given back.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from pd_service.config import GatewaySettings, Role
from pd_service.errors import EngineFailed, Overloaded, RetryableError, Unavailable
from pd_service.gateway.generation import StoryEnd, StoryEvent, StoryPrompt, StoryTokens
from pd_service.gateway.job import Job
from pd_service.gateway.router import Affinity, Candidate, choose_way, rank_decode, rank_prefill
from pd_service.metrics import GatewayMetrics
from pd_service.request import EngineRequest, FinishReason, RequestId, Ticket, TokenEvent

logger = logging.getLogger(__name__)


class Engine(Candidate, Protocol):
    """One engine as the story needs it."""

    def run(self, request: EngineRequest, deadline: float | None) -> AsyncGenerator[TokenEvent, None]: ...
    def release(self, lease_id: str) -> None: ...


class Engines(Protocol):
    """Where engines come from."""

    async def wait_for(self, role: Role, timeout_s: float) -> Sequence[Engine]: ...


@dataclass(slots=True, eq=False)
class _Progress:
    """What the story knows so far. `preferred` engines have the prompt's KV, if any have: those of the first answer."""

    job: Job
    output: list[int] = field(default_factory=list)
    preferred: Affinity = field(init=False)

    def __post_init__(self) -> None:
        self.preferred = self.job.affinity if self.job.index else Affinity()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.job.prompt_token_ids + tuple(self.output)

    @property
    def num_missing(self) -> int:
        return self.job.max_new_tokens - len(self.output)


class RequestStory:
    """Runs jobs on engines. Keeps nothing between requests."""

    def __init__(self, engines: Engines, settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        self._engines = engines
        self._settings = settings
        self._metrics = metrics

    async def run(self, job: Job) -> AsyncGenerator[StoryEvent, None]:
        """See `Story.run`. Raises Unavailable, or Overloaded, when the retries are used up."""
        progress = _Progress(job)
        failures = 0
        while True:
            try:
                async with aclosing(self._round(progress)) as events:
                    async for event in events:
                        failures = 0
                        yield event
                return
            except RetryableError as error:
                failures += 1
                job.phases.lost(_now())
                progress.preferred = Affinity()  # what failed is not asked for again
                self._metrics.count_retry(type(error).__name__)
                logger.info("request %s goes round again: %s", job.request_id, error)
                if failures > self._settings.retry.max_failures:
                    raise _final(error, failures) from error
            await asyncio.sleep(self._backoff_s(failures))

    async def _round(self, progress: _Progress) -> AsyncGenerator[StoryEvent, None]:
        """One attempt to get all missing tokens; raises RetryableError when another one can help."""
        way = choose_way(len(progress.token_ids), self._settings.local_prefill_max_tokens)
        self._metrics.count_routing_decision("local" if way.is_local else "disaggregated", way.reason)
        if way.is_local:
            async with aclosing(self._decode(progress, None)) as events:
                async for event in events:
                    yield event
            return
        if progress.num_missing > 1:
            await self._wait_for("decode")  # a ticket that nobody can use yet would only lose its lease
        engine, first = await self._prefill(progress)
        with _given_back(engine, first.ticket):
            for event in _hand_out(first, progress):
                yield event
            if first.ticket is None:
                yield _end(first)
                return
            async with aclosing(self._decode(progress, first.ticket)) as events:
                async for event in events:
                    yield event

    async def _prefill(self, progress: _Progress) -> tuple[Engine, TokenEvent]:
        """The first prefill engine that has room, and what it says; a full one costs one refused call."""
        refusal: Overloaded | None = None
        for engine in rank_prefill(await self._wait_for("prefill"), progress.preferred.prefill):
            try:
                return engine, await self._prefill_on(engine, progress)
            except Overloaded as error:
                refusal = error
        assert refusal is not None
        raise refusal

    async def _prefill_on(self, engine: Engine, progress: _Progress) -> TokenEvent:
        """The first token, and the ticket for the KV before it unless the request has ended with that token."""
        request = _request(progress, prefill_only=True)
        if progress.job.index == 0:
            progress.job.affinity.prefill = engine.engine_id
        async with aclosing(engine.run(request, progress.job.deadline)) as events:
            async for event in events:
                if event.finish is not None:
                    _account(event, progress, has_ticket=False)
                    return event
        raise EngineFailed(f"{engine.engine_id} ended the request without a token")

    async def _decode(self, progress: _Progress, ticket: Ticket | None) -> AsyncGenerator[StoryEvent, None]:
        """All further tokens from the first decode engine that has room; a full one costs one refused call."""
        refusal: Overloaded | None = None
        for engine in rank_decode(await self._wait_for("decode"), progress.preferred.decode):
            try:
                async with aclosing(self._decode_on(engine, progress, ticket)) as events:
                    async for event in events:
                        yield event
                return
            except Overloaded as error:
                refusal = error
        assert refusal is not None
        raise refusal

    async def _decode_on(
        self, engine: Engine, progress: _Progress, ticket: Ticket | None
    ) -> AsyncGenerator[StoryEvent, None]:
        request = _request(progress, ticket=ticket)
        if progress.job.index == 0:
            progress.job.affinity.decode = engine.engine_id
        async with aclosing(engine.run(request, progress.job.deadline)) as events:
            async for event in events:
                _account(event, progress, has_ticket=ticket is not None)
                self._metrics.count_drafts(event.num_drafted, max(0, len(event.token_ids) - 1))
                for handed in _hand_out(event, progress):
                    yield handed
                if event.finish is not None:
                    yield _end(event)

    async def _wait_for(self, role: Role) -> Sequence[Engine]:
        return await self._engines.wait_for(role, self._settings.retry.engine_wait_s)

    def _backoff_s(self, failures: int) -> float:
        retry = self._settings.retry
        return float(min(retry.backoff_s * 2.0 ** (failures - 1), retry.max_backoff_s))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _request(progress: _Progress, *, prefill_only: bool = False, ticket: Ticket | None = None) -> EngineRequest:
    """The prompt's log probabilities are asked of rounds without output alone: they came with the first token."""
    job, sampling = progress.job, progress.job.sampling
    return EngineRequest(
        request_id=RequestId(uuid.uuid4().hex),  # unique per attempt, whatever the client's id
        token_ids=progress.token_ids,
        num_prompt_tokens=len(job.prompt_token_ids),
        max_new_tokens=progress.num_missing,
        sampling=replace(sampling, prompt_logprobs=None) if progress.output else sampling,
        prefill_only=prefill_only,
        ticket=ticket,
        priority=job.priority,
        cache_salt=job.cache_salt,
    )


def _hand_out(event: TokenEvent, progress: _Progress) -> Iterator[StoryEvent]:
    if event.prompt_logprobs:
        yield StoryPrompt(logprobs=event.prompt_logprobs)
    if event.token_ids:
        progress.output.extend(event.token_ids)
        yield StoryTokens(token_ids=event.token_ids, logprobs=event.logprobs)


def _account(event: TokenEvent, progress: _Progress, *, has_ticket: bool) -> None:
    """Writes down the time that this event ends."""
    phases = progress.job.phases
    if event.times is None:
        phases.decoded(_now())
    elif has_ticket:
        phases.handed_over(_now(), event.times)
    else:
        phases.prefilled(_now(), event.times)
        if not progress.output:  # a later round finds in the cache what this request has put there
            phases.cached_tokens = event.times.cached_tokens


def _end(event: TokenEvent) -> StoryEnd:
    assert event.finish in (FinishReason.STOP, FinishReason.LENGTH)
    return StoryEnd(finish=event.finish)


def _final(error: RetryableError, failures: int) -> Unavailable | Overloaded:
    message = f"gave up after {failures} failures in a row; the last: {error}"
    return Overloaded(message) if isinstance(error, Overloaded) else Unavailable(message)


@contextmanager
def _given_back(engine: Engine, ticket: Ticket | None) -> Iterator[None]:
    """Releases the ticket on every way out. A ticket that was confirmed has ended, and the message changes nothing."""
    try:
        yield
    finally:
        if ticket is not None:
            engine.release(ticket.lease_id)
