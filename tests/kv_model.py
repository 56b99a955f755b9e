"""Small cache descriptions and managers, shared by the tests of kv_cache."""

from collections.abc import Sequence

import torch

from kv_cache import (
    CacheEntry,
    KVCacheManager,
    LayerCacheInfo,
    ModelCacheInfo,
    PrefixCache,
    create_single_type_managers,
)


def new_entry(attn_type: str, window: int = 8, **changes: object) -> CacheEntry:
    fields: dict[str, object] = {
        "cache_name": f"{attn_type}_cache",
        "attn_type": attn_type,
        "dim": 3,
        "num_head": 2,
        "dtype": torch.float32,
        "tensor_setter": lambda tensor: None,
        "sliding_window": window if attn_type == "SlidingWindow" else None,
    }
    return CacheEntry(**(fields | changes))  # type: ignore[arg-type]


def new_info(
    attn_types: Sequence[str],
    block_size: int = 4,
    window: int = 8,
    layers: Sequence[int] = (0,),
    tensors: dict[tuple[int, str], torch.Tensor] | None = None,
) -> ModelCacheInfo:
    """One cache per attention type in every layer; `tensors` collects by (layer, cache name)."""
    seen = {} if tensors is None else tensors

    def entry(layer: int, attn_type: str) -> CacheEntry:
        key = (layer, f"{attn_type}_cache")
        return new_entry(attn_type, window, tensor_setter=lambda tensor: seen.__setitem__(key, tensor))

    infos = [LayerCacheInfo(layer_idx=layer, caches=[entry(layer, t) for t in attn_types]) for layer in layers]
    return ModelCacheInfo(num_layers=len(infos), block_size=block_size, layer_infos=infos)


def new_kv(
    block_nums: dict[str, int],
    *,
    block_size: int = 4,
    window: int = 8,
    max_model_len: int = 64,
    max_step_tokens: int | None = None,
    prefix_cache: PrefixCache | None = None,
) -> KVCacheManager:
    """A manager of the given types, in their order."""
    info = new_info(list(block_nums), block_size, window)
    managers = create_single_type_managers(info, block_nums, max_model_len)
    return KVCacheManager(managers, info, max_model_len, max_step_tokens=max_step_tokens, prefix_cache=prefix_cache)
