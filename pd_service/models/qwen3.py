"""Qwen3: Llama's layers with queries and keys normalized per head; the upper ones may have a window."""

from __future__ import annotations

from typing import ClassVar

from pd_service.models.attention import AttentionShape
from pd_service.models.config import Count
from pd_service.models.llama import PreNormConfig, PreNormLM
from pd_service.models.qwen2 import UpperWindowConfig


class Qwen3Config(PreNormConfig, UpperWindowConfig):
    """The keys of transformers' class of this name, with its defaults; files must state the sizes."""

    num_key_value_heads: Count | None = 32
    head_dim: Count = 128
    max_position_embeddings: Count = 32_768
    attention_bias: bool = False


class Qwen3ForCausalLM(PreNormLM):
    config_class: ClassVar = Qwen3Config
    family_name: ClassVar = "Qwen3"
    examples: ClassVar = ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B")
    attention: ClassVar = "full, or full and sliding window"

    @classmethod
    def make_shape(cls, hf: Qwen3Config, layer: int) -> AttentionShape:
        return AttentionShape.of(
            hf,
            qkv_bias=hf.attention_bias,
            o_bias=hf.attention_bias,
            qk_norm_eps=hf.rms_norm_eps,
            sliding_window=hf.window_of(layer),
        )
