"""The run of a decode engine that is started while the prompt is still being computed.

It queues, gets its blocks and reads there what is ready, so that little is left to do when the prompt's last token is
computed. Its first event is waited for by a task beside the prefill. Whoever leaves the context has ended the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType

from pd_service.channels import end
from pd_service.request import TokenEvent


class EarlyDecode:
    """At most one run, which another may follow when its ticket has ended. `engine_id` is that of the last one."""

    def __init__(self) -> None:
        self.engine_id = ""
        self._events: AsyncGenerator[TokenEvent, None] | None = None
        self._first: asyncio.Task[TokenEvent] | None = None

    async def __aenter__(self) -> EarlyDecode:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def begin(self, engine_id: str, events: AsyncGenerator[TokenEvent, None]) -> None:
        """Ends the former run, and starts the one whose `events` these are."""
        await self._end()
        self.engine_id, self._events = engine_id, events
        self._first = asyncio.create_task(_next(events))

    @property
    def is_running(self) -> bool:
        """It has begun and has not failed."""
        if self._first is None:
            return False
        return not self._first.done() or (not self._first.cancelled() and self._first.exception() is None)

    async def events(self) -> AsyncGenerator[TokenEvent, None]:
        """All events of the run. Raises what it raises."""
        assert self._events is not None
        assert self._first is not None
        yield await self._first
        async for event in self._events:
            yield event

    async def _end(self) -> None:
        if self._first is not None and self._events is not None:
            await end(self._first)
            await self._events.aclose()


async def _next(events: AsyncGenerator[TokenEvent, None]) -> TokenEvent:
    return await anext(events)
