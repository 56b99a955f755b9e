"""The story of a request, readable top to bottom.

While tokens are missing: prefill what we have so far somewhere, hand out the token, decode it somewhere with the
ticket. That comes when the prefill begins, and a decode engine follows it from then on; if it cannot, another one takes
the ticket when the prompt is computed. On an error that another round can mend, go round again; resuming after any
failure is the first line again, with prompt and output so far. Whatever happens, the ticket is given back.
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
from pd_service.gateway.early_decode import EarlyDecode
from pd_service.gateway.generation import StoryEnd, StoryEvent, StoryPrompt, StoryTokens
from pd_service.gateway.job import Job
from pd_service.gateway.router import Affinity, Candidate, choose_way, rank_decode, rank_prefill
from pd_service.gateway.story_notes import StoryNotes
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
    notes: StoryNotes
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
        progress = _Progress(job, StoryNotes(job.timeline, self._metrics))
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
                progress.notes.note("round failed", detail=f"{type(error).__name__}: {error}")
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
        async with EarlyDecode() as early:
            engine, first = await self._prefill(progress, early)
            with _given_back(engine, first.ticket):
                for event in _hand_out(first, progress):
                    yield event
                if first.ticket is None:
                    yield _end(first)
                    return
                async with aclosing(self._go_on(progress, first.ticket, early)) as events:
                    async for event in events:
                        yield event

    async def _prefill(self, progress: _Progress, early: EarlyDecode) -> tuple[Engine, TokenEvent]:
        """The first prefill engine that has room, and what it says; a full one costs one refused call."""
        refusal: Overloaded | None = None
        for engine in rank_prefill(await self._wait_for("prefill"), progress.preferred.prefill):
            try:
                return engine, await self._prefill_on(engine, progress, early)
            except RetryableError as error:
                progress.notes.failed("prefill failed", engine.engine_id, error)
                if not isinstance(error, Overloaded):
                    raise
                refusal = error
        assert refusal is not None
        raise refusal

    async def _prefill_on(self, engine: Engine, progress: _Progress, early: EarlyDecode) -> TokenEvent:
        """The first token, and the ticket for the KV before it unless the request has ended with that token.

        Each ticket before that begins an early decode; one that has lost its blocks is followed by another.
        """
        request = _request(progress, prefill_only=True)
        progress.notes.note("sent to prefill", engine.engine_id)
        if progress.job.index == 0:
            progress.job.affinity.prefill = engine.engine_id
        async with aclosing(engine.run(request, progress.job.deadline)) as events:
            async for event in events:
                if event.finish is not None:
                    progress.notes.prefilled(engine.engine_id, event.times)
                    _account(event, progress, has_ticket=False)
                    return event
                if event.ticket is not None and progress.num_missing > 1:
                    await self._begin(early, event.ticket, progress)
        raise EngineFailed(f"{engine.engine_id} ended the request without a token")

    async def _begin(self, early: EarlyDecode, ticket: Ticket, progress: _Progress) -> None:
        """Has the best decode engine there is now follow the prefill; without any, it is asked for later."""
        try:
            engines = await self._engines.wait_for("decode", 0.0)
        except Unavailable:
            return
        engine = rank_decode(engines, progress.preferred.decode)[0]
        await early.begin(engine.engine_id, self._run_decode(engine, progress, ticket))

    async def _go_on(self, progress: _Progress, ticket: Ticket, early: EarlyDecode) -> AsyncGenerator[StoryEvent, None]:
        """All further tokens, from the decode engine that has followed the prefill unless it could not."""
        if early.is_running:
            try:
                async with aclosing(self._listen(early.events(), progress, has_ticket=True)) as events:
                    async for event in events:
                        yield event
                return
            except Overloaded as error:
                logger.info("request %s takes its ticket elsewhere: %s", progress.job.request_id, error)
        async with aclosing(self._decode(progress, ticket, avoided=early.engine_id)) as events:
            async for event in events:
                yield event

    async def _decode(
        self, progress: _Progress, ticket: Ticket | None, avoided: str = ""
    ) -> AsyncGenerator[StoryEvent, None]:
        """All further tokens from the first decode engine that has room; a full one costs one refused call.

        The engine named `avoided` is asked last.
        """
        refusal: Overloaded | None = None
        ranked = rank_decode(await self._wait_for("decode"), progress.preferred.decode)
        for engine in sorted(ranked, key=lambda engine: engine.engine_id == avoided):
            try:
                events = self._run_decode(engine, progress, ticket)
                async with aclosing(self._listen(events, progress, has_ticket=ticket is not None)) as handed:
                    async for event in handed:
                        yield event
                return
            except Overloaded as error:
                refusal = error
        assert refusal is not None
        raise refusal

    def _run_decode(
        self, engine: Engine, progress: _Progress, ticket: Ticket | None
    ) -> AsyncGenerator[TokenEvent, None]:
        if progress.job.index == 0:
            progress.job.affinity.decode = engine.engine_id
        progress.notes.note("sent to decode", engine.engine_id)
        events = engine.run(_request(progress, ticket=ticket), progress.job.deadline)
        return progress.notes.of_decode(engine.engine_id, events, has_ticket=ticket is not None)

    async def _listen(
        self, events: AsyncGenerator[TokenEvent, None], progress: _Progress, *, has_ticket: bool
    ) -> AsyncGenerator[StoryEvent, None]:
        """Hands out what a decode engine says."""
        async with aclosing(events):
            async for event in events:
                _account(event, progress, has_ticket=has_ticket)
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
    """The prompt's log probabilities are asked of whoever computes it, in rounds without output alone.

    A ticket for all tokens brings one more, which is not asked for.
    """
    job, sampling = progress.job, progress.job.sampling
    gets_token = ticket is not None and ticket.num_tokens == len(progress.token_ids)
    return EngineRequest(
        request_id=RequestId(uuid.uuid4().hex),  # unique per attempt, whatever the client's id
        token_ids=progress.token_ids,
        num_prompt_tokens=len(job.prompt_token_ids),
        max_new_tokens=progress.num_missing - gets_token,
        sampling=replace(sampling, prompt_logprobs=None) if progress.output or gets_token else sampling,
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
