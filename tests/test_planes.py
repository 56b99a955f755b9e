"""The conformance suite of the data planes: which bytes arrive, and what is refused; `test_planes_faults` has the rest.

`plane_suite.CANNOT` lists what a plane cannot promise, and why. What only one promises is in a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import fields

import msgpack
import numpy as np
import pytest
from plane_memory import LENS, Bounds, Ended, Open, Region, Secret, apply, random_runs, runs_of
from plane_suite import CANNOT, HOST, TIMEOUT_S, WAIT_S, Other, OtherHolder, Pair, make, planes, read_and_compare

from transfer.planes import PLANE_NAMES, make_plane
from transfer.planes.base import Plane, PlaneError, PlaneUnavailable, ReadRefused, Runs


@pytest.fixture(params=PLANE_NAMES, scope="module")
def plane(request: pytest.FixtureRequest) -> Plane:
    return make(request.param)


@pytest.fixture(scope="module")
def pair(plane: Plane) -> Iterator[Pair]:
    """One for all tests that leave both sides open."""
    with Pair(plane) as made:
        yield made


def check(pair: Pair, runs: Runs) -> None:
    read_and_compare(pair.reader, pair.source, pair.dest, runs)


# ---- bytes


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num", [1, 50, 3000])
def test_a_read_copies_exactly_the_runs(pair: Pair, num: int, seed: int) -> None:
    check(pair, random_runs(seed, num))


@pytest.mark.parametrize("num_runs", [1, 5])
def test_one_pattern_in_many_buffers_arrives_in_each(pair: Pair, num_runs: int) -> None:
    """Buffers 0, 1 and 4 are alike, 0 and 1 at another distance than 1 and 4."""
    places = [(100 + 64 * i, 900 - 64 * i, 33 + i) for i in range(num_runs)]
    check(pair, runs_of(*((b, s, b, d, n) for b in (0, 1, 4) for s, d, n in places)))


def test_a_pattern_repeats_although_buffers_are_paired_crosswise(pair: Pair) -> None:
    check(pair, runs_of((4, 1, 0, 5, 99), (1, 1, 1, 5, 99), (0, 1, 4, 5, 99)))


def test_whole_buffers_and_single_bytes_are_runs_too(pair: Pair) -> None:
    check(pair, runs_of((3, 0, 3, 0, 65536), (5, 0, 5, 0, 1), (2, 776, 2, 776, 1), (0, 0, 1, 0, 4096)))


def test_runs_without_bytes_copy_nothing(pair: Pair) -> None:
    check(pair, runs_of((0, 5, 1, 5, 0), (0, 4096, 1, 4096, 0), (2, 3, 2, 7, 2), (5, 1, 5, 1, 0)))


def test_a_read_without_runs_succeeds(pair: Pair) -> None:
    check(pair, runs_of())


@pytest.mark.parametrize("step", [17, -17])
def test_runs_that_adjoin_keep_their_edges(pair: Pair, step: int) -> None:
    """Ascending and descending, on both sides and on one side only."""
    for spread in (17, 40):
        starts = [2000 + step * i for i in range(40)]
        check(pair, runs_of(*((0, s, 1, 20 + spread * i, 17) for i, s in enumerate(starts))))
        check(pair, runs_of(*((3, 20 + spread * i, 4, s, 17) for i, s in enumerate(starts))))


def test_one_source_feeds_several_destinations(pair: Pair) -> None:
    check(pair, runs_of((0, 50, 1, 0, 300), (0, 50, 1, 400, 300), (0, 100, 4, 7, 300), (0, 200, 2, 300, 200)))


def test_runs_that_overlap_with_the_same_bytes_arrive(pair: Pair) -> None:
    check(pair, runs_of((0, 0, 1, 100, 300), (0, 200, 1, 300, 300), (0, 100, 1, 200, 50), (0, 0, 1, 100, 300)))


@pytest.mark.parametrize("size", [40 * 2**20 + 13])
def test_a_run_longer_than_any_step_arrives_whole(plane: Plane, size: int) -> None:
    with Pair(plane, (size, size)) as pair:
        pair.reader.read("lease", runs_of((0, 3, 0, 1, size - 5), (1, 3, 1, 1, size - 5)), TIMEOUT_S)
        for source, dest in zip(pair.source.arrays, pair.dest.arrays, strict=True):
            assert np.array_equal(dest[1:-4], source[3:-2])
        del source, dest


def shares(whole: Runs, num: int) -> list[Runs]:
    """Every `num`-th run each."""
    return [Runs(**{field.name: getattr(whole, field.name)[i::num] for field in fields(Runs)}) for i in range(num)]


def test_reads_run_side_by_side(pair: Pair) -> None:
    expected = Region(0)
    expected.bytes[:] = pair.dest.bytes
    whole = random_runs(9, 3000)
    apply(whole, pair.source.arrays, expected.arrays)
    with ThreadPoolExecutor(6) as pool:
        for done in [
            pool.submit(pair.reader.read, f"l{i}", part, TIMEOUT_S) for i, part in enumerate(shares(whole, 6))
        ]:
            done.result(WAIT_S)
    np.testing.assert_array_equal(pair.dest.bytes, expected.bytes)
    expected.close()


def test_several_readers_share_a_holder(plane: Plane) -> None:
    with ExitStack() as stack:
        source, expected = Region(1), Region(2)
        server = plane.serve(source.buffers, Open())
        for end in (source, expected, server):
            stack.callback(end.close)
        dests = [Region(2) for _ in range(4)]
        readers = [plane.connect(server.endpoint, f"token {i}".encode(), d.buffers) for i, d in enumerate(dests)]
        for end in (*dests, *readers):
            stack.callback(end.close)
        whole = random_runs(5, 800)
        apply(whole, source.arrays, expected.arrays)
        pool = stack.enter_context(ThreadPoolExecutor(8))
        reads = [pool.submit(one.read, "lease", part, TIMEOUT_S) for one in readers for part in shares(whole, 2)]
        for done in reads:
            done.result(WAIT_S)
        for dest in dests:
            np.testing.assert_array_equal(dest.bytes, expected.bytes)


# ---- what is refused

OUTSIDE = [
    (6, 0, 0, 0, 1),
    (-1, 0, 0, 0, 1),
    (0, -1, 0, 0, 1),
    (0, 0, 0, 0, -1),
    (0, 4096, 0, 0, 1),
    (0, 2**63 - 1, 0, 0, 2**63 - 1),
    (0, 0, 6, 0, 1),
    (0, 0, -1, 0, 1),
    (0, 0, 0, -1, 1),
    (3, 0, 0, 0, 4097),
    (0, 0, 2, 777, 1),
]


@pytest.fixture(scope="module")
def bounded(plane: Plane) -> Iterator[Pair]:
    with Pair(plane, guard=Bounds()) as made:
        yield made


@pytest.mark.parametrize("run", OUTSIDE)
def test_a_run_outside_the_buffers_fails_and_writes_nothing(bounded: Pair, run: tuple[int, int, int, int, int]) -> None:
    before = bounded.dest.bytes.copy()
    with pytest.raises(PlaneError, match="of buffer"):
        bounded.reader.read("lease", runs_of((0, 0, 0, 0, 8), run), TIMEOUT_S)
    np.testing.assert_array_equal(bounded.dest.bytes, before)


def test_a_reader_is_of_use_after_a_refusal(bounded: Pair) -> None:
    with pytest.raises(PlaneError):
        bounded.reader.read("lease", runs_of((0, 4096, 0, 0, 1)), TIMEOUT_S)
    check(bounded, random_runs(2, 50))


def connect_and_read(plane: Plane, endpoint: Mapping[str, object], token: bytes, dest: Region, runs: Runs) -> None:
    reader = plane.connect(endpoint, token, dest.buffers)
    try:
        reader.read("lease", runs, TIMEOUT_S)
    finally:
        reader.close()


@pytest.mark.parametrize("name", planes("token"))
def test_who_does_not_know_the_token_gets_no_byte(name: str) -> None:
    plane, source, dest = make(name), Region(1), Region(2)
    before = dest.bytes.copy()
    server = plane.serve(source.buffers, Secret())
    for token in (b"", b"secre", b"secret ", b"SECRET", bytes(64)):
        with pytest.raises(PlaneError):
            connect_and_read(plane, server.endpoint, token, dest, runs_of((0, 0, 0, 0, 8)))
    np.testing.assert_array_equal(dest.bytes, before)
    reader = plane.connect(server.endpoint, b"secret", dest.buffers)
    read_and_compare(reader, source, dest, random_runs(1, 50))
    for end in (reader, server, source, dest):
        end.close()


@pytest.mark.parametrize("name", planes("lease"))
def test_an_ended_lease_is_refused_before_a_byte_moves(name: str) -> None:
    with Pair(make(name), guard=Ended()) as pair:
        before = pair.dest.bytes.copy()
        with pytest.raises(ReadRefused, match="the lease has ended"):
            pair.reader.read("lease", random_runs(1, 50), TIMEOUT_S)
        np.testing.assert_array_equal(pair.dest.bytes, before)


@pytest.mark.parametrize("bad", [None, "x", -1, 2**70, 1.5, b"", [], True, {}])
def test_any_endpoint_field_can_be_nonsense(plane: Plane, pair: Pair, bad: object) -> None:
    endpoint = dict(pair.server.endpoint)
    for name in endpoint:
        for forged in ({**endpoint, name: bad}, {k: v for k, v in endpoint.items() if k != name}):
            with pytest.raises(PlaneUnavailable):
                plane.connect(forged, b"token", pair.dest.buffers)
    with pytest.raises(PlaneUnavailable):
        plane.connect(bad, b"token", pair.dest.buffers)  # type: ignore[arg-type]


def test_an_endpoint_of_another_plane_is_refused(plane: Plane, pair: Pair) -> None:
    source = Region(1)
    for other in (make_plane(name, host=HOST) for name in ("memory", "shm", "tcp") if name != plane.name):
        server = other.serve(source.buffers, Open())
        with pytest.raises(PlaneUnavailable):
            plane.connect(server.endpoint, b"token", pair.dest.buffers)
        server.close()
    source.close()


def test_lists_of_an_endpoint_can_be_cut_short(plane: Plane, pair: Pair) -> None:
    """A shorter list of buffers is refused, or what it lacks cannot be read."""
    endpoint = dict(pair.server.endpoint)
    for name in [name for name, value in endpoint.items() if isinstance(value, list)]:
        forged = {**endpoint, name: endpoint[name][:-1]}
        with pytest.raises(PlaneError):
            connect_and_read(plane, forged, b"token", pair.dest, runs_of((len(LENS) - 1, 0, 0, 0, 1)))


def test_an_endpoint_survives_msgpack(plane: Plane, pair: Pair) -> None:
    dest = Region(2)
    reader = plane.connect(msgpack.unpackb(msgpack.packb(dict(pair.server.endpoint))), b"token", dest.buffers)
    reader.read("lease", runs_of((0, 0, 0, 0, 4096)), TIMEOUT_S)
    assert np.array_equal(dest.arrays[0], pair.source.arrays[0])
    reader.close()
    dest.close()


# ---- between processes


@pytest.mark.parametrize("name", planes("other processes"))
def test_a_read_between_processes_copies_exactly(name: str) -> None:
    plane, source, dest = make(name), Region(1), Region(2)
    with OtherHolder(name) as holder:
        reader = plane.connect(holder.endpoint, b"token", dest.buffers)
        read_and_compare(reader, source, dest, random_runs(4, 1000))
        for end in (reader, source, dest):
            end.close()


def test_memory_joins_one_process_only() -> None:
    plane, source = make_plane("memory", host=""), Region(1)
    server = plane.serve(source.buffers, Open())
    with Other("read", "memory", msgpack.packb(dict(server.endpoint)).hex(), *map(str, LENS)) as other:
        assert other.hello == "the holder is another process"
    server.close()
    source.close()


# ---- names


def test_what_a_plane_cannot_promise_is_said_of_known_planes() -> None:
    assert {name for name, _ in CANNOT} <= set(PLANE_NAMES)
    assert planes("lease") == ["tcp"]


def test_an_unknown_plane_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown data plane 'rdma', known are memory, shm, mooncake, tcp"):
        make_plane("rdma", host=HOST)
