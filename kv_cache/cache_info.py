"""What a model says about its caches: values only.

One `CacheEntry` per cache tensor, grouped by layer (`LayerCacheInfo`), then by model (`ModelCacheInfo`). Blocks are
grouped by `attn_type`: one layer may hold several entries, and entries of several types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """One cache of one layer.

    `dim` values per head, `num_head` heads held here (after the tensor-parallel split), per token. `tensor_setter`
    receives the tensor [num_blocks, block_size, num_head, dim] once it is allocated. `needs_block` is False for a
    cache that is not paged. `sliding_window` is the window in tokens, the current token included; for
    `SlidingWindow` entries only.
    """

    cache_name: str
    attn_type: str
    dim: int
    num_head: int
    dtype: torch.dtype
    tensor_setter: Callable[[torch.Tensor], None]
    needs_block: bool = True
    sliding_window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return self.num_head * self.dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCacheInfo:
    """The caches of one layer, in the order the model defines them."""

    layer_idx: int
    caches: list[CacheEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCacheInfo:
    """The caches of the whole model. `block_size` is in tokens."""

    num_layers: int
    block_size: int
    layer_infos: list[LayerCacheInfo]
