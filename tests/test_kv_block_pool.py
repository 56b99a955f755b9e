"""Laws of the block pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache.block_pool import BlockPool, CacheInvariantError


def state(pool: BlockPool) -> tuple[list[int], set[int]]:
    return list(pool._free_block_queue), set(pool._free_block_set)


def test_draining_returns_every_usable_block_once_and_never_null() -> None:
    pool = BlockPool(8, 4)
    blocks = pool.get_new_blocks(pool.num_usable_blocks)
    assert sorted(blocks) == list(range(1, 8))
    assert pool.null_block == 0
    assert pool.num_free_blocks == pool.get_num_free_blocks() == 0


def test_blocks_are_reused_in_the_order_they_were_freed() -> None:
    pool = BlockPool(6, 4)
    first = pool.get_new_blocks(5)
    pool.free_blocks([first[3], first[0]])
    pool.free_blocks([first[4]])
    assert pool.get_new_blocks(3) == [first[3], first[0], first[4]]


@pytest.mark.parametrize("n", [-1, 4])
def test_asking_for_more_than_is_free_takes_nothing(n: int) -> None:
    pool = BlockPool(4, 1)
    before = state(pool)
    with pytest.raises(ValueError, match="cannot hand out"):
        pool.get_new_blocks(n)
    assert state(pool) == before


@pytest.mark.parametrize(
    ("blocks", "message"),
    [([1, 2, 1], "double free"), ([1, 5], "double free"), ([1, 6], "ids of this pool"), ([2, -1], "ids of this pool")],
)
def test_a_refused_free_changes_nothing(blocks: list[int], message: str) -> None:
    pool = BlockPool(6, 4)
    pool.get_new_blocks(3)
    before = state(pool)
    with pytest.raises(ValueError, match=message):
        pool.free_blocks(blocks)
    assert state(pool) == before
    pool.check(owned=[1, 2, 3])


def test_null_blocks_in_a_freed_list_are_skipped() -> None:
    pool = BlockPool(4, 4)
    pool.get_new_blocks(3)
    pool.free_blocks([0, 2, 0])
    pool.free_blocks([0])
    pool.check(owned=[1, 3])
    assert pool.get_new_blocks(1) == [2]


@pytest.mark.parametrize("args", [(1, 4), (0, 4), (4, 0), (2**20, 2**12)])
def test_impossible_sizes_are_refused(args: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="block"):
        BlockPool(*args)


@pytest.mark.parametrize("owned", [[1], [1, 2, 2], [1, 2, 3], [0, 1, 2]])
def test_a_recount_finds_lost_doubled_stolen_and_null_blocks(owned: list[int]) -> None:
    pool = BlockPool(5, 4)
    pool.get_new_blocks(2)
    pool.check(owned=[2, 1])
    with pytest.raises(CacheInvariantError, match="each once"):
        pool.check(owned)


@given(st.lists(st.lists(st.integers(-2, 9), max_size=6), max_size=20))
def test_any_sequence_of_frees_keeps_every_block_once(frees: list[list[int]]) -> None:
    pool = BlockPool(8, 2)
    owned = set(pool.get_new_blocks(7))
    for blocks in frees:
        real = [block for block in blocks if block != 0]
        if len(set(real)) == len(real) and owned.issuperset(real):
            pool.free_blocks(blocks)
            owned.difference_update(real)
        else:
            before = state(pool)
            with pytest.raises(ValueError, match="free"):
                pool.free_blocks(blocks)
            assert state(pool) == before
        pool.check(owned)
