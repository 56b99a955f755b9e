"""How a service answers under load, over gRPC, and what its hand-overs cost.

Closed loops of clients send prompts of random token ids; each answer carries its own phases, so the hand-over is known
request by request: transfer and confirm, split into the time bytes were moving (wire) and the rest, which is ours to
lower and is held to the aim. Times to tokens are the client's; the gap that a hand-over makes counts as one of the
inter-token times. Without `--address` a service of its own is started and stopped again: the demo model, one prefill
and one decode engine.

    python -m benchmarks.serve --json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import random
import re
import secrets
import signal
import statistics
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from benchmarks.report import Bar, arguments, publish
from pd_service.channels import channel_options
from pd_service.rpc import generation_pb2, generation_pb2_grpc

AIM_MS = 10.0  # hand-over without wire, p50
BUSY_STREAMS, BUSY_AIMS_MS = 8, {"p50": 3.0, "p99": 10.0}  # the same where several requests are under way
PROMPT_TOKENS, LONG_PROMPT_TOKENS, OUTPUT_TOKENS = 128, 512, 64
WARM_UP_TOKENS = 4
TOKEN_RANGE = (1000, 40_000)  # ordinary tokens of the vocabularies of today
DEADLINE_S = 300.0  # of one request
START_TIMEOUT_S = 600.0  # the first start fetches the demo model
STOP_TIMEOUT_S = 20.0
SERVE = ("-m", "pd_service.cli", "serve")
ONE_EACH = ("--prefill", "1", "--decode", "1", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0")

Figures = dict[str, Any]  # of one load, in JSON types

progress = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`streams` clients, each with one request at a time, until `num_requests` are done; lengths in tokens."""

    streams: int
    num_requests: int
    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = OUTPUT_TOKENS

    @property
    def name(self) -> str:
        streams = f"{self.streams} stream{'s' if self.streams > 1 else ''}"
        return streams if self.prompt_tokens == PROMPT_TOKENS else f"{streams} of {self.prompt_tokens} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request as its client saw it: the arrivals of its messages with tokens, in seconds from its start."""

    arrivals_s: tuple[float, ...]
    finish: generation_pb2.Finish

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals_s)]


def draw_prompt(source: random.Random, num_tokens: int) -> list[int]:
    """Token ids of a prompt like no other, so that no cache can answer for a computation."""
    return [source.randrange(*TOKEN_RANGE) for _ in range(num_tokens)]


