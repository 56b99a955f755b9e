"""The device seam on an emulated NPU: what every engine on one relies on."""

from __future__ import annotations

import threading

import pytest
import torch

from kv_cache import ALIGNMENT
from pd_service.device import get_device
from pd_service.errors import ConfigError
from tests.npu.emulator import EmulatedNpu, host_view


def test_cache_memory_is_aligned_zero_and_on_the_device(emulated: EmulatedNpu) -> None:
    device = get_device("npu")
    before = device.free_bytes()
    storage = device.allocate_cache(3 * ALIGNMENT, is_mapped=True)
    pieces = [storage.allocate(ALIGNMENT), storage.allocate(10)]
    for piece in pieces:
        assert piece.device == device.torch_device
        assert piece.data_ptr() % ALIGNMENT == 0
        assert not host_view(piece).any()
    assert before - device.free_bytes() >= 3 * ALIGNMENT


def test_a_cache_that_does_not_fit_says_how_much_is_free(emulated: EmulatedNpu) -> None:
    device = get_device("npu")
    with pytest.raises(ConfigError, match=r"npu:0 has no room for 0\.50 GiB .*GiB are free: lower pools"):
        device.allocate_cache(2**29, is_mapped=False)


def test_a_thread_that_entered_can_copy_beside_the_others(emulated: EmulatedNpu) -> None:
    device = get_device("npu")
    memory = device.allocate_cache(ALIGNMENT, is_mapped=False).allocate(4)
    failures: list[BaseException] = []

    def fill() -> None:
        try:
            device.enter_thread()
            with device.copying():
                memory.copy_(torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
        except BaseException as error:  # would die with the thread
            failures.append(error)

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    device.synchronize()
    assert not failures
    assert memory.tolist() == [1, 2, 3, 4]


def test_a_host_that_shows_no_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.npu, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"finds no device.*npu-smi.*ASCEND_RT_VISIBLE_DEVICES"):
        get_device("npu")
