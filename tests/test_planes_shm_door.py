"""The door of the `shm` plane opens to a known token alone, and whatever strangers or rogues do, others get through."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from plane_memory import SECRET, Open, Region, Secret, random_runs
from plane_suite import TIMEOUT_S, WAIT_S, OtherHolder, read_and_compare

from transfer.guard import ReadGuard
from transfer.layout import EngineLayout
from transfer.planes import shm_server
from transfer.planes.base import Buffers, Guard, PlaneError, PlaneUnavailable
from transfer.planes.shm import ShmPlane, ShmReader, ShmServer
from transfer.planes.shm_server import MAX_STRANGERS, OPEN, address_of

PLANE = ShmPlane()
HERE = {"host": "here", "network_namespace": 1}


@pytest.fixture(scope="module")
def source() -> Iterator[Region]:
    region = Region(1)
    yield region
    region.close()


@pytest.fixture(scope="module")
def dest() -> Iterator[Region]:
    region = Region(2)
    yield region
    region.close()


@pytest.fixture
def server(source: Region) -> Iterator[ShmServer]:
    made = PLANE.serve(source.buffers, Secret())
    yield made
    made.close()


def door_of(server: ShmServer) -> str:
    door = server.endpoint["door"]
    assert isinstance(door, str)
    return door


def knock(server: ShmServer) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(address_of(door_of(server)))  # waits for a place in the queue, which a timeout would not
    sock.settimeout(WAIT_S)
    return sock


def is_ended(sock: socket.socket) -> bool:
    """Waits for the other side's end; whatever it says before is passed over."""
    while True:
        try:
            if not sock.recv(4096):
                return True
        except ConnectionResetError:
            return True


def check_read(server: ShmServer, source: Region, dest: Region) -> None:
    reader = PLANE.connect(server.endpoint, SECRET, dest.buffers)
    read_and_compare(reader, source, dest, random_runs(3, 50))
    reader.close()


@pytest.mark.parametrize("token", [b"secre", b"secret ", b"\0", bytes(256), bytes(257), b"x" * 100_000])
def test_a_wrong_token_is_refused_and_gets_no_descriptor(server: ShmServer, token: bytes) -> None:
    with knock(server) as sock:
        sock.send(token)
        answer, descriptors, *_ = socket.recv_fds(sock, 4096, 4)
        assert answer == b"the holder does not know this reader's token"
        assert descriptors == []
        assert is_ended(sock)


def test_what_is_handed_out_can_be_read_alone(server: ShmServer) -> None:
    with knock(server) as sock:
        sock.send(SECRET)
        answer, (fd,), *_ = socket.recv_fds(sock, 4096, 4)
    assert answer == OPEN
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    size = os.fstat(fd).st_size
    with mmap.mmap(fd, size, prot=mmap.PROT_READ), pytest.raises(PermissionError):
        mmap.mmap(fd, size)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    os.close(fd)


def test_a_token_that_was_forgotten_opens_nothing_and_ends_its_connection(source: Region, dest: Region) -> None:
    guard = ReadGuard(EngineLayout(version=1, model="m", buffers=()))
    guard.register_reader(b"alice")
    guard.register_reader(b"bob")
    server = PLANE.serve(source.buffers, guard)
    alice = PLANE.connect(server.endpoint, b"alice", dest.buffers)
    guard.forget_reader(b"alice")
    with pytest.raises(PlaneUnavailable, match="does not know this reader's token"):
        PLANE.connect(server.endpoint, b"alice", dest.buffers)
    bob = PLANE.connect(server.endpoint, b"bob", dest.buffers)  # now at the latest alice's connection is gone
    with pytest.raises(PlaneError, match="closed its shared memory"):
        alice.read("lease", random_runs(1, 5), TIMEOUT_S)
    bob.read("lease", random_runs(1, 5), TIMEOUT_S)
    for end in (alice, bob, server):
        end.close()


def nothing(sock: socket.socket) -> None:
    """Connects, and that was all."""


def an_empty_message(sock: socket.socket) -> None:
    sock.send(b"")


def half_a_token(sock: socket.socket) -> None:
    sock.send(SECRET[:3])
    sock.send(SECRET[3:])


