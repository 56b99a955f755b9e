"""The device an engine computes on, behind one protocol: its memory, its queue of work, and what reaches both.

A device is one class here and one module of operators in `pd_service.ops`; `get_device` and `get_ops` are the only
places that know which there are, and nothing else asks. A device's own library is imported by its class, so that an
engine on another device neither needs nor loads it. What a configuration must respect stands in `pd_service.config`,
because it is checked on hosts that have no such device.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import ClassVar, Protocol, cast

import torch

from kv_cache import CacheStorage
from pd_service.errors import ConfigError

DEVICE_CLASSES = {"cpu": "pd_service.device.cpu.CpuDevice", "npu": "pd_service.device.npu.NpuDevice"}


class Device(Protocol):
    """One device of this process. Its constructor raises ConfigError, naming what is missing, where there is none.

    `process_group` is the backend of torch.distributed for collectives on its tensors. `is_addressable`: the host can
    read and write its memory at the addresses of its tensors, so that data planes reach it without a copy between.
    """

    process_group: ClassVar[str]
    is_addressable: ClassVar[bool]
    torch_device: torch.device

    def free_bytes(self) -> int:
        """Bytes of its memory that this process may still take."""

    def allocate_cache(self, num_bytes: int, *, is_mapped: bool) -> CacheStorage:
        """Memory for `num_bytes` of aligned cache tensors, of a kind that other processes of the host can map if asked.

        A device whose memory cannot be mapped gives its own all the same. Raises ConfigError when it has not enough.
        """

    def enter_thread(self) -> None:
        """Comes first in each thread that touches the device's tensors or memory; again does no harm."""

    def synchronize(self) -> None:
        """Returns when all work queued by this thread is done, its writes to memory included."""

    def copying(self) -> AbstractContextManager[None]:
        """Copies made inside are queued beside the steps of the engine, and done when the block ends."""


def get_device(name: str) -> Device:
    """The device of a configuration, such as "cpu". Raises ConfigError for one that is unknown or missing here."""
    if name not in DEVICE_CLASSES:
        raise ConfigError(f"unknown device {name!r}; available: {', '.join(sorted(DEVICE_CLASSES))}")
    module, _, class_name = DEVICE_CLASSES[name].rpartition(".")
    return cast(Device, getattr(importlib.import_module(module), class_name)())
