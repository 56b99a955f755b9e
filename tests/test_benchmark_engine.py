"""Laws of the engine benchmark's arithmetic, and a tiny run of both parts that need no peer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import make_tiny_llama

from benchmarks import engine
from benchmarks.engine import Measured, decode_bars, draw_prompt, measure_decode, measure_prefill, measure_scheduler
from benchmarks.engine_limits import Machine, Work, work_of
from benchmarks.engine_sides import PEER_SCRIPT, Ours, Transformers, engine_config
from pd_service.engine.execution_engine import ExecutionEngine

torch.set_num_threads(1)
WORK = Work(weight_bytes=1000, kv_bytes_per_token=8, layer_weights=200, head_weights=50, attention_width=16)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("benchmarks.engine_sides.MAX_MODEL_LEN", 128)
    monkeypatch.setattr("benchmarks.engine_sides.MAX_NEW_TOKENS", 60)
    monkeypatch.setattr("benchmarks.engine_limits.READ_BYTES", 2**16)
    monkeypatch.setattr("benchmarks.engine_limits.PRODUCT_SHAPE", (8, 32, 32))
    monkeypatch.setattr(engine, "draw_prompt", lambda length, seed: [(seed + i) % 500 for i in range(length)])
    return make_tiny_llama(tmp_path / "model")


@given(requests=st.integers(1, 64), context=st.integers(1, 4096))
def test_a_decode_step_reads_all_weights_once_and_every_requests_cache(requests: int, context: int) -> None:
    assert WORK.decode_bytes(requests, context) - WORK.decode_bytes(0, context) == requests * context * 8
    assert WORK.decode_bytes(0, context) == 1000


@given(tokens=st.integers(1, 300))
def test_a_prefill_is_two_operations_per_weight_and_token_and_four_per_pair_of_tokens(tokens: int) -> None:
    pairs = sum(range(1, tokens + 1))
    assert WORK.prefill_operations(tokens) == 2 * 200 * tokens + 2 * 50 + 4 * 16 * pairs


@given(times=st.lists(st.floats(0.1, 10), min_size=1, max_size=5), factor=st.floats(1.0, 8.0))
def test_ratios_are_taken_turn_by_turn_so_that_a_drift_of_the_machine_cancels(
    times: list[float], factor: float
) -> None:
    measured = Measured(name="", num_tokens=1)
    measured.times_s = {"ours": times, "vLLM": [factor * time for time in times]}
    measured.limits_s = [time / factor for time in times]
    assert measured.ratio_to("vLLM") == pytest.approx(factor)
    assert measured.share_of_limit() == pytest.approx(1 / factor)


@pytest.mark.parametrize(("limit_s", "peer_s", "ok"), [(0.85, 1.3, True), (0.84, 1.3, False), (0.85, 1.29, False)])
def test_a_decode_of_one_request_is_held_to_both_aims(limit_s: float, peer_s: float, ok: bool) -> None:
    measured = Measured(name="decode batch 1 at 128", num_tokens=1)
    measured.times_s, measured.limits_s = {"ours": [1.0], "vLLM": [peer_s]}, [limit_s]
    assert all(bar.ok for bar in decode_bars("float32", 1, measured)) is ok


def test_prompts_follow_from_length_and_seed() -> None:
    assert draw_prompt(8, 1) == draw_prompt(8, 1)
    assert draw_prompt(8, 1) != draw_prompt(8, 2)
    assert len(draw_prompt(8, 1)) == 8


def test_the_peers_script_imports_nothing_of_the_project() -> None:
    tree = ast.parse(PEER_SCRIPT.read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in names if name and name.split(".")[0] in ("benchmarks", "pd_service", "kv_cache")]


@pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")
def test_a_tiny_run_measures_every_side_in_every_turn_and_leaves_nothing_behind(tiny: Path) -> None:
    ours, reference = Ours(tiny, "float32"), Transformers(tiny, "float32")
    torch.set_num_threads(1)
    work, machine = work_of(ours.engine), Machine("float32")
    for measured in (
        measure_prefill([ours, reference], 20, work, machine),
        measure_decode([ours, reference], 3, 10, work, machine),
    ):
        assert {name: len(times) for name, times in measured.times_s.items()} == {
            "ours": engine.TURNS,
            "transformers": engine.TURNS,
        }
        assert len(measured.limits_s) == engine.TURNS
        assert all(time > 0 for times in measured.times_s.values() for time in times)
    load = ours.engine.scheduler.load()
    assert (load.running, load.waiting) == (0, 0)
    assert load.free_blocks == load.total_blocks
    ours.close()


def test_the_cost_of_a_schedulers_step_is_that_of_steps_in_which_everybody_decodes(tiny: Path) -> None:
    one = ExecutionEngine(engine_config(tiny, "float32", max_num_batched_tokens=64, max_num_seqs=5))
    torch.set_num_threads(1)
    figures = measure_scheduler(one, 5, 4)
    assert figures["step_ms"] > 0
    assert figures["arrays_ms"] > 0
    assert one.scheduler.load().running == 5
    one.close()