# ---- statistics


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated between the two nearest ranks, as numpy does by default. Raises ValueError without values."""
    if not values:
        raise ValueError("no values to take a percentile of")
    ranked = sorted(values)
    rank = (len(ranked) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (rank - below)


def middle_and_tail(values: Sequence[float]) -> dict[str, float]:
    return {"p50": round(statistics.median(values), 3), "p99": round(percentile(values, 99), 3)}


def figures(answers: Sequence[Answer], wall_s: float) -> Figures:
    """All that is known of one load; `*_ms` are p50 and p99 over its requests, over all gaps for `itl_ms`."""
    phases = [answer.finish.phases for answer in answers]
    num_output = sum(answer.finish.completion_tokens for answer in answers)
    return {
        "ttft_ms": middle_and_tail([answer.arrivals_s[0] * 1e3 for answer in answers]),
        "itl_ms": middle_and_tail([gap * 1e3 for answer in answers for gap in answer.gaps_s]),
        "output_tokens_per_s": round(num_output / wall_s, 2),
        "queue_ms": middle_and_tail([p.queue_ms for p in phases]),
        "prefill_ms": middle_and_tail([p.prefill_ms for p in phases]),
        "hand_over_ms": middle_and_tail([p.transfer_ms + p.confirm_ms for p in phases]),
        "wire_ms": middle_and_tail([p.wire_ms for p in phases]),
        "hand_over_without_wire_ms": middle_and_tail([p.transfer_ms + p.confirm_ms - p.wire_ms for p in phases]),
        "confirm_ms": middle_and_tail([p.confirm_ms for p in phases]),
        "first_decode_ms": middle_and_tail([p.first_decode_ms for p in phases]),
        "kv_bytes_per_request": statistics.median(p.kv_bytes for p in phases),
        "planes": sorted({p.plane or "none" for p in phases}),
        "retries": sum(answer.finish.retries for answer in answers),
        "wall_s": round(wall_s, 3),
    }


# ---- load


async def ask(stub: generation_pb2_grpc.GenerationStub, prompt: Sequence[int], output_tokens: int) -> Answer:
    """One request, greedy, never ended early. Raises RuntimeError unless the answer is complete."""
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=prompt),
        sampling=generation_pb2.Sampling(temperature=0.0, max_tokens=output_tokens, ignore_eos=True),
    )
    arrivals: list[float] = []
    start = time.perf_counter()
    async for response in stub.Generate(request, timeout=DEADLINE_S):
        if response.HasField("finish"):
            if response.finish.completion_tokens != output_tokens:
                raise RuntimeError(f"{response.finish.completion_tokens} tokens instead of {output_tokens}")
            return Answer(arrivals_s=tuple(arrivals), finish=response.finish)
        if response.delta.token_ids:
            arrivals.append(time.perf_counter() - start)
    raise RuntimeError("a stream ended without a finish")


async def closed_loop(stub: generation_pb2_grpc.GenerationStub, load: Load, source: random.Random) -> list[Answer]:
    """All answers of the load. Raises the first failure of any of them."""
    waiting = iter([draw_prompt(source, load.prompt_tokens) for _ in range(load.num_requests)])
    answers: list[Answer] = []

    async def client() -> None:
        for prompt in waiting:
            answers.append(await ask(stub, prompt, load.output_tokens))  # noqa: PERF401 - clients share the list

    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(load.streams):
                clients.create_task(client())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed  # one failure spoils the measurement; the others are cancellations
    return answers


async def measure(stub: generation_pb2_grpc.GenerationStub, load: Load, source: random.Random) -> Figures:
    """One round of short answers that does not count, then the load."""
    warm_up = replace(load, num_requests=load.streams + 1, output_tokens=WARM_UP_TOKENS)
    await closed_loop(stub, warm_up, source)
    progress.print(f"{load.name}: {load.num_requests} requests")
    start = time.perf_counter()
    answers = await closed_loop(stub, load, source)
    return asdict(load) | figures(answers, time.perf_counter() - start)


async def run(address: str | None, loads: Sequence[Load], source: random.Random) -> list[Figures]:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with (
        _service(address) as served_at,
        grpc.aio.insecure_channel(served_at, options=channel_options()) as channel,
    ):
        stub = generation_pb2_grpc.GenerationStub(channel)
        return [await measure(stub, load, source) for load in loads]


# ---- the service


@asynccontextmanager
async def _service(address: str | None) -> AsyncIterator[str]:
    """The address given, or that of a service which lives as long as this context."""
    if address is not None:
        yield address
        return
    # A session of its own: Ctrl-C reaches it through the clean-up here, once, and not from the terminal as well.
    process = await asyncio.create_subprocess_exec(
        sys.executable, *SERVE, *ONE_EACH, stdout=PIPE, start_new_session=True
    )
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            found = await _printed_address(process)
        yield found
    finally:
        await _stop(process)


async def _printed_address(process: Process) -> str:
    """Passes on what the service says until it names its gRPC door. Raises RuntimeError when it ends before that."""
    assert process.stdout is not None
    while line := (await process.stdout.readline()).decode():
        progress.print(line.rstrip(), markup=False, soft_wrap=True)
        if match := re.search(r"--address (\S+)", line):
            return match[1]
    raise RuntimeError(f"the service ended with exit code {await process.wait()} before it was ready")


async def _stop(process: Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.communicate()
    except TimeoutError:
        progress.print(f"the service did not stop within {STOP_TIMEOUT_S:g} s")
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


# ---- report


def bars(load: Load, measured: Figures) -> list[Bar]:
    without_wire, wire = measured["hand_over_without_wire_ms"], measured["wire_ms"]
    aims = BUSY_AIMS_MS if load.streams == BUSY_STREAMS else {"p50": AIM_MS}
    return [
        Bar(
            name=f"hand-over without wire {percent}, {load.name}",
            value=without_wire[percent],
            aim=aim,
            better="lower",
            unit="ms",
            note=f"p50 {without_wire['p50']:.1f}, p99 {without_wire['p99']:.1f} ms; wire p50 {wire['p50']:.1f} ms",
        )
        for percent, aim in aims.items()
    ]


ROWS = {
    "ttft_ms": "first token",
    "itl_ms": "between tokens",
    "queue_ms": "queue",
    "prefill_ms": "prefill",
    "hand_over_ms": "hand-over",
    "wire_ms": "  wire",
    "hand_over_without_wire_ms": "  the rest",
    "confirm_ms": "    confirm",
    "first_decode_ms": "first decode step",
}


def table(loads: Sequence[Load], measured: Sequence[Figures]) -> Table:
    made = Table(title="p50 / p99 in ms")
    made.add_column("")
    for load in loads:
        made.add_column(load.name, justify="right")
    for key, name in ROWS.items():
        made.add_row(name, *(_cell(values[key]) for values in measured))
    made.add_row("output tokens/s", *(f"{values['output_tokens_per_s']}" for values in measured))
    return made


def _cell(value: dict[str, float]) -> str:
    return f"{value['p50']:.1f} / {value['p99']:.1f}"


def streams_of(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"expected positive numbers with commas between them, given {text!r}")
    return [int(part) for part in text.split(",")]


def loads_of(streams: Sequence[int]) -> list[Load]:
    """Enough requests for a steady median, and at least two for each client; long prompts one at a time at the end."""
    levels = [Load(streams=n, num_requests=6 if n == 1 else max(24, 2 * n)) for n in streams]
    return [*levels, Load(streams=1, num_requests=6, prompt_tokens=LONG_PROMPT_TOKENS)]


def main() -> int:
    parser = arguments("Latency, throughput and cost of the hand-over of a service under load, over gRPC.")
    parser.add_argument("--streams", type=streams_of, default=[1, 8, 16], help="concurrent streams (default: 1,8,16)")
    parser.add_argument("--address", help="host:port of a running service's gRPC door (default: start one)")
    options = parser.parse_args()
    loads = loads_of(options.streams)
    seed = secrets.randbits(32)
    try:
        measured = asyncio.run(run(options.address, loads, random.Random(seed)))
    except grpc.aio.AioRpcError as error:
        raise SystemExit(f"error: {error.code().name}: {error.details()}") from error
    except (RuntimeError, TimeoutError) as error:
        raise SystemExit(f"error: {error or 'the service was not ready in time'}") from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    Console(stderr=options.json).print(table(loads, measured))
    made = [bar for load, values in zip(loads, measured, strict=True) for bar in bars(load, values)]
    details = {"cpus": os.cpu_count(), "kernel": platform.release(), "seed": seed, "loads": measured}
    return publish("A service under load", made, as_json=options.json, details=details)


if __name__ == "__main__":
    sys.exit(main())
