"""What `benchmarks.failures` plays: requests on two engine nodes that are cancelled, or that lose one of the two.

A scene returns times in milliseconds. They end with the first status that shows every block free, so they are at most
`Watch.resolution_ms` too long; a state that does not last is not taken for the end.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from benchmarks.node_process import NodeProcess
from benchmarks.serve import draw_prompt
from pd_service.errors import PdError
from pd_service.gateway.engines import Directory, EngineClient
from pd_service.gateway.generation import StoryTokens
from pd_service.gateway.job import Job
from pd_service.gateway.phases import Phases
from pd_service.gateway.story import RequestStory
from pd_service.request import EngineRequest, EngineSampling, RequestId, Ticket, TokenEvent

GIVE_UP_S = 30.0
LASTS_S = 0.05  # a request on its way when its engine looked free would show within this time

CANCELLED_AT_ONCE, PROMPT_TOKENS, OUTPUT_TOKENS = 2, 128, 12
LONG_PROMPT_TOKENS, SHORT_PROMPT_TOKENS = 2048, 64
STREAMS, STREAM_TOKENS, PULLED_TOKENS = 4, 3000, 1024


@dataclass(slots=True)
class Watch:
    """Waits for engines to be free, and knows how finely it looked."""

    looks_ms: list[float] = field(default_factory=list)

    @property
    def resolution_ms(self) -> float:
        return statistics.median(self.looks_ms)

    async def until_free(self, start: float, *nodes: NodeProcess) -> float:
        """Milliseconds from `start` (perf_counter) until all are free and stay so. Raises TimeoutError."""
        async with asyncio.timeout(GIVE_UP_S):
            while True:
                ended = await self._look(nodes)
                if ended is not None:
                    await asyncio.sleep(LASTS_S)
                    if await self._look(nodes) is not None:
                        return (ended - start) * 1e3

    async def _look(self, nodes: Sequence[NodeProcess]) -> float | None:
        """When all were seen to be free, if they were."""
        before = time.perf_counter()
        free = await asyncio.gather(*(node.is_free() for node in nodes))
        now = time.perf_counter()
        self.looks_ms.append((now - before) * 1e3)
        return now if all(free) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two engines that have met: their processes, and the gateway's clients of them."""

    holder: NodeProcess
    reader: NodeProcess
    prefill: EngineClient
    decode: EngineClient

    @classmethod
    async def meet(cls, directory: Directory, holder: NodeProcess, reader: NodeProcess) -> Pair:
        """Makes these two the members, and returns when gateway and engines are connected. Raises Unavailable."""
        await directory.update([holder.member, reader.member])
        prefill = (await directory.wait_for("prefill", GIVE_UP_S))[0]
        decode = (await directory.wait_for("decode", GIVE_UP_S))[0]
        await _until(reader, "holders", 1)
        return cls(holder=holder, reader=reader, prefill=prefill, decode=decode)


async def _until(node: NodeProcess, what: str, at_least: int) -> None:
    """The engine's status says that it has as many of them."""
    async with asyncio.timeout(GIVE_UP_S):
        while getattr(await node.status(), what) < at_least:  # noqa: ASYNC110  # another process is watched
            await asyncio.sleep(0.01)


# ---- cancels


async def cancelled(
    pair: Pair, story: RequestStory, watch: Watch, num_rounds: int, source: random.Random
) -> tuple[list[float], Counter[str]]:
    """From a cancel to all blocks free on both sides, of several requests at a random moment of their lives.

    Also what the requests were at: no token yet, between the first and the second, or later.
    """
    whole_s = 0.0
    for _ in range(2):  # the first warms up
        start = time.perf_counter()
        await asyncio.gather(*(_Life(story, source).run() for _ in range(CANCELLED_AT_ONCE)))
        whole_s = time.perf_counter() - start
    times, stages = [], Counter[str]()
    for _ in range(num_rounds):
        lives = [_Life(story, source) for _ in range(CANCELLED_AT_ONCE)]
        tasks = [asyncio.create_task(life.run()) for life in lives]
        await asyncio.sleep(source.uniform(0, whole_s))
        stages.update(life.stage for life in lives)
        start = time.perf_counter()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        times.append(await watch.until_free(start, pair.holder, pair.reader))
    return times, stages


class _Life:
    """One request from the gateway's side."""

    def __init__(self, story: RequestStory, source: random.Random) -> None:
        self._story = story
        self._prompt = draw_prompt(source, PROMPT_TOKENS)
        self._num_tokens = 0

    @property
    def stage(self) -> str:
        if self._num_tokens == OUTPUT_TOKENS:
            return "over"
        return ("queue or prefill", "hand-over")[self._num_tokens] if self._num_tokens < 2 else "decode"

    async def run(self) -> None:
        job = Job(
            request_id=RequestId(uuid.uuid4().hex),
            prompt_token_ids=tuple(self._prompt),
            sampling=EngineSampling(),
            max_new_tokens=OUTPUT_TOKENS,
            deadline=None,
            phases=Phases(mark=asyncio.get_running_loop().time()),
        )
        async with aclosing(self._story.run(job)) as events:
            async for event in events:
                if isinstance(event, StoryTokens):
                    self._num_tokens += len(event.token_ids)


# ---- lost engines


