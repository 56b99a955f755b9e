"""The Llama family: the equations, and nothing else.

What a layer needs to know about the step comes as `metadata`; nothing about requests or blocks is kept here. The cache
tensors are handed in through `CacheEntry.tensor_setter` before the first forward.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from kv_cache.cache_info import CacheEntry, LayerCacheInfo, ModelCacheInfo
from pd_service.models.config import ModelConfig
from pd_service.models.layers import Embedding, Linear, RMSNorm, RotaryEmbedding
from pd_service.ops import Ops
from pd_service.ops.metadata import ForwardMetadata


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: str, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.scale = config.head_dim**-0.5
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        place = {"bias": config.attention_bias, "dtype": dtype, "device": device, "ops": ops}
        self.qkv_proj = Linear(config.hidden_size, q_size, kv_size, kv_size, **place)
        self.o_proj = Linear(q_size, config.hidden_size, **place)

        self.attn_type = "FullAttention"
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_entries = [
            CacheEntry(
                cache_name=cache_name,
                attn_type=self.attn_type,
                dim=config.head_dim,
                num_head=config.num_kv_heads,
                dtype=dtype,
                needs_block=True,
                tensor_setter=lambda tensor, layer=self, name=cache_name: setattr(layer, name, tensor),
            )
            for cache_name in ("k_cache", "v_cache")
        ]

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, metadata: ForwardMetadata
    ) -> torch.Tensor:  # [tokens, hidden] -> [tokens, hidden]
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)  # [tokens, q + k + v heads, dim]
        qk, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        q, k = self.ops.rotary(qk, cos, sin).split((self.num_heads, self.num_kv_heads), dim=1)
        self.ops.write_kv(k, v, self.k_cache, self.v_cache, metadata.slot_mapping[self.attn_type])
        o = self.ops.paged_attention(q, self.k_cache, self.v_cache, metadata, self.attn_type, self.scale)
        return self.o_proj(o.flatten(1))


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: str, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        place = {"bias": config.mlp_bias, "dtype": dtype, "device": device, "ops": ops}
        self.gate_up_proj = Linear(config.hidden_size, config.intermediate_size, config.intermediate_size, **place)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, **place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, hidden] -> [tokens, hidden]
        return self.down_proj(self.ops.silu_and_mul(self.gate_up_proj(x)))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: str, ops: Ops) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device, "ops": ops}
        self.self_attn = LlamaAttention(config, **place)
        self.mlp = LlamaMLP(config, **place)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **place)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **place)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, metadata: ForwardMetadata
    ) -> torch.Tensor:  # [tokens, hidden] -> [tokens, hidden]
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, metadata)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: str, ops: Ops) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **place)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_model_len, **place)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, ops=ops, **place) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops=ops, **place)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: ForwardMetadata) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary(positions)
        for layer in self.layers:
            x = layer(x, cos, sin, metadata)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """`forward` and `compute_logits` are apart because logits are wanted for few of the tokens of a step."""

    # Checkpoint names are the attribute paths here, but for these merged matrices: ours, and its parts in order.
    merged_weights: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    # Endings of checkpoint tensors that carry nothing: older conversions saved the rotary table of each layer.
    ignored_weights: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: str, block_size: int, ops: Ops) -> None:
        super().__init__()
        self.block_size = block_size
        self.model = LlamaModel(config, dtype=dtype, device=device, ops=ops)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, device=device, ops=ops)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: ForwardMetadata) -> torch.Tensor:
        """`input_ids` and `positions` [tokens] to the last hidden states [tokens, hidden]; writes the KV cache."""
        return self.model(input_ids, positions, metadata)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [rows, hidden] to float32 [rows, vocab]."""
        return self.lm_head(hidden).float()

    def get_cache_info(self) -> ModelCacheInfo:
        layer_infos = [
            LayerCacheInfo(layer_idx=i, caches=list(layer.self_attn.cache_entries))
            for i, layer in enumerate(self.model.layers)
        ]
        return ModelCacheInfo(num_layers=len(layer_infos), block_size=self.block_size, layer_infos=layer_infos)
