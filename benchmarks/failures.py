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
SHORT_STEP_TOKENS = 32  # a step of some 40 ms on one core, as accelerators have with their prompts
DEFAULT_STEP_TOKENS = EngineSettings().max_num_batched_tokens
SCENES = ("cancels", "pulls", "losses")

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

    async def run(self, scenes: Sequence[str]) -> Figures:
        figures: Figures = {}
        try:
            async with self._node("decode") as reader:
                if "cancels" in scenes:
                    figures |= await self._cancel(reader)
                if "pulls" in scenes:
                    figures |= await self._pull(reader)
                if "losses" in scenes:
                    figures |= await self._lose_holders(reader)
            if "losses" in scenes:
                async with self._node("prefill") as holder:
                    figures |= await self._lose_readers(holder)
        finally:
            await self._directory.close()
        if self._watch.looks_ms:
            figures["resolution_ms"] = round(self._watch.resolution_ms, 2)
        return figures

    def _node(
        self, role: Role, *, max_num_seqs: int = 64, step_tokens: int = DEFAULT_STEP_TOKENS
    ) -> AbstractAsyncContextManager[NodeProcess]:
        settings = EngineSettings(lease_s=LEASE_S, max_num_seqs=max_num_seqs, max_num_batched_tokens=step_tokens)
        return node_process(
            role,
            EngineConfig(role=role, model_dir=self._model_dir, kv_cache_bytes=KV_CACHE_BYTES, settings=settings),
        )

    async def _cancel(self, reader: NodeProcess) -> Figures:
        """What a step in flight may write to is free when it ends: with short steps, and with the default ones."""
        story = RequestStory(self._directory, GatewaySettings(), GatewayMetrics())
        figures: Figures = {}
        rounds = {SHORT_STEP_TOKENS: self._num_cancels, DEFAULT_STEP_TOKENS: self._num_cancels // 4}
        for step_tokens, num_cancels in rounds.items():
            progress.print(f"{num_cancels} cancels, steps of {step_tokens} tokens")
            async with self._node("prefill", max_num_seqs=1, step_tokens=step_tokens) as holder:  # half of them queue
                pair = await Pair.meet(self._directory, holder, reader)
                times, stages = await cancelled(pair, story, self._watch, num_cancels, self._source)
                figures |= {f"cancel_{step_tokens}_ms": times, f"cancelled_{step_tokens}_at": dict(stages)}
        return figures

    async def _pull(self, reader: NodeProcess) -> Figures:
        progress.print("running decodes beside pulls")
        async with self._node("prefill") as holder:
            pair = await Pair.meet(self._directory, holder, reader)
            without_ms, beside_ms = await gaps_beside_pulls(pair, PULLS, self._source)
        return {"gaps_without_ms": without_ms, "gaps_beside_ms": beside_ms}

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
    """Of the scenes that were played."""
    found = []
    if "gaps_beside_ms" in figures:
        found.append(_pull_bar(figures))
    steps = (SHORT_STEP_TOKENS, DEFAULT_STEP_TOKENS)
    found += [_cancel_bar(figures, tokens) for tokens in steps if f"cancel_{tokens}_ms" in figures]
    for way, aim in (("killed", KILLED_AIM_MS), ("silent", SILENT_AIM_MS)):
        found += [
            _loss_bar(f"{what} {way}", figures[f"{way}_{what}_ms"], aim)
            for what in ("holder", "reader")
            if f"{way}_{what}_ms" in figures
        ]
    return found


def _cancel_bar(figures: Figures, step_tokens: int) -> Bar:
    times = figures[f"cancel_{step_tokens}_ms"]
    stages = ", ".join(f"{num} {stage}" for stage, num in sorted(figures[f"cancelled_{step_tokens}_at"].items()))
    return Bar(
        name=f"cancel to all blocks free, p99, steps of {step_tokens} tokens",
        value=percentile(times, 99),
        aim=CANCEL_AIM_MS,
        better="lower",
        unit="ms",
        note=f"p50 {statistics.median(times):.0f} ms of {len(times)}, a look takes {figures['resolution_ms']:.1f} ms; "
        f"{stages}",
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
    parser.add_argument("--cancels", type=int, default=80, help="cancels at random moments (default: 80)")
    parser.add_argument("--losses", type=int, default=3, help="losses of each kind (default: 3)")
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=SCENES, help="what is played (default: all)")
    options = parser.parse_args()
    if options.cancels < 4 or options.losses < 1:
        parser.error(f"at least 4 cancels and one loss, given {options.cancels} and {options.losses}")
    model_dir = demo_model_dir(lambda line: progress.print(line))
    seed = secrets.randbits(32)
    figures = asyncio.run(Bench(model_dir, options.cancels, options.losses, random.Random(seed)).run(options.scenes))
    details = {"cpus": os.cpu_count(), "kernel": platform.release(), "seed": seed, **figures}
    return publish("Failures", bars(figures), as_json=options.json, details=details)


if __name__ == "__main__":
    sys.exit(main())
