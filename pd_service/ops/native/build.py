"""The CPU operators in C, compiled on this machine when it is first asked for them.

Plain torch pays 2 to 20 microseconds for every small operator and reads the cache of one request at a time, and a step
of a small model is made of a thousand of those. The C files beside this one compile in a second or two with whatever
`cc`, `gcc` or `clang` there is and are kept in the user's cache folder, one library per processor, compiler and source.
Without a compiler, or on a processor without AVX-512, `kernels()` is None and `cpu.py` computes in torch: the same
results but for rounding. Threads are those of torch's own OpenMP; nothing here polls or sets an affinity.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
COMPILE_TIMEOUT_S = 120.0
KINDS = {torch.float32: 0, torch.bfloat16: 1}  # of vectors.h
LANES = 16  # of vectors.h
_POINTER, _COUNT, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
_ARGUMENTS = {
    "pd_linear": (_INT, _POINTER, _COUNT, *(_POINTER,) * 3, *(_COUNT,) * 3, _INT),
    "pd_gated_mlp": (_INT, _POINTER, _COUNT, *(_POINTER,) * 4, *(_COUNT,) * 4, _INT),
    "pd_rms_norm": (_INT, _POINTER, _COUNT, _COUNT, _INT, _POINTER, _POINTER, *(_COUNT,) * 3, _DOUBLE, _INT),
    "pd_add_rms_norm": (_INT, _POINTER, _POINTER, _INT, *(_POINTER,) * 3, _COUNT, _COUNT, _DOUBLE, _INT),
    "pd_rotary": (_INT, _POINTER, _COUNT, *(_POINTER,) * 3, *(_COUNT,) * 3, _INT),
    "pd_silu_and_mul": (_INT, _POINTER, _POINTER, _COUNT, _COUNT, _INT),
    "pd_write_kv": (_POINTER, _COUNT, _POINTER, _COUNT, *(_POINTER,) * 3, *(_COUNT,) * 3, _INT),
    "pd_attention": (_INT, _POINTER, _INT),
    "pd_rotate_write_attend": (_INT, _POINTER, _POINTER, _INT),
    "pd_dense_layer": (_INT, *(_POINTER,) * 6, _INT),
    "pd_use_large_pages": (_POINTER, _COUNT),
    "pd_has_bfloat16": (),
}


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The compiled library, its functions typed; None, with the reason logged, where it cannot be had."""
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("CPU operators run in torch: %s", error)
        return None
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    return library


def _compiled() -> Path:
    """The library's file, made when it is not there yet. Raises OSError or SubprocessError where it cannot be made."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        raise OSError(f"the C kernels need AVX-512, this {platform.machine()} has none")
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        raise OSError("no C compiler (cc, gcc, clang) is installed")
    folder = Path(__file__).parent
    sources = sorted(folder.glob("*.c"))
    key = hashlib.blake2b(digest_size=8)
    for text in (*FLAGS, compiler, torch.__version__, _processor()):
        key.update(text.encode())
    for file in (*sources, *sorted(folder.glob("*.h"))):
        key.update(file.read_bytes())
    target = _cache_folder() / f"kernels-{key.hexdigest()}.so"
    if not target.exists():
        _compile(compiler, sources, target)
    return target


def _compile(compiler: str, sources: list[Path], target: Path) -> None:
    """Several processes may do this at once: each compiles beside the target and renames."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [compiler, *FLAGS, "-o", str(made), *map(str, sources)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        except subprocess.CalledProcessError as error:
            raise OSError(f"{compiler} failed: {error.stderr.strip().splitlines()[:3]}") from error
        made.replace(target)


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(line for line in lines[:40] if line.startswith(("model name", "flags")))


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pd-service"
