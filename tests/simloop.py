"""An asyncio event loop whose time is virtual: hours pass in milliseconds, and one seed gives one course of events.

Callbacks that are ready at the same moment run in an order drawn from the seed, so that no code gets away with relying
on order. When nothing is ready the clock jumps to the next timer. Nothing is lost in silence: tasks that all wait for
ever, an exception in a callback or a forgotten task, an async generator that was dropped instead of closed, and a task
that outlives the main one all make `run` raise.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


class WaitsForEver(Exception):
    """No callback is ready and no timer is set, yet the main coroutine has not ended."""


class LeftBehind(Exception):
    """Something went wrong, or went on, that nobody looked after."""


class SimLoop(asyncio.AbstractEventLoop):
    """Only what tasks, futures, timeouts and queues need; sockets, threads and signals have no place here."""

    def __init__(self, seed: int) -> None:
        self._now = 0.0
        self._random = random.Random(seed)
        self._ready: list[asyncio.Handle] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []  # a heap; the number keeps handles uncompared
        self._num_timers = 0
        self._problems: list[str] = []

    # ---- what asyncio asks of a loop

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return asyncio._get_running_loop() is self

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, T], **kwargs: Any) -> asyncio.Task[T]:  # type: ignore[override]
        return asyncio.Task(coro, loop=self, **kwargs)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """The heap drops it when its time comes."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._problems.append(f"{context['message']}: {context.get('exception')!r}")

    # ---- running

    def run_until_complete(self, main: Coroutine[Any, Any, T]) -> T:  # type: ignore[override]
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=None, finalizer=self._dropped)
        asyncio._set_running_loop(self)
        task = self.create_task(main)
        try:
            while not task.done() and not self._problems:
                self._turn()
            if not task.done():
                raise LeftBehind("; ".join(self._problems))
            result = task.result()
            if left := [t.get_name() for t in asyncio.all_tasks(self)]:
                self._problems.append(f"tasks outlive the main one: {sorted(left)}")
        finally:
            self._end_all_tasks()
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
        if self._problems:
            raise LeftBehind("; ".join(self._problems))
        return result

    def _turn(self) -> None:
        """Runs what is ready, in random order; jumps to the next timer first if nothing is."""
        if not self._ready:
            self._jump()
        batch, self._ready = self._ready, []
        self._random.shuffle(batch)
        for handle in batch:
            if not handle.cancelled():
                handle._run()

    def _jump(self) -> None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers:
            waiting = sorted(t.get_name() for t in asyncio.all_tasks(self))
            raise WaitsForEver(f"at {self._now:g} s no timer is set and nothing is ready; waiting: {waiting}")
        self._now = max(self._now, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(self._timers)[2])

    def _dropped(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._problems.append(f"{generator!r} was dropped before it was closed")

    def _end_all_tasks(self) -> None:
        self._timers.clear()
        while tasks := asyncio.all_tasks(self):
            for task in tasks:
                task.cancel()
            self._turn()


def run(main: Coroutine[Any, Any, T], seed: int = 0) -> T:
    """The result of `main` on a loop of its own. Raises what it raises, WaitsForEver, and LeftBehind."""
    return SimLoop(seed).run_until_complete(main)  # type: ignore[abstract]
