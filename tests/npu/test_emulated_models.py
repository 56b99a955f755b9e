"""Every model family on an emulated NPU against the CPU run; no step makes the host wait before its end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pd_service.device import get_device
from tests.model_parity import save_random, some_prompts
from tests.model_runner import Runner, load
from tests.npu.emulator import EmulatedNpu
from tests.npu.families import BLOCK, FAMILIES, assert_as_near_as_on_a_cpu

torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_as_near_to_float32_as_on_a_cpu(family: str, tmp_path: Path, emulated: EmulatedNpu) -> None:
    get_device("npu")
    directory = save_random(FAMILIES[family], tmp_path)
    model = load(directory, block_size=BLOCK, dtype=torch.bfloat16, device="npu")
    assert all(parameter.device.type == "npu" for parameter in model.parameters())
    assert_as_near_as_on_a_cpu(directory, model, "npu")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_makes_nobody_wait(family: str, tmp_path: Path, emulated: EmulatedNpu) -> None:
    get_device("npu")
    model = load(save_random(FAMILIES[family], tmp_path), block_size=BLOCK, dtype=torch.bfloat16, device="npu")
    runner = Runner(model, block_size=BLOCK, num_blocks=20, device="npu")
    prefill, decode = dict(enumerate(some_prompts(3, 150))), {0: [5], 2: [7]}
    with emulated.no_host_reads():
        for chunks in (prefill, decode):
            runner.step(chunks)
