"""Prefill and decode engines on emulated NPUs, with real channels and leases: the tokens of a CPU run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from pd_service.config import DeviceName, EngineConfig, EngineSettings, GatewaySettings, RetrySettings
from pd_service.engine.execution_engine import ExecutionEngine
from pd_service.errors import ConfigError
from pd_service.request import EngineSampling
from tests.local_cluster import local_cluster
from tests.model_parity import save_random, some_prompts
from tests.model_runner import Runner, load
from tests.npu.emulator import EmulatedNpu
from tests.npu.families import BLOCK, FAMILIES
from tests.one_loop import run_async

torch.set_num_threads(1)

SETTINGS = EngineSettings(block_size=BLOCK, max_num_batched_tokens=96, max_num_seqs=4)
NO_RETRY = GatewaySettings(retry=RetrySettings(max_failures=0))
KV_BYTES = 2**25
PROMPTS = some_prompts(3, 200)
NUM_NEW = 6


def answers(directory: Path, device: DeviceName, samplings: list[EngineSampling]) -> list[list[int]]:
    """Through a prefill and a decode engine; every prompt's KV is handed over."""

    async def scenario() -> list[list[int]]:
        async with local_cluster(
            directory, settings=SETTINGS, gateway=NO_RETRY, device=device, dtype="bfloat16", kv_cache_bytes=KV_BYTES
        ) as cluster:
            jobs = zip(PROMPTS, samplings, strict=True)
            outputs = await asyncio.gather(*(cluster.generate(prompt, NUM_NEW, sampling) for prompt, sampling in jobs))
            status = await cluster.status("decode/1")
            assert status.received_tokens == sum(len(prompt) for prompt in PROMPTS)
            return outputs

    return run_async(scenario())


def logits(directory: Path, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """[tokens, vocab] on a CPU."""
    return Runner(load(directory, block_size=BLOCK, dtype=dtype), block_size=BLOCK).logits([tokens], None)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_service_answers_as_a_cpu_does_but_for_rounding(family: str, tmp_path: Path, emulated: EmulatedNpu) -> None:
    """Each token is the likeliest on a CPU, or as near to it as bfloat16 tells numbers apart there."""
    directory = save_random(FAMILIES[family], tmp_path)
    for prompt, output in zip(PROMPTS, answers(directory, "npu", [EngineSampling()] * 3), strict=True):
        assert len(output) == NUM_NEW
        exact = logits(directory, prompt + output, torch.float32)[len(prompt) - 1 : -1]
        rounding = (exact - logits(directory, prompt + output, torch.bfloat16)[len(prompt) - 1 : -1]).abs().amax(-1)
        chosen = exact.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        assert (exact.amax(-1) - chosen <= 2 * rounding).all()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_service_answers_as_on_a_cpu(family: str, tmp_path: Path, emulated: EmulatedNpu) -> None:
    """Seeded samples, and log probabilities on the way, of models whose likeliest tokens lie apart."""
    directory = save_random(FAMILIES[family], tmp_path)
    samplings = [EngineSampling(temperature=0.5, seed=3), EngineSampling(), EngineSampling(logprobs=2)]
    assert answers(directory, "npu", samplings) == answers(directory, "cpu", samplings)


def test_an_engine_that_does_not_fit_a_device_says_what_it_needs(tmp_path: Path, emulated: EmulatedNpu) -> None:
    config = EngineConfig(
        role="mixed",
        model_dir=save_random(FAMILIES["llama"], tmp_path),
        device="npu",
        dtype="bfloat16",
        kv_cache_bytes=2**29,
        settings=SETTINGS,
    )
    with pytest.raises(ConfigError, match=r"KV cache 0\.5.* are free: lower pools\.mixed\.kv_cache_bytes"):
        ExecutionEngine(config)
