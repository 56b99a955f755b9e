"""The seam between the service and what it computes on."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed

from kv_cache import SharedStorage
from pd_service.device import get_device
from pd_service.errors import ConfigError

torch.set_num_threads(1)


def test_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown device 'tpu'; available: cpu, npu"):
        get_device("tpu")


def test_the_cpu_gives_memory_that_can_be_mapped_only_when_asked() -> None:
    device = get_device("cpu")
    mapped = device.allocate_cache(1000, is_mapped=True)
    assert isinstance(mapped, SharedStorage)
    mapped.close()
    own = device.allocate_cache(1000, is_mapped=False)
    assert not isinstance(own, SharedStorage)
    assert own.allocate(1000).device == device.torch_device


def test_copies_and_steps_of_the_cpu_are_done_at_once() -> None:
    device = get_device("cpu")
    device.enter_thread()
    with device.copying():
        copy = torch.arange(3).clone()
    device.synchronize()
    assert copy.tolist() == [0, 1, 2]
    assert device.free_bytes() > 0
    assert torch.distributed.is_backend_available(device.process_group)


def test_an_npu_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ConfigError, match=r"not installed \(torch_npu\).*pip install 'pd-service\[npu\]'"):
        get_device("npu")


def test_an_npu_without_its_toolkit_says_which_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "torch_npu":
                raise ImportError("libhccl.so: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ConfigError, match=r"libhccl\.so.*CANN.*set_env\.sh"):
        get_device("npu")
