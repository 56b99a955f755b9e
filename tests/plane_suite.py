"""What the conformance suite of the data planes shares: what a plane cannot promise, pairs, other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgpack
import numpy as np
import pytest
from plane_memory import LENS, Open, Region, apply

from transfer.planes import PLANE_NAMES, make_plane
from transfer.planes.base import Guard, Plane, PlaneReader, PlaneServer, PlaneUnavailable, Runs
from transfer.planes.mooncake import load_engine

HOST = "127.0.0.1"
TIMEOUT_S = 30.0
WAIT_S = 60.0  # for things that happen at once; only a fault makes a test wait so long
_ROOT = Path(__file__).parent.parent

# Laws that not every plane keeps, and why. All others hold for all planes.
CANNOT = {
    ("memory", "other processes"): "it joins buffers of one process",
    ("memory", "token"): "both sides are one process, which has no secrets from itself",
    ("memory", "lease"): "the reader copies without the holder; the confirm protects",
    ("shm", "lease"): "the reader copies without the holder; the confirm protects",
    ("mooncake", "token"): "its library has none; whoever reaches the port may read",
    ("mooncake", "lease"): "its library asks nobody, it knows registered memory alone; the confirm protects",
}


def planes(law: str) -> list[str]:
    """The names of those that keep it."""
    assert law in {of for _, of in CANNOT}
    return [name for name in PLANE_NAMES if (name, law) not in CANNOT]


def make(name: str) -> Plane:
    """Skips the test, with the reason, where an optional package is missing."""
    if name == "mooncake":
        try:
            load_engine()
        except PlaneUnavailable as reason:
            pytest.skip(str(reason))
    return make_plane(name, host=HOST)


class Pair:
    """A holder and a reader of one plane in this process."""

    def __init__(self, plane: Plane, lens: tuple[int, ...] = LENS, guard: Guard | None = None) -> None:
        self.source, self.dest = Region(1, lens), Region(2, lens)
        self.server: PlaneServer = plane.serve(self.source.buffers, guard or Open())
        self.reader: PlaneReader = plane.connect(self.server.endpoint, b"token", self.dest.buffers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for end in (self.reader, self.server, self.source, self.dest):
            end.close()


def read_and_compare(reader: PlaneReader, source: Region, dest: Region, runs: Runs) -> None:
    holder_before = source.bytes.copy()
    expected = Region(0)
    expected.bytes[:] = dest.bytes
    apply(runs, source.arrays, expected.arrays)
    reader.read("lease", runs, TIMEOUT_S)
    np.testing.assert_array_equal(dest.bytes, expected.bytes)  # also the gaps between the buffers
    np.testing.assert_array_equal(source.bytes, holder_before)
    expected.close()


class Other:
    """Another process, see `plane_memory`; its first line is `hello`."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, str(Path(__file__).parent / "plane_memory.py"), *arguments]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.hello = self.line()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, line: str) -> str:
        """Its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.line()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """Also one that is frozen; returns when it is gone."""
        self._process.kill()
        self._process.communicate()


class OtherHolder(Other):
    """Serves a `Region` of seed 1."""

    def __init__(self, plane: str, *lens: int) -> None:
        super().__init__("hold", plane, *map(str, lens or LENS))
        self.endpoint: dict[str, Any] = msgpack.unpackb(bytes.fromhex(self.hello))

    def close_server(self) -> None:
        assert self.tell("close") == "closed"
