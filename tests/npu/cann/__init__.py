"""Stand-ins for the libraries of Ascend's CANN, so that torch_npu can be loaded where there is none.

`build` compiles the two C files beside this one into libascendcl.so; what torch_npu links against and they do not have
becomes a function that says its name and returns an error, or quietly succeeds where it is about profiling, logs and
settings. The other libraries are empty and depend on that one. `load` must run before torch_npu is imported.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
FIRST = "libascendcl.so"
OTHERS = (
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libatb.so",
)
SYSTEM_LIBRARIES = (None, "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1")  # None: this process
NOT_EMULATED = 500001
# About profiling, logs, dumps, settings and descriptions of operators that are refused in the end.
_QUIET = re.compile(
    r"Msprof|aclAppLog|aclmdl|aclopSet|aclop(Create|Destroy)Attr|acl(Create|Destroy)(TensorDesc|DataBuffer)|aclSetTensor|"
    r"aclSetCompileopt|aclrt(Set|Get)DeviceSatMode|aclrtSetOp(Execute|Wait)TimeOut|aclrtSetOpWaitTimeout|"
    r"aclrtSetStream|aclrt(Ctx)?SetSysParamOpt|aclrtGetSysParamOpt|aclrt(Un)?[sS]ubscribeReport|aclrtPeekAtLastError|"
    r"aclrtGetLastError|aclrtSynchronize|aclrtStreamWaitEvent|aclrtResetEvent|HcclSetConfig|"
    r"HcclGetCommConfigCapability|_Z"
)
# Looked up by name when they are needed, so that no list of what is missing has them.
_LOOKED_UP = (
    "aclSetCompileopt",
    "aclrtCtxSetSysParamOpt",
    "aclrtGetDeviceSatMode",
    "aclrtGetLastError",
    "aclrtGetSysParamOpt",
    "aclrtPeekAtLastError",
    "aclrtSetDeviceSatMode",
    "aclrtSetOpExecuteTimeOut",
    "aclrtSetOpWaitTimeout",
    "aclrtSetStreamAttribute",
    "aclrtSetStreamFailureMode",
    "aclrtSetStreamOverflowSwitch",
    "aclrtSetSysParamOpt",
    "aclrtSubscribeReport",
    "aclrtSynchronizeDevice",
    "aclrtSynchronizeDeviceWithTimeout",
    "aclrtSynchronizeStreamWithTimeout",
    "aclrtUnSubscribeReport",
)


def build(directory: Path) -> None:
    """Compile the stand-ins into `directory`. Needs gcc and nm."""
    directory.mkdir(parents=True, exist_ok=True)
    own = directory / "own.o"
    objects = [directory / f"{source.stem}.o" for source in sorted(HERE.glob("*.c"))]
    for source, compiled in zip(sorted(HERE.glob("*.c")), objects, strict=True):
        _run("gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-c", "-o", str(compiled), str(source))
    _run("ld", "-r", "-o", str(own), *map(str, objects))
    rest = directory / "rest.c"
    rest.write_text(_rest(sorted((_missing() | set(_LOOKED_UP)) - _symbols(own, "--defined-only"))))
    # Names such as those of the compiler's own functions may be among the rest.
    shared = ("gcc", "-w", "-shared", "-fPIC", "-fno-builtin")
    _run(*shared, "-o", str(directory / FIRST), f"-Wl,-soname,{FIRST}", str(own), str(rest), "-lpthread")
    for name in OTHERS:
        link = ("-Wl,--no-as-needed", f"-L{directory}", "-lascendcl", "-Wl,-rpath,$ORIGIN")
        _run(*shared, "-o", str(directory / name), f"-Wl,-soname,{name}", "-x", "c", os.devnull, *link)


def load(directory: Path) -> None:
    """Load what `build` made, under the names that torch_npu asks for."""
    os.environ["ASCEND_LAUNCH_BLOCKING"] = "1"  # errors come from the call that caused them
    for name in (FIRST, *OTHERS):
        ctypes.CDLL(str(directory / name), ctypes.RTLD_GLOBAL)


def _missing() -> set[str]:
    """What torch_npu's libraries refer to and neither they, torch nor the system have."""
    torch_npu, torch = _package("torch_npu"), _package("torch")
    users = [*torch_npu.glob("lib/*.so"), *torch_npu.glob("_C*.so")]
    present = set[str]().union(*(_symbols(path, "--defined-only") for path in (*users, *torch.glob("lib/*.so*"))))
    wanted = set[str]().union(*(_symbols(path, "--undefined-only") for path in users)) - present
    system = [ctypes.CDLL(name) for name in SYSTEM_LIBRARIES]
    return {name for name in wanted if not any(hasattr(library, name) for library in system)}


def _rest(names: Iterable[str]) -> str:
    lines = ["#include <stdio.h>"]
    for name in names:
        body = "return 0;"
        if not _QUIET.match(name):
            body = f'fprintf(stderr, "emulated NPU: {name} is not emulated\\n"); return {NOT_EMULATED};'
        lines.append(f"long {name}(void) {{ {body} }}")
    return "\n".join(lines) + "\n"


def _symbols(path: Path, which: str) -> set[str]:
    """Names without their versions; weak ones need nobody to define them."""
    flags = (which,) if path.suffix == ".o" else ("-D", which)
    found = set()
    for line in _run("nm", *flags, str(path)).splitlines():
        *_, kind, name = line.split()
        if kind not in "wv":
            found.add(name.partition("@")[0])
    return found


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
