"""Laws every cache storage keeps, and what only shared memory does."""

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kv_cache import cache_storage, shared_file
from kv_cache.cache_storage import ALIGNMENT, CacheStorage, HeapStorage, SharedStorage

NewStorage = Callable[..., CacheStorage]


@pytest.fixture(params=[HeapStorage, SharedStorage])
def new_storage(request: pytest.FixtureRequest) -> Iterator[NewStorage]:
    torch.set_num_threads(1)
    made: list[CacheStorage] = []

    def new(num_bytes: int, *, poison: bool = False) -> CacheStorage:
        made.append(request.param(num_bytes, poison=poison))
        return made[-1]

    yield new
    for storage in made:
        if isinstance(storage, SharedStorage):
            storage.close()


def open_fds() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}


def _is_open(fd: str) -> bool:
    return Path(f"/proc/self/fd/{fd}").is_symlink()


def is_mapped() -> bool:
    return "memfd:pd-kv-cache" in Path("/proc/self/maps").read_text()


def test_pieces_are_aligned_disjoint_and_as_long_as_asked(new_storage: NewStorage) -> None:
    sizes = (1, ALIGNMENT, ALIGNMENT + 1, 1000)
    storage = new_storage(5 * ALIGNMENT)
    pieces = [storage.allocate(size) for size in sizes]
    for i, piece in enumerate(pieces):
        assert piece.dtype is torch.uint8
        assert piece.data_ptr() % ALIGNMENT == 0
        piece.fill_(i + 1)
    assert [piece.numel() for piece in pieces] == list(sizes)
    assert [piece.unique().tolist() for piece in pieces] == [[1], [2], [3], [4]]
    starts = sorted(piece.data_ptr() for piece in pieces)
    assert starts[-1] - starts[0] == 4 * ALIGNMENT


def test_more_than_the_region_is_refused_and_takes_nothing(new_storage: NewStorage) -> None:
    storage = new_storage(2 * ALIGNMENT)
    storage.allocate(1)
    with pytest.raises(ValueError, match=r"cannot hand out \d+ bytes"):
        storage.allocate(2 * ALIGNMENT + 1)
    for num_bytes in (0, -1):
        with pytest.raises(ValueError, match="cannot hand out"):
            storage.allocate(num_bytes)
    assert storage.allocate(ALIGNMENT).numel() == ALIGNMENT


def test_fresh_memory_is_zero_or_poison(new_storage: NewStorage) -> None:
    assert not new_storage(1000).allocate(1000).any()
    poisoned = new_storage(1000, poison=True).allocate(1000)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert poisoned.view(dtype).isnan().all()


@pytest.mark.parametrize("num_bytes", [0, -5])
def test_an_empty_storage_is_refused_and_leaves_nothing_open(new_storage: NewStorage, num_bytes: int) -> None:
    before = open_fds()
    with pytest.raises(ValueError, match="at least 1 byte"):
        new_storage(num_bytes)
    assert open_fds() == before


def test_shared_memory_is_readable_through_the_descriptor_at_the_offset_from_base() -> None:
    with SharedStorage(2 * ALIGNMENT) as storage:
        storage.allocate(3)
        piece = storage.allocate(5)
        piece.copy_(torch.tensor([5, 4, 3, 2, 1], dtype=torch.uint8))
        offset = piece.data_ptr() - storage.base_ptr
        with open(f"/proc/self/fd/{storage.fd}", "rb") as file:
            assert os.fstat(file.fileno()).st_size == storage.num_bytes
            with mmap.mmap(file.fileno(), storage.num_bytes, prot=mmap.PROT_READ) as view:
                assert view[offset : offset + 5] == bytes([5, 4, 3, 2, 1])
                piece[0] = 9
                assert view[offset] == 9


def test_memory_is_backed_unasked_and_keeps_what_was_written_meanwhile() -> None:
    with SharedStorage(32 * ALIGNMENT) as storage:
        piece = storage.allocate(32 * ALIGNMENT)
        piece[:: mmap.PAGESIZE] = 7  # while the thread is at it
        wait_until_backed()
        assert os.fstat(storage.fd).st_blocks * 512 == storage.num_bytes
        assert piece[:: mmap.PAGESIZE].eq(7).all()
        assert not piece[1 :: mmap.PAGESIZE].any()


def test_the_shared_file_keeps_its_size() -> None:
    with SharedStorage(1) as storage:
        for size in (0, 2 * storage.num_bytes):
            with pytest.raises(PermissionError):
                os.ftruncate(storage.fd, size)


