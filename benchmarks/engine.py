"""The engine's speed on this processor beside the machine's limits, transformers, and vLLM when its Python is given.

The demo model in float32 and bfloat16, two threads, greedy. Prefill: the time from submitting one prompt to its first
token. Decode: the median step of a number of requests of one context length, scheduling and sampling included. All
sides get the same prompts and compute in turns, a few steps each, so that a drift of the machine meets all of them;
ratios are medians over the turns. Limits (see `engine_limits.py`) are measured in every turn as well.

Prompts of up to 1,024 tokens go through in steps of 512 tokens here and 1,024 in vLLM: what suits each best.

    python -m benchmarks.engine --json --peer-python /path/to/vllm/bin/python

The last bar is what a step of 256 decodes costs beside the model: schedule, build and commit.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.engine_limits import Machine, Work, work_of
from benchmarks.engine_sides import (
    OUR_BATCHED_TOKENS,
    PEER_BATCHED_TOKENS,
    THREADS,
    Ours,
    Peer,
    Side,
    Transformers,
    engine_config,
    make_request,
)
from benchmarks.report import Bar, arguments, publish
from pd_service.demo import demo_model_dir
from pd_service.engine.batch import InputRow, make_batch
from pd_service.engine.execution_engine import ExecutionEngine
from pd_service.engine.messages import Submit
from pd_service.engine.step import SampledToken, StepResult
from pd_service.ops import native

AIM_DECODE_SHARE, AIM_DECODE_RATIO = 0.85, 1.3
AIM_PREFILL_SHARE, AIM_PREFILL_RATIO = 0.7, 1.0
AIM_SCHEDULER_MS, SCHEDULER_REQUESTS, SCHEDULER_STEPS = 1.0, 256, 50
TURNS, STEPS_PER_TURN, WARM_STEPS = 5, 5, 2
REFERENCE_BATCHES = (1, 8)  # transformers takes part in these alone, at the shortest context


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    dtypes: Sequence[str] = ("float32", "bfloat16")
    prefills: Sequence[int] = (128, 512, 1024)  # tokens
    contexts: Sequence[int] = (128, 512)  # tokens
    batches: Sequence[int] = (1, 4, 8, 16, 32)


QUICK = Plan(dtypes=("float32",), prefills=(128, 512), contexts=(128,), batches=(1, 8))


@dataclass(slots=True, kw_only=True)
class Measured:
    """One case: seconds per side, one figure for each turn, and what the machine's limit was in each."""

    name: str
    num_tokens: int  # that each of these seconds brings
    times_s: dict[str, list[float]] = field(default_factory=dict)
    limits_s: list[float] = field(default_factory=list)

    def rate(self, side: str) -> float:
        return self.num_tokens / statistics.median(self.times_s[side])

    def share_of_limit(self) -> float:
        return statistics.median(limit / ours for limit, ours in zip(self.limits_s, self.times_s["ours"], strict=True))

    def ratio_to(self, side: str) -> float:
        return statistics.median(t / o for t, o in zip(self.times_s[side], self.times_s["ours"], strict=True))


# ---- rounds


def measure_prefill(sides: Iterable[Side], length: int, work: Work, machine: Machine) -> Measured:
    measured = Measured(name=f"prefill {length}", num_tokens=length)
    for turn in range(TURNS + 1):  # the first does not count
        prompt = draw_prompt(length, turn)
        for side in sides:
            spent = sum(side.start([prompt]))
            side.stop()
            if turn:
                measured.times_s.setdefault(side.name, []).append(spent)
        if turn:
            measured.limits_s.append(work.prefill_operations(length) / machine.operations_per_s())
    return measured


def measure_decode(sides: Sequence[Side], batch: int, context: int, work: Work, machine: Machine) -> Measured:
    measured = Measured(name=f"decode batch {batch} at {context}", num_tokens=batch)
    prompts = [draw_prompt(context, request) for request in range(batch)]
    for side in sides:
        side.start(prompts)
    for _ in range(TURNS):
        for side in sides:
            side.steps(WARM_STEPS)
            spent = statistics.median(side.steps(STEPS_PER_TURN))
            measured.times_s.setdefault(side.name, []).append(spent)
        measured.limits_s.append(work.decode_bytes(batch, context) / machine.bytes_per_s())
    for side in sides:
        side.stop()
    return measured


def draw_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(f"{length}, {seed}")
    return [rng.randrange(1000, 40000) for _ in range(length)]


def measure_scheduler(engine: ExecutionEngine, num_requests: int, num_steps: int) -> dict[str, float]:
    """Median milliseconds of a step of `num_requests` decodes: all but the model, and its arrays on their own.

    Raises RuntimeError when the engine cannot run that many at once.
    """
    arrays_s: list[float] = []

    def run(rows: Sequence[InputRow]) -> list[StepResult]:
        start = time.perf_counter()
        tokens, firsts = [row.token_ids for row in rows], [row.first for row in rows]
        make_batch(rows, tokens, firsts, engine.config.settings.block_size, torch.device("cpu"))
        arrays_s.append(time.perf_counter() - start)
        return [StepResult((SampledToken(7),) if row.sampling is not None else (), (), ()) for row in rows]

    engine.worker.run = run  # type: ignore[method-assign]
    for request in range(num_requests):
        engine.handle(Submit(make_request(f"request-{request}", draw_prompt(64, request))), 0.0)
    if (running := engine.scheduler.load().running) < num_requests:
        raise RuntimeError(f"the engine runs {running} of {num_requests} requests at once")
    while len(arrays_s) < 2 or engine.scheduler.load().queued_tokens > num_requests:
        engine.step()
    arrays_s.clear()
    steps_s = []
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.step()
        steps_s.append(time.perf_counter() - start - arrays_s[-1])
    return {"step_ms": statistics.median(steps_s) * 1e3, "arrays_ms": statistics.median(arrays_s) * 1e3}


