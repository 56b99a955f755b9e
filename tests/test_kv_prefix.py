"""Laws of the prefix cache on small, written-out cases."""

import os
import subprocess
import sys

import pytest

from kv_cache import KVCacheManager, PrefixCache, PrefixHit, create_single_type_managers
from kv_cache.prefix_cache import CachingBlockPool
from tests.kv_model import new_info

PROMPT = tuple(range(100, 117))  # 17 tokens: four blocks of 4, and one token more


def new_cached(
    block_nums: dict[str, int], block_size: int = 4, window: int = 8, cache: PrefixCache | None = None
) -> KVCacheManager:
    managers = create_single_type_managers(new_info(list(block_nums), block_size, window), block_nums, 64)
    info = new_info(list(block_nums), block_size, window)
    return KVCacheManager(managers, info, 64, prefix_cache=cache or PrefixCache("model"))


def run(kv: KVCacheManager, request_id: str, tokens: tuple[int, ...], salt: str = "") -> PrefixHit:
    """Computes all of a prompt in one step; returns what it did not have to compute."""
    hit = kv.find_prefix(tokens, salt)
    assert kv.allocate_slots(request_id, hit.num_tokens, len(tokens) - hit.num_tokens, prefix=hit)
    kv.commit(request_id, tokens, len(tokens))
    kv.check()
    return hit


@pytest.mark.parametrize("length", [4, 8, 12, 16])
def test_at_least_one_token_is_computed_and_later_runs_hit_alike(length: int) -> None:
    kv = new_cached({"FullAttention": 20})
    hits = []
    for i in range(3):
        hits.append(run(kv, f"r{i}", PROMPT[:length]).num_tokens)
        kv.free(f"r{i}")
    assert hits == [0, length - 4, length - 4]


def test_only_full_computed_blocks_are_visible() -> None:
    """Block size 4, chunk 3: none after 3 tokens, one after 6."""
    kv = new_cached({"FullAttention": 20})
    assert kv.allocate_slots("r", 0, 3, prefix=kv.find_prefix(PROMPT))
    kv.commit("r", PROMPT, 3)
    assert kv.find_prefix(PROMPT).num_tokens == 0
    assert kv.allocate_slots("r", 3, 3)
    assert kv.find_prefix(PROMPT).num_tokens == 0
    kv.commit("r", PROMPT, 6)
    assert kv.find_prefix(PROMPT).num_tokens == 4


def test_equal_prompts_of_one_step_compute_alone_and_keep_one_copy() -> None:
    kv = new_cached({"FullAttention": 50})
    hits = [kv.find_prefix(PROMPT) for _ in range(8)]
    for i, hit in enumerate(hits):
        assert kv.allocate_slots(f"r{i}", 0, 17, prefix=hit)
    tables = [kv.get_block_ids(f"r{i}")["FullAttention"] for i in range(8)]
    assert len({block for table in tables for block in table}) == 40
    for i in range(8):
        kv.commit(f"r{i}", PROMPT, 17)
        kv.free(f"r{i}")
        kv.check()
    assert kv.usage()["FullAttention"].cached == 4


def test_sharing_counts_each_block_once_until_its_last_user_goes() -> None:
    kv = new_cached({"FullAttention": 11})
    run(kv, "a", PROMPT)
    run(kv, "b", PROMPT)
    assert kv.usage()["FullAttention"].used == 6
    assert kv.usage()["FullAttention"].hit_tokens == 16
    kv.lease("a", "l")
    assert (kv.usage()["FullAttention"].used, kv.usage()["FullAttention"].leased) == (5, 1)
    kv.free("b")
    assert (kv.usage()["FullAttention"].used, kv.usage()["FullAttention"].leased) == (0, 5)
    kv.release_lease("l")
    assert kv.usage()["FullAttention"].cached == 4
    kv.check()


def test_a_prompts_tail_is_evicted_first_and_blocks_without_content_before() -> None:
    kv = new_cached({"FullAttention": 8})
    run(kv, "a", PROMPT)
    kv.free("a")
    assert kv.allocate_slots("b", 0, 12)
    assert kv.usage()["FullAttention"].evicted == 0
    for num_left in (12, 8, 4, 0):
        assert kv.allocate_slots("b", 24 - num_left, 4)
        assert kv.find_prefix(PROMPT).num_tokens == num_left
        kv.check()
    assert kv.usage()["FullAttention"].evicted == 4


def test_the_least_recently_used_content_goes_first() -> None:
    kv = new_cached({"FullAttention": 6})
    prompts = [(i,) * 4 + (9,) for i in range(2)]
    for i in (0, 1, 0):
        run(kv, "r", prompts[i])
        kv.free("r")
    assert kv.allocate_slots("big", 0, 16)
    assert [kv.find_prefix(prompt).num_tokens for prompt in prompts] == [4, 0]


