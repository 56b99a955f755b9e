"""The host itself. Its work is done when a call returns, so there is nothing to queue or to wait for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch

from kv_cache import CacheStorage, HeapStorage, SharedStorage
from pd_service.host_memory import available_bytes


class CpuDevice:
    process_group: ClassVar[str] = "gloo"
    is_addressable: ClassVar[bool] = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def free_bytes(self) -> int:
        return available_bytes()

    def allocate_cache(self, num_bytes: int, *, is_mapped: bool) -> CacheStorage:
        return SharedStorage(num_bytes) if is_mapped else HeapStorage(num_bytes)

    def enter_thread(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def copying(self) -> AbstractContextManager[None]:
        return nullcontext()
