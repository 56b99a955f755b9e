"""How long a read plan takes: 1,000 blocks of 16 tokens in 120 buffers, between engines cut alike and cut differently.

`plan_read` pairs the engines' buffers anew for each read; a `ReadPlanner` keeps that for its pair of engines, so its
bars are the time of a plan alone. Medians, block tables given as lists. Cuts that differ are observed without an aim:
their time is that of writing down as many runs as the two memories allow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.report import Bar
from transfer.layout import LAYOUT_VERSION, BufferLayout, EngineLayout
from transfer.plan import BlockTables, ReadPlan, ReadPlanner, plan_read

ATTN_TYPE = "FullAttention"
NUM_BLOCKS = 1000
BLOCK_SIZE = 16
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE
NUM_LAYERS = 60
NUM_HEADS = 4
DIM = 128
ROUNDS = 21
CONTIGUOUS_AIM_MS = 2.0
SCATTERED_AIM_MS = 20.0


def engine(*, num_ranks: int = 1, block_size: int = BLOCK_SIZE, is_heads_first: bool = False) -> EngineLayout:
    """120 buffers of float16 per rank, the heads divided among the ranks."""
    num_heads = NUM_HEADS // num_ranks
    block_bytes = block_size * num_heads * DIM * 2
    return EngineLayout(
        version=LAYOUT_VERSION,
        model="grouped queries",
        buffers=tuple(
            BufferLayout(
                layer=layer,
                cache_name=name,
                attn_type=ATTN_TYPE,
                block_size=block_size,
                first_head=rank * num_heads,
                num_heads=num_heads,
                total_heads=NUM_HEADS,
                dim=DIM,
                dtype="float16",
                num_bytes=(num_blocks(block_size) + 1) * block_bytes,
                is_heads_first=is_heads_first,
                rank=rank,
            )
            for rank in range(num_ranks)
            for layer in range(NUM_LAYERS)
            for name in ("k_cache", "v_cache")
        ),
    )


def num_blocks(block_size: int) -> int:
    """Blocks of a request; the null block comes on top."""
    return NUM_TOKENS // block_size


def table(block_size: int, *, seed: int | None) -> BlockTables:
    """In order without a seed, else shuffled."""
    ids = np.arange(1, num_blocks(block_size) + 1)
    return {ATTN_TYPE: (ids if seed is None else np.random.default_rng(seed).permutation(ids)).tolist()}


def median_ms(plan: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Of all rounds but a first one."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        plan()
        times.append(time.perf_counter() - start)
    return round(1e3 * statistics.median(times[1:]), 3)


def note_of(plan: ReadPlan) -> str:
    stats = plan.stats().values()
    runs, largest = sum(one.num_runs for one in stats), max(one.largest_run for one in stats)
    return f"{runs:,} runs of {plan.num_bytes / runs:,.0f} bytes, largest {largest:,}"


def bars_of_equal_cuts() -> list[Bar]:
    layout = engine()
    planner = ReadPlanner(layout, layout)
    made = []
    for name, seeds, aim in (
        ("contiguous", (None, None), CONTIGUOUS_AIM_MS),
        ("scattered", (1, 2), SCATTERED_AIM_MS),
    ):
        tables = [table(BLOCK_SIZE, seed=seed) for seed in seeds]
        note = note_of(planner.plan(tables[0], tables[1], 0, NUM_TOKENS))
        kept = median_ms(lambda t=tables: planner.plan(t[0], t[1], 0, NUM_TOKENS))  # type: ignore[misc]
        anew = median_ms(lambda t=tables: plan_read(layout, layout, t[0], t[1], 0, NUM_TOKENS))  # type: ignore[misc]
        where = f"{NUM_BLOCKS:,} blocks x {2 * NUM_LAYERS} buffers, {name}"
        made.append(Bar(name=f"plan, {where}", value=kept, aim=aim, better="lower", unit="ms", note=note))
        made.append(Bar(name=f"pair and plan, {where}", value=anew, aim=aim, better="lower", unit="ms"))
    return made


def bars_of_other_cuts() -> list[Bar]:
    """Scattered tables; the destination's last rank plans."""
    whole, halves, first = engine(), engine(num_ranks=2), engine(is_heads_first=True)
    cuts = (
        ("blocks of 16 to 128", whole, engine(block_size=8 * BLOCK_SIZE)),
        ("1 rank to 2", whole, halves),
        ("2 ranks to 1", halves, whole),
        ("2 ranks to 1, heads first", engine(num_ranks=2, is_heads_first=True), first),
    )
    made = []
    for name, source, dest in cuts:
        planner = ReadPlanner(source, dest, dest.num_ranks - 1)
        tables = [table(side.buffers[0].block_size, seed=seed) for seed, side in enumerate((source, dest))]
        plan = planner.plan(tables[0], tables[1], 0, NUM_TOKENS)
        taken = median_ms(lambda p=planner, t=tables: p.plan(t[0], t[1], 0, NUM_TOKENS), 5)  # type: ignore[misc]
        made.append(Bar(name=f"plan, {name}, scattered", value=taken, better="lower", unit="ms", note=note_of(plan)))
    return made


def plan_bars() -> list[Bar]:
    return bars_of_equal_cuts() + bars_of_other_cuts()
