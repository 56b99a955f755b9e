"""What a story writes down about one answer while it runs: hops in its timeline, failures in the metrics.

Nothing is decided here, and nothing waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pd_service.errors import RetryableError, TransferFailed
from pd_service.gateway.timeline import Timeline
from pd_service.metrics import GatewayMetrics
from pd_service.request import EngineTimes, TokenEvent


class StoryNotes:
    def __init__(self, timeline: Timeline, metrics: GatewayMetrics) -> None:
        self._timeline = timeline
        self._metrics = metrics

    def note(self, what: str, engine_id: str = "", detail: str = "") -> None:
        self._timeline.note(asyncio.get_running_loop().time(), what, engine_id, detail)

    def failed(self, what: str, engine_id: str, error: RetryableError) -> None:
        if isinstance(error, TransferFailed):
            self._metrics.count_transfer_failure(error.reason)
        self.note(what, engine_id, f"{_kind(error)}: {error}")

    def prefilled(self, engine_id: str, times: EngineTimes | None) -> None:
        self.note("first token", engine_id, "" if times is None else _of_prefill(times))

    async def of_decode(
        self, engine_id: str, events: AsyncGenerator[TokenEvent, None], *, has_ticket: bool
    ) -> AsyncGenerator[TokenEvent, None]:
        """The same events. Notes when the first comes, and what ends them too early."""
        try:
            async with aclosing(events):
                async for event in events:
                    if event.times is not None:
                        text = _of_hand_over(event.times) if has_ticket else _of_prefill(event.times)
                        self.note("decoding" if has_ticket else "first token", engine_id, text)
                    yield event
        except RetryableError as error:
            self.failed("decode failed", engine_id, error)
            raise


def _kind(error: RetryableError) -> str:
    name = type(error).__name__
    return f"{name} ({error.reason.value})" if isinstance(error, TransferFailed) else name


def _of_prefill(times: EngineTimes) -> str:
    return f"queued {times.queue_ms:.1f} ms, computed {times.compute_ms:.1f} ms, {times.cached_tokens} tokens cached"


def _of_hand_over(times: EngineTimes) -> str:
    moved_ms = times.wire_ms + times.hidden_wire_ms
    rate = f" at {times.kv_bytes / moved_ms / 1e6:.1f} GB/s" if moved_ms else ""
    moved = f"{times.kv_bytes / 1e6:.1f} MB in {times.num_runs} runs over {times.plane}{rate}" if times.plane else ""
    parts = [
        moved or "no KV moved",
        f"planned {times.plan_ms:.1f} ms",
        f"on the wire {times.hidden_wire_ms:.1f} ms beside the prefill and {times.wire_ms:.1f} ms after it",
        f"confirmed in {times.confirm_ms:.1f} ms",
        f"computed {times.compute_ms:.1f} ms",
    ]
    return ", ".join(parts)