def test_a_reused_block_is_not_found_under_its_old_content() -> None:
    kv = new_cached({"FullAttention": 6})
    run(kv, "a", PROMPT)
    kv.free("a")
    run(kv, "b", tuple(range(17)))
    assert kv.find_prefix(PROMPT).num_tokens == 0
    kv.check()


def test_a_window_hit_needs_the_blocks_before_it() -> None:
    """W=4, B=2, 8 tokens, the window group holds only blocks 2 and 3: the hit must be shortened below, so it is 0."""
    kv = new_cached({"FullAttention": 10, "SlidingWindow": 10}, block_size=2, window=4)
    tokens = tuple(range(8))
    hit = kv.find_prefix(tokens)
    assert kv.allocate_received_slots("r", 7, 1, prefix=hit)
    kv.commit("r", tokens, 8)
    assert kv.get_block_ids("r")["SlidingWindow"][:2] == [0, 0]
    assert kv.find_prefix(tokens).num_tokens == 0
    assert kv.find_prefix((*tokens, 1)).num_tokens == 8


def test_only_equal_salt_shares() -> None:
    kv = new_cached({"FullAttention": 30}, cache=PrefixCache("model", lambda content: b""))
    run(kv, "a", PROMPT, "one")
    assert run(kv, "b", PROMPT, "two").num_tokens == 0
    assert run(kv, "c", PROMPT).num_tokens == 0
    assert run(kv, "d", PROMPT, "one").num_tokens == 16


def test_lookups_that_are_not_used_hold_nothing() -> None:
    kv = new_cached({"FullAttention": 6})
    run(kv, "a", PROMPT)
    kv.free("a")
    hits = [kv.find_prefix(PROMPT) for _ in range(20)]
    assert kv.allocate_slots("b", 0, 20)
    kv.check()
    kv.free("b")
    assert not kv.allocate_slots("c", 16, 1, prefix=hits[0])
    assert not kv.owns_blocks("c")
    with pytest.raises(ValueError, match="look it up again"):
        kv.num_blocks_needed("c", 16, 17, hits[0])


def test_cached_blocks_taken_over_count_against_what_is_free() -> None:
    kv = new_cached({"FullAttention": 7})
    run(kv, "a", PROMPT)
    kv.free("a")
    hit = kv.find_prefix(PROMPT)
    assert kv.num_blocks_needed(None, 16, 25, hit) == {"FullAttention": 7}
    assert not kv.allocate_slots("b", 16, 9, prefix=hit)
    assert kv.num_free_blocks() == {"FullAttention": 6}
    assert kv.allocate_slots("b", 16, 8, prefix=hit)
    kv.check()


@pytest.mark.parametrize("num_cached", [0, 4, 8, 12])
def test_received_blocks_follow_those_that_are_here(num_cached: int) -> None:
    kv = new_cached({"FullAttention": 30})
    run(kv, "a", PROMPT[: num_cached + 1])
    hit = kv.find_prefix(PROMPT)
    assert hit.num_tokens == num_cached
    assert kv.allocate_received_slots("b", 16, 1, prefix=hit)
    shared = num_cached // 4
    first, second = (kv.get_block_ids(r)["FullAttention"] for r in "ab")
    assert first[:shared] == second[:shared]
    assert len(second) == 5
    assert not set(first) & set(second[shared:])


