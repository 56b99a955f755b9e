"""Where the memory of cache tensors comes from: one region per engine, cut into 2 MiB-aligned pieces in order.

    base_ptr                                                        region end
    ├─ slack ─┼── piece 0 ──┼─ pad ─┼──── piece 1 ────┼─ pad ─┼ ... ┤
              └ multiple of 2 MiB   └ multiple of 2 MiB

`HeapStorage` is private memory of a device; `SharedStorage` is an anonymous shared file that other processes of the
host can map. The whole region is written at construction, so that no request pays for page faults. Pieces stay valid
as long as a tensor refers to them, whatever happens to the storage.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from types import TracebackType
from typing import Self

import torch

ALIGNMENT = 2 * 2**20  # bytes; device-to-device transfer engines register memory in such pages


def align_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class CacheStorage:
    """Hands out the aligned pieces of `region`, a uint8 tensor, each once. Pieces come zeroed.

    `poison` fills with 0xFF instead: NaN in every floating type, so that a test sees a read of what nobody wrote.
    """

    def __init__(self, region: torch.Tensor, *, poison: bool) -> None:
        region.fill_(0xFF if poison else 0)
        self._region = region
        self._next_offset = -region.data_ptr() % ALIGNMENT

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A uint8 tensor [num_bytes] that starts at a multiple of `ALIGNMENT`.

        Raises ValueError when the region has less left than `num_bytes` rounded up to `ALIGNMENT`.
        """
        start, end = self._next_offset, self._next_offset + align_up(num_bytes)
        if num_bytes < 1 or end > self._region.numel():
            num_left = max(0, self._region.numel() - start)
            raise ValueError(f"cannot hand out {num_bytes} bytes of cache memory, {num_left} are left")
        self._next_offset = end
        return self._region[start : start + num_bytes]


class HeapStorage(CacheStorage):
    """`num_bytes` (see `cache_utils.calculate_cache_bytes`) of memory of one device, private to this process."""

    def __init__(self, num_bytes: int, device: torch.device | str = "cpu", *, poison: bool = False) -> None:
        super().__init__(torch.empty(_region_bytes(num_bytes), dtype=torch.uint8, device=device), poison=poison)


class SharedStorage(CacheStorage):
    """`num_bytes` (see `cache_utils.calculate_cache_bytes`) in one memfd, mapped here at `base_ptr`.

    `fd` refers to the file, whose byte 0 is at `base_ptr`; `num_bytes` is the length of the file. The file has no name
    and cannot change its size, so that a reader never meets a hole; it vanishes with its last mapping.
    """

    def __init__(self, num_bytes: int, *, poison: bool = False) -> None:
        self.num_bytes = _region_bytes(num_bytes)
        self.fd = os.memfd_create("pd-kv-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            region = torch.frombuffer(mmap.mmap(self.fd, self.num_bytes), dtype=torch.uint8)
            self.base_ptr = region.data_ptr()
            super().__init__(region, poison=poison)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Closes `fd` and hands out nothing more; the mapping ends with the last piece. May be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._region = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _region_bytes(num_bytes: int) -> int:
    if num_bytes < 1:
        raise ValueError(f"cache memory must be at least 1 byte, given: {num_bytes}")
    return align_up(num_bytes) + ALIGNMENT  # the start of a mapping is aligned to small pages only
