"""What a hand-over costs after the prompt's last token, when its KV is read chunk by chunk while it is computed.

A prefill and a decode engine in a process each, one torch thread each, and the demo model. One prompt at a time is
computed in one step, or in 2, 4 and 8. Exposed is what the client waits for, from the first token to the holder's yes,
and of that the time in which bytes moved. "Late" is the hand-over without any overlap: the decode engine is asked when
the prompt is done.

A layer of the last chunk could be read as soon as it is computed. That would save at most the time in which the last
chunk's bytes move, and would cost a message and a read for each layer: both are shown, the cost from below.

    python -m benchmarks.overlap --json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import secrets
import statistics
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pydantic import ByteSize
from rich.console import Console

from benchmarks.node_process import node_process
from benchmarks.report import Bar, arguments, publish
from benchmarks.serve import draw_prompt
from pd_service.config import EngineConfig, EngineSettings, GatewaySettings, Role
from pd_service.demo import demo_model_dir
from pd_service.gateway.early_decode import EarlyDecode
from pd_service.gateway.engines import Directory, EngineMember
from pd_service.gateway.job import Job
from pd_service.gateway.phases import Phases
from pd_service.gateway.story import RequestStory
from pd_service.metrics import GatewayMetrics
from pd_service.models.config import fingerprint, load_model_config
from pd_service.request import EngineSampling, RequestId, Ticket

NUM_CHUNKS = (1, 2, 4, 8)
OUTPUT_TOKENS = 4
CONNECT_TIMEOUT_S = 30.0
AIM_MS = 20.0  # from the first token to the holder's yes, for 1,024 tokens
AIM_BEYOND_SHARE = 0.25  # of the exposed wire of one step, beside the last chunk's share of the bytes

progress = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Medians over the repetitions, in milliseconds; `exposed_ms` has the wire and all else in it."""

    name: str
    num_chunks: int
    prefill_ms: float
    exposed_ms: float
    wire_ms: float
    hidden_wire_ms: float
    confirm_ms: float
    plan_ms: float
    num_bytes: float
    hidden_bytes: float


class LateStory(RequestStory):
    """Nobody follows a prefill: the decode engine is asked when it is done."""

    async def _begin(self, early: EarlyDecode, ticket: Ticket, progress: object) -> None:
        pass


async def run_one(story: RequestStory, prompt: Sequence[int]) -> Phases:
    job = Job(
        request_id=RequestId("benchmark"),
        prompt_token_ids=tuple(prompt),
        sampling=EngineSampling(),
        max_new_tokens=OUTPUT_TOKENS,
        deadline=None,
        phases=Phases(mark=asyncio.get_running_loop().time()),
    )
    async with aclosing(story.run(job)) as events:
        async for _ in events:
            pass
    if job.phases.retries:
        raise RuntimeError("a request went round again, which spoils the measurement")
    return job.phases


async def measure(story: RequestStory, name: str, num_chunks: int, prompts: Sequence[Sequence[int]]) -> Measured:
    """The first prompt does not count."""
    phases = [await run_one(story, prompt) for prompt in prompts][1:]

    def middle(value: Any) -> float:
        return round(statistics.median(map(value, phases)), 3)

    return Measured(
        name=name,
        num_chunks=num_chunks,
        prefill_ms=middle(lambda p: p.prefill_ms),
        exposed_ms=middle(lambda p: p.transfer_ms + p.confirm_ms),
        wire_ms=middle(lambda p: p.wire_ms),
        hidden_wire_ms=middle(lambda p: p.hidden_wire_ms),
        confirm_ms=middle(lambda p: p.confirm_ms),
        plan_ms=middle(lambda p: p.plan_ms),
        num_bytes=middle(lambda p: p.kv_bytes),
        hidden_bytes=middle(lambda p: p.hidden_kv_bytes),
    )


def engine_config(role: Role, num_tokens: int, step_tokens: int) -> EngineConfig:
    settings = EngineSettings(
        max_model_len=num_tokens + 64,
        max_num_batched_tokens=step_tokens,
        prefix_cache=False,
        planes=("shm",),
    )
    return EngineConfig(
        role=role, model_dir=demo_model_dir(progress.print), kv_cache_bytes=ByteSize(2**29), settings=settings
    )


