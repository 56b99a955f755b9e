"""Laws of the sliding window, exactly, over small block sizes, windows and lengths."""

import itertools
from collections.abc import Sequence

import pytest

from kv_cache.block_pool import BlockPool
from kv_cache.single_type_kv_cache_manager import SlidingWindowManager

BLOCK_SIZES = (1, 2, 4, 8, 16, 128)
WINDOWS = range(1, 21)
LENGTHS = range(1, 65)
MAX_LEN = 80


def new_manager(block_size: int, window: int) -> SlidingWindowManager:
    return SlidingWindowManager("SlidingWindow", BlockPool(MAX_LEN + 1, block_size), block_size, MAX_LEN, window)


def extend(manager: SlidingWindowManager, num_tokens: int, computed_tokens: int = 0) -> None:
    num_new = manager.get_num_blocks_to_allocate("r", num_tokens, computed_tokens)
    manager.allocate_new_blocks("r", num_new, num_tokens)


def num_live(manager: SlidingWindowManager) -> int:
    return sum(block != 0 for block in manager.req_to_blocks["r"])


def assert_visible_is_live(manager: SlidingWindowManager, first_new: int, end: int) -> None:
    """Every position that a token at first_new..end-1 sees lies in a live block."""
    table = manager.req_to_blocks["r"]
    for position in range(max(0, first_new - manager.sliding_window + 1), end):
        assert table[position // manager.block_size] != 0, (table, position)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_reclaimed_blocks_are_exactly_those_no_token_sees(block_size: int) -> None:
    for window, length in itertools.product(WINDOWS, LENGTHS):
        manager = new_manager(block_size, window)
        extend(manager, length)
        manager.remove_skipped_blocks("r", length)
        table = manager.req_to_blocks["r"]
        assert len(table) == -(-length // block_size)
        assert len(table) - num_live(manager) == max(0, length - window + 1) // block_size
        assert_visible_is_live(manager, length, length)
        manager.check()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_token_by_token_decode_agrees_with_reclaim_at_once(block_size: int) -> None:
    for window in WINDOWS:
        manager = new_manager(block_size, window)
        for length in LENGTHS:
            manager.remove_skipped_blocks("r", length - 1)
            extend(manager, length)
            table = manager.req_to_blocks["r"]
            assert len(table) - num_live(manager) == max(0, length - window) // block_size
            assert_visible_is_live(manager, length - 1, length)
            manager.check()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_chunked_prompt_holds_window_and_chunk_only(block_size: int) -> None:
    for window, chunk in itertools.product(WINDOWS, (1, 3, 8, 13)):
        manager = new_manager(block_size, window)
        for computed in range(0, 64, chunk):
            end = min(64, computed + chunk)
            manager.remove_skipped_blocks("r", computed)
            extend(manager, end)
            assert num_live(manager) <= -(-(window - 1 + chunk) // block_size) + 1
            assert num_live(manager) <= manager.get_peak_num_blocks(64, chunk)
            assert_visible_is_live(manager, computed, end)
            manager.check()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_received_prompt_gets_blocks_only_where_a_later_token_looks(block_size: int) -> None:
    for window, length in itertools.product(WINDOWS, LENGTHS):
        manager = new_manager(block_size, window)
        extend(manager, length + 1, computed_tokens=length)
        table = manager.req_to_blocks["r"]
        assert len(table) == -(-(length + 1) // block_size)
        assert len(table) - num_live(manager) == max(0, length - window + 1) // block_size
        assert_visible_is_live(manager, length, length + 1)
        manager.check()


def test_a_thousand_repeats_lose_no_block() -> None:
    manager = new_manager(4, 8)
    for _ in range(1000):
        extend(manager, 64)
        manager.remove_skipped_blocks("r", 64)
        manager.remove_skipped_blocks("r", 64)
        manager.free("r")
    manager.check()
    assert manager.block_pool.num_free_blocks == manager.block_pool.num_usable_blocks


def test_repeated_reclaim_is_harmless_also_with_fewer_tokens_or_no_table() -> None:
    manager = new_manager(4, 8)
    manager.remove_skipped_blocks("r", 64)
    assert manager.req_to_blocks == {}
    extend(manager, 32)
    manager.remove_skipped_blocks("r", 32)
    once = list(manager.req_to_blocks["r"])
    manager.remove_skipped_blocks("r", 32)
    manager.remove_skipped_blocks("r", 10)
    assert manager.req_to_blocks["r"] == once
    manager.check()


def test_reclaim_follows_confirmed_tokens() -> None:
    """Window 8, block size 4, 18 tokens confirmed, one step in flight: blocks 0 and 1 may go, block 2 may not."""
    manager = new_manager(4, 8)
    extend(manager, 19)
    manager.remove_skipped_blocks("r", 18)
    assert [block == 0 for block in manager.req_to_blocks["r"]] == [True, True, False, False, False]


def test_reclaim_looks_at_each_block_once() -> None:
    num_reads = 0

    class CountingTable(list[int]):
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            nonlocal num_reads
            found = super().__getitem__(index)
            num_reads += len(found) if isinstance(index, slice) else 1
            return found

    manager = SlidingWindowManager("SlidingWindow", BlockPool(5001, 1), 1, 5000, 4)
    extend(manager, 5000)
    manager.req_to_blocks["r"] = CountingTable(manager.req_to_blocks["r"])
    for computed in range(5000):
        manager.remove_skipped_blocks("r", computed)
    assert 5000 <= num_reads <= 3 * 5000


def test_a_finished_request_gives_back_its_tail_first() -> None:
    """So that the beginning of a prompt stays longest where content is kept."""
    freed: list[int] = []

    class RecordingPool(BlockPool):
        def free_blocks(self, blocks: Sequence[int]) -> None:
            freed.extend(blocks)
            super().free_blocks(blocks)

    manager = SlidingWindowManager("SlidingWindow", RecordingPool(5, 4), 4, 64, 64)
    extend(manager, 16)
    table = list(manager.req_to_blocks["r"])
    manager.free("r")
    assert freed == table[::-1]
    with pytest.raises(KeyError):
        manager.free("r")
