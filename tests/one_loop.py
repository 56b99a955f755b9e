"""One event loop for all tests that use gRPC, as every process of the product has one.

grpc.aio shares its poller between loops, and a loop that was closed while events for it were on their way can hold up
the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_runner = asyncio.Runner()


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, on the shared loop. Whatever `main` started must have ended with it."""
    result = _runner.run(main)
    left = _runner.run(_still_running())
    assert not left, f"tasks left behind: {left}"
    return result


async def _still_running() -> list[asyncio.Task[Any]]:
    """Tasks that do not end by themselves within a few turns of the loop."""
    for _ in range(50):
        await asyncio.sleep(0)
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
