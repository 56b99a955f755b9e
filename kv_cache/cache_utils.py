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

from kv_cache.cache_info import CacheEntry, ModelCacheInfo
from kv_cache.cache_storage import CacheStorage, align_up
from kv_cache.single_type_kv_cache_manager import (
    ATTN_TYPE_MANAGER_MAP,
    SlidingWindowManager,
    group_entries,
    num_logical_blocks,
    num_window_blocks,
)

T = TypeVar("T")

FIXED_BLOCK_ATTN_TYPES = frozenset({"SlidingWindow"})  # a request's blocks do not grow with its length


def validate_cache_info(info: ModelCacheInfo) -> None:
    """Raises ValueError, naming layer and cache, when the description cannot be true."""
    if info.num_layers < 1 or info.block_size < 1:
        raise ValueError(f"num_layers {info.num_layers} and block_size {info.block_size} must be at least 1")
    if len(info.layer_infos) != info.num_layers:
        raise ValueError(f"num_layers is {info.num_layers}, but {len(info.layer_infos)} layers are described")
    if layers := _repeated(layer.layer_idx for layer in info.layer_infos):
        raise ValueError(f"layers {layers} are described more than once")
    first_of_type: dict[str, CacheEntry] = {}
    for layer in info.layer_infos:
        if names := _repeated(entry.cache_name for entry in layer.caches):
            raise ValueError(f"layer {layer.layer_idx}: caches {names} are defined more than once")
        for entry in layer.caches:
            try:
                _validate_entry(entry, first_of_type)
            except ValueError as error:
                raise ValueError(f"layer {layer.layer_idx}, cache {entry.cache_name!r}: {error}") from error
    if not first_of_type:
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
    """Blocks per attn_type, the null block included.

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
    for attn_type in groups.keys() & FIXED_BLOCK_ATTN_TYPES:
        num_fixed = _num_fixed_blocks(groups[attn_type], info.block_size, max_step_tokens, next_n)
        block_nums[attn_type] = max_concurrency * min(num_fixed, num_longest) + 1
    num_growing = max_concurrency * num_longest
    if available_bytes is not None:
        num_growing = _num_affordable_blocks(info, block_nums, max_model_len, available_bytes)
    return {attn_type: block_nums.get(attn_type, num_growing + 1) for attn_type in groups}


def calculate_fixed_block_memory_bytes(info: ModelCacheInfo, block_nums: Mapping[str, int]) -> int:
    """Bytes of all caches whose type has a block number already, the null block included."""
    return sum(
        block_nums.get(entry.attn_type, 0) * info.block_size * entry.bytes_per_token
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
        align_up(block_nums[entry.attn_type] * info.block_size * entry.bytes_per_token)
        for _, entry in get_entries_in_export_order(info)
    )


def allocate_cache_tensors(
    info: ModelCacheInfo, block_nums: Mapping[str, int], storage: CacheStorage
) -> list[torch.Tensor]:
    """Gives every paged cache its tensor [num_blocks, block_size, num_head, dim] through `tensor_setter`.

    They lie on the storage's device and are returned in export order. Raises ValueError when the storage is too small;
    then no setter has been called.
    """
    entries = [entry for _, entry in get_entries_in_export_order(info)]
    tensors = []
    for entry in entries:
        shape = (block_nums[entry.attn_type], info.block_size, entry.num_head, entry.dim)
        piece = storage.allocate(shape[0] * info.block_size * entry.bytes_per_token)
        tensors.append(piece.view(entry.dtype).view(shape))
    for entry, tensor in zip(entries, tensors, strict=True):
        entry.tensor_setter(tensor)
    return tensors


def prepare_block_tables(block_ids_per_request: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
    """int32 [requests, longest table] per attn_type, on the CPU, padded with the null block 0.

    Every request gives the same attention types.
    """
    attn_types = block_ids_per_request[0] if block_ids_per_request else {}
    return {attn_type: _pad([ids[attn_type] for ids in block_ids_per_request]) for attn_type in attn_types}


def prepare_slot_mapping(
    positions: Sequence[int], query_lens: Sequence[int], block_tables: Mapping[str, torch.Tensor], block_size: int
) -> dict[str, torch.Tensor]:
    """The slot, block id * block_size + offset, of each new token: int32 [tokens] per attn_type, on the CPU.

    `positions` [tokens] holds `query_lens[i]` positions of request i, request after request; `block_tables` are those
    of `prepare_block_tables`. Raises ValueError when a token has no live block: it would write into the null block.
    """
    position = np.asarray(positions, dtype=np.int64)
    row = np.repeat(np.arange(len(query_lens)), query_lens)
    if row.shape != position.shape:
        raise ValueError(f"query_lens add up to {row.size} tokens, but {position.size} positions are given")
    index, offset = np.divmod(position, block_size)
    slots = {}
    for attn_type, table in block_tables.items():
        if position.size and not 0 <= index.min() <= index.max() < table.shape[1]:
            raise ValueError(f"{attn_type}: positions must be 0 to {table.shape[1] * block_size - 1}")
        block = table.numpy()[row, index]
        if not block.all():
            raise ValueError(f"{attn_type}: no live block at positions {position[block == 0].tolist()}")
        slots[attn_type] = torch.from_numpy((block * block_size + offset).astype(np.int32))
    return slots


def _validate_entry(entry: CacheEntry, first_of_type: dict[str, CacheEntry]) -> None:
    """Checks one entry alone and against the first one of its type, and notes it if it is the first."""
    if entry.dim < 1 or entry.num_head < 1:
        raise ValueError(f"dim {entry.dim} and num_head {entry.num_head} must be at least 1")
    if not entry.needs_block:
        return
    if entry.attn_type not in ATTN_TYPE_MANAGER_MAP:
        raise ValueError(f"unknown attn_type {entry.attn_type!r}, known: {sorted(ATTN_TYPE_MANAGER_MAP)}")
    first = first_of_type.setdefault(entry.attn_type, entry)
    ATTN_TYPE_MANAGER_MAP[entry.attn_type].validate_and_build_kwargs([first, entry])


def _num_fixed_blocks(entries: Sequence[CacheEntry], block_size: int, max_step_tokens: int, next_n: int) -> int:
    """Most blocks one request holds: for the window and what two models predict ahead, or for window and chunk."""
    window = SlidingWindowManager.validate_and_build_kwargs(entries)["sliding_window"]
    return num_window_blocks(max(window + 2 * next_n, window - 1 + max_step_tokens), block_size)


def _num_affordable_blocks(
    info: ModelCacheInfo, fixed_nums: Mapping[str, int], max_model_len: int, available_bytes: int
) -> int:
    """Blocks of every type not in `fixed_nums` that fit beside those."""
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
