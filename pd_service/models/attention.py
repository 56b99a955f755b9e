"""Grouped-query attention, as most families have it; what differs between them is in `AttentionShape`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from kv_cache.cache_info import CacheEntry
from pd_service.models.config import HeadsConfig
from pd_service.models.layers import Linear, Place, RMSNorm, RotaryEmbedding
from pd_service.ops.metadata import ForwardMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """`scale` multiplies the scores. `sliding_window` in tokens, the current one included; None sees all.

    `qk_norm_eps`: queries and keys are normalized per head before rotation. `has_sinks`: each head has a score that
    takes part in its softmax and has no value.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm_eps: float | None = None
    sliding_window: int | None = None
    has_sinks: bool = False

    @classmethod
    def of(
        cls,
        hf: HeadsConfig,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm_eps: float | None = None,
        sliding_window: int | None = None,
        has_sinks: bool = False,
    ) -> AttentionShape:
        """With the sizes of `hf` and the usual scale, 1 / sqrt(head_dim)."""
        return cls(
            hidden_size=hf.hidden_size,
            num_heads=hf.num_attention_heads,
            num_kv_heads=hf.num_kv_heads,
            head_dim=hf.dim_per_head,
            scale=hf.dim_per_head**-0.5,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm_eps=qk_norm_eps,
            sliding_window=sliding_window,
            has_sinks=has_sinks,
        )


class GroupedQueryAttention(nn.Module):
    """`rotary` may be shared by layers; it is no part of the checkpoint."""

    norm_class: ClassVar[type[RMSNorm]] = RMSNorm  # of queries and keys

    def __init__(self, shape: AttentionShape, rotary: RotaryEmbedding, *, place: Place) -> None:
        super().__init__()
        self.shape = shape
        self.rotary = rotary
        self.ops = place.ops
        self.head_counts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.qkv_proj = Linear(shape.hidden_size, q_size, kv_size, kv_size, bias=shape.qkv_bias, place=place)
        self.o_proj = Linear(q_size, shape.hidden_size, bias=shape.o_bias, place=place)
        if shape.qk_norm_eps is not None:
            self.q_norm = self.norm_class(shape.head_dim, shape.qk_norm_eps, place=place)
            self.k_norm = self.norm_class(shape.head_dim, shape.qk_norm_eps, place=place)
        self.sinks = place.empty(shape.num_heads) if shape.has_sinks else None

        self.attn_type = "FullAttention" if shape.sliding_window is None else "SlidingWindow"
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_entries = [
            CacheEntry(
                cache_name=cache_name,
                attn_type=self.attn_type,
                dim=shape.head_dim,
                num_head=shape.num_kv_heads,
                dtype=place.dtype,
                sliding_window=shape.sliding_window,
                tensor_setter=partial(setattr, self, cache_name),
            )
            for cache_name in ("k_cache", "v_cache")
        ]

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, metadata: ForwardMetadata
    ) -> torch.Tensor:  # [tokens, hidden] -> [tokens, hidden]
        shape = self.shape
        heads = self.qkv_proj(x).view(x.shape[0], -1, shape.head_dim)  # [tokens, q + k + v heads, dim]
        q, k, v = heads.split(self.head_counts, dim=1)
        if shape.qk_norm_eps is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = self.rotary(positions, metadata)
        o = self.ops.rotate_write_attend(
            q,
            k,
            v,
            cos,
            sin,
            self.k_cache,
            self.v_cache,
            metadata,
            self.attn_type,
            shape.scale,
            shape.sliding_window,
            self.sinks,
        )
        return self.o_proj(o.flatten(1))
