"""The description of an engine's cache that travels in the handshake, from what the model says about its caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kv_cache import ModelCacheInfo
from kv_cache.cache_info import CacheLayout
from kv_cache.cache_utils import get_entries_in_export_order
from transfer.layout import LAYOUT_VERSION, BufferKey, BufferLayout, EngineLayout


def describe_layout(cache_info: ModelCacheInfo, block_nums: Mapping[str, int], model: str) -> EngineLayout:
    """Of an engine of one rank: buffers in the order of `get_contiguous_buf_infos()`.

    `block_nums` is by group_key; `model` is the model's fingerprint.
    """
    return describe_ranks([cache_info], block_nums, model)


def describe_ranks(cache_infos: Sequence[ModelCacheInfo], block_nums: Mapping[str, int], model: str) -> EngineLayout:
    """Of an engine whose rank i holds the caches of `cache_infos[i]`, all with the same block ids.

    A cache has as many heads as its ranks hold together. Raises ValueError when two ranks disagree on what a cache is.
    """
    total_heads: dict[BufferKey, int] = {}
    for info in cache_infos:
        for layer, entry in get_entries_in_export_order(info):
            key = layer, entry.cache_name
            total_heads[key] = max(total_heads.get(key, 0), entry.first_head + entry.num_head)
    buffers = [
        buffer for rank, info in enumerate(cache_infos) for buffer in _buffers(info, block_nums, total_heads, rank)
    ]
    return EngineLayout(version=LAYOUT_VERSION, model=model, buffers=tuple(buffers))


def _buffers(
    info: ModelCacheInfo, block_nums: Mapping[str, int], total_heads: Mapping[BufferKey, int], rank: int
) -> list[BufferLayout]:
    return [
        BufferLayout(
            layer=layer,
            cache_name=entry.cache_name,
            attn_type=entry.group_key,  # the key of block tables, which is what the transfer pairs by
            block_size=info.block_size,
            first_head=entry.first_head,
            num_heads=entry.num_head,
            total_heads=total_heads[layer, entry.cache_name],
            dim=entry.dim,
            dtype=str(entry.dtype).removeprefix("torch."),
            num_bytes=info.block_size * entry.bytes_per_token * block_nums[entry.group_key],
            sliding_window=entry.sliding_window or 0,
            is_heads_first=info.layout is CacheLayout.HEADS_FIRST,
            rank=rank,
        )
        for layer, entry in get_entries_in_export_order(info)
    ]