def test_the_shared_file_cannot_be_written_but_through_the_owners_mapping() -> None:
    with SharedStorage(1) as storage:
        path = f"/proc/self/fd/{storage.fd}"
        with open(path, "r+b") as again:  # as its owner may, with a descriptor that could write
            for fd in (storage.fd, again.fileno()):
                with pytest.raises(PermissionError):
                    mmap.mmap(fd, storage.num_bytes)
                with pytest.raises(PermissionError):
                    os.pwrite(fd, b"x", 0)
        storage.allocate(3).fill_(7)
        with open(path, "rb") as file:
            assert file.read().count(7) == 3


def test_the_shared_memory_begins_where_huge_pages_do() -> None:
    with SharedStorage(1) as storage:
        assert storage.base_ptr % ALIGNMENT == 0


def wait_until_backed() -> None:
    for thread in threading.enumerate():
        if thread.name == "commit":
            thread.join()


def in_huge_pages(address: int) -> int:
    """Bytes of the shared mapping that begins there."""
    start = Path("/proc/self/smaps").read_text().split(f"\n{address:x}-")[1]
    return int(start.split("ShmemPmdMapped:")[1].split()[0]) * 1024


def test_shared_memory_is_backed_by_huge_pages_where_the_kernel_makes_them() -> None:
    with SharedStorage(3 * ALIGNMENT) as storage:
        storage.allocate(1).fill_(7)
        wait_until_backed()
        if cache_storage._LIBC.madvise(storage.base_ptr, ALIGNMENT, cache_storage._MADV_COLLAPSE) != 0:
            pytest.skip("this kernel makes no huge pages of shared memory")
        assert in_huge_pages(storage.base_ptr) == storage.num_bytes


def test_a_kernel_without_huge_pages_backs_the_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_storage, "_MADV_COLLAPSE", 9999)  # no advice that a kernel knows
    with SharedStorage(3 * ALIGNMENT) as storage:
        wait_until_backed()
        assert os.fstat(storage.fd).st_blocks * 512 == storage.num_bytes


def test_a_kernel_without_the_writers_seal_keeps_the_size_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_file, "_F_SEAL_FUTURE_WRITE", 1 << 20)  # no seal that a kernel knows
    with SharedStorage(1) as storage, pytest.raises(PermissionError):
        os.ftruncate(storage.fd, 0)


def reserved_sizes() -> set[int]:
    """Bytes of each stretch of addresses that is taken and not accessible."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ends = [[int(end, 16) for end in line[0].split("-")] for line in lines if line[1] == "---p"]
    return {end - start for start, end in ends}


def test_a_file_that_cannot_be_mapped_leaves_no_reservation() -> None:
    size = 123 * ALIGNMENT  # like no other
    with pytest.raises(OSError, match="Bad file descriptor"):
        shared_file.map_aligned(1 << 20, size, ALIGNMENT)
    assert size + ALIGNMENT not in reserved_sizes()


def test_close_leaves_neither_descriptor_nor_mapping() -> None:
    before = open_fds()
    storage = SharedStorage(ALIGNMENT)
    storage.allocate(10).fill_(1)
    assert is_mapped()
    storage.close()
    storage.close()
    assert not is_mapped()
    assert open_fds() == before
    with pytest.raises(ValueError, match="0 are left"):
        storage.allocate(1)


def test_a_piece_outlives_its_storage_and_takes_the_mapping_with_it() -> None:
    storage = SharedStorage(ALIGNMENT)
    piece = storage.allocate(10)
    storage.close()
    piece.fill_(3)
    assert piece.tolist() == [3] * 10
    assert is_mapped()
    del piece
    assert not is_mapped()


def test_heap_memory_lies_on_the_named_device() -> None:
    assert HeapStorage(10, "meta").allocate(10).device == torch.device("meta")


@pytest.mark.parametrize("shift", [0, 1, 4096, ALIGNMENT - 1])
def test_a_storage_has_what_was_asked_wherever_its_memory_begins(shift: int) -> None:
    memory = torch.zeros(4 * ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % ALIGNMENT + shift
    storage = CacheStorage(memory[start : start + 2 * ALIGNMENT], poison=False)  # one aligned piece and the slack
    assert storage.allocate(ALIGNMENT).data_ptr() % ALIGNMENT == 0
    with pytest.raises(ValueError, match="0 are left"):
        storage.allocate(1)
