"""The Llama family, and the layer that most families after it share."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import nn

from pd_service.models.attention import AttentionShape, GroupedQueryAttention
from pd_service.models.base import CausalLM, Decoder
from pd_service.models.config import Count, HeadsConfig, ModelConfig
from pd_service.models.layers import GatedMLP, Place, RMSNorm, RotaryEmbedding
from pd_service.ops.metadata import ForwardMetadata


class LlamaConfig(HeadsConfig):
    intermediate_size: Count
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False

    def model_post_init(self, context: object) -> None:
        self.read_rope()  # refused here, at the first look at the model


class PreNormLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, hf: LlamaConfig, self_attn: nn.Module, mlp: nn.Module, *, place: Place) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(hf.hidden_size, hf.rms_norm_eps, place=place)
        self.post_attention_layernorm = RMSNorm(hf.hidden_size, hf.rms_norm_eps, place=place)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, metadata: ForwardMetadata
    ) -> torch.Tensor:  # [tokens, hidden] -> [tokens, hidden]
        x = x + self.self_attn(self.input_layernorm(x), positions, metadata)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaForCausalLM(CausalLM):
    config_class: ClassVar = LlamaConfig
    family_name: ClassVar = "Llama"
    examples: ClassVar = ("Llama 2", "Llama 3.1", "SmolLM2")
    attention: ClassVar = "full"

    def __init__(self, config: ModelConfig, *, place: Place, block_size: int) -> None:
        hf = config.hf
        assert isinstance(hf, LlamaConfig)
        rotary = RotaryEmbedding(hf.read_rope(), hf.dim_per_head, config.max_model_len, place=place)
        layers = [_layer(hf, rotary, place=place) for _ in range(hf.num_hidden_layers)]
        norm = RMSNorm(hf.hidden_size, hf.rms_norm_eps, place=place)
        super().__init__(hf, Decoder(hf, layers, norm, place=place), place=place, block_size=block_size)


def _layer(hf: LlamaConfig, rotary: RotaryEmbedding, *, place: Place) -> PreNormLayer:
    shape = AttentionShape(
        hidden_size=hf.hidden_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_kv_heads,
        head_dim=hf.dim_per_head,
        scale=hf.dim_per_head**-0.5,
        qkv_bias=hf.attention_bias,
        o_bias=hf.attention_bias,
    )
    mlp = GatedMLP(hf.hidden_size, hf.intermediate_size, bias=hf.mlp_bias, place=place)
    return PreNormLayer(hf, GroupedQueryAttention(shape, rotary, place=place), mlp, place=place)
