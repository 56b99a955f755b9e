"""An Ascend NPU: the first one this process can see (`ASCEND_RT_VISIBLE_DEVICES` says which that is).

Owns the import of torch_npu, which happens here and nowhere else, when an NPU was asked for. All work is queued on a
stream and done later: who needs a result waits for it with `synchronize`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, ClassVar

import torch

from kv_cache import CacheStorage, HeapStorage
from pd_service.errors import ConfigError

_GIB = 2**30


class NpuDevice:
    process_group: ClassVar[str] = "hccl"
    is_addressable: ClassVar[bool] = False

    def __init__(self) -> None:
        _load_torch_npu()
        self._npu: Any = torch.npu  # type: ignore[attr-defined]  # torch_npu adds it
        if self._npu.device_count() == 0:
            raise ConfigError(
                "device 'npu': torch_npu finds no device; check that `npu-smi info` lists one, that the driver's "
                "devices are mapped into this container, and that ASCEND_RT_VISIBLE_DEVICES is not empty"
            )
        self.torch_device = torch.device("npu", 0)
        self.enter_thread()

    def free_bytes(self) -> int:
        free, _ = self._npu.mem_get_info(self.torch_device)
        kept = self._npu.memory_reserved(self.torch_device) - self._npu.memory_allocated(self.torch_device)
        return int(free + kept)  # torch keeps what was given back to it

    def allocate_cache(self, num_bytes: int, *, is_mapped: bool) -> CacheStorage:
        try:
            return HeapStorage(num_bytes, self.torch_device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{self.torch_device} has no room for {num_bytes / _GIB:.2f} GiB of KV cache, "
                f"{self.free_bytes() / _GIB:.2f} GiB are free: lower pools.*.kv_cache_bytes"
            ) from error

    def enter_thread(self) -> None:
        self._npu.set_device(self.torch_device)  # a thread has a device context of its own, or none

    def synchronize(self) -> None:
        self._npu.current_stream(self.torch_device).synchronize()

    def copying(self) -> AbstractContextManager[None]:
        return self._copying()

    @contextmanager
    def _copying(self) -> Iterator[None]:
        stream = self._npu.Stream(device=self.torch_device)
        with self._npu.stream(stream):
            yield
        stream.synchronize()


def _load_torch_npu() -> ModuleType:
    try:
        return importlib.import_module("torch_npu")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"device 'npu' needs a package that is not installed ({error.name}); it belongs into an environment of its "
            "own, because torch does not start beside it without CANN: pip install 'pd-service[npu]'"
        ) from error
    except Exception as error:  # ImportError for a library that is not there, and bare ones for variables not set
        raise ConfigError(
            f"device 'npu': torch_npu cannot be loaded ({error}); it needs Ascend's CANN toolkit, of the version that "
            "its release notes name: install it, then `source /usr/local/Ascend/ascend-toolkit/set_env.sh`"
        ) from error
