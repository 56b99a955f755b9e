"""The Llama family, and the layer that most families after it share."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from pd_service.models.attention import AttentionShape, GroupedQueryAttention
from pd_service.models.base import CausalLM, Decoder
from pd_service.models.config import Count, HeadsConfig, HfConfig, ModelConfig
from pd_service.models.layers import GatedMLP, Place, RMSNorm, RotaryEmbedding
from pd_service.ops import LayerWeights
from pd_service.ops.metadata import ForwardMetadata


class PreNormConfig(HfConfig):
    """What `PreNormLM` needs of a family's configuration."""

    intermediate_size: Count
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = 1e-6

    def model_post_init(self, context: object) -> None:
        self.read_rope()  # refused here, at the first look at the model


class PreNormLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual.

    What a layer adds to the residual is added by the next norm, which is one operator on every device.
    """

    def __init__(self, hf: PreNormConfig, self_attn: nn.Module, mlp: nn.Module, *, place: Place) -> None:
        super().__init__()
        self.ops = place.ops
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(hf.hidden_size, hf.rms_norm_eps, place=place)
        self.post_attention_layernorm = RMSNorm(hf.hidden_size, hf.rms_norm_eps, place=place)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, metadata: ForwardMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Its input is x + residual [tokens, hidden], or x alone; its output the sum of both results, not yet added.

        A given residual and its x may be overwritten.
        """
        weights = self.dense_weights
        if weights is not None and residual is not None:
            attention = self.self_attn
            cos, sin = attention.rotary(positions, metadata)
            self.ops.dense_layer(x, residual, weights, cos, sin, attention.k_cache, attention.v_cache, metadata)
            return x, residual
        normed, residual = (self.input_layernorm(x), x) if residual is None else self.input_layernorm.add(x, residual)
        attended = self.self_attn(normed, positions, metadata)
        normed, residual = self.post_attention_layernorm.add(attended, residual)
        return self.mlp(normed), residual

    @cached_property
    def dense_weights(self) -> LayerWeights | None:
        """What `ops.dense_layer` takes, if this layer is of that kind; asked for after loading."""
        attention, mlp = self.self_attn, self.mlp
        if not isinstance(attention, GroupedQueryAttention) or not isinstance(mlp, GatedMLP):
            return None
        shape = attention.shape
        if shape.qk_norm_eps is not None or shape.has_sinks or mlp.activate is not None:
            return None
        return LayerWeights(
            input_norm=self.input_layernorm.weight,
            qkv=attention.qkv_proj.weight,
            qkv_bias=attention.qkv_proj.bias,
            o=attention.o_proj.weight,
            o_bias=attention.o_proj.bias,
            mlp_norm=self.post_attention_layernorm.weight,
            gate_up=mlp.gate_up_proj.weight,
            down=mlp.down_proj.weight,
            eps=self.input_layernorm.eps,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            inner_size=mlp.gate_up_proj.out_sizes[0],
            scale=shape.scale,
            attn_type=attention.attn_type,
            sliding_window=shape.sliding_window,
        )


class PreNormDecoder(Decoder):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: ForwardMetadata) -> torch.Tensor:
        x, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, positions, metadata)
        return self.norm.add(x, residual)[0]


class PreNormLM(CausalLM):
    """A model of `PreNormLayer`s that share one rotary embedding. A family states how its layers attend."""

    def __init__(self, config: ModelConfig, *, place: Place, block_size: int) -> None:
        hf = config.hf
        assert isinstance(hf, HeadsConfig)
        assert isinstance(hf, PreNormConfig)
        rotary = RotaryEmbedding(hf.read_rope(), hf.dim_per_head, config.max_model_len, place=place)
        layers = []
        for layer in range(hf.num_hidden_layers):
            attention = GroupedQueryAttention(self.make_shape(hf, layer), rotary, place=place)
            layers.append(PreNormLayer(hf, attention, self.make_mlp(hf, layer, place=place), place=place))
        norm = RMSNorm(hf.hidden_size, hf.rms_norm_eps, place=place)
        super().__init__(hf, PreNormDecoder(hf, layers, norm, place=place), place=place, block_size=block_size)

    @classmethod
    def make_shape(cls, hf: Any, layer: int) -> AttentionShape:
        """How the layer of this number attends; `hf` is a `config_class`."""
        raise NotImplementedError

    @classmethod
    def make_mlp(cls, hf: Any, layer: int, *, place: Place) -> nn.Module:
        return GatedMLP(hf.hidden_size, hf.intermediate_size, place=place)


class LlamaConfig(PreNormConfig, HeadsConfig):
    attention_bias: bool = False
    mlp_bias: bool = False


class LlamaForCausalLM(PreNormLM):
    config_class: ClassVar = LlamaConfig
    family_name: ClassVar = "Llama"
    examples: ClassVar = ("Llama 2", "Llama 3.1", "SmolLM2")
    attention: ClassVar = "full"

    @classmethod
    def make_shape(cls, hf: LlamaConfig, layer: int) -> AttentionShape:
        return AttentionShape.of(hf, qkv_bias=hf.attention_bias, o_bias=hf.attention_bias)

    @classmethod
    def make_mlp(cls, hf: LlamaConfig, layer: int, *, place: Place) -> nn.Module:
        return GatedMLP(hf.hidden_size, hf.intermediate_size, bias=hf.mlp_bias, place=place)
