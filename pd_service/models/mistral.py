"""Mistral: Llama's layers, all with a sliding window or none."""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from pd_service.models.attention import AttentionShape
from pd_service.models.config import Count, LayerType, LayerTypesConfig
from pd_service.models.llama import PreNormConfig, PreNormLM


class UniformWindowConfig(LayerTypesConfig):
    """A family whose layers are all of one type. `layer_types` may say so too, but nothing else."""

    def type_of_layers(self) -> list[LayerType]:
        return ["full_attention" if self.sliding_window is None else "sliding_attention"] * self.num_hidden_layers

    @model_validator(mode="after")
    def _refuse_other_types(self) -> UniformWindowConfig:
        if self.layer_types not in (None, self.type_of_layers()):
            raise ValueError(
                f"layer_types {self.layer_types} is not supported for model_type {self.model_type!r} with "
                f"sliding_window {self.sliding_window}; allowed: {self.type_of_layers()[0]!r} for each layer"
            )
        return self


class MistralConfig(PreNormConfig, UniformWindowConfig):
    """The keys of transformers' class of this name, with its defaults; files must state the sizes."""

    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 131_072
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    sliding_window: Count | None = 4096


class MistralForCausalLM(PreNormLM):
    config_class: ClassVar = MistralConfig
    family_name: ClassVar = "Mistral"
    examples: ClassVar = ("Mistral 7B", "Mistral Nemo", "Codestral 22B")
    attention: ClassVar = "sliding window, or full"

    @classmethod
    def make_shape(cls, hf: MistralConfig, layer: int) -> AttentionShape:
        return AttentionShape.of(hf, sliding_window=hf.window_of(layer))