def a_flood(sock: socket.socket) -> None:
    for size in range(1, 2000, 7):
        sock.send(os.urandom(size))


def a_descriptor_of_its_own(sock: socket.socket) -> None:
    socket.send_fds(sock, [b"take this"], [0, 1, 2])


def half_closed(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize(
    "act", [nothing, an_empty_message, half_a_token, a_flood, a_descriptor_of_its_own, half_closed]
)
@pytest.mark.parametrize("goes", [True, False])
def test_a_reader_gets_in_whatever_strangers_do(
    server: ShmServer, source: Region, dest: Region, act: Callable[[socket.socket], None], goes: bool
) -> None:
    strangers = [knock(server) for _ in range(5)]
    for sock in strangers:
        with contextlib.suppress(OSError):  # the door may be shut meanwhile
            act(sock)
        if goes:
            sock.close()
    check_read(server, source, dest)
    for sock in strangers:
        sock.close()


def test_a_reader_that_speaks_again_is_put_out(server: ShmServer, dest: Region) -> None:
    with knock(server) as sock:
        sock.send(SECRET)
        _, (fd,), *_ = socket.recv_fds(sock, 4096, 1)
        os.close(fd)
        sock.send(b"more")
        assert is_ended(sock)


def test_a_stranger_that_says_nothing_is_put_out_in_time(source: Region) -> None:
    server = ShmServer(source.buffers, Open(), HERE, greeting_s=0.0)
    with knock(server) as sock:
        assert is_ended(sock)
    server.close()


def test_silent_strangers_take_each_others_place_but_no_readers(
    server: ShmServer, source: Region, dest: Region
) -> None:
    reader = PLANE.connect(server.endpoint, SECRET, dest.buffers)
    strangers = [knock(server) for _ in range(MAX_STRANGERS + 3)]
    check_read(server, source, dest)
    for sock in strangers[:4]:  # the reader took one's place, too
        assert is_ended(sock)
    reader.read("lease", random_runs(1, 5), TIMEOUT_S)
    reader.close()
    for sock in strangers:
        sock.close()


def test_a_full_queue_at_the_door_is_waited_for(server: ShmServer, dest: Region) -> None:
    rogue = Rogue(send_with(text=b"not here"))
    crowd = []
    with contextlib.suppress(BlockingIOError):
        while True:
            crowd.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            crowd[-1].setblocking(False)
            crowd[-1].connect(address_of(rogue.door))
    error = rogue.meet(dict(server.endpoint), dest.buffers, num_before=len(crowd) - 1)
    assert str(error) == "not here"
    for sock in crowd:
        sock.close()


def test_readers_are_limited_and_one_that_goes_makes_room(source: Region, dest: Region) -> None:
    server = ShmServer(source.buffers, Open(), HERE, max_readers=1)
    with knock(server) as first, knock(server) as second:
        first.send(b"a")
        _, fds, *_ = socket.recv_fds(first, 4096, 1)
        second.send(b"b")
        assert second.recv(4096) == b"the holder serves 1 readers already"
    with knock(server) as third:  # accepted after the end of the first was seen, or together with it
        third.send(b"c")
        answer, more, *_ = socket.recv_fds(third, 4096, 1)
    assert answer == OPEN
    for fd in (*fds, *more):
        os.close(fd)
    server.close()


# ---- holders that are no holders, or no more


class Rogue:
    """Listens at a door of its own and answers the one reader with `answer`."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self.door = os.urandom(8).hex()
        self._listener = shm_server._listen(self.door)
        self._listener.settimeout(WAIT_S)
        self._answer = answer

    def meet(self, endpoint: dict[str, object], buffers: Buffers, *, num_before: int = 0) -> Exception | None:
        """What the reader gets for it, whose turn comes after `num_before` others."""
        with ThreadPoolExecutor(1) as pool, self._listener:
            reader: Future[ShmReader] = pool.submit(
                PLANE.connect, {**endpoint, "door": self.door}, SECRET, buffers
            )  # fmt: skip
            for _ in range(num_before):
                self._listener.accept()[0].close()
            sock, _ = self._listener.accept()
            with sock:
                sock.settimeout(WAIT_S)
                assert sock.recv(4096) == SECRET
                self._answer(sock)
            return reader.exception(WAIT_S)  # type: ignore[return-value]


def send_with(*makers: Callable[[], int], text: bytes = OPEN) -> Callable[[socket.socket], None]:
    def answer(sock: socket.socket) -> None:
        fds = [make() for make in makers]
        socket.send_fds(sock, [text], fds)
        for fd in fds:
            os.close(fd)

    return answer


def a_pipe() -> int:
    read_end, write_end = os.pipe()
    os.close(write_end)
    return read_end


def another_file() -> int:
    fd = os.memfd_create("rogue")
    os.ftruncate(fd, 1 << 20)
    return fd


def a_file_on_disk() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda sock: None, "the holder closed the connection"),
        (send_with(), "open"),
        (send_with(text=b"\xff\xfe"), "\ufffd"),
        (send_with(text=b"no" * 5000), "no"),
        (send_with(a_pipe), "is not the file it described"),
        (send_with(another_file), "is not the file it described"),
        (send_with(a_file_on_disk), "is not the file it described"),
        (send_with(another_file, another_file), "is not the file it described"),
        (send_with(another_file, text=b"go away"), "go away"),
    ],
)
def test_a_rogue_at_the_door_is_refused_and_leaves_no_descriptor(
    server: ShmServer, dest: Region, answer: Callable[[socket.socket], None], reason: str
) -> None:
    rogue = Rogue(answer)
    before = len(list(Path("/proc/self/fd").iterdir()))
    error = rogue.meet(dict(server.endpoint), dest.buffers)
    assert isinstance(error, PlaneUnavailable)
    assert reason in str(error)
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 1  # the rogue's own listener


def guard_that(act: Callable[[], None]) -> Guard:
    class Acting(Open):
        def knows(self, token: bytes) -> bool:
            act()
            return True

    return Acting()


def test_a_reader_that_vanished_before_its_answer_disturbs_nobody(source: Region, dest: Region) -> None:
    socks: list[socket.socket] = []
    server = PLANE.serve(source.buffers, guard_that(lambda: socks.pop().close() if socks else None))
    sock = knock(server)
    socks.append(sock)
    sock.send(b"token")
    check_read(server, source, dest)
    server.close()


def test_a_holder_killed_before_it_opened_is_unavailable(dest: Region) -> None:
    with OtherHolder("shm") as holder:
        holder.kill()
        with pytest.raises(PlaneUnavailable, match="the holder's door does not open"):
            PLANE.connect(holder.endpoint, b"token", dest.buffers)


def test_a_holder_killed_while_the_reader_waits_for_its_answer_is_unavailable(dest: Region) -> None:
    """Frozen, it accepts nothing, but its kernel does."""
    with OtherHolder("shm") as holder, ThreadPoolExecutor(1) as pool:
        holder.freeze()
        reader = pool.submit(PLANE.connect, holder.endpoint, b"token", dest.buffers)
        holder.kill()
        assert isinstance(reader.exception(WAIT_S), PlaneUnavailable)


def test_a_holder_killed_while_nothing_is_read_is_found_by_the_next_read(dest: Region) -> None:
    with OtherHolder("shm") as holder:
        reader = PLANE.connect(holder.endpoint, b"token", dest.buffers)
        reader.read("lease", random_runs(1, 5), TIMEOUT_S)
        holder.kill()
        with pytest.raises(PlaneError, match="the holder died or closed its shared memory"):
            reader.read("lease", random_runs(1, 5), TIMEOUT_S)
        reader.close()


def test_a_holder_killed_in_the_middle_of_a_read_fails_that_read(dest: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    with OtherHolder("shm") as holder:
        reader = PLANE.connect(holder.endpoint, b"token", dest.buffers)
        copy, was_alive = reader._copier.copy, []

        def copy_and_kill(runs: object, check: Callable[[], None]) -> None:
            was_alive.append(reader._is_held())
            copy(runs, check)  # type: ignore[arg-type]
            holder.kill()

        monkeypatch.setattr(reader._copier, "copy", copy_and_kill)
        with pytest.raises(PlaneError, match="died or closed its shared memory during the read"):
            reader.read("lease", random_runs(1, 500), TIMEOUT_S)
        assert was_alive == [True]
        reader.close()
