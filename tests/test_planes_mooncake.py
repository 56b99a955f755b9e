"""What only the `mooncake` plane promises: how it calls the library, here a stand-in that copies within the process."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from plane_memory import Open, Region, apply, random_runs, runs_of
from plane_suite import TIMEOUT_S, WAIT_S, Pair, read_and_compare

from transfer.planes import mooncake
from transfer.planes.base import PlaneError, PlaneUnavailable
from transfer.planes.mooncake import MAX_PIECES, PIECE_BYTES, MooncakePlane

PLANE = MooncakePlane("127.0.0.1")
ROOT = Path(__file__).parent.parent


class Library:
    """Engines by session, what they were asked, and what they answer."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []  # lengths of each
        self.num_engines = 0
        self.answers: dict[str, int] = {}  # by method; 0 where none is given
        self.ports = count(1)

    def make(self) -> StandIn:
        return StandIn(self)


class StandIn:
    """An engine that moves bytes at once."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._port = next(library.ports)
        self.registered: list[tuple[int, int]] = []
        library.num_engines += 1

    def __del__(self) -> None:
        self._library.num_engines -= 1

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        return self._library.answers.get("initialize", 0)

    def batch_register_memory(self, addresses: Sequence[int], lens: Sequence[int]) -> int:
        self.registered += zip(addresses, lens, strict=True)
        return self._library.answers.get("batch_register_memory", 0)

    def get_rpc_port(self) -> int:
        return self._port

    def batch_transfer_sync_read(
        self, session: str, dst: Sequence[int], src: Sequence[int], lens: Sequence[int]
    ) -> int:
        self._library.calls.append(list(lens))
        for to, at, n in zip(dst, src, lens, strict=True):
            assert any(start <= to and to + n <= start + size for start, size in self.registered)
            ctypes.memmove(to, at, n)
        return self._library.answers.get("batch_transfer_sync_read", 0)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    monkeypatch.setattr(mooncake, "load_engine", lambda: made.make)
    yield made
    gc.collect()
    assert made.num_engines == 0


def test_calls_are_bounded_in_pieces_and_in_bytes(library: Library) -> None:
    size = 3 * PIECE_BYTES + 5
    with Pair(PLANE, (size, 4096)) as pair:
        library.calls.clear()
        many = [(1, 20 * i, 1, 20 * i, 13) for i in range(2 * MAX_PIECES + 1)]
        runs = runs_of((0, 1, 0, 0, size - 1), *many, (0, 0, 0, size, 0))
        dest = pair.dest.bytes.copy()
        expected = Region(2, (size, 4096))
        apply(runs_of(*many), pair.source.arrays, expected.arrays)
        expected.arrays[0][: size - 1] = pair.source.arrays[0][1:]
        pair.reader.read("lease", runs, TIMEOUT_S)
        np.testing.assert_array_equal(pair.dest.bytes, expected.bytes)
        assert not np.array_equal(pair.dest.bytes, dest)
        expected.close()
    assert max(map(len, library.calls)) == MAX_PIECES
    assert [len(call) for call in library.calls] == [MAX_PIECES, MAX_PIECES, 5]
    assert max(map(max, library.calls)) == PIECE_BYTES
    assert min(map(min, library.calls)) > 0


def test_a_failed_call_is_told_when_its_engine_is_gone(library: Library) -> None:
    """What a failed call left behind could else write into blocks that have another owner."""
    with Pair(PLANE) as pair:
        library.answers["batch_transfer_sync_read"] = -1
        with pytest.raises(PlaneError, match="answered -1"):
            pair.reader.read("lease", random_runs(1, 10), TIMEOUT_S)
        gc.collect()
        assert library.num_engines == 1  # the server's
        with pytest.raises(PlaneError, match="answered -1"):
            pair.reader.read("lease", random_runs(1, 10), TIMEOUT_S)
        library.answers.clear()
        read_and_compare(pair.reader, pair.source, pair.dest, random_runs(1, 50))


def test_after_a_failure_the_next_read_asks_for_the_mark_again(library: Library) -> None:
    with Pair(PLANE) as pair:
        library.answers["batch_transfer_sync_read"] = -1
        with pytest.raises(PlaneError):
            pair.reader.read("lease", random_runs(1, 10), TIMEOUT_S)
        library.answers.clear()
        ctypes.memset(pair.server.endpoint["mark_ptr"][0], 0, 16)  # type: ignore[index]
        with pytest.raises(PlaneError, match="another process answers"):
            pair.reader.read("lease", random_runs(1, 10), TIMEOUT_S)


def test_a_failed_call_ends_only_its_own_pair(library: Library) -> None:
    with Pair(PLANE) as pair:
        dest = Region(3)
        other = PLANE.connect(pair.server.endpoint, b"token", dest.buffers)
        library.answers["batch_transfer_sync_read"] = -1
        with pytest.raises(PlaneError):
            other.read("lease", random_runs(1, 10), TIMEOUT_S)
        library.answers.clear()
        pair.reader.read("lease", random_runs(1, 10), TIMEOUT_S)
        other.close()
        dest.close()


def test_closing_waits_for_the_call_and_ends_the_read_before_the_next(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Pair(PLANE) as pair:
        is_inside, may_leave = threading.Event(), threading.Event()
        call = StandIn.batch_transfer_sync_read

        def slow(*arguments: object) -> int:
            is_inside.set()
            assert may_leave.wait(WAIT_S)
            return call(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(StandIn, "batch_transfer_sync_read", slow)
        errors: list[PlaneError] = []
        reading = threading.Thread(target=lambda: errors.append(error_of(pair)))
        closing = threading.Thread(target=pair.reader.close)
        reading.start()
        assert is_inside.wait(WAIT_S)
        closing.start()
        assert library.num_engines == 2
        may_leave.set()
        for thread in (reading, closing):
            thread.join(WAIT_S)
        assert str(errors[0]) == "the reader was closed"
        assert len(library.calls) == 2  # the mark's, and the first of the read


def error_of(pair: Pair) -> PlaneError:
    with pytest.raises(PlaneError) as caught:
        pair.reader.read("lease", random_runs(1, 3000), TIMEOUT_S)
    return caught.value


@pytest.mark.parametrize("name", ["initialize", "batch_register_memory"])
def test_an_engine_that_cannot_start_is_unavailable_on_both_sides(library: Library, name: str) -> None:
    source, dest = Region(1), Region(2)
    server = PLANE.serve(source.buffers, Open())
    library.answers[name] = -7
    with pytest.raises(PlaneUnavailable, match="it answered -7"):
        PLANE.serve(source.buffers, Open())
    with pytest.raises(PlaneUnavailable, match="it answered -7"):
        PLANE.connect(server.endpoint, b"token", dest.buffers)
    for end in (server, source, dest):
        end.close()


def test_another_process_at_the_session_is_found_by_its_mark(library: Library) -> None:
    with Pair(PLANE) as pair, pytest.raises(PlaneUnavailable, match="another process answers"):
        PLANE.connect({**pair.server.endpoint, "mark": bytes(16)}, b"token", pair.dest.buffers)


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    source = Region(1)
    with pytest.raises(PlaneUnavailable, match=r"pd-service\[mooncake\].*libibverbs1"):
        PLANE.serve(source.buffers, Open())
    source.close()


def test_what_the_operator_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "60")
    monkeypatch.setenv("GLOG_minloglevel", "0")
    monkeypatch.delenv("MC_LOG_LEVEL", raising=False)
    with pytest.raises(PlaneUnavailable):
        mooncake.load_engine()
    wanted = ("MC_TRANSFER_TIMEOUT", "GLOG_minloglevel", "MC_LOG_LEVEL")
    assert [os.environ.pop(name) for name in wanted] == ["60", "0", "ERROR"]


def test_the_library_is_not_loaded_before_the_plane_is_used() -> None:
    script = "import sys; from transfer.planes import make_plane; make_plane('mooncake', host=''); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "mooncake" not in loaded.stdout.split()
