"""Prefill and decode engines on emulated NPUs, with real channels and leases: the tokens of a CPU run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pd_service.config import EngineConfig, EngineSettings, GatewaySettings, RetrySettings
from pd_service.engine.execution_engine import ExecutionEngine
from pd_service.errors import ConfigError
from pd_service.gateway.engines import Directory, EngineMember
from pd_service.gateway.story import RequestStory
from pd_service.metrics import GatewayMetrics
from pd_service.models.config import fingerprint
from pd_service.request import EngineSampling
from tests.local_cluster import local_cluster, new_job, run
from tests.model_parity import save_random, some_prompts
from tests.model_runner import Runner, load
from tests.npu.emulator import EmulatedNpu
from tests.npu.families import BLOCK, FAMILIES
from tests.one_loop import run_async

torch.set_num_threads(1)

SETTINGS = EngineSettings(block_size=BLOCK, max_num_batched_tokens=96, max_num_seqs=4)
NO_RETRY = GatewaySettings(retry=RetrySettings(max_failures=0))
KV_BYTES = 2**25
# All choose the likeliest token, by different ways.
SAMPLINGS = [EngineSampling(), EngineSampling(temperature=0.5, top_k=1, seed=3), EngineSampling(logprobs=2)]
PROMPTS = some_prompts(3, 200)
NUM_NEW = 6


def answers(directory: Path) -> list[list[int]]:
    """Through a prefill and a decode engine; every prompt's KV is handed over."""

    async def scenario() -> list[list[int]]:
        async with local_cluster(
            directory, settings=SETTINGS, gateway=NO_RETRY, device="npu", dtype="bfloat16", kv_cache_bytes=KV_BYTES
        ) as cluster:
            jobs = zip(PROMPTS, SAMPLINGS, strict=True)
            outputs = await asyncio.gather(*(cluster.generate(prompt, NUM_NEW, sampling) for prompt, sampling in jobs))
            status = await cluster.status("decode/1")
            assert status.received_tokens == sum(len(prompt) for prompt in PROMPTS)
            return outputs

    return run_async(scenario())


def logits(directory: Path, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """[tokens, vocab] on a CPU."""
    return Runner(load(directory, block_size=BLOCK, dtype=dtype), block_size=BLOCK).logits([tokens], None)[0]


def assert_likeliest(directory: Path, outputs: list[list[int]]) -> None:
    """Each token is the likeliest on a CPU, or as near to it as bfloat16 tells numbers apart there."""
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert len(output) == NUM_NEW
        exact = logits(directory, prompt + output, torch.float32)[len(prompt) - 1 : -1]
        rounding = (exact - logits(directory, prompt + output, torch.bfloat16)[len(prompt) - 1 : -1]).abs().amax(-1)
        chosen = exact.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        assert (exact.amax(-1) - chosen <= 3 * rounding).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_service_answers_as_a_cpu_does_but_for_rounding(family: str, tmp_path: Path, emulated: EmulatedNpu) -> None:
    directory = save_random(FAMILIES[family], tmp_path)
    assert_likeliest(directory, answers(directory))


class EngineProcess:
    """An engine on the device of this number on the host."""

    def __init__(self, config: EngineConfig, device: int) -> None:
        self.role = config.role
        environment = os.environ | {"ASCEND_RT_VISIBLE_DEVICES": str(device), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.npu.engine_process", config.model_dump_json()]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def member(self) -> EngineMember:
        """Once it serves."""
        assert self._process.stdout is not None
        lines = iter(self._process.stdout.readline, "")
        words = next(line.split() for line in lines if line.count(" ") == 2 and ":" in line)
        return EngineMember(engine_id=self.role, role=self.role, address=words[0], incarnation=words[1])

    def stop(self) -> int:
        self._process.communicate("", timeout=60)
        return self._process.returncode


def test_engines_on_two_devices_in_two_processes_answer_as_a_cpu_does(tmp_path: Path) -> None:
    directory = save_random(FAMILIES["llama"], tmp_path)
    processes = [
        EngineProcess(
            EngineConfig(
                role=role,
                model_dir=directory,
                device="npu",
                dtype="bfloat16",
                kv_cache_bytes=KV_BYTES,
                settings=SETTINGS,
            ),
            device,
        )
        for device, role in enumerate(("prefill", "decode"))
    ]

    async def scenario() -> list[list[int]]:
        directory_of_engines = Directory(fingerprint(directory))
        try:
            members = [await asyncio.to_thread(process.member) for process in processes]
            await directory_of_engines.update(members)
            for role in ("prefill", "decode"):
                await directory_of_engines.wait_for(role, 60.0)
            story = RequestStory(directory_of_engines, NO_RETRY, GatewayMetrics())
            ends = await asyncio.gather(*(run(story, new_job(prompt, NUM_NEW)) for prompt in PROMPTS))
            return [tokens for tokens, _, _ in ends]
        finally:
            await directory_of_engines.close()

    try:
        outputs = run_async(scenario())
    finally:
        codes = [process.stop() for process in processes]
    assert codes == [0, 0]
    assert_likeliest(directory, outputs)


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
