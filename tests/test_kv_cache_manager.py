"""Laws of the request-level manager on small, written-out cases."""

import itertools

import pytest
import torch
from kv_model import new_info, new_kv

from kv_cache import (
    CacheInvariantError,
    HeapStorage,
    KVCacheManager,
    allocate_cache_tensors,
    create_single_type_managers,
)
from kv_cache.cache_utils import calculate_cache_bytes


def snapshot(kv: KVCacheManager) -> object:
    return [
        (list(m.block_pool._free_map), {r: list(t) for r, t in m.req_to_blocks.items()}) for m in kv.managers.values()
    ]


def test_blocks_needed_is_the_missing_part_of_the_table() -> None:
    for computed, new, block_size in itertools.product(range(12), range(1, 10), (1, 2, 3, 4)):
        kv = new_kv({"FullAttention": 32}, block_size=block_size)
        if computed:
            assert kv.allocate_slots("r", 0, computed)
        owned = -(-computed // block_size)
        expected = max(0, -(-(computed + new) // block_size) - owned)
        assert kv.num_blocks_needed("r", computed, computed + new) == {"FullAttention": expected}
        free = kv.num_free_blocks()["FullAttention"]
        assert kv.allocate_slots("r", computed, new)
        assert free - kv.num_free_blocks()["FullAttention"] == expected
        kv.check()


@pytest.mark.parametrize("order", [("FullAttention", "SlidingWindow"), ("SlidingWindow", "FullAttention")])
@pytest.mark.parametrize("short", ["FullAttention", "SlidingWindow"])
def test_refused_first_allocation_changes_nothing_in_any_type(order: tuple[str, str], short: str) -> None:
    kv = new_kv({attn_type: 4 if attn_type == short else 40 for attn_type in order}, window=64)
    before = snapshot(kv)
    assert not kv.allocate_slots("r", 0, 13)
    assert not kv.allocate_received_slots("r", 12, 1)
    assert snapshot(kv) == before
    assert not kv.owns_blocks("r")
    assert kv.allocate_slots("r", 0, 12)


def test_refused_growth_allocates_nothing_and_keeps_the_request() -> None:
    kv = new_kv({"SlidingWindow": 20, "FullAttention": 5}, window=4)
    assert kv.allocate_slots("r", 0, 16)
    before = kv.get_block_ids("r")
    assert not kv.allocate_slots("r", 16, 1)
    after = kv.get_block_ids("r")
    assert after["FullAttention"] == before["FullAttention"]
    assert after["SlidingWindow"] == [0, 0, 0, before["SlidingWindow"][3]]
    kv.check()


def test_lookahead_gets_blocks_and_never_drives_reclaim() -> None:
    kv = new_kv({"SlidingWindow": 20}, window=8)
    assert kv.allocate_slots("r", 0, 18)
    assert kv.allocate_slots("r", 18, 1, lookahead_tokens=6)
    table = kv.get_block_ids("r")["SlidingWindow"]
    assert [block == 0 for block in table] == [True, True, False, False, False, False, False]


def test_no_block_lies_beyond_the_model_length() -> None:
    kv = new_kv({"FullAttention": 40, "SlidingWindow": 40}, window=4, max_model_len=10)
    assert kv.allocate_slots("r", 0, 9)
    assert kv.allocate_slots("r", 9, 5, lookahead_tokens=5)
    assert kv.allocate_slots("r", 13, 1)
    tables = kv.get_block_ids("r")
    assert {len(table) for table in tables.values()} == {3}
    assert tables["SlidingWindow"].count(0) == 1  # what token 10 would see, not what token 13 would
    kv.check()


@pytest.mark.parametrize("num_prompt", [4, 8, 12, 16])
def test_first_token_after_a_full_block_owns_one_more(num_prompt: int) -> None:
    kv = new_kv({"FullAttention": 10, "SlidingWindow": 10}, window=64)
    assert kv.allocate_received_slots("r", num_prompt, 1)
    assert {len(table) for table in kv.get_block_ids("r").values()} == {num_prompt // 4 + 1}


def test_admission_of_received_kv_includes_the_next_block() -> None:
    """7 usable blocks of 4 tokens, prompts of 16 and 12: each needs one block more, so one after the other."""
    kv = new_kv({"FullAttention": 8})
    assert kv.num_blocks_needed(None, 16, 17) == {"FullAttention": 5}
    assert kv.allocate_received_slots("a", 16, 1)
    assert kv.num_blocks_needed(None, 12, 13) == {"FullAttention": 4}
    assert not kv.allocate_received_slots("b", 12, 1)
    assert kv.allocate_slots("a", 17, 1)
    kv.free("a")
    assert kv.allocate_received_slots("b", 12, 1)


def test_a_windowed_prompt_is_charged_for_window_and_chunk() -> None:
    """22 usable blocks, window 8, block size 4, chunk 8: a prompt of 64 tokens takes 5 at most and finishes."""
    kv = new_kv({"SlidingWindow": 23}, window=8, max_model_len=100, max_step_tokens=8)
    assert kv.peak_blocks_needed(64) == {"SlidingWindow": 5}
    assert kv.can_ever_hold(100)
    for request in "abcd":  # together they need 64 blocks without reclaim
        assert kv.allocate_slots(request, 0, 8)
    for computed in range(8, 64, 8):
        for request in "abcd":
            assert kv.allocate_slots(request, computed, 8)
            kv.check()
    for request in "abcd":
        kv.free(request)
    assert kv.num_free_blocks() == kv.num_usable_blocks() == {"SlidingWindow": 22}


@pytest.mark.parametrize(("usable", "fits"), [(4, False), (5, True)])
def test_what_can_ever_be_held_depends_on_usable_blocks_only(usable: int, fits: bool) -> None:
    kv = new_kv({"FullAttention": usable + 1}, max_model_len=40)
    assert kv.can_ever_hold(17) is fits
    assert kv.allocate_slots("other", 0, 16)
    assert kv.can_ever_hold(17) is fits


def test_more_than_the_model_length_is_never_held() -> None:
    kv = new_kv({"FullAttention": 40, "SlidingWindow": 40}, max_model_len=40)
    assert kv.can_ever_hold(40)
    assert not kv.can_ever_hold(41)


def test_usage_counts_real_blocks_only() -> None:
    kv = new_kv({"FullAttention": 11, "SlidingWindow": 9}, window=5)
    assert kv.format_usage() == "full:0/10,sliding:0/8"
    assert kv.allocate_received_slots("r", 16, 1)
    assert kv.format_usage() == "full:5/10,sliding:2/8"
    kv.free("r")
    assert kv.format_usage() == "full:0/10,sliding:0/8"


def test_a_returned_table_is_a_copy() -> None:
    kv = new_kv({"FullAttention": 11})
    assert kv.allocate_slots("r", 0, 8)
    kv.get_block_ids("r")["FullAttention"].clear()
    kv.check()
    assert len(kv.get_block_ids("r")["FullAttention"]) == 2


def test_ids_are_matched_exactly() -> None:
    kv = new_kv({"FullAttention": 11})
    assert kv.allocate_slots("req-10", 0, 8)
    for call in (kv.free, kv.get_block_ids):
        with pytest.raises(KeyError, match="'req-1' owns no blocks"):
            call("req-1")
    assert kv.owns_blocks("req-10")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("", 0, 1), "must not be empty"),
        (("r", 0, 0), "at least 1 new token"),
        (("r", 0, -3), "at least 1 new token"),
        (("r", -1, 1), "negative"),
        (("r", 0, 1, -1), "negative"),
        (("r", 0, 8, 1), "exceed the 8 tokens of one step"),
        (("r", 5, 1), "blocks for 4 tokens"),
        (("new", 1, 1), "blocks for 0 tokens"),
    ],
)
def test_impossible_allocations_are_refused_unchanged(args: tuple[str, int, int], message: str) -> None:
    kv = new_kv({"FullAttention": 9, "SlidingWindow": 9}, window=2, max_step_tokens=8)
    assert kv.allocate_slots("r", 0, 4)
    before = snapshot(kv)
    with pytest.raises(ValueError, match=message):
        kv.allocate_slots(*args)
    assert snapshot(kv) == before


def test_a_running_request_cannot_receive_its_first_tokens() -> None:
    kv = new_kv({"FullAttention": 9})
    assert kv.allocate_slots("r", 0, 4)
    with pytest.raises(ValueError, match="owns blocks already"):
        kv.allocate_received_slots("r", 4, 1)


def test_a_recount_finds_every_kind_of_damage() -> None:
    def damaged(name: str) -> KVCacheManager:
        kv = new_kv({"FullAttention": 9, "SlidingWindow": 9}, window=4)
        assert kv.allocate_slots("a", 0, 8)
        assert kv.allocate_received_slots("b", 8, 1)
        kv.check()
        full, sliding = kv.managers.values()
        if name == "lost":
            full.req_to_blocks["a"].pop()
        elif name == "doubled":
            full.req_to_blocks["a"][0] = full.req_to_blocks["b"][0]
        elif name == "null where a token looks":
            full.block_pool.free_blocks([full.req_to_blocks["a"][0]])
            full.req_to_blocks["a"][0] = 0
        elif name == "hole":
            sliding.block_pool.free_blocks([sliding.req_to_blocks["a"][1]])
            sliding.req_to_blocks["a"][1] = 0
        elif name == "one type only":
            sliding.free("a")
        elif name == "miscounted":
            full.block_pool._free_map.num_free -= 1
        return kv

    for name in ("lost", "doubled", "null where a token looks", "hole", "one type only", "miscounted"):
        with pytest.raises(CacheInvariantError):
            damaged(name).check()


def test_exported_buffers_follow_layer_then_definition_order() -> None:
    tensors: dict[tuple[int, str], torch.Tensor] = {}
    info = new_info(["SlidingWindow", "FullAttention"], layers=(3, 0, 11, 2), tensors=tensors)
    block_nums = {"FullAttention": 5, "SlidingWindow": 3}
    exported = allocate_cache_tensors(info, block_nums, HeapStorage(calculate_cache_bytes(info, block_nums)))
    managers = create_single_type_managers(info, block_nums, 64)
    ptrs, lens, item_lens, types = KVCacheManager(managers, info, 64, exported).get_contiguous_buf_infos()
    expected = [(layer, name) for layer in (0, 2, 3, 11) for name in ("SlidingWindow_cache", "FullAttention_cache")]
    assert ptrs == [tensors[key].data_ptr() for key in expected]
    assert types == ["SlidingWindow", "FullAttention"] * 4
    assert item_lens == [4 * 2 * 3 * 4] * 8
    assert lens == [item * block_nums[t] for item, t in zip(item_lens, types, strict=True)]
    with pytest.raises(ValueError, match="8 paged caches, given: 0 tensors"):
        KVCacheManager(managers, info, 64).get_contiguous_buf_infos()


def test_a_manager_without_attention_types_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one attention type"):
        KVCacheManager({}, new_info(["FullAttention"]), 64)
