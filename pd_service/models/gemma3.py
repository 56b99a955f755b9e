"""Gemma 3: windows on most layers, four norms around each, whose checkpoint weights lack 1; text only.

Where transformers rounds, this rounds: norms compute in float32 and round once, the embedding scale has the model's
type. A checkpoint with a vision tower is read for its text model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from pd_service.models.attention import AttentionShape, GroupedQueryAttention
from pd_service.models.base import CausalLM, Decoder
from pd_service.models.config import Count, LayerType, LayerTypesConfig, ModelConfig
from pd_service.models.layers import GatedMLP, Place, RMSNorm, RotaryEmbedding
from pd_service.models.rope import RopeConfig
from pd_service.ops.metadata import ForwardMetadata


class Gemma3Config(LayerTypesConfig):
    """Keys and defaults of transformers' Gemma3TextConfig; released files state few of them."""

    vocab_size: Count = 262_208
    hidden_size: Count = 2304
    intermediate_size: Count = 9216
    num_hidden_layers: Count = 26
    num_attention_heads: Count = 8
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 256
    max_position_embeddings: Count = 131_072
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    query_pre_attn_scalar: float = Field(default=256, gt=0)
    sliding_window: Count | None = 4096
    sliding_window_pattern: Count = 6
    rope_local_base_freq: float | None = None
    attn_logit_softcapping: None = None
    final_logit_softcapping: None = None
    use_bidirectional_attention: Literal[False] | None = False

    @property
    def full_attention_period(self) -> int:
        return self.sliding_window_pattern

    def model_post_init(self, context: object) -> None:
        for layer_type in set(self.type_of_layers()):
            self.rope_of(layer_type)  # refused here, at the first look at the model

    def rope_of(self, layer_type: LayerType) -> RopeConfig:
        """The rotary embedding of the layers of one type; `rope_scaling`, the older key, is about full attention."""
        by_type = self.rope_parameters or {}
        if foreign := by_type.keys() - {"full_attention", "sliding_attention"}:
            raise ValueError(f"rope_parameters holds {sorted(foreign)}; allowed: full_attention, sliding_attention")
        given = dict(by_type.get(layer_type) or {})
        if layer_type == "full_attention":
            given |= self.rope_scaling or {}
            given.setdefault("rope_theta", self.rope_theta or 1_000_000.0)
        else:
            given.setdefault("rope_theta", self.rope_local_base_freq or 10_000.0)
        return self.read_rope(given)


class OffsetNorm(RMSNorm):
    """The checkpoint holds the weight less 1. Kept in float32, where adding it loses nothing."""

    def __init__(self, dim: int, eps: float, *, place: Place) -> None:
        super().__init__(dim, eps, place=replace(place, dtype=torch.float32))

    def finish_loading(self) -> None:
        self.weight.add_(1.0)


class Gemma3Attention(GroupedQueryAttention):
    norm_class = OffsetNorm


class Gemma3Layer(nn.Module):
    """Attention and MLP, each between two norms and beside a residual."""

    def __init__(self, hf: Gemma3Config, layer_type: LayerType, rotary: RotaryEmbedding, *, place: Place) -> None:
        super().__init__()
        self.self_attn = Gemma3Attention(_attention_shape(hf, layer_type), rotary, place=place)
        self.mlp = GatedMLP(hf.hidden_size, hf.intermediate_size, activate=place.ops.gelu_and_mul, place=place)
        self.input_layernorm = OffsetNorm(hf.hidden_size, hf.rms_norm_eps, place=place)
        self.post_attention_layernorm = OffsetNorm(hf.hidden_size, hf.rms_norm_eps, place=place)
        self.pre_feedforward_layernorm = OffsetNorm(hf.hidden_size, hf.rms_norm_eps, place=place)
        self.post_feedforward_layernorm = OffsetNorm(hf.hidden_size, hf.rms_norm_eps, place=place)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, metadata: ForwardMetadata
    ) -> torch.Tensor:  # [tokens, hidden] -> [tokens, hidden]
        attended = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), positions, metadata))
        normed, x = self.pre_feedforward_layernorm.add(attended, x)
        return x + self.post_feedforward_layernorm(self.mlp(normed))


class Gemma3ForCausalLM(CausalLM):
    config_class: ClassVar = Gemma3Config
    family_name: ClassVar = "Gemma 3"
    examples: ClassVar = ("Gemma 3 270M", "Gemma 3 1B")
    attention: ClassVar = "full and sliding window"

    def __init__(self, config: ModelConfig, *, place: Place, block_size: int) -> None:
        hf = config.hf
        assert isinstance(hf, Gemma3Config)
        types = hf.type_of_layers()
        rotary = {
            t: RotaryEmbedding(hf.rope_of(t), hf.dim_per_head, config.max_model_len, place=place) for t in set(types)
        }
        layers = [Gemma3Layer(hf, t, rotary[t], place=place) for t in types]
        norm = OffsetNorm(hf.hidden_size, hf.rms_norm_eps, place=place)
        scale = torch.tensor(hf.hidden_size**0.5, dtype=place.dtype).item()
        decoder = Decoder(hf, layers, norm, place=place, embedding_scale=scale)
        super().__init__(hf, decoder, place=place, block_size=block_size)


class Gemma3WithVisionConfig(Gemma3Config):
    """The text model's keys stand under `text_config`; what the whole model says as well, such as its end, prevails."""

    @model_validator(mode="before")
    @classmethod
    def _lift_text_config(cls, given: dict[str, Any]) -> dict[str, Any]:
        text = given.get("text_config")
        if not isinstance(text, dict):  # ValueError is what pydantic reports
            raise ValueError(f"text_config is {text!r}; expected the keys of the text model")  # noqa: TRY004
        return text | {key: value for key, value in given.items() if value is not None}


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text model of one that can see; its vision tower is neither loaded nor computed."""

    config_class: ClassVar = Gemma3WithVisionConfig
    examples: ClassVar = ("Gemma 3 4B", "Gemma 3 12B", "Gemma 3 27B")
    renamed_prefixes: ClassVar = {
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
    }
    ignored_prefixes: ClassVar = (
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    )


def _attention_shape(hf: Gemma3Config, layer_type: LayerType) -> AttentionShape:
    return AttentionShape(
        hidden_size=hf.hidden_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_kv_heads,
        head_dim=hf.dim_per_head,
        scale=hf.query_pre_attn_scalar**-0.5,
        qkv_bias=hf.attention_bias,
        o_bias=hf.attention_bias,
        qk_norm_eps=hf.rms_norm_eps,
        sliding_window=hf.sliding_window if layer_type == "sliding_attention" else None,
    )
