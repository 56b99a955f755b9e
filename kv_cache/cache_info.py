"""What a model says about its caches: values only.

One `CacheEntry` per cache tensor, grouped by layer (`LayerCacheInfo`), then by model (`ModelCacheInfo`). Entries of one
`group_key`, by default their `attn_type`, share block tables and a pool: one layer may hold entries of several groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch


class CacheLayout(Enum):
    """The order of a cache tensor's dimensions; a block is contiguous in both."""

    TOKENS_FIRST = "blocks, block_size, heads, dim"
    HEADS_FIRST = "blocks, heads, block_size, dim"

    def shape(self, num_blocks: int, block_size: int, num_head: int, dim: int) -> tuple[int, int, int, int]:
        if self is CacheLayout.HEADS_FIRST:
            return num_blocks, num_head, block_size, dim
        return num_blocks, block_size, num_head, dim


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """One cache of one layer.

    `dim` values per head, `num_head` heads held here (after the tensor-parallel split), per token; `first_head` is the
    first of them among the model's. `tensor_setter` receives the tensor, in the model's `CacheLayout`, once it is
    allocated. `needs_block` is False for a cache that is not paged. `group_key` separates the tables of two groups of
    one attn_type; empty stands for `attn_type`. The rest is for one type each: `sliding_window` tokens, the current one
    included, for `SlidingWindow`; `attention_chunk` tokens for `ChunkedLocal`; `next_n` further states for
    `FixedState`.
    """

    cache_name: str
    attn_type: str
    dim: int
    num_head: int
    dtype: torch.dtype
    tensor_setter: Callable[[torch.Tensor], None]
    needs_block: bool = True
    sliding_window: int | None = None
    attention_chunk: int | None = None
    next_n: int = 0
    group_key: str = ""
    first_head: int = 0

    def __post_init__(self) -> None:
        if not self.group_key:
            object.__setattr__(self, "group_key", self.attn_type)

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
    """The caches of the whole model. `block_size` is in tokens, `layout` what the model's operators read."""

    num_layers: int
    block_size: int
    layer_infos: list[LayerCacheInfo]
    layout: CacheLayout = CacheLayout.TOKENS_FIRST
