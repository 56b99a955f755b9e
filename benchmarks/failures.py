"""How fast two engines let go of what nobody wants any more, and what a pull costs the streams beside it.

One prefill and one decode engine of the demo model, a process and a torch thread each, without Ray; the gateway's part
runs here. Cancels come at random moments of requests' lives. Engines are killed (SIGKILL) and frozen (SIGSTOP) while
the other one has blocks that depend on them; nobody but the channel between the two tells the survivor.

    python -m benchmarks.failures --json
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
import secrets
import statistics
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.failures_scenes import Pair, Watch, cancelled, gaps_beside_pulls, holder_lost, reader_lost
from benchmarks.node_process import NodeProcess, node_process
from benchmarks.report import Bar, arguments, publish
from benchmarks.serve import percentile
from pd_service.config import EngineConfig, EngineSettings, GatewaySettings, Role
from pd_service.demo import demo_model_dir
from pd_service.gateway.engines import Directory
from pd_service.gateway.story import RequestStory
from pd_service.metrics import GatewayMetrics
from pd_service.models.config import fingerprint

CANCEL_AIM_MS, KILLED_AIM_MS, SILENT_AIM_MS, STEPS_AIM = 100.0, 2000.0, 3000.0, 1.0
KV_CACHE_BYTES = 2**29
LEASE_S = 60.0  # so that no lease ends by itself
PULLS = 6

Figures = dict[str, Any]


progress = Console(stderr=True, highlight=False)


class Bench:
    """The processes of one run, and what is measured on them; all times in milliseconds."""

    def __init__(self, model_dir: Path, num_cancels: int, num_losses: int, source: random.Random) -> None:
        self._model_dir = model_dir
        self._num_cancels = num_cancels
        self._num_losses = num_losses
        self._source = source
        self._watch = Watch()
        self._directory = Directory(fingerprint(model_dir))

    async def run(self) -> Figures:
        try:
            async with self._node("decode") as reader:
                async with self._node("prefill", max_num_seqs=2) as holder:  # half of what is cancelled queues
                    figures = await self._together(await Pair.meet(self._directory, holder, reader))
                figures |= await self._lose_holders(reader)
            async with self._node("prefill") as holder:
                figures |= await self._lose_readers(holder)
        finally:
            await self._directory.close()
        return figures | {"resolution_ms": round(self._watch.resolution_ms, 2)}

    def _node(self, role: Role, max_num_seqs: int = 64) -> AbstractAsyncContextManager[NodeProcess]:
        settings = EngineSettings(lease_s=LEASE_S, max_num_seqs=max_num_seqs)
        return node_process(
            role,
            EngineConfig(role=role, model_dir=self._model_dir, kv_cache_bytes=KV_CACHE_BYTES, settings=settings),
        )

    async def _together(self, pair: Pair) -> Figures:
        story = RequestStory(self._directory, GatewaySettings(), GatewayMetrics())
        progress.print(f"{self._num_cancels} cancels")
        cancel_ms, stages = await cancelled(pair, story, self._watch, self._num_cancels, self._source)
        progress.print("running decodes beside pulls")
        without_ms, beside_ms = await gaps_beside_pulls(pair, PULLS, self._source)
        return {
            "cancel_ms": cancel_ms,
            "cancelled_at": dict(stages),
            "gaps_without_ms": without_ms,
            "gaps_beside_ms": beside_ms,
        }

    async def _lose_holders(self, reader: NodeProcess) -> Figures:
        silent, killed = [], []
        for _ in range(self._num_losses):
            progress.print("a holder falls silent, then is killed")
            async with self._node("prefill") as holder:
                for times, is_killed in ((silent, False), (killed, True)):
                    pair = await Pair.meet(self._directory, holder, reader)
                    times.append(await holder_lost(pair, self._watch, self._source, is_killed=is_killed))
        return {"silent_holder_ms": silent, "killed_holder_ms": killed}

    async def _lose_readers(self, holder: NodeProcess) -> Figures:
        silent, killed = [], []
        for _ in range(self._num_losses):
            progress.print("a reader falls silent, then is killed")
            async with self._node("decode", max_num_seqs=1) as reader:
                for times, is_killed in ((silent, False), (killed, True)):
                    pair = await Pair.meet(self._directory, holder, reader)
                    times.append(await reader_lost(pair, self._watch, self._source, is_killed=is_killed))
        return {"silent_reader_ms": silent, "killed_reader_ms": killed}


def bars(figures: Figures) -> list[Bar]:
    return [
        _cancel_bar(figures),
        *(_loss_bar(f"{what} killed", figures[f"killed_{what}_ms"], KILLED_AIM_MS) for what in ("holder", "reader")),
        *(_loss_bar(f"{what} silent", figures[f"silent_{what}_ms"], SILENT_AIM_MS) for what in ("holder", "reader")),
        _pull_bar(figures),
    ]


def _cancel_bar(figures: Figures) -> Bar:
    times = figures["cancel_ms"]
    stages = ", ".join(f"{num} {stage}" for stage, num in sorted(figures["cancelled_at"].items()))
    return Bar(
        name="cancel to all blocks free, p99",
        value=percentile(times, 99),
        aim=CANCEL_AIM_MS,
        better="lower",
        unit="ms",
        note=f"p50 {statistics.median(times):.0f} ms, looked each {figures['resolution_ms']:.1f} ms; {stages}",
    )


def _loss_bar(what: str, times: Sequence[float], aim: float) -> Bar:
    return Bar(
        name=f"{what}, to all blocks free",
        value=max(times),
        aim=aim,
        better="lower",
        unit="ms",
        note=f"the most of {len(times)}; median {statistics.median(times):.0f} ms",
    )


def _pull_bar(figures: Figures) -> Bar:
    """What the slowest gaps of a running stream lose to a pull, in steps."""
    without, beside = figures["gaps_without_ms"], figures["gaps_beside_ms"]
    step = statistics.median(without)
    extra = percentile(beside, 99) - percentile(without, 99)
    return Bar(
        name="running decodes beside a pull, p99 of gaps",
        value=extra / step,
        aim=STEPS_AIM,
        better="lower",
        unit="steps more",
        note=f"p99 {percentile(without, 99):.1f} and {percentile(beside, 99):.1f} ms, a step takes {step:.1f} ms",
    )


def main() -> int:
    parser = arguments("Time until blocks are free after cancels and losses, and running decodes beside pulls.")
    parser.add_argument("--cancels", type=int, default=100, help="cancels at random moments (default: 100)")
    parser.add_argument("--losses", type=int, default=3, help="losses of each kind (default: 3)")
    options = parser.parse_args()
    if min(options.cancels, options.losses) < 1:
        parser.error(f"at least one cancel and one loss, given {options.cancels} and {options.losses}")
    model_dir = demo_model_dir(lambda line: progress.print(line))
    seed = secrets.randbits(32)
    figures = asyncio.run(Bench(model_dir, options.cancels, options.losses, random.Random(seed)).run())
    details = {"cpus": os.cpu_count(), "kernel": platform.release(), "seed": seed, **figures}
    return publish("Failures", bars(figures), as_json=options.json, details=details)


if __name__ == "__main__":
    sys.exit(main())
