"""Every model family through the operators of an NPU, with references in place of kernels, against the CPU run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pd_service import ops
from tests.model_parity import save_random
from tests.model_runner import load
from tests.npu.families import BLOCK, FAMILIES, assert_as_near_as_on_a_cpu
from tests.npu.host_library import SCHEMAS

torch.set_num_threads(1)


@contextmanager
def npu_operators(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """A model that is built inside computes on the host, with the operators of an NPU."""
    with patch.context() as inside:
        inside.setitem(ops.DEVICE_MODULES, "cpu", ops.DEVICE_MODULES["npu"])
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_as_near_to_float32_as_on_a_cpu(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_random(FAMILIES[family], tmp_path)
    with npu_operators(monkeypatch):
        model = load(directory, block_size=BLOCK, dtype=torch.bfloat16)
    assert_as_near_as_on_a_cpu(directory, model, "cpu")


def test_the_families_use_every_operator_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[str] = set()
    run = ops.npu._run
    monkeypatch.setattr(ops.npu, "_run", lambda call: (called.add(call.name), run(call))[1])
    for family in ("llama", "qwen3-moe", "gpt-oss", "gemma3"):
        directory = save_random(FAMILIES[family], tmp_path / family)
        with npu_operators(monkeypatch):
            model = load(directory, block_size=BLOCK, dtype=torch.bfloat16)
        assert_as_near_as_on_a_cpu(directory, model, "cpu")
    assert called == set(SCHEMAS)
