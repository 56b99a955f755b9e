"""Qwen2 and Qwen2.5: Llama's layers with biases on queries, keys and values; the upper ones may have a window."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import NonNegativeInt, model_validator

from pd_service.models.attention import AttentionShape
from pd_service.models.config import Count, LayerType, LayerTypesConfig
from pd_service.models.llama import PreNormConfig, PreNormLM


class QwenWindowConfig(LayerTypesConfig):
    """A window counts only with `use_sliding_window`: released files state one also where none is used."""

    use_sliding_window: bool = False
    sliding_window: Count | None = 4096

    @model_validator(mode="before")
    @classmethod
    def _drop_unused_window(cls, given: dict[str, Any]) -> dict[str, Any]:
        if given.get("use_sliding_window"):
            return given
        if "sliding_attention" in (given.get("layer_types") or ()):
            raise ValueError("layer_types holds 'sliding_attention', but use_sliding_window is false")
        return given | {"sliding_window": None}


class UpperWindowConfig(QwenWindowConfig):
    """Without `layer_types`, the layers from `max_window_layers` on have the window."""

    max_window_layers: NonNegativeInt = 28

    def type_of_layers(self) -> list[LayerType]:
        if self.layer_types is not None:
            return self.layer_types
        first = self.num_hidden_layers if self.sliding_window is None else self.max_window_layers
        return ["sliding_attention" if i >= first else "full_attention" for i in range(self.num_hidden_layers)]


class Qwen2Config(PreNormConfig, UpperWindowConfig):
    """The keys of transformers' class of this name, with its defaults; files must state the sizes."""

    num_key_value_heads: Count | None = 32
    max_position_embeddings: Count = 32_768


class Qwen2ForCausalLM(PreNormLM):
    config_class: ClassVar = Qwen2Config
    family_name: ClassVar = "Qwen2"
    examples: ClassVar = ("Qwen2", "Qwen2.5", "DeepSeek-R1-Distill-Qwen")
    attention: ClassVar = "full, or full and sliding window"

    @classmethod
    def make_shape(cls, hf: Qwen2Config, layer: int) -> AttentionShape:
        return AttentionShape.of(hf, qkv_bias=True, sliding_window=hf.window_of(layer))
