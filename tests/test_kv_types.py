"""Laws of groups and attention types: two groups of one type, fixed states, chunks, and a type from outside."""

from collections.abc import Sequence

import pytest
import torch

from kv_cache import (
    ATTN_TYPE_MANAGER_MAP,
    CacheEntry,
    CacheLayout,
    HeapStorage,
    KVCacheManager,
    LayerCacheInfo,
    ModelCacheInfo,
    SingleTypeKVCacheManager,
    allocate_cache_tensors,
    calculate_block_num,
    calculate_cache_bytes,
    create_single_type_managers,
    get_min_block_nums,
    prepare_block_tables,
    prepare_slot_mapping,
    validate_cache_info,
)
from tests.kv_model import new_entry

LIMITS = {"max_concurrency": 3, "max_model_len": 64, "max_step_tokens": 8}


def info_of(*caches: CacheEntry, layout: CacheLayout = CacheLayout.TOKENS_FIRST) -> ModelCacheInfo:
    layer = LayerCacheInfo(layer_idx=0, caches=list(caches))
    return ModelCacheInfo(num_layers=1, block_size=4, layer_infos=[layer], layout=layout)


def kv_of(info: ModelCacheInfo, **changes: int) -> KVCacheManager:
    validate_cache_info(info)
    nums = calculate_block_num(info, **(LIMITS | changes))
    return KVCacheManager(create_single_type_managers(info, nums, 64), info, 64, max_step_tokens=8)


def test_two_windows_of_one_type_have_separate_tables() -> None:
    near = new_entry("SlidingWindow", 4, cache_name="near", group_key="near")
    far = new_entry("SlidingWindow", 16, cache_name="far")
    kv = kv_of(info_of(near, far))
    for computed in range(0, 32, 8):
        assert kv.allocate_slots("r", computed, 8)
    tables = kv.get_block_ids("r")
    assert [table.count(0) for table in (tables["near"], tables["SlidingWindow"])] == [5, 2]
    slots = prepare_slot_mapping([31], [1], prepare_block_tables([tables]), 4)
    assert {key: slot.item() for key, slot in slots.items()} == {k: t[7] * 4 + 3 for k, t in tables.items()}
    assert kv.format_usage().count("sliding:") == 2


def test_one_group_is_of_one_type() -> None:
    caches = new_entry("FullAttention", group_key="g"), new_entry("SlidingWindow", group_key="g")
    with pytest.raises(ValueError, match="'g' is of attn_type FullAttention, given: SlidingWindow"):
        validate_cache_info(info_of(*caches))


def test_a_state_takes_its_blocks_once_and_never_grows() -> None:
    info = info_of(new_entry("FixedState", next_n=2), new_entry("FullAttention"))
    assert calculate_block_num(info, **LIMITS)["FixedState"] == 3 * 3 + 1
    kv = kv_of(info)
    assert kv.allocate_slots("r", 0, 8)
    state = kv.get_block_ids("r")["FixedState"]
    for computed in range(8, 64):
        assert kv.allocate_slots("r", computed, 1)
        kv.check()
    assert kv.get_block_ids("r")["FixedState"] == state
    assert len(set(state)) == 3
    assert kv.peak_blocks_needed(64) == {"FixedState": 3, "FullAttention": 16}
    assert kv.format_usage() == "state:3/9,full:16/48"


def test_a_chunk_goes_back_when_the_next_one_begins() -> None:
    kv = kv_of(info_of(new_entry("ChunkedLocal", attention_chunk=6)))
    assert kv.allocate_slots("r", 0, 8)
    for computed in range(8, 64):
        assert kv.allocate_slots("r", computed, 1)
        assert kv.get_block_ids("r")["ChunkedLocal"].count(0) == computed // 6 * 6 // 4
        kv.check()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (new_entry("ChunkedLocal"), "attention_chunk must be at least 1, given: None"),
        (new_entry("ChunkedLocal", attention_chunk=0), "attention_chunk must be at least 1, given: 0"),
        (new_entry("FixedState", next_n=-1), "next_n must be at least 0, given: -1"),
    ],
)
def test_a_type_refuses_what_it_cannot_be_made_of(entry: CacheEntry, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_cache_info(info_of(entry))


class TwoHalvesManager(SingleTypeKVCacheManager):
    """From outside: a token from position 32 on sees nothing before it."""

    short_name = "halves"

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 32 if num_computed_tokens >= 32 else 0

    @staticmethod
    def validate_and_build_kwargs(group_entries: Sequence[CacheEntry]) -> dict[str, int]:
        return {}


def test_a_type_from_outside_is_one_class_and_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTN_TYPE_MANAGER_MAP, "TwoHalves", TwoHalvesManager)
    kv = kv_of(info_of(new_entry("FullAttention"), new_entry("TwoHalves")))
    for computed in range(0, 40, 8):
        assert kv.allocate_slots("r", computed, 8)
        kv.check()
    assert kv.get_block_ids("r")["TwoHalves"][:8] == [0] * 8
    assert kv.usage()["TwoHalves"].reclaimed == 8
    kv.free("r")
    assert kv.num_free_blocks() == kv.num_usable_blocks()


def test_ranks_use_what_the_smallest_has() -> None:
    assert get_min_block_nums([{"a": 5, "b": 9}, {"a": 7, "b": 3}]) == {"a": 5, "b": 3}
    with pytest.raises(ValueError, match=r"rank 1 has groups \['b'\]"):
        get_min_block_nums([{"a": 5}, {"b": 5}])
    with pytest.raises(ValueError, match="at least one rank"):
        get_min_block_nums([])


@pytest.mark.parametrize(
    ("layout", "shape"), [(CacheLayout.TOKENS_FIRST, (7, 4, 2, 3)), (CacheLayout.HEADS_FIRST, (7, 2, 4, 3))]
)
def test_a_block_is_contiguous_in_both_layouts_and_described_in_full(layout: CacheLayout, shape: object) -> None:
    seen: list[torch.Tensor] = []
    entry = new_entry("FullAttention", group_key="g", first_head=6, tensor_setter=seen.append)
    info, nums = info_of(entry, layout=layout), {"g": 7}
    tensors = allocate_cache_tensors(info, nums, HeapStorage(calculate_cache_bytes(info, nums)))
    assert seen[0].shape == shape
    kv = KVCacheManager(create_single_type_managers(info, nums, 64), info, 64, tensors)
    (buffer,) = kv.get_buffer_infos()
    assert (buffer.cache_name, buffer.layer_idx, buffer.group_key) == ("FullAttention_cache", 0, "g")
    assert (buffer.first_head, buffer.num_head, buffer.dim, buffer.block_size) == (6, 2, 3, 4)
    assert buffer.layout is layout
    assert seen[0][1].data_ptr() - buffer.data_ptr == buffer.bytes_per_block == 4 * 2 * 3 * 4
    assert kv.get_contiguous_buf_infos() == ([buffer.data_ptr], [7 * 96], [96], ["g"])
