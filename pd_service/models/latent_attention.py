"""Multi-head latent attention (DeepSeek-V2 report, section 2.1): one latent and one rotated key per token, all heads'.

Nothing else is cached. A head's key and value are linear in the latent c, so neither is ever made:

    score = q_nope · (W_UK c) + q_rope · k_rope = (W_UKᵀ q_nope) · c + q_rope · k_rope
    out   = Σ p W_UV c                          = W_UV (Σ p c)

Query and output pass through W_UK and W_UV instead (the absorbed form), for prompts as for single tokens: over a chunk
of 512 tokens it is also the faster one here, because all heads of all queries meet the same keys in one product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from kv_cache.cache_info import CacheEntry
from pd_service.models.layers import Linear, Place, RMSNorm, RotaryEmbedding
from pd_service.ops.metadata import ForwardMetadata

NORM_EPS = 1e-6  # of the two inner norms, whatever the model's own


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """`nope_dim` and `rope_dim` are a head's query without and with position; `scale` multiplies the scores.

    `query_rank` None: queries come straight from the hidden state. `is_interleaved`: the planes that the checkpoint
    rotates are neighbours, (0, 1), (2, 3), …, not halves. `bias`: of the projections down and of the output.
    """

    hidden_size: int
    num_heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    bias: bool
    is_interleaved: bool


class LatentAttention(nn.Module):
    """`rotary` may be shared by layers; it is no part of the checkpoint."""

    def __init__(self, shape: LatentShape, rotary: RotaryEmbedding, *, place: Place) -> None:
        super().__init__()
        self.shape = shape
        self.rotary = rotary
        self.ops = place.ops
        hidden, query_size = shape.hidden_size, shape.num_heads * (shape.nope_dim + shape.rope_dim)
        if shape.query_rank is None:
            self.q_proj = Linear(hidden, query_size, place=place)
        else:
            self.q_a_proj = Linear(hidden, shape.query_rank, bias=shape.bias, place=place)
            self.q_a_layernorm = RMSNorm(shape.query_rank, NORM_EPS, place=place)
            self.q_b_proj = Linear(shape.query_rank, query_size, place=place)
        self.kv_a_proj_with_mqa = Linear(hidden, shape.kv_rank + shape.rope_dim, bias=shape.bias, place=place)
        self.kv_a_layernorm = RMSNorm(shape.kv_rank, NORM_EPS, place=place)
        self.kv_b_proj = UpProjection(shape, place=place)
        self.o_proj = Linear(shape.num_heads * shape.value_dim, hidden, bias=shape.bias, place=place)

        self.attn_type = "FullAttention"
        self.nope_cache = torch.Tensor([])  # the latents, normalized
        self.rope_cache = torch.Tensor([])  # the keys with position, rotated
        self.cache_entries = [
            CacheEntry(
                cache_name=cache_name,
                attn_type=self.attn_type,
                dim=dim,
                num_head=1,
                dtype=place.dtype,
                tensor_setter=partial(setattr, self, cache_name),
            )
            for cache_name, dim in (("nope_cache", shape.kv_rank), ("rope_cache", shape.rope_dim))
        ]

    def finish_loading(self) -> None:
        """Bring interleaved planes into the order of `ops.rotary`: of queries and keys alike, so no score changes."""
        if not self.shape.is_interleaved:
            return
        queries = self.q_proj if self.shape.query_rank is None else self.q_b_proj
        per_head = queries.weight.data.view(self.shape.num_heads, -1, queries.weight.shape[-1])
        _part_planes(per_head[:, self.shape.nope_dim :])
        keys = self.kv_a_proj_with_mqa
        _part_planes(keys.weight.data[None, self.shape.kv_rank :])
        if keys.bias is not None:
            _part_planes(keys.bias.data[None, self.shape.kv_rank :])

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, metadata: ForwardMetadata
    ) -> torch.Tensor:  # [tokens, hidden] -> [tokens, hidden]
        shape = self.shape
        q = self._project_queries(x).view(x.shape[0], shape.num_heads, -1)
        q_nope, q_rope = q.split((shape.nope_dim, shape.rope_dim), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).unsqueeze(1).split((shape.kv_rank, shape.rope_dim), dim=-1)
        cos, sin = self.rotary(positions, metadata)
        rotated = self.ops.rotary(torch.cat((q_rope, k_rope), dim=1), cos, sin)
        q_rope, k_rope = rotated.split((shape.num_heads, 1), dim=1)
        slots = metadata.slot_mapping[self.attn_type]
        self.ops.write_kv(self.kv_a_layernorm(latent), k_rope, self.nope_cache, self.rope_cache, slots)
        o_latent = self.ops.latent_attention(
            self.kv_b_proj.absorb(q_nope),
            q_rope,
            self.nope_cache,
            self.rope_cache,
            metadata,
            self.attn_type,
            shape.scale,
        )
        return self.o_proj(self.kv_b_proj.expand(o_latent).flatten(1))

    def _project_queries(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, hidden] -> [tokens, heads * dim]
        if self.shape.query_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))


class UpProjection(nn.Module):
    """W_UK and W_UV of every head: one matrix of the checkpoint, split once it is filled."""

    def __init__(self, shape: LatentShape, *, place: Place) -> None:
        super().__init__()
        self.shape = shape
        self.ops = place.ops
        self.weight = place.empty(shape.num_heads * (shape.nope_dim + shape.value_dim), shape.kv_rank)

    def finish_loading(self) -> None:
        per_head = self.weight.data.view(self.shape.num_heads, -1, self.shape.kv_rank)
        to_key, to_value = per_head.split((self.shape.nope_dim, self.shape.value_dim), dim=1)
        self.key_heads = self.ops.pack_head_linear(to_key.transpose(1, 2))
        self.value_heads = self.ops.pack_head_linear(to_value)
        del self.weight

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:  # [tokens, heads, nope_dim] -> [tokens, heads, kv_rank]
        return self.ops.head_linear(q_nope, self.key_heads)

    def expand(self, o_latent: torch.Tensor) -> torch.Tensor:  # [tokens, heads, kv_rank] -> [tokens, heads, value_dim]
        return self.ops.head_linear(o_latent, self.value_heads)


def _part_planes(rows: torch.Tensor) -> None:
    """Reorder dimension 1 of `rows` in place, from (0, 1), (2, 3), … to all first ones, then all second ones."""
    rows.copy_(torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1))
