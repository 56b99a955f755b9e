"""Laws of the hours that the benchmark of contiguity lives; nothing is timed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.contiguity_lives import Cache, FreeQueue, Lives, count_runs
from benchmarks.contiguity_trace import Arrival, draw_mix, load_trace, thin


def cache_of(block_size: int, *, prefix_cache: bool, is_fifo: bool) -> Cache:
    return Cache(
        block_size=block_size, usable_tokens=32_768, max_model_len=20_000, prefix_cache=prefix_cache, is_fifo=is_fifo
    )


@pytest.mark.parametrize(("prefix_cache", "is_fifo"), [*itertools.product([False, True], repeat=2)])
def test_every_request_is_handed_over_once_and_leaves_no_block(prefix_cache: bool, is_fifo: bool) -> None:
    arrivals = draw_mix(seed=1, duration_s=60.0)
    lives = Lives(cache_of(16, prefix_cache=prefix_cache, is_fifo=is_fifo), step_s=0.1)
    lives.run(arrivals)
    assert sorted(id(one.arrival) for one in lives.transfers) == sorted(map(id, arrivals))
    assert all(one.num_runs <= one.num_blocks for one in lives.transfers)
    assert (lives.prefill.hit_tokens > 0) is prefix_cache


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_the_pool_keeps_prompts_in_far_fewer_runs_than_first_in_first_out(prefix_cache: bool) -> None:
    arrivals = draw_mix(seed=2, duration_s=120.0)
    runs = {}
    for is_fifo in (True, False):
        lives = Lives(cache_of(16, prefix_cache=prefix_cache, is_fifo=is_fifo), step_s=0.1)
        lives.run(arrivals)
        runs[is_fifo] = sum(one.num_runs for one in lives.transfers[len(arrivals) // 2 :])
    assert runs[True] > 4 * runs[False]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=9))
def test_a_run_is_counted_where_either_side_does_not_go_on(pairs: list[tuple[int, int]]) -> None:
    source, target = [a for a, _ in pairs], [b for _, b in pairs]
    breaks = [i for i in range(1, len(pairs)) if pairs[i] != (source[i - 1] + 1, target[i - 1] + 1)]
    assert count_runs(source, target) == len(breaks) + bool(pairs)


def test_the_queue_to_compare_with_is_first_in_first_out() -> None:
    queue = FreeQueue(6)
    assert queue.take(4) == [1, 2, 3, 4]
    queue.put_back([3, 1])
    queue.put_back([4])
    assert queue.take(4) == [5, 3, 1, 4]
    assert (queue.num_free, list(queue)) == (0, [])


def test_both_kinds_of_traces_are_read_by_time_and_too_long_requests_left_out(tmp_path: Path) -> None:
    azure = tmp_path / "a.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.6805900,99999,4\n2023-11-16 18:15:47.6805900,5,6\n"
    )
    assert load_trace(azure) == [
        Arrival(at_s=0.0, prompt_tokens=374, output_tokens=44),
        Arrival(at_s=1.0, prompt_tokens=5, output_tokens=6),
    ]
    mooncake = tmp_path / "m.jsonl"
    mooncake.write_text('{"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n')
    assert load_trace(mooncake) == [Arrival(at_s=1.5, prompt_tokens=600, output_tokens=5, contents=(0, 7))]


def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one of \['\.csv', '\.jsonl'\], given: 'a\.txt'"):
        load_trace(tmp_path / "a.txt")
    empty = tmp_path / "e.csv"
    empty.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,99999,4\n")
    with pytest.raises(ValueError, match=r"'e\.csv' has no request"):
        load_trace(empty)


@given(num=st.integers(0, 200), share=st.floats(0.01, 1.0))
def test_a_share_is_taken_evenly(num: int, share: float) -> None:
    arrivals = [Arrival(at_s=float(i), prompt_tokens=1, output_tokens=1) for i in range(num)]
    taken = thin(arrivals, share)
    assert abs(len(taken) - num * share) <= 1
    assert set(taken) <= set(arrivals)
    assert draw_mix(3, 20.0) == draw_mix(3, 20.0)
