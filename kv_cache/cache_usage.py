"""What can be told of a KV cache to people, metrics and other engines: values, taken at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kv_cache.cache_info import CacheEntry, CacheLayout, ModelCacheInfo
from kv_cache.prefix_cache import CachingBlockPool
from kv_cache.single_type_kv_cache_manager import SingleTypeKVCacheManager


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUsage:
    """The usable blocks of one group: used + leased + cached + free = usable.

    `used` by a request, or by a pull that outlived it; `leased` by leases alone; `cached`: by nobody, content findable;
    `free`: without content. Since the start: blocks `reclaimed` from running requests, cached blocks `evicted`,
    `hit_tokens` whose blocks were shared instead of computed.
    """

    usable: int
    used: int
    leased: int
    cached: int
    free: int
    reclaimed: int
    evicted: int
    hit_tokens: int


def measure_usage(manager: SingleTypeKVCacheManager, hit_tokens: int) -> GroupUsage:
    pool = manager.block_pool
    cached = pool.num_cached_blocks if isinstance(pool, CachingBlockPool) else 0
    leases = [table for (kind, _), table in manager.holder_to_blocks.items() if kind == "lease"]
    others = [table for (kind, _), table in manager.holder_to_blocks.items() if kind != "lease"]
    used = set().union(*manager.req_to_blocks.values(), *others) - {pool.null_block}
    return GroupUsage(
        usable=pool.num_usable_blocks,
        used=len(used),
        leased=len(set().union(*leases) - used - {pool.null_block}),
        cached=cached,
        free=pool.num_free_blocks - cached,
        reclaimed=manager.num_reclaimed,
        evicted=pool.num_evicted if isinstance(pool, CachingBlockPool) else 0,
        hit_tokens=hit_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferInfo:
    """One cache tensor: what it holds and where. Heads are [first_head, first_head + num_head) of the model's."""

    cache_name: str
    layer_idx: int
    attn_type: str
    group_key: str
    layout: CacheLayout
    block_size: int
    first_head: int
    num_head: int
    dim: int
    dtype: torch.dtype
    data_ptr: int
    num_bytes: int
    bytes_per_block: int


def describe_buffers(
    info: ModelCacheInfo, entries: Sequence[tuple[int, CacheEntry]], tensors: Sequence[torch.Tensor]
) -> list[BufferInfo]:
    """Of the tensors that belong to these (layer_idx, entry), in their order."""
    return [
        BufferInfo(
            cache_name=entry.cache_name,
            layer_idx=layer_idx,
            attn_type=entry.attn_type,
            group_key=entry.group_key,
            layout=info.layout,
            block_size=info.block_size,
            first_head=entry.first_head,
            num_head=entry.num_head,
            dim=entry.dim,
            dtype=entry.dtype,
            data_ptr=tensor.data_ptr(),
            num_bytes=tensor.nbytes,
            bytes_per_block=info.block_size * entry.bytes_per_token,
        )
        for (layer_idx, entry), tensor in zip(entries, tensors, strict=True)
    ]
