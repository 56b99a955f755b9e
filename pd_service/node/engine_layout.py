"""The description of an engine's cache that travels in the handshake, from what the model says about its caches."""

from __future__ import annotations

from collections.abc import Mapping

from kv_cache import ModelCacheInfo
from transfer.layout import LAYOUT_VERSION, BufferLayout, EngineLayout


def describe_layout(cache_info: ModelCacheInfo, block_nums: Mapping[str, int], model: str) -> EngineLayout:
    """Buffers in the order of `get_contiguous_buf_infos()`; `model` is the model's fingerprint."""
    buffers = []
    for layer in sorted(cache_info.layer_infos, key=lambda one: one.layer_idx):
        for entry in layer.caches:
            if not entry.needs_block:
                continue
            bytes_per_block = cache_info.block_size * entry.bytes_per_token
            buffers.append(
                BufferLayout(
                    layer=layer.layer_idx,
                    cache_name=entry.cache_name,
                    attn_type=entry.group_key,  # the key of block tables, which is what the transfer pairs by
                    block_size=cache_info.block_size,
                    first_head=entry.first_head,
                    num_heads=entry.num_head,
                    total_heads=entry.num_head,
                    dim=entry.dim,
                    dtype=str(entry.dtype).removeprefix("torch."),
                    num_bytes=bytes_per_block * block_nums[entry.group_key],
                    sliding_window=entry.sliding_window or 0,
                )
            )
    return EngineLayout(version=LAYOUT_VERSION, model=model, buffers=tuple(buffers))
