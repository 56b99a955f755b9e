"""Paged KV cache: which blocks belong to whom, and the tensors behind them. See README.md beside this file."""

from kv_cache.block_pool import BlockPool, CacheInvariantError
from kv_cache.cache_info import CacheEntry, CacheLayout, LayerCacheInfo, ModelCacheInfo
from kv_cache.cache_storage import ALIGNMENT, CacheStorage, HeapStorage, SharedStorage
from kv_cache.cache_usage import BufferInfo, GroupUsage
from kv_cache.cache_utils import (
    FIXED_BLOCK_ATTN_TYPES,
    allocate_cache_tensors,
    calculate_block_num,
    calculate_cache_bytes,
    get_entries_in_export_order,
    get_min_block_nums,
    prepare_block_tables,
    prepare_slot_mapping,
    validate_cache_info,
)
from kv_cache.kv_cache_manager import KVCacheManager
from kv_cache.prefix_cache import PrefixCache, PrefixHit
from kv_cache.single_type_kv_cache_manager import (
    ATTN_TYPE_MANAGER_MAP,
    ChunkedLocalManager,
    FixedStateManager,
    FullAttentionManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
    create_single_type_managers,
)

__all__ = [
    "ALIGNMENT",
    "ATTN_TYPE_MANAGER_MAP",
    "FIXED_BLOCK_ATTN_TYPES",
    "BlockPool",
    "BufferInfo",
    "CacheEntry",
    "CacheInvariantError",
    "CacheLayout",
    "CacheStorage",
    "ChunkedLocalManager",
    "FixedStateManager",
    "FullAttentionManager",
    "GroupUsage",
    "HeapStorage",
    "KVCacheManager",
    "LayerCacheInfo",
    "ModelCacheInfo",
    "PrefixCache",
    "PrefixHit",
    "SharedStorage",
    "SingleTypeKVCacheManager",
    "SlidingWindowManager",
    "allocate_cache_tensors",
    "calculate_block_num",
    "calculate_cache_bytes",
    "create_single_type_managers",
    "get_entries_in_export_order",
    "get_min_block_nums",
    "prepare_block_tables",
    "prepare_slot_mapping",
    "validate_cache_info",
]