# ---- report


def prefill_bars(dtype: str, measured: Measured) -> list[Bar]:
    share = measured.share_of_limit()
    bars = [
        Bar(name=f"{dtype} {measured.name}", value=measured.rate("ours"), unit="tok/s", note=others(measured)),
        Bar(name=f"{dtype} {measured.name} / arithmetic limit", value=share, aim=AIM_PREFILL_SHARE),
    ]
    if "vLLM" in measured.times_s:
        ratio = measured.ratio_to("vLLM")
        bars.append(Bar(name=f"{dtype} {measured.name} / vLLM", value=ratio, aim=AIM_PREFILL_RATIO))
    return bars


def decode_bars(dtype: str, batch: int, measured: Measured) -> list[Bar]:
    share = measured.share_of_limit()
    aim = AIM_DECODE_SHARE if batch == 1 and dtype == "float32" else None  # more rows are bounded by arithmetic too
    bars = [
        Bar(name=f"{dtype} {measured.name}", value=measured.rate("ours"), unit="tok/s", note=others(measured)),
        Bar(name=f"{dtype} {measured.name} / bandwidth limit", value=share, aim=aim),
    ]
    if "vLLM" in measured.times_s:
        ratio = measured.ratio_to("vLLM")
        bars.append(Bar(name=f"{dtype} {measured.name} / vLLM", value=ratio, aim=AIM_DECODE_RATIO))
    return bars


def others(measured: Measured) -> str:
    """The other sides' rates, and the machine's."""
    rates = [f"{side} {measured.rate(side):.1f}" for side in measured.times_s if side != "ours"]
    return ", ".join([*rates, f"limit {measured.num_tokens / statistics.median(measured.limits_s):.1f}"])


def scheduler_bar(figures: dict[str, float]) -> Bar:
    return Bar(
        name=f"scheduler, {SCHEDULER_REQUESTS} requests",
        value=figures["step_ms"],
        aim=AIM_SCHEDULER_MS,
        better="lower",
        unit="ms",
        note=f"per step, model excluded; its arrays (tables, slots) another {figures['arrays_ms']:.2f} ms",
    )


# ---- one run


def run_dtype(dtype: str, plan: Plan, model_dir: Path, peer_python: str | None) -> tuple[list[Bar], dict[str, object]]:
    """All cases of one type: bars, and the figures behind them."""
    with ExitStack() as stack:
        peer = None
        if peer_python is not None:
            peer = stack.enter_context(closing(Peer(peer_python, model_dir, dtype)))
        ours = stack.enter_context(closing(Ours(model_dir, dtype)))
        reference = stack.enter_context(closing(Transformers(model_dir, dtype)))
        work, machine = work_of(ours.engine), Machine(dtype)
        two: list[Side] = [ours] if peer is None else [ours, peer]
        bars: list[Bar] = []
        figures: dict[str, object] = {"peer": None if peer is None else vars(peer) | {"_process": None}}
        for length in plan.prefills:
            measured = measure_prefill([*two, reference], length, work, machine)
            figures[measured.name] = [measured.times_s, measured.limits_s]
            bars += prefill_bars(dtype, measured)
        for context in plan.contexts:
            for batch in plan.batches:
                is_referenced = context == plan.contexts[0] and batch in REFERENCE_BATCHES
                sides = [*two, reference] if is_referenced else two
                measured = measure_decode(sides, batch, context, work, machine)
                figures[measured.name] = [measured.times_s, measured.limits_s]
                bars += decode_bars(dtype, batch, measured)
        return bars, figures


def run_scheduler(model_dir: Path) -> Bar:
    settings = {"max_num_batched_tokens": 4096, "max_num_seqs": SCHEDULER_REQUESTS}
    with closing(ExecutionEngine(engine_config(model_dir, "bfloat16", **settings))) as engine:
        return scheduler_bar(measure_scheduler(engine, SCHEDULER_REQUESTS, SCHEDULER_STEPS))


def main() -> int:
    parser = arguments("Speed of the engine on this processor.")
    parser.add_argument("--peer-python", help="a Python with vLLM, to be measured beside ours (default: ours alone)")
    parser.add_argument("--quick", action="store_true", help="float32 and a few cases only")
    options = parser.parse_args()
    plan = QUICK if options.quick else Plan()
    load = os.getloadavg()
    torch.set_num_threads(THREADS)
    model_dir = demo_model_dir(lambda line: print(line, file=sys.stderr))
    bars: list[Bar] = []
    details: dict[str, object] = {
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "load_at_start": load,
        "torch": torch.__version__,
        "has_kernels": native.kernels() is not None,
        "batched_tokens": {"ours": OUR_BATCHED_TOKENS, "vLLM": PEER_BATCHED_TOKENS},
    }
    try:
        for dtype in plan.dtypes:
            of_dtype, figures = run_dtype(dtype, plan, model_dir, options.peer_python)
            bars += of_dtype
            details[dtype] = figures
    except (OSError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from error
    bars.append(run_scheduler(model_dir))
    against = "without a peer, see --peer-python" if options.peer_python is None else "beside vLLM"
    return publish(f"Engine, {against}", bars, as_json=options.json, details=details)


if __name__ == "__main__":
    sys.exit(main())
