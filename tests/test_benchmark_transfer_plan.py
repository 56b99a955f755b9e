"""Laws of the planner's benchmark: what it plans is the same data in every cut. Nothing is held to a time."""

from __future__ import annotations

import pytest

from benchmarks import transfer_plan
from benchmarks.transfer_plan import ATTN_TYPE, engine, plan_bars, table
from transfer.plan import ReadPlanner

NUM_BYTES = 120 * 128 * transfer_plan.NUM_HEADS * transfer_plan.DIM * 2


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_plan, "NUM_BLOCKS", 8)
    monkeypatch.setattr(transfer_plan, "NUM_TOKENS", 128)


def test_aims_are_those_of_equal_cuts_and_every_bar_has_its_own_name() -> None:
    bars = plan_bars()
    assert [bar.aim for bar in bars] == [2.0, 2.0, 20.0, 20.0, None, None, None, None]
    assert len({bar.name for bar in bars}) == len(bars)
    assert {bar.better for bar in bars} == {"lower"}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("is_heads_first", [False, True])
def test_every_engine_of_the_benchmark_takes_all_bytes_of_another(
    num_ranks: int, block_size: int, is_heads_first: bool
) -> None:
    dest = engine(num_ranks=num_ranks, block_size=block_size, is_heads_first=is_heads_first)
    planners = [ReadPlanner(engine(num_ranks=2), dest, rank) for rank in range(num_ranks)]
    plans = [p.plan(table(16, seed=1), table(block_size, seed=None), 0, 128) for p in planners]
    assert sum(plan.num_bytes for plan in plans) == NUM_BYTES


def test_a_shuffled_table_has_the_same_blocks() -> None:
    ordered, shuffled = (list(table(16, seed=seed)[ATTN_TYPE]) for seed in (None, 3))
    assert ordered == sorted(shuffled) == list(range(1, 9))
