"""One event loop for all tests that use gRPC, as every process of the product has one.

grpc.aio shares its poller between loops, and a loop that was closed while events for it were on their way can hold up
the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

ENDING_S = 2.0  # a bound for a busy machine: what ends by itself does so within a few turns of the loop

_runner = asyncio.Runner()


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, on the shared loop. Whatever `main` started must have ended with it."""
    result = _runner.run(main)
    left = _runner.run(_still_running())
    assert not left, f"tasks left behind: {left}"
    return result


async def _still_running() -> list[asyncio.Task[Any]]:
    """Tasks that do not end by themselves, though gRPC has had time to tell them of the end of their calls."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=ENDING_S)
    return list(left)
