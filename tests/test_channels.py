"""Laws of the small pieces behind our streams."""

import asyncio

import pytest

from pd_service.channels import beside, end, write_all
from tests.one_loop import run_async


async def slow_to_end(started: asyncio.Event, may_end: asyncio.Event) -> None:
    """Work whose clean-up takes a while."""
    try:
        started.set()
        await asyncio.Event().wait()
    finally:
        await may_end.wait()


def test_a_cancel_that_comes_during_the_clean_up_is_not_swallowed() -> None:
    async def scenario() -> None:
        started, may_end = asyncio.Event(), asyncio.Event()

        async def body() -> None:
            async with beside(slow_to_end(started, may_end)):
                await started.wait()

        task = asyncio.create_task(body())
        await started.wait()
        for _ in range(5):
            await asyncio.sleep(0)  # the body is over and waits for its work
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()
        may_end.set()

    run_async(scenario())


def test_work_beside_has_ended_with_the_body_and_its_failure_is_heard() -> None:
    async def fails() -> None:
        raise ZeroDivisionError("a bug")

    async def scenario() -> None:
        with pytest.raises(ZeroDivisionError):
            async with beside(fails()):
                await asyncio.sleep(0)

    run_async(scenario())


def test_end_says_nothing_of_how_the_task_ended() -> None:
    async def fails() -> None:
        raise ZeroDivisionError("a bug")

    async def scenario() -> None:
        task = asyncio.create_task(fails())
        await asyncio.sleep(0)
        await end(task)
        waiting = asyncio.create_task(asyncio.Event().wait())
        await end(waiting)
        assert waiting.cancelled()

    run_async(scenario())


def test_messages_are_written_in_order_until_none() -> None:
    class Stream:
        def __init__(self) -> None:
            self.written: list[int] = []

        async def write(self, message: int) -> None:
            await asyncio.sleep(0)
            self.written.append(message)

    async def scenario() -> None:
        outbox: asyncio.Queue[int | None] = asyncio.Queue()
        for message in (1, 2, 3, None, 4):
            outbox.put_nowait(message)
        stream = Stream()
        await write_all(outbox, stream)
        assert stream.written == [1, 2, 3]

    run_async(scenario())
