"""Laws of the workload that the benchmark of block bookkeeping gives to both sides; nothing is timed."""

from __future__ import annotations

import ast
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kv_cache import PEER_SCRIPT, ROWS, length_bar, row_bars
from benchmarks.kv_cache_ours import Measured, Row, measure_ours
from benchmarks.kv_cache_workload import SHARED_TOKENS, STEP_TOKENS, Step, Workload, num_calls, steps_of, tokens_of

workloads = st.builds(
    Workload,
    concurrency=st.integers(1, 9),
    rounds=st.integers(1, 3),
    prompt_tokens=st.integers(1, 3 * STEP_TOKENS),
    decode_steps=st.integers(0, 40),
)


def calls_of(steps: list[Step], request: int) -> list[tuple[int, int, int]]:
    """(step, computed, new) of one request."""
    return [(i, c[1], c[2]) for i, step in enumerate(steps) for c in [*step.prefill, *step.decode] if c[0] == request]


@given(workload=workloads)
def test_every_request_computes_each_token_once_in_consecutive_steps_and_is_freed_right_after(
    workload: Workload,
) -> None:
    steps = steps_of(workload)
    finished = [(i, request) for i, step in enumerate(steps) for request in step.finished]
    assert sorted(request for _, request in finished) == list(range(workload.concurrency * workload.rounds))
    for freed_at, request in finished:
        calls = calls_of(steps, request)
        assert [i for i, _, _ in calls] == list(range(freed_at - len(calls), freed_at))
        num_computed = 0
        for _, computed, new in calls:
            assert computed == num_computed
            assert 1 <= new <= STEP_TOKENS
            num_computed += new
        assert num_computed == workload.max_model_len


@given(workload=workloads)
def test_no_more_requests_run_at_once_than_there_are_seats_and_a_free_seat_is_taken_at_once(workload: Workload) -> None:
    running: set[int] = set()
    waiting = workload.concurrency * workload.rounds
    was_full = False
    for step in steps_of(workload):
        running.difference_update(step.finished)
        started = {call.request for call in step.prefill if call.num_computed == 0}
        running |= started
        waiting -= len(started)
        was_full = was_full or len(running) == workload.concurrency
        assert len(running) <= workload.concurrency
        if was_full and waiting:
            assert len(running) == workload.concurrency
    assert not running
    assert was_full


def test_the_workload_is_64_requests_of_512_prompt_tokens_with_256_decode_steps_each() -> None:
    for row in ROWS:
        steps = steps_of(row.workload)
        assert max(len(step.prefill) + len(step.decode) for step in steps) == 64
        assert num_calls(steps) == (64 * row.workload.rounds, 64 * row.workload.rounds * 256)


@settings(max_examples=20)
@given(workload=workloads, window=st.none() | st.integers(1, 64), block_size=st.sampled_from([1, 16, 128]))
def test_the_sized_cache_holds_every_workload_and_is_empty_again_after_it(
    workload: Workload, window: int | None, block_size: int
) -> None:
    row = Row(block_size=block_size, sliding_window=window, workload=workload)
    assert measure_ours(row, steps_of(workload)).max_blocks > 0


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("window", [None, 128])
def test_every_shared_prefix_is_found_whole_and_nothing_else(window: int | None, block_size: int) -> None:
    row = Row(block_size=block_size, sliding_window=window, prefix_cache=True)
    num_sharing = len(tokens_of(row.workload)) // 2
    assert measure_ours(row, steps_of(row.workload)).hit_tokens == num_sharing * SHARED_TOKENS


def test_half_of_the_requests_begin_like_an_earlier_one_and_all_differ_after_that() -> None:
    requests = [tuple(tokens) for tokens in tokens_of(Workload())]
    starts = [tokens[:SHARED_TOKENS] for tokens in requests]
    assert [start in starts[:i] for i, start in enumerate(starts)] == [False, True] * (len(requests) // 2)
    assert len({tokens[SHARED_TOKENS : SHARED_TOKENS + 16] for tokens in requests}) == len(requests)
    assert requests == [tuple(tokens) for tokens in tokens_of(Workload())]


def test_the_peer_imports_nothing_of_the_project() -> None:
    tree = ast.parse(PEER_SCRIPT.read_text())
    roots = {alias.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    roots |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert roots - sys.stdlib_module_names == {"torch", "vllm"}


# ---- figures


def measured(prefill_ns: int, decode_ns: int) -> Measured:
    return Measured(prefill_ns=prefill_ns, decode_ns=decode_ns, free_ns=0, max_blocks=1)


def test_the_ratio_is_the_median_of_the_turns_and_only_there_with_a_peer() -> None:
    row = Row(block_size=16, workload=Workload(concurrency=1, rounds=1, prompt_tokens=1, decode_steps=1))  # two calls
    ours = [measured(100, 100), measured(1000, 1000), measured(50, 50)]
    peers = [measured(400, 400), measured(2000, 2000), measured(1000, 1000)]
    assert [bar.value for bar in row_bars(row, {"ours": ours})] == [100]
    cost, ratio = row_bars(row, {"ours": ours, "vLLM": peers})
    assert cost.value == 100
    assert ratio.value == pytest.approx(4)
    assert ratio.aim == 3


@pytest.mark.parametrize(("long_ns", "ok"), [(120, True), (121, False)])
def test_a_decode_step_of_a_long_request_may_cost_a_fifth_more_and_its_prompt_does_not_count(
    long_ns: int, ok: bool
) -> None:
    short, long = (
        Row(block_size=16, workload=Workload(concurrency=1, rounds=1, prompt_tokens=n, decode_steps=1)) for n in (1, 2)
    )
    sides = {short: {"ours": [measured(7, 100)]}, long: {"ours": [measured(700, long_ns)]}}
    assert length_bar(short, long, sides, "ours").ok is ok