def test_content_hashes_are_equal_in_all_processes_and_depend_on_model_salt_and_past() -> None:
    code = (
        "from kv_cache import PrefixCache\n"
        "for model, salt, first in (('m', '', 1), ('n', '', 1), ('m', 's', 1), ('m', '', 3), ('ms', '', 1)):\n"
        "    cache = PrefixCache(model)\n"
        "    child = cache._child(cache._root(salt), (first, 2))\n"
        "    print(cache._child(child, (7, 8)).key.hex())\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0].split())) == 5


def test_twenty_thousand_short_requests_leave_no_entry_behind() -> None:
    cache = PrefixCache("model")
    kv = new_cached({"FullAttention": 6}, cache=cache)
    for i in range(20_000):
        tokens = (i,) * 6
        assert kv.allocate_slots("r", 0, 6, prefix=kv.find_prefix(tokens, str(i)))
        if i % 2:
            kv.commit("r", tokens, 6)
        kv.free("r")
    kv.check()
    assert len(cache._index) == len(cache._roots) == kv.usage()["FullAttention"].cached <= 5
    assert not cache._ends


def test_misuse_is_refused_by_name() -> None:
    plain = new_cached({"FullAttention": 6})
    assert plain.allocate_slots("r", 0, 4)
    with pytest.raises(ValueError, match="did not start with a prefix"):
        plain.commit("r", PROMPT, 4)
    with pytest.raises(ValueError, match="owns blocks already"):
        plain.allocate_slots("r", 0, 4, prefix=plain.find_prefix(PROMPT))
    assert plain.allocate_slots("s", 0, 4, prefix=plain.find_prefix(PROMPT))
    with pytest.raises(ValueError, match="so 5 cannot be computed"):
        plain.commit("s", PROMPT, 5)
    plain.commit("s", PROMPT, 4)
    with pytest.raises(ValueError, match="more than 0 computed"):
        plain.allocate_slots("t", 0, 4, prefix=plain.find_prefix(PROMPT))
    info = new_info(["FullAttention"])
    without = KVCacheManager(create_single_type_managers(info, {"FullAttention": 4}, 64), info, 64)
    with pytest.raises(ValueError, match="without a prefix cache"):
        without.find_prefix(PROMPT)
    with pytest.raises(ValueError, match=r"\['FixedState'\] have none"):
        new_cached({"FixedState": 4})


def test_a_freed_shared_block_cannot_be_freed_again() -> None:
    kv = new_cached({"FullAttention": 6})
    run(kv, "a", PROMPT)
    pool, table = kv.managers["FullAttention"].block_pool, kv.get_block_ids("a")["FullAttention"]
    assert isinstance(pool, CachingBlockPool)
    kv.free("a")
    for blocks in (table[:1], table[4:], [table[1], table[1]]):
        with pytest.raises(ValueError, match="double free"):
            pool.free_blocks(blocks)
    kv.check()


def test_what_others_may_share_is_never_written_again() -> None:
    kv = new_cached({"FullAttention": 20, "SlidingWindow": 20})
    for request_id in ("a", "b"):
        run(kv, request_id, PROMPT)
        for computed in (0, 8, 15):
            with pytest.raises(ValueError, match=r"first 16 tokens of request .* are shared"):
                kv.allocate_slots(request_id, computed, 1)
        assert kv.allocate_slots(request_id, 16, 1)
    assert kv.allocate_slots("c", 16, 1, prefix=kv.find_prefix(PROMPT))
    with pytest.raises(ValueError, match="are shared"):
        kv.allocate_slots("c", 15, 1)
    kv.check()


def cached_pool(num_usable: int, *, num_first: int = 2) -> tuple[CachingBlockPool, list[list[int]]]:
    """A pool full of unused content, and its blocks by the prompts that filled it, the least recently used first.

    Prompts take turns, `num_first` blocks at a time, so that their blocks lie between each other.
    """
    cache = PrefixCache("model")
    pool = CachingBlockPool(num_usable + 1, 1, cache)
    owned: list[list[int]] = [[], []]
    for turn in range(num_usable // num_first):
        owned[turn % 2] += pool.get_new_blocks(num_first)
    for prompt, blocks in enumerate(owned):
        cache.begin(str(prompt), PrefixHit(salt=str(prompt), nodes=(), num_tokens=0))
        for index, node in cache.extend(str(prompt), [prompt] * len(blocks), len(blocks), 1):
            pool.register(blocks[index], node)
        cache.end(str(prompt))
        pool.free_blocks(blocks[::-1])
    return pool, owned


def test_spare_content_is_evicted_for_a_long_run_up_to_an_eighth_of_the_pool() -> None:
    pool, _ = cached_pool(64)
    taken = pool.get_new_blocks(4)  # the oldest prompt's blocks lie in pairs: no run of four among them
    assert pool.num_evicted == 64 // 8
    assert pool.num_free_blocks == 64 - len(taken)
    pool.free_blocks(taken)
    pool.check([])


def test_no_content_is_evicted_while_a_run_without_is_long_enough() -> None:
    pool, owned = cached_pool(64, num_first=32)
    pool.free_blocks(pool.get_new_blocks(8))
    assert pool.num_evicted == 8
    assert pool.get_new_blocks(8) == owned[0][-8:]
    assert pool.num_evicted == 8


def test_a_refused_allocation_evicts_nothing() -> None:
    pool, _ = cached_pool(16)
    for n in (-1, 17):
        with pytest.raises(ValueError, match="cannot hand out"):
            pool.get_new_blocks(n)
    assert (pool.num_evicted, pool.num_cached_blocks) == (0, 16)


def test_a_small_pool_gives_up_no_more_content_than_it_must() -> None:
    pool, owned = cached_pool(7, num_first=1)
    assert pool.num_cached_blocks == 7
    assert sorted(pool.get_new_blocks(3)) == sorted(owned[0][:0:-1][:3])
    assert pool.num_evicted == 3
