"""Several streams as one. The first goes ahead, so that what it leaves in caches serves the others.

    first   ──●──●─────●──┐                      an error of one ends all of them
    others       └─●─●──●─┴─●──►                 whatever ends the reading closes all of them

Every stream is read in a task of its own. The tasks live exactly as long as the generator that owns them; they hand
over what they read, errors included, and nothing of theirs is raised anywhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None = None


_Queue = asyncio.Queue[_Item[T] | _End]


async def interleaved(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Everything `streams` yield, as it comes; the others start with the first item, or the end, of the first one.

    Raises the first error of any of them, when all have been closed. One stream alone is read without a task.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]):
            async for value in streams[0]:
                yield value
        return
    queue: _Queue[T] = asyncio.Queue()
    tasks = [asyncio.create_task(_read(streams[0], queue))]
    try:
        num_ended = 0
        while num_ended < len(streams):
            item = await queue.get()
            if len(tasks) == 1:
                tasks += [asyncio.create_task(_read(stream, queue)) for stream in streams[1:]]
            if isinstance(item, _Item):
                yield item.value
                continue
            if item.error is not None:
                raise item.error
            num_ended += 1
    finally:
        await _end_all(tasks)


async def _read(stream: AsyncGenerator[T, None], queue: _Queue[T]) -> None:
    try:
        async with aclosing(stream):
            async for value in stream:
                queue.put_nowait(_Item(value))
    except Exception as error:  # handed to the reader, who raises it
        queue.put_nowait(_End(error))
    else:
        queue.put_nowait(_End())


async def _end_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()  # without effect on one that has ended
    await asyncio.wait(tasks)
