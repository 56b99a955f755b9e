"""The story of a request, readable top to bottom.

While tokens are missing: prefill what we have so far somewhere, hand out the token, decode it somewhere with the ticket.
On an error that another round can mend, go round again; resuming after any failure is the first line again, with prompt
and output so far. Whatever happens, the ticket is given back.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from pd_service.config import GatewaySettings, Role
from pd_service.errors import EngineFailed, Overloaded, RetryableError, Unavailable
from pd_service.gateway.generation import Job, Phases, StoryEnd, StoryEvent, StoryTokens
from pd_service.gateway.router import Candidate, choose_way, rank_decode, rank_prefill
from pd_service.metrics import GatewayMetrics
from pd_service.request import EngineRequest, EngineTimes, FinishReason, RequestId, Ticket, TokenEvent

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
    """What the story knows so far. Times are of the loop's clock, in seconds; durations in milliseconds."""

    job: Job
    mark: float  # when the phase that runs now began
    output: list[int] = field(default_factory=list)
    retries: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    wire_ms: float = 0.0
    confirm_ms: float = 0.0
    first_decode_ms: float = 0.0
    decode_ms: float = 0.0
    kv_bytes: int = 0
    plane: str = ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.job.prompt_token_ids + tuple(self.output)

    @property
    def num_missing(self) -> int:
        return self.job.max_new_tokens - len(self.output)

    def lap_ms(self) -> float:
        """Milliseconds since the last lap."""
        now = asyncio.get_running_loop().time()
        elapsed, self.mark = (now - self.mark) * 1e3, now
        return elapsed

    def prefilled(self, times: EngineTimes) -> None:
        """The time the engine did not compute is queueing, the way to it and back included."""
        elapsed = self.lap_ms()
        self.prefill_ms += times.compute_ms
        self.queue_ms += max(0.0, elapsed - times.compute_ms)

    def handed_over(self, times: EngineTimes) -> None:
        """The time the engine neither computed nor waited for the confirmation is transfer."""
        elapsed = self.lap_ms()
        self.first_decode_ms += times.compute_ms
        self.confirm_ms += times.confirm_ms
        self.wire_ms += times.wire_ms
        self.transfer_ms += max(0.0, elapsed - times.compute_ms - times.confirm_ms)
        self.kv_bytes += times.kv_bytes
        self.plane = times.plane

    def phases(self) -> Phases:
        self.decode_ms += self.lap_ms()
        return Phases(
            queue_ms=self.queue_ms,
            prefill_ms=self.prefill_ms,
            transfer_ms=self.transfer_ms,
            wire_ms=self.wire_ms,
            confirm_ms=self.confirm_ms,
            first_decode_ms=self.first_decode_ms,
            decode_ms=self.decode_ms,
            total_ms=(self.mark - self.job.accepted_at) * 1e3,
            kv_bytes=self.kv_bytes,
            plane=self.plane,
        )


class RequestStory:
    """Runs jobs on engines. Keeps nothing between requests."""

    def __init__(self, engines: Engines, settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        self._engines = engines
        self._settings = settings
        self._metrics = metrics

    async def run(self, job: Job) -> AsyncGenerator[StoryEvent, None]:
        """See `Story.run`. Raises Unavailable, or Overloaded, when the retries are used up."""
        progress = _Progress(job, mark=job.accepted_at)
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
                progress.retries += 1
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
        prefill = rank_prefill(await self._wait_for("prefill"))[0]
        first = await self._prefill(prefill, progress)
        with _given_back(prefill, first.ticket):
            if first.token_ids:
                yield self._hand_out(first, progress)
            if first.ticket is None:
                yield _end(first, progress)
                return
            async with aclosing(self._decode(progress, first.ticket)) as events:
                async for event in events:
                    yield event

    async def _prefill(self, engine: Engine, progress: _Progress) -> TokenEvent:
        """The first token, and the ticket for the KV before it unless the request has ended with that token."""
        request = self._request(progress, prefill_only=True)
        async with aclosing(engine.run(request, progress.job.deadline)) as events:
            async for event in events:
                if event.times is not None:
                    progress.prefilled(event.times)
                return event
        raise EngineFailed(f"{engine.engine_id} ended the request without a token")

    async def _decode(self, progress: _Progress, ticket: Ticket | None) -> AsyncGenerator[StoryEvent, None]:
        """All further tokens from the first decode engine that has room; a full one costs one refused call."""
        refusal: Overloaded | None = None
        for engine in rank_decode(await self._wait_for("decode")):
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
        request = self._request(progress, ticket=ticket)
        async with aclosing(engine.run(request, progress.job.deadline)) as events:
            async for event in events:
                if event.times is not None:
                    (progress.prefilled if ticket is None else progress.handed_over)(event.times)
                if event.token_ids:
                    yield self._hand_out(event, progress)
                if event.finish is not None:
                    yield _end(event, progress)

    def _hand_out(self, event: TokenEvent, progress: _Progress) -> StoryTokens:
        progress.output.extend(event.token_ids)
        return StoryTokens(token_ids=event.token_ids, logprobs=event.logprobs)

    def _request(
        self, progress: _Progress, *, prefill_only: bool = False, ticket: Ticket | None = None
    ) -> EngineRequest:
        job = progress.job
        return EngineRequest(
            request_id=RequestId(uuid.uuid4().hex),  # unique per attempt, whatever the client's id
            token_ids=progress.token_ids,
            num_prompt_tokens=len(job.prompt_token_ids),
            max_new_tokens=progress.num_missing,
            sampling=job.sampling,
            prefill_only=prefill_only,
            ticket=ticket,
        )

    async def _wait_for(self, role: Role) -> Sequence[Engine]:
        return await self._engines.wait_for(role, self._settings.retry.engine_wait_s)

    def _backoff_s(self, failures: int) -> float:
        retry = self._settings.retry
        return min(retry.backoff_s * 2 ** (failures - 1), retry.max_backoff_s)


def _end(event: TokenEvent, progress: _Progress) -> StoryEnd:
    assert event.finish in (FinishReason.STOP, FinishReason.LENGTH)
    return StoryEnd(finish=event.finish, phases=progress.phases(), retries=progress.retries)


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
