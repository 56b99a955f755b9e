"""What the bookkeeping of blocks costs, beside vLLM's in the same run when its Python is given.

64 requests at a time, each a prompt of 512 tokens (one allocation: the budget of a step is 512 tokens, longer prompts
come in chunks of it) and 256 decode steps of one token. They start one after the other, and a finished request is
freed and replaced in the next step, so that a step mixes prompts, decodes and frees. Both sides get the same calls in
the same order, and as many blocks. Measured is the time inside `allocate_slots` alone, step by step; what a scheduler
does around it is not, and garbage collection is off, which favours whoever makes more objects. Repetitions of all rows
and both sides take turns, since the speed of a shared machine drifts; a ratio is the median of the turns' ratios.

With a prefix cache, both sides get the same token ids, outputs included; every other request begins with 256 tokens of
an earlier one. Measured, per `allocate_slots`, is then all that a request costs from its tokens to findable content:

              ours                                            vLLM
    prompt    find_prefix, allocate_slots with the hit        its block hasher, get_computed_blocks, allocate_slots
    decode    allocate_slots                                  its block hasher, allocate_slots
    after     commit, of every request in every step          nothing: allocate_slots commits

Making a request, appending a token to its list and freeing it are on neither clock; frees are shown beside the ratio.
Both take only full blocks as hits and leave a token to compute, so that hit tokens are equal here; they are shown too.
The same end is reached by unequal means, which the figures include: vLLM hashes a block once (SHA-256 over a pickle,
its default) and keeps the hashes, ours (BLAKE2b) hashes what it looks up and again what it commits; ours confirms a
hit by comparing tokens, vLLM trusts the hash; ours commits content in a call of its own once it is computed, vLLM
before that, in a call it makes anyway. vLLM's groups share one pool, each of ours has its own: with fewer blocks than
here, or prefixes of longer ago, they would evict different content and find different hits.

The cost of a decode step must not depend on the length of a request, and the operators' tables of 256 requests of
8,192 tokens are held to a millisecond.

    python -m benchmarks.kv_cache --json --peer-python /path/to/vllm/bin/python
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.kv_cache_ours import Measured, Row, block_nums, make_manager, measure_ours, no_collection, request_name
from benchmarks.kv_cache_workload import Step, Workload, chunks_of, num_calls, steps_of, tokens_of
from benchmarks.report import Bar, arguments, publish
from kv_cache import prepare_block_tables, prepare_slot_mapping

WINDOW = 128
REPETITIONS = 9
TABLE_REQUESTS, TABLE_TOKENS, TABLE_BLOCK_SIZE, TABLE_REPETITIONS = 256, 8192, 128, 101
AIM_RATIO, AIM_LENGTH_RATIO, AIM_TABLES_MS = 3.0, 1.2, 1.0
PEER_SCRIPT = Path(__file__).with_name("kv_cache_peer.py")
STOP_TIMEOUT_S = 10.0


ROWS = [
    Row(block_size=size, sliding_window=window, prefix_cache=cached)
    for cached in (False, True)
    for window in (None, WINDOW)
    for size in (16, 128)
]
LENGTH_ROWS = [  # pairs of a short and a long one
    (
        Row(block_size=16, sliding_window=window, workload=Workload(rounds=1)),
        Row(block_size=16, sliding_window=window, workload=Workload(rounds=1, prompt_tokens=8192)),
    )
    for window in (None, WINDOW)
]
TABLE_ROWS = [
    Row(
        block_size=TABLE_BLOCK_SIZE,
        sliding_window=window,
        workload=Workload(concurrency=TABLE_REQUESTS, rounds=1, prompt_tokens=TABLE_TOKENS, decode_steps=0),
    )
    for window in (None, WINDOW)
]


# ---- the peer's side


class Peer:
    """A process of vLLM's Python that measures one repetition per line, see `kv_cache_peer.py`."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, "-I", str(PEER_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version: str = self._answer()["version"]

    def measure(self, row: Row, steps: Sequence[Step]) -> Measured:
        """Raises RuntimeError when the peer ends instead."""
        task = {
            "block_size": row.block_size,
            "sliding_window": row.sliding_window,
            "num_blocks": sum(block_nums(row).values()),  # one pool for all its groups
            "max_model_len": row.workload.max_model_len,
            "prompt_tokens": row.workload.prompt_tokens,
            "prefix_cache": row.prefix_cache,
            "tokens": tokens_of(row.workload),
            "steps": steps,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return Measured(**self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            return answer
        raise RuntimeError(f"the peer ended with exit code {self._process.wait()}; its last words are on stderr")


# ---- rounds


Sides = dict[str, list[Measured]]  # "ours" and, with a peer, "vLLM": one entry per repetition


def measure_rows(rows: Sequence[Row], peer: Peer | None) -> dict[Row, Sides]:
    """All rows and both sides in turn, one repetition that does not count and then `REPETITIONS`."""
    sides: dict[str, Callable[[Row, Sequence[Step]], Measured]] = {"ours": measure_ours}
    if peer is not None:
        sides["vLLM"] = peer.measure
    steps = {row: steps_of(row.workload) for row in rows}
    measured: dict[Row, Sides] = {row: {side: [] for side in sides} for row in rows}
    for repetition in range(REPETITIONS + 1):
        for row in rows:
            for side, measure in sides.items():
                figures = measure(row, steps[row])
                if repetition > 0:
                    measured[row][side].append(figures)
    return measured


def measure_tables(row: Row) -> dict[str, float]:
    """Milliseconds of the inputs of one decode step of all requests: tables, slots, and the copies they start from."""
    manager = make_manager(row)
    request_ids = [request_name(request) for request in range(row.workload.concurrency)]
    for request_id in request_ids:
        for num_computed, num_new in chunks_of(row.workload.prompt_tokens):
            manager.allocate_slots(request_id, num_computed, num_new)
    positions, query_lens = [row.workload.prompt_tokens - 1] * len(request_ids), [1] * len(request_ids)
    block_ids = [manager.get_block_ids(request_id) for request_id in request_ids]
    tables = prepare_block_tables(block_ids)
    return {
        "tables_ms": _median_ms(lambda: prepare_block_tables(block_ids)),
        "slots_ms": _median_ms(lambda: prepare_slot_mapping(positions, query_lens, tables, row.block_size)),
        "block_ids_ms": _median_ms(lambda: [manager.get_block_ids(request_id) for request_id in request_ids]),
    }


def _median_ms(work: Callable[[], object]) -> float:
    times = []
    with no_collection():
        for _ in range(TABLE_REPETITIONS):
            start = time.perf_counter_ns()
            work()
            times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e6


# ---- report


def ns_per_call(row: Row, repetition: Measured) -> float:
    """Prompts and decodes together, with what a prefix cache adds to them."""
    return repetition.call_ns / sum(num_calls(steps_of(row.workload)))


def ns_per_decode(row: Row, repetition: Measured) -> float:
    return repetition.decode_ns / num_calls(steps_of(row.workload))[1]


def ns_per_free(row: Row, repetitions: Sequence[Measured]) -> float:
    """Median of the repetitions."""
    num_requests = row.workload.concurrency * row.workload.rounds
    return statistics.median(one.free_ns for one in repetitions) / num_requests


def cached_note(row: Row, sides: Sides) -> str:
    """Whether the sides found the same, and what our nanoseconds of a call are made of."""
    hits = ", ".join(f"{side} {repetitions[0].hit_tokens}" for side, repetitions in sides.items())
    calls, ours = sum(num_calls(steps_of(row.workload))), sides["ours"]
    find = statistics.median(one.find_ns for one in ours) / calls
    allocate = statistics.median(one.prefill_ns + one.decode_ns for one in ours) / calls
    commit = statistics.median(one.commit_ns for one in ours) / calls
    return f"hit tokens: {hits}; of ours find {find:.0f}, allocate {allocate:.0f}, commit {commit:.0f}"


def row_bars(row: Row, sides: Sides) -> list[Bar]:
    """Our nanoseconds, and our rate in vLLM's if it took part."""
    per_call = {side: [ns_per_call(row, one) for one in repetitions] for side, repetitions in sides.items()}
    blocks = ", ".join(f"{side} {repetitions[0].max_blocks}" for side, repetitions in sides.items())
    frees = ", ".join(f"{side} {ns_per_free(row, repetitions):.0f}" for side, repetitions in sides.items())
    ours = statistics.median(per_call["ours"])
    note = f"most blocks held: {blocks}"
    if row.prefix_cache:
        note += f"; {cached_note(row, sides)}"
    bars = [Bar(name=f"allocate_slots, {row.name}", value=ours, unit="ns", note=note)]
    if "vLLM" in per_call:
        ratio = statistics.median(v / o for o, v in zip(per_call["ours"], per_call["vLLM"], strict=True))
        note = f"vLLM {statistics.median(per_call['vLLM']):.0f} ns; ns per free: {frees}"
        bars.append(Bar(name=f"rate / vLLM's, {row.name}", value=ratio, aim=AIM_RATIO, note=note))
    return bars


def length_bar(short: Row, long: Row, measured: dict[Row, Sides], side: str) -> Bar:
    """How much more a decode step costs a long request; only ours is held to the aim."""
    of_short = [ns_per_decode(short, one) for one in measured[short][side]]
    of_long = [ns_per_decode(long, one) for one in measured[long][side]]
    return Bar(
        name=f"decode step at {long.workload.prompt_tokens} / {short.workload.prompt_tokens} tokens, {short.name}"
        + ("" if side == "ours" else f", {side}"),
        value=statistics.median(b / a for a, b in zip(of_short, of_long, strict=True)),
        aim=AIM_LENGTH_RATIO if side == "ours" else None,
        better="lower",
        note=f"{statistics.median(of_long):.0f} / {statistics.median(of_short):.0f} ns",
    )


def table_bar(row: Row, times: dict[str, float]) -> Bar:
    return Bar(
        name=f"block tables of {TABLE_REQUESTS} requests of {TABLE_TOKENS} tokens, {row.name}",
        value=times["tables_ms"],
        aim=AIM_TABLES_MS,
        better="lower",
        unit="ms",
        note=f"slots of a decode step {times['slots_ms']:.3f} ms, get_block_ids {times['block_ids_ms']:.3f} ms",
    )


def run(peer: Peer | None) -> tuple[list[Bar], dict[str, object]]:
    """The bars and the figures behind them."""
    length_rows = [row for pair in LENGTH_ROWS for row in pair]
    measured = measure_rows([*ROWS, *length_rows], peer)
    bars = [bar for row in ROWS for bar in row_bars(row, measured[row])]
    sides = list(measured[ROWS[0]])
    bars += [length_bar(short, long, measured, side) for short, long in LENGTH_ROWS for side in sides]
    tables = {row: measure_tables(row) for row in TABLE_ROWS}
    bars += [table_bar(row, times) for row, times in tables.items()]
    details: dict[str, object] = {
        "rows": [
            asdict(row) | {side: [asdict(one) for one in repetitions] for side, repetitions in sides.items()}
            for row, sides in measured.items()
        ],
        "tables": [asdict(row) | times for row, times in tables.items()],
    }
    return bars, details


def main() -> int:
    parser = arguments("Cost of allocating blocks and of building the operators' tables.")
    parser.add_argument("--peer-python", help="a Python with vLLM, to be measured beside ours (default: ours alone)")
    options = parser.parse_args()
    load = os.getloadavg()
    try:
        with ExitStack() as stack:
            peer = None
            if options.peer_python is not None:
                peer = stack.enter_context(closing(Peer(options.peer_python)))
            bars, details = run(peer)
    except (OSError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from error
    against = "without a peer, see --peer-python" if peer is None else f"beside vLLM {peer.version}"
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "load_at_start": load}
    versions = {"python": platform.python_version(), "vllm": None if peer is None else peer.version}
    return publish(f"Block bookkeeping, {against}", bars, as_json=options.json, details=machine | versions | details)


if __name__ == "__main__":
    sys.exit(main())
