"""The plan of an engine's memory against the engine that starts: what was planned is what is held."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ByteSize
from torch import nn
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from pd_service.config import EngineConfig, EngineSettings
from pd_service.device.cpu import CpuDevice
from pd_service.engine.execution_engine import ExecutionEngine
from pd_service.engine.memory_plan import MemoryPlan, plan_memory, require_memory
from pd_service.errors import ConfigError
from pd_service.models.config import limit_length, load_model_config
from pd_service.models.loader import load_model
from tests.model_parity import TINY, save_random

torch.set_num_threads(1)

WINDOW = {"sliding_window": 24, "sliding_window_pattern": 2, "head_dim": 16}
MOE = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS: dict[str, PreTrainedConfig] = {
    "tied": LlamaConfig(**(TINY | {"tie_word_embeddings": True})),
    "untied": LlamaConfig(**(TINY | {"attention_bias": True})),
    "windows": Gemma3TextConfig(**(TINY | WINDOW)),
    "experts": Qwen3MoeConfig(**(TINY | MOE)),
}


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(MODELS[request.param], tmp_path_factory.mktemp(request.param))


def engine_config(directory: Path, *, dtype: Any = "float32", kv_bytes: int = 2**20, **settings: Any) -> EngineConfig:
    sizes = {"block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 32}
    return EngineConfig(
        role="prefill",
        model_dir=directory,
        dtype=dtype,
        kv_cache_bytes=ByteSize(kv_bytes),
        settings=EngineSettings(**(sizes | settings)),
    )


def planned(config: EngineConfig) -> MemoryPlan:
    return plan_memory(config, load_model_config(config.model_dir))


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor that a module's attribute holds, however it is wrapped; its submodules are asked for theirs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))
    elif isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)
    elif not isinstance(value, nn.Module) and hasattr(value, "__dict__") and not hasattr(value, "__file__"):
        for one in vars(value).values():
            yield from tensors_in(one) if isinstance(one, torch.Tensor) else ()


def held_bytes(model: nn.Module) -> int:
    found = {id(t): t for module in model.modules() for t in tensors_in(vars(module))}
    return sum(tensor.numel() * tensor.element_size() for tensor in found.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weights_planned_are_those_that_are_loaded(model_dir: Path, dtype: str) -> None:
    config = engine_config(model_dir, dtype=dtype)
    model, _ = load_model(model_dir, dtype=getattr(torch, dtype), device="cpu", block_size=4)
    assert planned(config).weight_bytes == held_bytes(model)


def test_blocks_and_bytes_planned_are_those_of_the_engine(model_dir: Path) -> None:
    config = engine_config(model_dir)
    plan, engine = planned(config), ExecutionEngine(config)
    try:
        usable = engine.kv_cache_manager.num_usable_blocks()
        assert {group.key: group.num_blocks for group in plan.groups} == usable
        held = sum(-(-tensor.nbytes // 2**21) * 2**21 for tensor in engine.worker.cache_tensors)
        assert plan.kv_bytes == held
        assert engine.worker.memory_plan == plan
    finally:
        engine.close()


def test_the_requests_planned_fit_together_and_one_more_does_not(model_dir: Path) -> None:
    config = engine_config(model_dir, kv_bytes=3 * 2**17, max_num_seqs=8)
    plan, engine = planned(config), ExecutionEngine(config)
    kv = engine.kv_cache_manager

    def holds(request_id: str) -> bool:
        chunks = range(0, plan.max_model_len, 32)
        return all(kv.allocate_slots(request_id, num_computed, 32) for num_computed in chunks)

    try:
        assert 1 <= plan.num_longest_requests < 8
        assert all(holds(f"request {i}") for i in range(plan.num_longest_requests))
        assert not holds("one more")
        assert plan.num_tokens >= plan.num_longest_requests * plan.max_model_len
    finally:
        engine.close()


def test_a_window_is_planned_as_one(tmp_path: Path) -> None:
    plan = planned(engine_config(save_random(MODELS["windows"], tmp_path)))
    window, full = sorted(plan.groups, key=lambda group: group.window is None)
    assert (window.window, full.window) == (24, None)
    assert window.blocks_per_request == -(-(24 - 1 + 32 - 1) // 4) + 1  # what two neighbouring steps can see
    assert window.num_blocks == 3 * window.blocks_per_request
    assert full.blocks_per_request == 256 // 4
    assert plan.num_tokens == full.num_blocks * 4


def test_a_shorter_model_leaves_room_for_more_requests(model_dir: Path) -> None:
    whole, half = planned(engine_config(model_dir)), planned(engine_config(model_dir, max_model_len=64))
    assert half.max_model_len == 64
    assert half.num_longest_requests >= whole.num_longest_requests
    with pytest.raises(ConfigError, match=r"max_model_len 257 .*256"):
        limit_length(load_model_config(model_dir), 257)


def test_a_cache_that_holds_no_request_names_the_settings(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs at least \d+ bytes, 1000 .*pools\.prefill\.kv_cache_bytes"):
        planned(engine_config(model_dir, kv_bytes=1000))


def test_an_engine_that_does_not_fit_fails_with_its_plan(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(model_dir)
    plan = require_memory(config, 2**40)
    monkeypatch.setattr(CpuDevice, "free_bytes", lambda device: plan.total_bytes - 1)
    with pytest.raises(ConfigError, match=r"weights .*KV cache .*are free: lower pools\.prefill\.kv_cache_bytes"):
        ExecutionEngine(config)
