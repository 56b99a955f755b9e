"""Laws of start-up arithmetic and of operator inputs."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_model import new_entry, new_info

from kv_cache import (
    CacheEntry,
    HeapStorage,
    KVCacheManager,
    LayerCacheInfo,
    ModelCacheInfo,
    allocate_cache_tensors,
    calculate_block_num,
    calculate_cache_bytes,
    create_single_type_managers,
    prepare_block_tables,
    prepare_slot_mapping,
    validate_cache_info,
)

BOTH = ["FullAttention", "SlidingWindow"]
TOKEN_BYTES = 2 * 3 * 4  # of every cache of kv_model


def info_of(*layers: list[CacheEntry], **changes: int) -> ModelCacheInfo:
    infos = [LayerCacheInfo(layer_idx=i, caches=caches) for i, caches in enumerate(layers)]
    return dataclasses.replace(ModelCacheInfo(num_layers=len(infos), block_size=4, layer_infos=infos), **changes)


def test_a_true_description_is_accepted() -> None:
    unpaged = new_entry("Recurrent", cache_name="state", needs_block=False)
    validate_cache_info(info_of([new_entry("FullAttention"), new_entry("SlidingWindow"), unpaged]))


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (
            info_of([new_entry("Linear")]),
            r"layer 0, cache 'Linear_cache': unknown attn_type 'Linear', known: \['Ch",
        ),
        (info_of([new_entry("FullAttention")] * 2), r"layer 0: caches \['FullAttention_cache'\] are defined more than"),
        (info_of([new_entry("FullAttention")], num_layers=2), "num_layers is 2, but 1 layers"),
        (info_of([new_entry("FullAttention")], block_size=0), "block_size 0 must be at least 1"),
        (info_of(), "num_layers 0"),
        (info_of([], [new_entry("FullAttention", dim=0)]), "layer 1, cache 'FullAttention_cache': dim 0"),
        (info_of([new_entry("FullAttention", num_head=-1)]), "num_head -1 must be at least 1"),
        (info_of([new_entry("FullAttention", sliding_window=8)]), "must be None for FullAttention, given: 8"),
        (info_of([new_entry("SlidingWindow", sliding_window=None)]), "at least 1, given: None"),
        (info_of([new_entry("SlidingWindow", 0)]), "at least 1, given: 0"),
        (info_of([new_entry("SlidingWindow", 4)], [new_entry("SlidingWindow", 8)]), r"layer 1, .* given: \[4, 8\]"),
        (info_of([new_entry("FullAttention", needs_block=False)]), "no paged cache"),
        (new_info(["FullAttention"], layers=(3, 3)), r"layers \[3\] are described more than once"),
    ],
)
def test_a_description_that_cannot_be_true_is_refused_by_name(info: ModelCacheInfo, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_cache_info(info)


def test_offline_block_numbers_follow_the_formulas() -> None:
    info = new_info(BOTH, block_size=4, window=8)
    nums = calculate_block_num(info, max_concurrency=3, max_model_len=101, max_step_tokens=1)
    assert nums == {"FullAttention": 26 * 3 + 1, "SlidingWindow": 3 * (2 + 1) + 1}
    nums = calculate_block_num(info, max_concurrency=3, max_model_len=101, max_step_tokens=1, next_n=2)
    assert nums["SlidingWindow"] == 3 * (3 + 1) + 1
    nums = calculate_block_num(info, max_concurrency=3, max_model_len=101, max_step_tokens=16)
    assert nums["SlidingWindow"] == 3 * (6 + 1) + 1
    nums = calculate_block_num(info, max_concurrency=3, max_model_len=10, max_step_tokens=16)
    assert nums == {"FullAttention": 3 * 3 + 1, "SlidingWindow": 3 * 3 + 1}


@pytest.mark.parametrize("attn_types", [BOTH, BOTH[::-1]])
def test_online_the_growing_types_share_what_the_windows_leave(attn_types: list[str]) -> None:
    info = new_info(attn_types, block_size=4, window=8, layers=(0, 1))
    fixed_bytes = (3 * 3 + 1) * 4 * TOKEN_BYTES * 2
    for num_tokens in (32, 35, 36, 1000):
        available = fixed_bytes + num_tokens * TOKEN_BYTES * 2 + 1
        nums = calculate_block_num(
            info, max_concurrency=3, max_model_len=32, max_step_tokens=1, available_bytes=available
        )
        assert nums == {"SlidingWindow": 10, "FullAttention": num_tokens // 4 + 1}
        assert list(nums) == attn_types


def test_memory_for_less_than_one_longest_request_is_refused_with_numbers() -> None:
    info = new_info(BOTH, block_size=4, window=8)
    needed = (3 * 3 + 1) * 4 * TOKEN_BYTES + 32 * TOKEN_BYTES
    limits = {"max_concurrency": 3, "max_model_len": 32, "max_step_tokens": 1}
    assert calculate_block_num(info, **limits, available_bytes=needed)["FullAttention"] == 9
    with pytest.raises(ValueError, match=f"at least {needed} bytes, {needed - 1} are available.*lower max_model_len"):
        calculate_block_num(info, **limits, available_bytes=needed - 1)
    only_windows = new_info(["SlidingWindow"], block_size=4, window=8)
    with pytest.raises(ValueError, match=f"at least {10 * 4 * TOKEN_BYTES} bytes"):
        calculate_block_num(only_windows, **limits, available_bytes=10 * 4 * TOKEN_BYTES - 1)


@pytest.mark.parametrize("name", ["max_concurrency", "max_model_len", "max_step_tokens", "next_n"])
def test_impossible_limits_are_refused(name: str) -> None:
    limits = {"max_concurrency": 1, "max_model_len": 1, "max_step_tokens": 1, "next_n": 0}
    limits[name] = -1
    with pytest.raises(ValueError, match="must be at least"):
        calculate_block_num(new_info(BOTH), **limits)


@given(
    block_size=st.sampled_from((1, 2, 4, 8)),
    window=st.integers(1, 20),
    chunk=st.integers(1, 20),
    concurrency=st.integers(1, 4),
)
def test_calculated_blocks_let_all_concurrent_requests_finish(
    block_size: int, window: int, chunk: int, concurrency: int
) -> None:
    info = new_info(BOTH[::-1], block_size=block_size, window=window)
    nums = calculate_block_num(info, max_concurrency=concurrency, max_model_len=50, max_step_tokens=chunk)
    kv = KVCacheManager(create_single_type_managers(info, nums, 50), info, 50, max_step_tokens=chunk)
    for computed in range(0, 50, chunk):
        for request in range(concurrency):
            assert kv.allocate_slots(f"r{request}", computed, chunk)
    kv.check()


def test_block_numbers_must_name_the_models_types() -> None:
    with pytest.raises(ValueError, match="must be given for"):
        create_single_type_managers(new_info(BOTH), {"FullAttention": 4}, 64)
    with pytest.raises(ValueError, match="at least 2 blocks"):
        create_single_type_managers(new_info(["FullAttention"]), {"FullAttention": 1}, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_cache_tensors_reach_their_layers_apart_and_aligned(dtype: torch.dtype) -> None:
    seen: dict[str, torch.Tensor] = {}

    def entry(name: str, num_head: int) -> CacheEntry:
        setter = lambda tensor: seen.__setitem__(name, tensor)  # noqa: E731
        return new_entry("FullAttention", cache_name=name, num_head=num_head, dtype=dtype, tensor_setter=setter)

    info = info_of([entry("k", 1), entry("v", 5)], [entry("nope", 1), entry("rope", 2)])
    nums = {"FullAttention": 7}
    storage = HeapStorage(calculate_cache_bytes(info, nums))
    tensors = allocate_cache_tensors(info, nums, storage)
    assert [t.data_ptr() for t in tensors] == [seen[name].data_ptr() for name in ("k", "v", "nope", "rope")]
    assert [tuple(t.shape) for t in tensors] == [(7, 4, heads, 3) for heads in (1, 5, 1, 2)]
    for i, tensor in enumerate(tensors):
        assert tensor.dtype is dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 2**21 == 0
        tensor.fill_(i + 1)
    assert [int(t.unique().item()) for t in tensors] == [1, 2, 3, 4]


def test_too_small_a_storage_sets_no_tensor() -> None:
    seen: dict[tuple[int, str], torch.Tensor] = {}
    info = new_info(BOTH, tensors=seen)
    with pytest.raises(ValueError, match="cannot hand out"):
        allocate_cache_tensors(info, {"FullAttention": 4, "SlidingWindow": 4}, HeapStorage(2**21))
    assert seen == {}


def test_block_tables_are_padded_with_the_null_block() -> None:
    tables = prepare_block_tables(
        [{"FullAttention": [3, 1, 2], "SlidingWindow": [0, 0, 5]}, {"FullAttention": [4], "SlidingWindow": [6]}]
    )
    assert tables["FullAttention"].tolist() == [[3, 1, 2], [4, 0, 0]]
    assert tables["SlidingWindow"].tolist() == [[0, 0, 5], [6, 0, 0]]
    assert {table.dtype for table in tables.values()} == {torch.int32}
    assert prepare_block_tables([]) == {}


@given(st.data())
def test_slot_mapping_equals_a_loop_over_tokens(data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 8))
    chunks = data.draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=5))
    ids = iter(np.random.default_rng(0).permutation(1000) + 1)
    tables = [
        {t: [int(next(ids)) for _ in range(-(-(start + num + 1) // block_size))] for t in BOTH} for start, num in chunks
    ]
    positions = [p for start, num in chunks for p in range(start, start + num)]
    query_lens = [num for _, num in chunks]
    slots = prepare_slot_mapping(positions, query_lens, prepare_block_tables(tables), block_size)
    for t in BOTH:
        expected = [
            table[t][p // block_size] * block_size + p % block_size
            for table, (start, num) in zip(tables, chunks, strict=True)
            for p in range(start, start + num)
        ]
        assert slots[t].tolist() == expected
        assert slots[t].dtype is torch.int32


@pytest.mark.parametrize(
    ("positions", "query_lens", "message"),
    [
        ([12], [1, 0], "positions must be 0 to 11"),
        ([-1], [1, 0], "positions must be 0 to 11"),
        ([4], [0, 1], r"no live block at positions \[4\]"),
        ([3], [1, 0], r"no live block at positions \[3\]"),
        ([4, 5], [1, 0], "add up to 1 tokens, but 2 positions"),
    ],
)
def test_a_token_without_a_live_block_is_refused(positions: list[int], query_lens: list[int], message: str) -> None:
    tables = prepare_block_tables([{"SlidingWindow": [0, 1, 2]}, {"SlidingWindow": [3]}])
    with pytest.raises(ValueError, match=message):
        prepare_slot_mapping(positions, query_lens, tables, 4)