async def measure_all(num_tokens: int, repetitions: int, source: random.Random) -> list[Measured]:
    """Late and in one chunk, then early in each number of chunks."""
    model = fingerprint(demo_model_dir(progress.print))
    measured = []
    async with node_process("decode", engine_config("decode", num_tokens, 256)) as decode:
        for num_chunks in NUM_CHUNKS:
            step_tokens = -(-num_tokens // num_chunks)
            async with node_process("prefill", engine_config("prefill", num_tokens, step_tokens)) as prefill:
                directory = await connected(model, [prefill.member, decode.member])
                try:
                    kinds = [("late", LateStory)] if num_chunks == 1 else []
                    for name, kind in [*kinds, ("early", RequestStory)]:
                        progress.print(f"{name}, {num_chunks} chunks")
                        story = kind(directory, GatewaySettings(), GatewayMetrics())
                        prompts = [draw_prompt(source, num_tokens) for _ in range(repetitions + 1)]
                        measured.append(await measure(story, name, num_chunks, prompts))
                finally:
                    await directory.close()
    return measured


async def connected(model: str, members: Sequence[EngineMember]) -> Directory:
    """When every engine has taken this gateway, and has had a moment to meet the others."""
    directory = Directory(model)
    await directory.update(members)
    for member in members:
        await directory.wait_for(member.role, CONNECT_TIMEOUT_S)
    return directory


# ---- report


def bars(measured: Sequence[Measured], num_layers: int) -> list[Bar]:
    late, one, *chunked = measured
    found = [
        Bar(
            name="early, 1 chunk: exposed beside late",
            value=round(one.exposed_ms / late.exposed_ms, 3),
            aim=1.0,
            better="lower",
            note=f"{one.exposed_ms:.1f} of {late.exposed_ms:.1f} ms, {late.num_bytes / 1e6:.1f} MB",
        ),
        Bar(
            name="early, 1 chunk: hand-over in all",
            value=round(one.exposed_ms, 2),
            aim=AIM_MS,
            better="lower",
            unit="ms",
            note=f"{one.num_bytes / 1e6:.1f} MB",
        ),
    ]
    found += [
        Bar(
            name=f"{one_of.num_chunks} chunks: exposed wire beside 1 chunk",
            value=round(one_of.wire_ms / one.wire_ms, 3),
            aim=1 / one_of.num_chunks + AIM_BEYOND_SHARE,
            better="lower",
            note=f"wire {one_of.wire_ms:.2f} of {one.wire_ms:.2f} ms; exposed {one_of.exposed_ms:.1f} ms in all; "
            f"{one_of.hidden_bytes / 1e6:.1f} MB behind the prefill",
        )
        for one_of in chunked
    ]
    return found + layerwise_bars(chunked[-1], num_layers)


def layerwise_bars(last: Measured, num_layers: int) -> list[Bar]:
    """Of the most chunks: what reading each layer of the last one as it comes could save, and what that would cost.

    A layer would need at least half a round trip and a plan of its own; `plan_ms` is that of all chunks together.
    """
    cost_ms = num_layers * (last.confirm_ms / 2 + last.plan_ms / last.num_chunks)
    return [
        Bar(
            name=f"layer by layer in the last of {last.num_chunks} chunks: saves at most",
            value=round(last.wire_ms * (num_layers - 1) / num_layers, 3),
            unit="ms",
            note="the time in which its bytes move, but for the last layer's",
        ),
        Bar(
            name=f"layer by layer in the last of {last.num_chunks} chunks: costs at least",
            value=round(cost_ms, 3),
            unit="ms",
            note=f"of work on both engines' hosts: {num_layers} messages and plans",
        ),
    ]


def at_least_one(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, given {text!r}")
    return value


def main() -> int:
    parser = arguments("What a hand-over costs after the prompt's last token, by the number of chunks.")
    parser.add_argument("--tokens", type=at_least_one, default=1024, help="length of the prompt (default: 1024)")
    parser.add_argument("--repetitions", type=at_least_one, default=3, help="prompts per figure (default: 3)")
    options = parser.parse_args()
    seed = secrets.randbits(32)
    measured = asyncio.run(measure_all(options.tokens, options.repetitions, random.Random(seed)))
    num_layers = load_model_config(demo_model_dir(progress.print)).hf.num_hidden_layers
    details = {
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "seed": seed,
        "tokens": options.tokens,
        "measured": [{name: getattr(one, name) for name in Measured.__slots__} for one in measured],
    }
    return publish("Overlap of prefill and transfer", bars(measured, num_layers), as_json=options.json, details=details)


if __name__ == "__main__":
    sys.exit(main())
