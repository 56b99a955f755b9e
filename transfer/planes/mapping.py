"""A file mapped for reading at an address where the kernel can use huge pages."""

from __future__ import annotations

import ctypes
import mmap
import os

_ALIGNMENT = 2 * 2**20  # bytes; of a huge page, to which a mapping is not aligned by itself
_PROT_NONE = 0
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class ReadOnlyMapping:
    """`num_bytes` of the file, shared, from `address` on; a write there kills the process. Raises OSError."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._total = num_bytes + _ALIGNMENT
        self._reserved = _mmap(None, self._total, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self.address = self._reserved + -self._reserved % _ALIGNMENT
        try:
            _mmap(self.address, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Nobody may look at `address` any more. May be called twice."""
        if self._total:
            _LIBC.munmap(self._reserved, self._total)
            self._total = 0


def _mmap(address: int | None, num_bytes: int, protection: int, flags: int, fd: int) -> int:
    found: int | None = _LIBC.mmap(address, num_bytes, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
