"""The anonymous file behind a shared cache: mapped for writing once, by its owner, before it is sealed for all."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref

_F_SEAL_FUTURE_WRITE = 0x10  # of Linux 5.1; the Python module has no name for it yet
_PROT_NONE = 0
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def map_aligned(fd: int, num_bytes: int, alignment: int) -> ctypes.Array[ctypes.c_ubyte]:
    """The file, mapped shared and writable at a multiple of `alignment` until the last reference to the result is gone.

    The kernel uses huge pages only where address and place in the file are multiples of their size; by itself it aligns
    to small ones. Raises OSError.
    """
    total = num_bytes + alignment
    reserved = _mmap(None, total, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start = reserved + -reserved % alignment
    try:
        _mmap(start, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _LIBC.munmap(reserved, total)
        raise
    mapping = (ctypes.c_ubyte * num_bytes).from_address(start)
    # What was reserved around it goes with it; at the process's end the kernel does this, later than any thread.
    weakref.finalize(mapping, _LIBC.munmap, reserved, total).atexit = False
    return mapping


def seal(fd: int) -> None:
    """For good: the file keeps its size, and no mapping made from now on can be written through."""
    size_and_seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, size_and_seals | _F_SEAL_FUTURE_WRITE)
    except OSError:  # a kernel without that seal
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, size_and_seals)


def _mmap(address: int | None, num_bytes: int, protection: int, flags: int, fd: int) -> int:
    found: int | None = _LIBC.mmap(address, num_bytes, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
