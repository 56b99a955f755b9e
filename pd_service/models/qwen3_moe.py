"""Qwen3-MoE: Qwen3's attention; most layers take, for each token, the few experts its router finds most probable."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import AliasChoices, Field, NonNegativeInt, model_validator
from torch import nn

from pd_service.models.config import Count
from pd_service.models.layers import GatedMLP, Linear, Place
from pd_service.models.llama import PreNormConfig
from pd_service.models.mistral import UniformWindowConfig
from pd_service.models.moe import Experts
from pd_service.models.qwen2 import QwenWindowConfig
from pd_service.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeConfig(PreNormConfig, UniformWindowConfig, QwenWindowConfig):
    """The keys of transformers' class of this name, with its defaults; files must state the sizes.

    `num_experts` has either name there.
    """

    num_key_value_heads: Count | None = 4
    max_position_embeddings: Count = 32_768
    attention_bias: bool = False
    num_experts: NonNegativeInt = Field(128, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[NonNegativeInt] | None = None

    def has_experts(self, layer: int) -> bool:
        return (
            self.num_experts > 0
            and layer not in (self.mlp_only_layers or ())
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    @model_validator(mode="after")
    def _have_experts_to_choose_from(self) -> Qwen3MoeConfig:
        if 0 < self.num_experts < self.num_experts_per_tok:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) exceeds num_experts ({self.num_experts})"
            )
        return self


class SparseMLP(nn.Module):
    """A token's experts are those of the highest softmax over all of them, which is their share as well."""

    def __init__(self, hf: Qwen3MoeConfig, *, place: Place) -> None:
        super().__init__()
        self.num_chosen = hf.num_experts_per_tok
        self.is_share_of_chosen = hf.norm_topk_prob
        self.gate = Linear(hf.hidden_size, hf.num_experts, place=place)
        self.experts = Experts(hf.num_experts, hf.hidden_size, hf.moe_intermediate_size, place=place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, hidden] -> [tokens, hidden]
        probabilities = self.gate(x).softmax(dim=-1, dtype=torch.float32)  # [tokens, experts]
        shares, chosen = probabilities.topk(self.num_chosen, dim=-1)
        if self.is_share_of_chosen:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return self.experts(x, chosen, shares)


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    config_class: ClassVar = Qwen3MoeConfig
    family_name: ClassVar = "Qwen3-MoE"
    examples: ClassVar = ("Qwen3-30B-A3B", "Qwen3-235B-A22B", "Qwen3-Coder-30B-A3B")
    attention: ClassVar = "full, or sliding window"

    @classmethod
    def make_mlp(cls, hf: Qwen3MoeConfig, layer: int, *, place: Place) -> nn.Module:
        if hf.has_experts(layer):
            return SparseMLP(hf, place=place)
        return GatedMLP(hf.hidden_size, hf.intermediate_size, place=place)
