"""Laws of memory in pieces: batches are the bytes in their order, and every byte arrives however it is interrupted."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.planes import vectored
from transfer.planes.vectored import MAX_PIECES, Pieces, receive, send

WAIT_S = 60.0


def pieces_of(area: np.ndarray, runs: list[tuple[int, int]]) -> Pieces:
    """Runs are offset and length in `area`."""
    columns = np.array(runs, np.int64).reshape(-1, 2)
    ptrs = np.array([area.ctypes.data], np.uint64)
    return Pieces.of_runs(ptrs, np.zeros(len(runs), np.int64), columns[:, 0], columns[:, 1])


RUNS = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 10)), max_size=12)


@given(RUNS, st.integers(1, 40))
def test_batches_are_the_bytes_in_their_order(runs: list[tuple[int, int]], most_bytes: int) -> None:
    area = np.arange(100, dtype=np.uint8)
    expected = [int(byte) for offset, length in runs for byte in area[offset : offset + length]]
    pieces, found = pieces_of(area, runs), []
    assert pieces.num_bytes == len(expected)
    while len(found) < pieces.num_bytes:
        batch = pieces.batch(len(found), most_bytes)
        assert 0 < batch[:, 1].sum() <= most_bytes
        for address, length in batch.tolist():
            found += range(address - area.ctypes.data, address - area.ctypes.data + length)
    assert found == expected


def test_a_batch_is_no_more_than_one_call_takes() -> None:
    area = np.zeros(5000, np.uint8)
    pieces = pieces_of(area, [(i, 1) for i in range(3000)])
    assert [len(pieces.batch(start, 10**6)) for start in (0, 1000, 2500)] == [MAX_PIECES, MAX_PIECES, 500]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right = listener.accept()[0]
    yield left, right
    left.close()
    right.close()


def scattered(num_bytes: int) -> list[tuple[int, int]]:
    """Runs of 1 to 700 bytes in any order that cover [0, num_bytes)."""
    rng = np.random.default_rng(0)
    cuts = np.unique(np.concatenate(([0], rng.integers(0, num_bytes, num_bytes // 350), [num_bytes])))
    return rng.permutation(np.stack((cuts[:-1], np.diff(cuts)), axis=1)).tolist()


def test_every_byte_arrives_whatever_the_sizes_of_calls(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectored, "SEND_BYTES", 7001)
    monkeypatch.setattr(vectored, "TAKE_BYTES", 999)
    source, dest = np.random.default_rng(1).integers(0, 256, 10**6, dtype=np.uint8), np.zeros(10**6, np.uint8)
    runs = scattered(len(source))
    sender = threading.Thread(target=send, args=(pair[0], b"head", pieces_of(source, runs)))
    sender.start()
    assert pair[1].recv(4, socket.MSG_WAITALL) == b"head"
    receive([(pair[1], pieces_of(dest, runs))], time.monotonic() + WAIT_S)
    sender.join()
    np.testing.assert_array_equal(dest, source)


def test_signals_during_a_send_lose_and_repeat_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    """The main thread, which signals interrupt, sends more than the kernel buffers; it is signalled, then drained."""
    source, dest = np.random.default_rng(1).integers(0, 256, 2 * 10**7, dtype=np.uint8), np.zeros(2 * 10**7, np.uint8)
    whole = [(0, len(source))]

    def drain() -> None:
        for start in range(0, len(source), 10**6):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            receive([(pair[1], pieces_of(dest, [(start, 10**6)]))], time.monotonic() + WAIT_S)

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    drainer = threading.Thread(target=drain)
    drainer.start()
    send(pair[0], b"", pieces_of(source, whole))
    drainer.join()
    signal.signal(signal.SIGUSR1, before)
    np.testing.assert_array_equal(dest, source)


def test_what_comes_after_the_pieces_stays_in_the_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    dest = np.zeros(10, np.uint8)
    pair[0].sendall(bytes(range(13)))
    receive([(pair[1], pieces_of(dest, [(5, 5), (0, 5)]))], time.monotonic() + WAIT_S)
    assert dest.tolist() == [5, 6, 7, 8, 9, 0, 1, 2, 3, 4]
    assert pair[1].recv(10) == bytes([10, 11, 12])


def test_a_side_that_closes_in_the_middle_is_an_error_and_a_deadline_a_timeout(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    dest = np.zeros(10, np.uint8)
    pair[0].sendall(b"12345")
    with pytest.raises(TimeoutError):
        receive([(pair[1], pieces_of(dest, [(0, 10)]))], time.monotonic())
    pair[0].close()
    with pytest.raises(ConnectionResetError, match="in the middle"):
        receive([(pair[1], pieces_of(dest, [(0, 10)]))], time.monotonic() + WAIT_S)
