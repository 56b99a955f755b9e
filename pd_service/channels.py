"""What all our gRPC servers and clients share: limits, keepalive, and the queue behind a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import grpc

from pd_service.config import MAX_MESSAGE_BYTES

T = TypeVar("T")

EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # what `read` returns at the end of a stream; the stubs forgot it
Context = grpc.aio.ServicerContext[Any, Any]

_LIMITS = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]

_SERVER = [
    *_LIMITS,
    # Clients may ping an idle connection, as often as our own channels do.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a second listener
]


def _pings(every_ms: int, answer_ms: int) -> list[tuple[str, int]]:
    """A peer from which nothing comes is found after `every_ms` + `answer_ms` at the latest.

    gRPC waits a minute for the answer to a ping unless `ping_timeout_ms` says otherwise: `keepalive_timeout_ms` alone
    ends nothing. Pings are sent and answered by its own threads, so an engine that holds the interpreter is not silent.
    """
    return [("grpc.keepalive_time_ms", every_ms), ("grpc.http2.ping_timeout_ms", answer_ms)]


_INSIDE = _pings(every_ms=750, answer_ms=1250)  # a busy host may be late by a second, and is not silent then


def channel_options() -> list[tuple[str, int]]:
    """For channels inside the service: a silent peer is found within two seconds."""
    return [
        *_LIMITS,
        *_INSIDE,
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Channels to one address must not share a connection: each has its own life and death.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options() -> list[tuple[str, int]]:
    """For servers inside the service: a silent peer is found within two seconds."""
    return [*_SERVER, *_INSIDE]


def door_options() -> list[tuple[str, int]]:
    """For the door of clients, whose networks may be slow: a silent one is found within 15 seconds."""
    return [*_SERVER, *_pings(every_ms=10_000, answer_ms=5_000)]


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work` as a task while the body runs; with the body it has ended too."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await end(task)
    if not task.cancelled():
        task.result()


async def end(task: asyncio.Task[Any]) -> None:
    """Cancels the task and returns when it has ended, however it did.

    Not by awaiting it under a suppressed CancelledError: that would swallow a cancellation of the caller as well.
    """
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # looked at, so that nobody reports it as forgotten


async def write_all(outbox: asyncio.Queue[T | None], stream: Any) -> None:
    """Writes the queue's messages to a client's call or a servicer's context, in order, until None.

    All our streams are written like this and none by a generator: grpc.aio leaves a generator, and the task that reads
    it, to the garbage collector when a call is cut. The end of the call ends the writing; its reader says why.
    """
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while (message := await outbox.get()) is not None:
            await stream.write(message)
