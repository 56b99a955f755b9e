"""Tests that need torch_npu: run by `make test-npu` in an environment of its own, left out elsewhere."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
import torch

IS_EMULATED = "tests.npu.load_emulation" in sys.modules
collect_ignore_glob = [] if IS_EMULATED else ["test_*.py"]

if IS_EMULATED:
    from pd_service.ops import npu
    from tests.npu.emulator import EmulatedNpu

    npu._IS_CHECKED = True

    @pytest.fixture
    def emulated() -> Iterator[EmulatedNpu]:
        """NPUs whose operators run on the host; empty before and after."""
        mode = EmulatedNpu()
        with mode.in_all_threads():
            yield mode
        gc.collect()  # a model and its caches refer to each other
        torch.npu.empty_cache()
