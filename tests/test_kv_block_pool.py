"""Laws of the block pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache.block_pool import BlockPool, CacheInvariantError


def state(pool: BlockPool) -> list[int]:
    return list(pool._free_map)


def test_draining_returns_every_usable_block_once_and_never_null() -> None:
    pool = BlockPool(8, 4)
    blocks = pool.get_new_blocks(pool.num_usable_blocks)
    assert sorted(blocks) == list(range(1, 8))
    assert pool.null_block == 0
    assert pool.num_free_blocks == pool.get_num_free_blocks() == 0


def test_the_first_run_that_has_room_is_taken_and_single_blocks_fill_the_lowest_hole() -> None:
    pool = BlockPool(12, 4)
    pool.get_new_blocks(11)
    pool.free_blocks([2, 4, 8, 5, 6, 9])
    assert pool.get_new_blocks(2) == [4, 5]
    assert pool.get_new_blocks(1) == [2]
    assert pool.get_new_blocks(3) == [8, 9, 6]


def test_freed_neighbours_are_one_run_whoever_had_them() -> None:
    pool = BlockPool(9, 4)
    first, second = pool.get_new_blocks(4), pool.get_new_blocks(4)
    pool.free_blocks([second[0], second[1]])
    pool.free_blocks([first[3], first[2]])
    assert pool.get_new_blocks(4) == [first[2], first[3], second[0], second[1]]


def num_runs(blocks: list[int]) -> int:
    return sum(i == 0 or block != blocks[i - 1] + 1 for i, block in enumerate(blocks))


@given(st.sets(st.integers(1, 39)), st.data())
def test_what_one_run_can_hold_is_one_run_and_the_rest_takes_few(free: set[int], data: st.DataObject) -> None:
    """No choice takes fewer pieces than the longest runs; looking for halves takes twice as many at most, and one."""
    pool = BlockPool(40, 4)
    pool.get_new_blocks(39)
    pool.free_blocks(sorted(free))
    n = data.draw(st.integers(0, len(free)))
    starts = [i for i in sorted(free) if i - 1 not in free]
    lengths = sorted((next(j for j in range(40) if i + j not in free) for i in starts), reverse=True)
    fewest = next(k for k in range(len(lengths) + 1) if sum(lengths[:k]) >= n)
    taken = pool.get_new_blocks(n)
    assert len(set(taken)) == n
    assert free.issuperset(taken)
    assert num_runs(taken) <= max(fewest, 2 * fewest + 1 if fewest > 1 else 0)


class SimplePool:
    """What any order of handing out must keep to."""

    def __init__(self, num_blocks: int) -> None:
        self.free = set(range(1, num_blocks))

    def can_free(self, blocks: list[int], num_blocks: int) -> bool:
        real = [block for block in blocks if block]
        known = all(0 < block < num_blocks for block in real)
        return known and len(set(real)) == len(real) and self.free.isdisjoint(real)


@given(st.lists(st.one_of(st.integers(-1, 12), st.lists(st.integers(-1, 12), max_size=6)), max_size=40))
def test_every_sequence_of_calls_ends_like_that_of_a_simple_pool(calls: list[int | list[int]]) -> None:
    """Equally many can be had, the same are free, the same calls are refused; a number takes, a list frees."""
    pool, simple = BlockPool(12, 2), SimplePool(12)
    for call in calls:
        before = state(pool)
        fits = 0 <= call <= len(simple.free) if isinstance(call, int) else simple.can_free(call, 12)
        if not fits:
            with pytest.raises(ValueError, match="free"):
                pool.get_new_blocks(call) if isinstance(call, int) else pool.free_blocks(call)
            assert state(pool) == before
        elif isinstance(call, int):
            taken = pool.get_new_blocks(call)
            assert len(set(taken)) == call
            assert simple.free.issuperset(taken)
            simple.free.difference_update(taken)
        else:
            pool.free_blocks(call)
            simple.free.update(block for block in call if block)
        assert state(pool) == sorted(simple.free)
        pool.check(set(range(1, 12)) - simple.free)


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