def _request(
    prompt: Sequence[int], *, max_new_tokens: int = 2, prefill_only: bool = False, ticket: Ticket | None = None
) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(uuid.uuid4().hex),
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        max_new_tokens=max_new_tokens,
        sampling=EngineSampling(),
        prefill_only=prefill_only,
        ticket=ticket,
    )


class Work:
    """Requests on engines, each a task that ends whatever becomes of its engine."""

    def __init__(self) -> None:
        self._prefills: list[asyncio.Task[None]] = []
        self._decodes: list[asyncio.Task[None]] = []

    async def prefill(self, engine: EngineClient, prompt: Sequence[int]) -> Ticket:
        """Returns as soon as there is a ticket; the prompt may still be computed."""
        began: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()

        def began_by(event: TokenEvent) -> None:
            if event.ticket is not None and not began.done():
                began.set_result(event.ticket)

        task = asyncio.create_task(_follow(engine, _request(prompt, prefill_only=True), began_by))
        self._prefills.append(task)
        async with asyncio.timeout(GIVE_UP_S):
            return await began

    def decode(
        self, engine: EngineClient, prompt: Sequence[int], *, ticket: Ticket | None = None, max_new_tokens: int = 2,
        seen: Callable[[TokenEvent], None] = lambda _: None,
    ) -> asyncio.Task[None]:  # fmt: skip
        request = _request(prompt, max_new_tokens=max_new_tokens, ticket=ticket)
        task = asyncio.create_task(_follow(engine, request, seen))
        self._decodes.append(task)
        return task

    async def prefilled(self) -> None:
        """All prompts are computed."""
        await asyncio.gather(*self._prefills)

    async def end(self) -> None:
        tasks = [*self._prefills, *self._decodes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(engine: EngineClient, request: EngineRequest, seen: Callable[[TokenEvent], None]) -> None:
    with suppress(PdError):  # a lost engine is what the scenes are about
        async with aclosing(engine.run(request, None)) as events:
            async for event in events:
                seen(event)


async def holder_lost(pair: Pair, watch: Watch, source: random.Random, *, is_killed: bool) -> float:
    """A decode engine follows a long prompt when its holder is killed, or freezes: until its blocks are free."""
    work = Work()
    prompt = draw_prompt(source, LONG_PROMPT_TOKENS)
    work.decode(pair.decode, prompt, ticket=await work.prefill(pair.prefill, prompt))
    await _until(pair.reader, "pulls", 1)
    return await _lose(pair.holder, pair.reader, work, watch, is_killed=is_killed)


async def reader_lost(pair: Pair, watch: Watch, source: random.Random, *, is_killed: bool) -> float:
    """A decode engine that runs one request at a time queues with two open tickets: until the holder's blocks are free.

    No ticket is given back: the end of the channel alone has to do it, long before the leases' time.
    """
    work = Work()
    work.decode(pair.decode, draw_prompt(source, SHORT_PROMPT_TOKENS), max_new_tokens=STREAM_TOKENS)
    await _until(pair.reader, "steps", 1)
    for _ in range(2):
        prompt = draw_prompt(source, SHORT_PROMPT_TOKENS)
        work.decode(pair.decode, prompt, ticket=await work.prefill(pair.prefill, prompt))
    await work.prefilled()
    assert (await pair.holder.status()).leases == 2
    return await _lose(pair.reader, pair.holder, work, watch, is_killed=is_killed)


async def _lose(lost: NodeProcess, survivor: NodeProcess, work: Work, watch: Watch, *, is_killed: bool) -> float:
    start = time.perf_counter()
    (lost.kill if is_killed else lost.freeze)()
    elapsed_ms = await watch.until_free(start, survivor)
    if not is_killed:
        lost.thaw()
    await work.end()
    return elapsed_ms


# ---- running decodes beside a pull


async def gaps_beside_pulls(pair: Pair, num_rounds: int, source: random.Random) -> tuple[list[float], list[float]]:
    """Milliseconds between the tokens of a running stream, without and with pulls beside it, in turns.

    The prefill engine computes the same lengths in both, so the pulls are all that differs.
    """
    work = Work()
    arrivals: list[float] = []
    for i in range(STREAMS):
        prompt = draw_prompt(source, SHORT_PROMPT_TOKENS)
        seen = (lambda _: arrivals.append(time.perf_counter())) if i == 0 else (lambda _: None)
        work.decode(pair.decode, prompt, max_new_tokens=STREAM_TOKENS, seen=seen)
    await _until(pair.reader, "steps", 20)
    gaps: tuple[list[float], list[float]] = ([], [])
    for i in range(2 * num_rounds):
        has_pull = bool(i % 2)
        start = time.perf_counter()
        await _long_prompt(work, pair, draw_prompt(source, PULLED_TOKENS), has_pull=has_pull)
        within = [at for at in arrivals if at >= start]
        gaps[has_pull].extend((later - earlier) * 1e3 for earlier, later in itertools.pairwise(within))
    await work.end()
    return gaps


async def _long_prompt(work: Work, pair: Pair, prompt: Sequence[int], *, has_pull: bool) -> None:
    """Computed, and pulled while it is if `has_pull`; returns when nothing of it is left to do."""
    ticket = await work.prefill(pair.prefill, prompt)
    if has_pull:
        await work.decode(pair.decode, prompt, ticket=ticket, max_new_tokens=1)
    else:
        await work.prefilled()
        pair.prefill.release(ticket.lease_id)
