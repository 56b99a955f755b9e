"""Where the memory of cache tensors comes from: one region per engine, cut into 2 MiB-aligned pieces in order.

    base_ptr                                                        region end
    ├─ slack ─┼── piece 0 ──┼─ pad ─┼──── piece 1 ────┼─ pad ─┼ ... ┤
              └ multiple of 2 MiB   └ multiple of 2 MiB

`HeapStorage` is private memory of a device, `SharedStorage` is an anonymous shared file that other processes of the
host can map. Both are zero from the start without being written. Host memory is backed with pages by a thread that
takes idle time only: construction does not wait for gigabytes of them, and requests seldom meet a page that is missing.
The pages are huge where the kernel has them: scattered reads of small pages were measured to take a fifth more time,
and a first read from another process meets 512 times as many missing ones.
Pieces stay valid as long as a tensor refers to them, whatever happens to the storage.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from types import TracebackType
from typing import Self

import torch

from kv_cache.shared_file import map_aligned, seal

ALIGNMENT = 2 * 2**20  # bytes; device-to-device transfer engines register memory in such pages

_COMMIT_BYTES = 16 * 2**20  # between two looks at whether to go on: some milliseconds
_HUGE_PAGE = 2 * 2**20
_MADV_POPULATE_WRITE = 23  # of Linux 5.14; an older kernel refuses it, and then whoever writes first pays for the page
_MADV_COLLAPSE = 25  # of Linux 6.1, whatever is set for huge pages in general; refused elsewhere, and pages stay small
_LIBC = ctypes.CDLL(None)  # its calls run without Python's lock, which mmap's own madvise keeps
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def align_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class CacheStorage:
    """Hands out the aligned pieces of `region`, a uint8 tensor, each once: all but the `ALIGNMENT` bytes for its slack.

    Pieces come zeroed.

    `poison` fills with 0xFF instead: NaN in every floating type, so that a test sees a read of what nobody wrote.
    """

    def __init__(self, region: torch.Tensor, *, poison: bool) -> None:
        if poison:
            region.fill_(0xFF)
        self._region = region
        self._next_offset = -region.data_ptr() % ALIGNMENT
        self._end = self._next_offset + region.numel() - ALIGNMENT  # wherever the region happens to begin
        self._committing = _Commit(region) if region.device.type == "cpu" else None

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A uint8 tensor [num_bytes] that starts at a multiple of `ALIGNMENT`.

        Raises ValueError when the storage has less left than `num_bytes` rounded up to `ALIGNMENT`.
        """
        start, end = self._next_offset, self._next_offset + align_up(num_bytes)
        if num_bytes < 1 or end > self._end:
            num_left = max(0, self._end - start)
            raise ValueError(f"cannot hand out {num_bytes} bytes of cache memory, {num_left} are left")
        self._next_offset = end
        return self._region[start : start + num_bytes]


class HeapStorage(CacheStorage):
    """`num_bytes` (see `cache_utils.calculate_cache_bytes`) of memory of one device, private to this process."""

    def __init__(self, num_bytes: int, device: torch.device | str = "cpu", *, poison: bool = False) -> None:
        size, device = _region_bytes(num_bytes), torch.device(device)
        if device.type == "cpu":  # torch.zeros would write every page of it
            region = torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
        else:
            region = torch.zeros(size, dtype=torch.uint8, device=device)
        super().__init__(region, poison=poison)


class SharedStorage(CacheStorage):
    """`num_bytes` (see `cache_utils.calculate_cache_bytes`) in one memfd, mapped here at `base_ptr`.

    `fd` refers to the file, whose byte 0 is at `base_ptr`, a multiple of `ALIGNMENT`; `num_bytes` is the length of the
    file. The file has no name and cannot change its size, so that a reader never meets a hole; it vanishes with its
    last mapping. Whoever gets hold of the file later, this process too, can map it for reading alone.
    """

    def __init__(self, num_bytes: int, *, poison: bool = False) -> None:
        self.num_bytes = _region_bytes(num_bytes)
        self.fd = os.memfd_create("pd-kv-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.num_bytes)
            region = torch.frombuffer(map_aligned(self.fd, self.num_bytes, ALIGNMENT), dtype=torch.uint8)
            seal(self.fd)
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
            if self._committing is not None:
                self._committing.stop()
            self._region, self._end = torch.empty(0, dtype=torch.uint8), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Commit:
    """Backs a region with memory from a thread of the lowest priority. Whatever is written meanwhile stays as it is."""

    def __init__(self, region: torch.Tensor) -> None:
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(region,), name="commit", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, which then refers to the region no more. May be called twice."""
        self._is_stopped.set()
        self._thread.join()

    def _run(self, region: torch.Tensor) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # a thread is a process to Linux
        start = region.data_ptr()
        for address in range(start, start + region.numel(), _COMMIT_BYTES):
            length = min(_COMMIT_BYTES, start + region.numel() - address)
            if self._is_stopped.is_set() or not _back(address, length):
                return


def _back(address: int, length: int) -> bool:
    """Gives a range its pages; False when the kernel cannot. A range begins with a page, and its content stays.

    A huge page is made around a page that is there, which is why one small page each comes first: to fill a range with
    small ones and then replace them was measured to take eight times as long, 0.9 s per GiB.
    """
    for at in range(address, address + length, _HUGE_PAGE):
        if _LIBC.madvise(at, mmap.PAGESIZE, _MADV_POPULATE_WRITE) != 0:
            return False
    _LIBC.madvise(address, length, _MADV_COLLAPSE)  # where it is refused, the next line makes small pages
    return bool(_LIBC.madvise(address, length, _MADV_POPULATE_WRITE) == 0)


def _region_bytes(num_bytes: int) -> int:
    if num_bytes < 1:
        raise ValueError(f"cache memory must be at least 1 byte, given: {num_bytes}")
    return align_up(num_bytes) + ALIGNMENT  # the start of a mapping is aligned to small pages only
