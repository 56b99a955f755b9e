"""Laws of how benchmarks report and of the statistics they rest on; nothing is started or timed."""

from __future__ import annotations

import argparse
import json
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.report import Bar, publish
from benchmarks.serve import (
    AIM_MS,
    BUSY_STREAMS,
    TOKEN_RANGE,
    Answer,
    Load,
    bars,
    draw_prompt,
    figures,
    loads_of,
    middle_and_tail,
    percentile,
    streams_of,
)
from pd_service.rpc import generation_pb2

numbers = st.floats(min_value=-1e6, max_value=1e6)


# ---- report


@given(value=numbers, aim=numbers)
def test_a_bar_is_ok_on_the_better_side_of_its_aim_and_on_the_aim(value: float, aim: float) -> None:
    assert Bar(name="a", value=value, aim=aim, better="higher").ok == (value >= aim)
    assert Bar(name="a", value=value, aim=aim, better="lower").ok == (value <= aim)
    assert Bar(name="a", value=aim, aim=aim, better="higher").ok
    assert Bar(name="a", value=aim, aim=aim, better="lower").ok


@given(value=numbers)
def test_an_observation_is_always_ok(value: float) -> None:
    assert Bar(name="a", value=value).ok


@pytest.mark.parametrize(("values", "code"), [((1.0, 2.0), 0), ((1.0, 3.0), 1)])
def test_the_document_has_every_bar_with_its_verdict_and_one_miss_fails_the_run(
    values: tuple[float, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    bars = [Bar(name=f"bar {v}", value=v, aim=2.0, better="lower", unit="ms") for v in values]
    assert publish("title", bars, as_json=True, details={"cpus": 2}) == code
    out, err = capsys.readouterr()
    document = json.loads(out)  # the object and nothing else
    assert document["title"] == "title"
    assert document["details"] == {"cpus": 2}
    shown = [(b["name"], b["value"], b["aim"], b["ok"]) for b in document["bars"]]
    assert shown == [(f"bar {v}", v, 2.0, v <= 2.0) for v in values]
    assert "title" in err


def test_without_json_the_table_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    publish("title", [Bar(name="speed", value=1.0)], as_json=False)
    out, err = capsys.readouterr()
    assert "speed" in out
    assert not err


# ---- statistics


@given(values=st.lists(numbers, min_size=1), percent=st.floats(min_value=0, max_value=100))
def test_percentile_is_that_of_numpy(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert math.isclose(percentile(values, percent), expected, rel_tol=1e-9, abs_tol=1e-6)


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@given(values=st.permutations([float(n) for n in range(1, 102)]))
def test_middle_and_tail_do_not_depend_on_the_order(values: list[float]) -> None:
    assert middle_and_tail(values) == {"p50": 51.0, "p99": 100.0}


def _answer(arrivals_s: tuple[float, ...], transfer_ms: float) -> Answer:
    phases = generation_pb2.PhaseTimes(
        queue_ms=1, prefill_ms=40, transfer_ms=transfer_ms, wire_ms=2, confirm_ms=1, first_decode_ms=20, plane="shm"
    )
    finish = generation_pb2.Finish(completion_tokens=len(arrivals_s), phases=phases, retries=1)
    return Answer(arrivals_s=arrivals_s, finish=finish)


def test_figures_split_the_hand_over_into_wire_and_rest_and_count_all_tokens() -> None:
    answers = [_answer((0.1, 0.3, 0.4), transfer_ms) for transfer_ms in (5, 7, 9)]
    measured = figures(answers, wall_s=3.0)
    assert measured["ttft_ms"] == {"p50": 100.0, "p99": 100.0}
    assert measured["itl_ms"] == {"p50": 150.0, "p99": 200.0}
    assert measured["output_tokens_per_s"] == 3.0
    assert measured["hand_over_ms"] == {"p50": 8.0, "p99": pytest.approx(9.96)}
    assert measured["hand_over_without_wire_ms"] == {"p50": 6.0, "p99": pytest.approx(7.96)}
    assert measured["wire_ms"] == {"p50": 2.0, "p99": 2.0}
    assert measured["first_decode_ms"] == {"p50": 20.0, "p99": 20.0}
    assert measured["planes"] == ["shm"]
    assert measured["retries"] == 3


def test_the_bar_holds_the_rest_of_the_hand_over_to_the_aim() -> None:
    load = Load(streams=1, num_requests=1)
    for transfer_ms, is_ok in ((AIM_MS, True), (AIM_MS + 3, False)):  # the rest is 1 ms less: confirm 1, wire 2
        (made,) = bars(load, figures([_answer((0.1, 0.2), transfer_ms)], wall_s=1.0))
        assert made.name == "hand-over without wire p50, 1 stream"
        assert made.value == transfer_ms - 1
        assert made.ok is is_ok


def test_several_requests_under_way_are_held_to_middle_and_tail() -> None:
    load = Load(streams=BUSY_STREAMS, num_requests=2)
    middle, tail = bars(load, figures([_answer((0.1, 0.2), ms) for ms in (2.0, 12.0)], wall_s=1.0))
    assert (middle.value, middle.aim, middle.ok) == (6.0, 3.0, False)
    assert (tail.value, tail.aim, tail.ok) == (pytest.approx(10.9), 10.0, False)


# ---- loads


@given(streams=st.lists(st.integers(min_value=1, max_value=256), min_size=1))
def test_every_client_gets_at_least_two_requests_and_names_differ(streams: list[int]) -> None:
    loads = loads_of(streams)
    assert [load.streams for load in loads] == [*streams, 1]
    assert all(load.num_requests >= 2 * load.streams for load in loads)
    assert loads[-1].name not in {load.name for load in loads[:-1]}


@pytest.mark.parametrize("text", ["", "0", "-1", "1,,8", "1,", "eight", "1;8"])
def test_streams_that_are_no_positive_numbers_are_refused_by_name(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected positive numbers"):
        streams_of(text)


def test_streams_are_read_in_order() -> None:
    assert streams_of("16,1,8") == [16, 1, 8]


@given(seed=st.integers(min_value=0, max_value=2**32), num_tokens=st.integers(min_value=1, max_value=64))
def test_prompts_follow_from_the_seed_and_stay_in_the_vocabulary(seed: int, num_tokens: int) -> None:
    drawn = draw_prompt(random.Random(seed), num_tokens)
    assert drawn == draw_prompt(random.Random(seed), num_tokens)
    assert len(drawn) == num_tokens
    assert all(TOKEN_RANGE[0] <= token < TOKEN_RANGE[1] for token in drawn)
