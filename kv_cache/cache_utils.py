"""From a model's cache description to pools and tensors at start-up, and from block tables to operator inputs per step.

Start-up: `validate_cache_info` → `calculate_block_num` → `allocate_cache_tensors`. Step: `prepare_block_tables` →
`prepare_slot_mapping`. Nothing here has state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np
import torch

from kv_cache.block_pool import BlockPool
from kv_cache.cache_info import CacheEntry, ModelCacheInfo
from kv_cache.cache_storage import CacheStorage, align_up
from kv_cache.single_type_kv_cache_manager import (
    ATTN_TYPE_MANAGER_MAP,
    create_manager,
    group_entries,
    num_logical_blocks,
)

T = TypeVar("T")

# A request's blocks do not grow with its length. A set, so that a new type can add its name.
FIXED_BLOCK_ATTN_TYPES = {"SlidingWindow", "ChunkedLocal", "FixedState"}


def validate_cache_info(info: ModelCacheInfo) -> None:
    """Raises ValueError, naming layer and cache, when the description cannot be true."""
    if info.num_layers < 1 or info.block_size < 1:
        raise ValueError(f"num_layers {info.num_layers} and block_size {info.block_size} must be at least 1")
    if len(info.layer_infos) != info.num_layers:
        raise ValueError(f"num_layers is {info.num_layers}, but {len(info.layer_infos)} layers are described")
    if layers := _repeated(layer.layer_idx for layer in info.layer_infos):
        raise ValueError(f"layers {layers} are described more than once")
    first_of_group: dict[str, CacheEntry] = {}
    for layer in info.layer_infos:
        if names := _repeated(entry.cache_name for entry in layer.caches):
            raise ValueError(f"layer {layer.layer_idx}: caches {names} are defined more than once")
        for entry in layer.caches:
            try:
                _validate_entry(entry, first_of_group)
            except ValueError as error:
                raise ValueError(f"layer {layer.layer_idx}, cache {entry.cache_name!r}: {error}") from error
    if not first_of_group:
        raise ValueError("the model describes no paged cache (needs_block)")


def calculate_block_num(
    info: ModelCacheInfo,
    *,
    max_concurrency: int,
    max_model_len: int,
    max_step_tokens: int,
    available_bytes: int | None = None,
    next_n: int = 0,
) -> dict[str, int]:
    """Blocks per group_key, the null block included.

    `max_concurrency` requests of up to `max_model_len` tokens own blocks at once; a step computes up to
    `max_step_tokens` new tokens of one request (lookahead included), with `next_n` tokens predicted ahead. Types of
    `FIXED_BLOCK_ATTN_TYPES` come first, with all that these requests can hold. The others get the same without
    `available_bytes` (offline), or share what remains of it (online); null blocks and the padding of tensors to 2 MiB
    are not counted against it. Raises ValueError when it cannot hold one request of `max_model_len` tokens.
    """
    amounts = (max_concurrency, max_model_len, max_step_tokens)
    if min(amounts) < 1 or next_n < 0:
        raise ValueError(
            f"max_concurrency, max_model_len and max_step_tokens must be at least 1, next_n at least 0; "
            f"given: {amounts}, {next_n}"
        )
    groups = group_entries(info)
    num_longest = num_logical_blocks(max_model_len, info.block_size)
    block_nums = {}
    for key, entries in groups.items():
        if entries[0].attn_type in FIXED_BLOCK_ATTN_TYPES:
            manager = create_manager(entries, BlockPool(2, info.block_size), max_model_len)
            # what two models predict ahead, beside the token that is computed, is a step as well
            num_fixed = manager.get_peak_num_blocks(max_model_len, max(max_step_tokens, 2 * next_n + 1))
            block_nums[key] = max_concurrency * num_fixed + 1
    num_growing = max_concurrency * num_longest
    if available_bytes is not None:
        num_growing = _num_affordable_blocks(info, block_nums, max_model_len, available_bytes)
    return {key: block_nums.get(key, num_growing + 1) for key in groups}


def get_min_block_nums(block_nums_per_rank: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """What every tensor-parallel rank can hold: the least of each group, as all ranks use the same block ids.

    Raises ValueError when there is no rank, or when two ranks describe different groups.
    """
    if not block_nums_per_rank:
        raise ValueError("block numbers of at least one rank are needed, given: none")
    first = block_nums_per_rank[0]
    for rank, nums in enumerate(block_nums_per_rank):
        if nums.keys() != first.keys():
            raise ValueError(f"rank {rank} has groups {sorted(nums)}, but rank 0 has {sorted(first)}")
    return {key: min(nums[key] for nums in block_nums_per_rank) for key in first}


def calculate_fixed_block_memory_bytes(info: ModelCacheInfo, block_nums: Mapping[str, int]) -> int:
    """Bytes of all caches whose group has a block number already, the null block included."""
    return sum(
        block_nums.get(entry.group_key, 0) * info.block_size * entry.bytes_per_token
        for _, entry in get_entries_in_export_order(info)
    )


def get_entries_in_export_order(info: ModelCacheInfo) -> list[tuple[int, CacheEntry]]:
    """(layer_idx, entry) of the paged caches, ascending by layer_idx, then in the order the layer defines them.

    Both ends of a transfer number their buffers this way.
    """
    layers = sorted(info.layer_infos, key=lambda layer: layer.layer_idx)
    return [(layer.layer_idx, entry) for layer in layers for entry in layer.caches if entry.needs_block]


def calculate_cache_bytes(info: ModelCacheInfo, block_nums: Mapping[str, int]) -> int:
    """Bytes a storage must have for all cache tensors, each padded to the alignment."""
    return sum(
        align_up(block_nums[entry.group_key] * info.block_size * entry.bytes_per_token)
        for _, entry in get_entries_in_export_order(info)
    )


def allocate_cache_tensors(
    info: ModelCacheInfo, block_nums: Mapping[str, int], storage: CacheStorage
) -> list[torch.Tensor]:
    """Gives every paged cache its tensor, with dimensions in the order of `info.layout`, through `tensor_setter`.

    They lie on the storage's device and are returned in export order. Raises ValueError when the storage is too small;
    then no setter has been called.
    """
    entries = [entry for _, entry in get_entries_in_export_order(info)]
    tensors = []
    for entry in entries:
        num_blocks = block_nums[entry.group_key]
        shape = info.layout.shape(num_blocks, info.block_size, entry.num_head, entry.dim)
        piece = storage.allocate(num_blocks * info.block_size * entry.bytes_per_token)
        tensors.append(piece.view(entry.dtype).view(shape))
    for entry, tensor in zip(entries, tensors, strict=True):
        entry.tensor_setter(tensor)
    return tensors


def prepare_block_tables(block_ids_per_request: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
    """int32 [requests, longest table] per group_key, on the CPU, padded with the null block 0.

    Every request gives the same groups.
    """
    keys = block_ids_per_request[0] if block_ids_per_request else {}
    return {key: _pad([ids[key] for ids in block_ids_per_request]) for key in keys}


def prepare_slot_mapping(
    positions: Sequence[int], query_lens: Sequence[int], block_tables: Mapping[str, torch.Tensor], block_size: int
) -> dict[str, torch.Tensor]:
    """The slot, block id * block_size + offset, of each new token: int32 [tokens] per group_key, on the CPU.

    `positions` [tokens] holds `query_lens[i]` positions of request i, request after request; `block_tables` are those
    of `prepare_block_tables`, but for states, which have no slots. Raises ValueError when a token has no live block: it
    would write into the null block.
    """
    position = np.asarray(positions, dtype=np.int64)
    row = np.repeat(np.arange(len(query_lens)), query_lens)
    if row.shape != position.shape:
        raise ValueError(f"query_lens add up to {row.size} tokens, but {position.size} positions are given")
    index, offset = np.divmod(position, block_size)
    slots = {}
    for key, table in block_tables.items():
        if position.size and not 0 <= index.min() <= index.max() < table.shape[1]:
            raise ValueError(f"{key}: positions must be 0 to {table.shape[1] * block_size - 1}")
        block = table.numpy()[row, index]
        if not block.all():
            raise ValueError(f"{key}: no live block at positions {position[block == 0].tolist()}")
        slots[key] = torch.from_numpy((block * block_size + offset).astype(np.int32))
    return slots


def _validate_entry(entry: CacheEntry, first_of_group: dict[str, CacheEntry]) -> None:
    """Checks one entry alone and against the first one of its group, and notes it if it is the first."""
    if entry.dim < 1 or entry.num_head < 1:
        raise ValueError(f"dim {entry.dim} and num_head {entry.num_head} must be at least 1")
    if not entry.needs_block:
        return
    if entry.attn_type not in ATTN_TYPE_MANAGER_MAP:
        raise ValueError(f"unknown attn_type {entry.attn_type!r}, known: {sorted(ATTN_TYPE_MANAGER_MAP)}")
    first = first_of_group.setdefault(entry.group_key, entry)
    if first.attn_type != entry.attn_type:
        raise ValueError(f"group_key {entry.group_key!r} is of attn_type {first.attn_type}, given: {entry.attn_type}")
    ATTN_TYPE_MANAGER_MAP[entry.attn_type].validate_and_build_kwargs([first, entry])


def _num_affordable_blocks(
    info: ModelCacheInfo, fixed_nums: Mapping[str, int], max_model_len: int, available_bytes: int
) -> int:
    """Blocks of every group not in `fixed_nums` that fit beside those."""
    fixed_bytes = calculate_fixed_block_memory_bytes(info, fixed_nums)
    groups = group_entries(info)
    per_token_bytes = sum(e.bytes_per_token for t in groups if t not in fixed_nums for e in groups[t])
    longest_bytes = num_logical_blocks(max_model_len, info.block_size) * info.block_size * per_token_bytes
    if fixed_bytes + longest_bytes > available_bytes:
        raise ValueError(
            f"the KV cache needs at least {fixed_bytes + longest_bytes} bytes, {available_bytes} are available: "
            f"{fixed_bytes} for the windows of all concurrent requests and {longest_bytes} for one request of "
            f"{max_model_len} tokens; give it more memory, or lower max_model_len, max_concurrency or max_step_tokens"
        )
    return (available_bytes - fixed_bytes) // max(1, per_token_bytes) // info.block_size


def _repeated(values: Iterable[T]) -> list[T]:
    return [value for value, count in Counter(values).items() if count > 1]


def _pad(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    lens = np.array([len(row) for row in rows])
    table = np.zeros((len(rows), lens.max()), dtype=np.int32)
    table[np.arange(lens.max()) < lens[:, None]] = np.fromiter(chain.from_iterable(rows), np.int32, lens.sum())
    return torch.from_numpy(table)
