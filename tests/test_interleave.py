"""Laws of many streams read as one: nothing lost, the first goes ahead, whatever ends one way ends for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_service.gateway.interleave import interleaved

Item = int | asyncio.Event | Exception


class Streams:
    """Streams that follow scripts: they wait at an event and raise an exception."""

    def __init__(self, *scripts: list[Item]) -> None:
        self.scripts = scripts
        self.started: list[int] = []
        self.num_open = 0
        self.all_started = asyncio.Event()

    def all(self) -> list[AsyncGenerator[tuple[int, int], None]]:
        return [self._one(index) for index in range(len(self.scripts))]

    async def _one(self, index: int) -> AsyncGenerator[tuple[int, int], None]:
        self.started.append(index)
        self.num_open += 1
        if len(self.started) == len(self.scripts):
            self.all_started.set()
        try:
            for item in self.scripts[index]:
                await asyncio.sleep(0)
                if isinstance(item, asyncio.Event):
                    await item.wait()
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield index, item
        finally:
            try:
                await asyncio.sleep(0)  # cleaning up takes a turn of the loop, and is waited for
            finally:
                self.num_open -= 1


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=6))
def test_every_item_comes_once_and_in_the_order_of_its_stream(scripts: list[list[int]]) -> None:
    async def scenario() -> None:
        streams = Streams(*scripts)  # type: ignore[arg-type]
        read = [item async for item in interleaved(streams.all())]
        for index, script in enumerate(scripts):
            assert [value for of, value in read if of == index] == script
        assert streams.num_open == 0
        assert sorted(streams.started) == list(range(len(scripts)))

    asyncio.run(scenario())


def test_the_others_start_with_the_first_item_of_the_first() -> None:
    async def scenario() -> None:
        gate, never = asyncio.Event(), asyncio.Event()
        streams = Streams([gate, 1, never], [2], [3])
        async with aclosing(interleaved(streams.all())) as items:
            first = asyncio.ensure_future(anext(items))
            for _ in range(20):
                await asyncio.sleep(0)
            assert streams.started == [0]
            gate.set()
            assert await first == (0, 1)
            assert {await anext(items), await anext(items)} == {(1, 2), (2, 3)}
        assert streams.num_open == 0

    asyncio.run(scenario())


def test_the_others_start_with_the_end_of_a_first_without_items() -> None:
    async def scenario() -> None:
        streams = Streams([], [2], [3])
        assert sorted([item async for item in interleaved(streams.all())]) == [(1, 2), (2, 3)]

    asyncio.run(scenario())


def test_an_error_before_the_first_item_starts_no_other() -> None:
    async def scenario() -> None:
        streams = Streams([KeyError("first")], [2])
        with pytest.raises(KeyError, match="first"):
            await anext(interleaved(streams.all()))
        assert streams.num_open == 0
        assert streams.scripts[1] == [2]

    asyncio.run(scenario())


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_of_one_is_raised_when_all_have_been_closed(failing: int) -> None:
    async def scenario() -> None:
        scripts: list[list[Item]] = [[1, asyncio.Event()] for _ in range(3)]
        scripts[failing][1:] = [KeyError("this one")]
        streams = Streams(*scripts)
        with pytest.raises(KeyError, match="this one"):
            async for _ in interleaved(streams.all()):
                pass
        assert streams.num_open == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("num_items", [1, 2, 3])
def test_closing_closes_all(num_items: int) -> None:
    async def scenario() -> None:
        streams = Streams(*([1, asyncio.Event()] for _ in range(3)))  # type: ignore[arg-type]
        async with aclosing(interleaved(streams.all())) as items:
            for _ in range(num_items):
                await anext(items)
        assert streams.num_open == 0

    asyncio.run(scenario())


def test_cancelling_the_reader_closes_all() -> None:
    async def scenario() -> None:
        streams = Streams(*([1, asyncio.Event()] for _ in range(3)))  # type: ignore[arg-type]

        async def read() -> None:
            async with aclosing(interleaved(streams.all())) as items:
                async for _ in items:
                    pass

        reading = asyncio.create_task(read())
        await streams.all_started.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert streams.num_open == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_one_stream_alone_is_read_in_the_readers_own_task() -> None:
    async def who() -> AsyncGenerator[asyncio.Task[None] | None, None]:
        yield asyncio.current_task()

    async def scenario() -> None:
        assert [task async for task in interleaved([who()])] == [asyncio.current_task()]

    asyncio.run(scenario())
