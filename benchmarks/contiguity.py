"""How blocks lie after an hour of requests: runs per transfer, first in first out beside what the pool does.

Each hour is lived twice, see `contiguity_lives.py`, on a prefill and a decode engine of 131,072 tokens each. Of a trace
(`contiguity_trace.py`) such a share is taken that the decode engine is three quarters full on average, and the prefill
engine computes 70 % of the time. Every minute a prompt of each of three lengths that is like no other joins in; those
of the second half hour are counted. With a prefix cache, all memory fills with content, and the share of prompt tokens
found in it shows what long runs cost there.

    python -m benchmarks.contiguity [--trace azure_llm_2023_conv.csv] [--trace mooncake_conversation.jsonl]
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contiguity_lives import DECODE_S, STEP_TOKENS, Cache, Lives
from benchmarks.contiguity_trace import HOUR_S, MAX_OUTPUT, MAX_PROMPT, Arrival, draw_mix, load_trace, thin
from benchmarks.report import Bar, arguments, publish

USABLE_TOKENS = 131_072
DECODE_FULL, PREFILL_BUSY = 0.75, 0.7
PROBE_TOKENS, PROBE_OUTPUT, PROBE_EVERY_S = (128, 1024, 8192), 64, 60
BLOCK_SIZES = (16, 128)
AIM_FEWER, AIM_FROM_RUNS = 2.0, 4  # times fewer runs, where first in, first out has so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Lived:
    """Of one hour: mean runs of the probes by their tokens; share of prompt tokens the prefill engine found cached."""

    runs: dict[int, float]
    hit_share: float


def load_of(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The share of them that fills the decode engine, with the probes, by time."""
    probes = [
        Arrival(at_s=minute + i, prompt_tokens=tokens, output_tokens=PROBE_OUTPUT)
        for minute in range(0, int(HOUR_S), PROBE_EVERY_S)
        for i, tokens in enumerate(PROBE_TOKENS)
    ]
    token_seconds = sum((a.prompt_tokens + a.output_tokens) * a.output_tokens * DECODE_S for a in arrivals)
    share = min(1.0, DECODE_FULL * USABLE_TOKENS * HOUR_S / token_seconds)
    return sorted([*thin(arrivals, share), *probes], key=lambda one: one.at_s)


def live(load: Sequence[Arrival], cache: Cache) -> Lived:
    num_tokens = sum(arrival.prompt_tokens for arrival in load)
    lives = Lives(cache, step_s=STEP_TOKENS * PREFILL_BUSY * HOUR_S / num_tokens)
    lives.run(load)
    late = [one for one in lives.transfers if not one.arrival.contents and one.arrival.at_s >= HOUR_S / 2]
    runs = {
        tokens: statistics.mean(one.num_runs for one in late if one.arrival.prompt_tokens == tokens)
        for tokens in PROBE_TOKENS
    }
    return Lived(runs=runs, hit_share=lives.prefill.hit_tokens / num_tokens)


def bars_of(name: str, block_size: int, fifo: Lived, ours: Lived) -> list[Bar]:
    hits = f"; tokens found: {ours.hit_share:.1%}, fifo {fifo.hit_share:.1%}" if fifo.hit_share else ""
    return [
        Bar(
            name=f"fifo's runs / ours, {tokens} tokens, {name}",
            value=fifo.runs[tokens] / ours.runs[tokens],
            aim=AIM_FEWER if tokens // block_size >= AIM_FROM_RUNS else None,
            note=f"{tokens // block_size} blocks: {ours.runs[tokens]:.1f} runs, fifo {fifo.runs[tokens]:.1f}{hits}",
        )
        for tokens in PROBE_TOKENS
    ]


def run(traces: dict[str, Sequence[Arrival]]) -> list[Bar]:
    bars = []
    for trace, has_content, block_size in itertools.product(traces, (False, True), BLOCK_SIZES):
        load = load_of(traces[trace])
        fifo, ours = (
            live(
                load,
                Cache(
                    block_size=block_size,
                    usable_tokens=USABLE_TOKENS,
                    max_model_len=MAX_PROMPT + MAX_OUTPUT,
                    prefix_cache=has_content,
                    is_fifo=is_fifo,
                ),
            )
            for is_fifo in (True, False)
        )
        name = f"block size {block_size}, {trace}{', prefix cache' if has_content else ''}"
        bars += bars_of(name, block_size, fifo, ours)
    return bars


def main() -> int:
    parser = arguments("Runs of blocks per transfer after an hour of requests.")
    parser.add_argument("--trace", type=Path, action="append", help="a published trace (default: a mix that is drawn)")
    options = parser.parse_args()
    try:
        traces: dict[str, Sequence[Arrival]] = {path.stem: load_trace(path) for path in options.trace or ()}
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"error: {error}") from error
    bars = run(traces or {"drawn mix": draw_mix()})
    return publish("Runs of blocks per transfer after an hour", bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
