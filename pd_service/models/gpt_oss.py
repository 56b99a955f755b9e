"""gpt-oss: every second layer sees a window, heads have sinks, all MLPs are mixtures of experts."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import AliasChoices, Field, model_validator
from torch import nn

from pd_service.models.attention import AttentionShape
from pd_service.models.config import Count, LayerTypesConfig
from pd_service.models.layers import Linear, Place
from pd_service.models.llama import PreNormConfig, PreNormLM
from pd_service.models.moe import Experts
from pd_service.models.rope import RopeConfig

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssConfig(PreNormConfig, LayerTypesConfig):
    """The keys of transformers' class of this name, with its defaults. The number of experts has either name there."""

    vocab_size: Count = 201_088
    hidden_size: Count = 2880
    intermediate_size: Count = 2880
    num_hidden_layers: Count = 36
    num_attention_heads: Count = 64
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 64
    max_position_embeddings: Count = 131_072
    rope_theta: float | None = 150_000.0
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    sliding_window: Count | None = 128
    num_local_experts: Count = Field(128, validation_alias=AliasChoices("num_local_experts", "num_experts"))
    num_experts_per_tok: Count = 4
    swiglu_alpha: float = Field(default=1.702, gt=0)
    swiglu_limit: float = Field(default=7.0, gt=0)

    @property
    def full_attention_period(self) -> int:
        return 2

    def read_rope(self, given: dict[str, Any] | None = None) -> RopeConfig:
        return super().read_rope(given or self.rope_parameters or self.rope_scaling or _ROPE)

    @model_validator(mode="before")
    @classmethod
    def _say_how_to_unpack(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The released files hold 4-bit experts, so this refusal is the first that most will meet."""
        quantization = given.get("quantization_config")
        if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
            raise ValueError(
                "quantization_config ('mxfp4') is not supported; unpack the weights once: load them in transformers "
                "with quantization_config=Mxfp4Config(dequantize=True) and write them with save_pretrained"
            )
        return given

    @model_validator(mode="after")
    def _have_experts_to_choose_from(self) -> GptOssConfig:
        if self.num_local_experts < self.num_experts_per_tok:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) exceeds num_local_experts ({self.num_local_experts})"
            )
        return self


class GptOssExperts(Experts):
    """The checkpoint stacks the experts' matrices, [experts, in, out], with gate and up in turns, as we keep them."""

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        places = {
            "gate_up_proj": self.gate_up_proj.transpose(1, 2),
            "gate_up_proj_bias": self.gate_up_proj_bias,
            "down_proj": self.down_proj.transpose(1, 2),
            "down_proj_bias": self.down_proj_bias,
        }
        return {name: tensor.data for name, tensor in places.items()}


class GptOssMLP(nn.Module):
    """A token's experts are those of the highest scores; their shares are the softmax over these alone."""

    def __init__(self, hf: GptOssConfig, *, place: Place) -> None:
        super().__init__()
        self.num_chosen = hf.num_experts_per_tok
        self.router = Linear(hf.hidden_size, hf.num_local_experts, bias=True, place=place)
        activate = partial(place.ops.clipped_swiglu, alpha=hf.swiglu_alpha, limit=hf.swiglu_limit)
        self.experts = GptOssExperts(
            hf.num_local_experts, hf.hidden_size, hf.intermediate_size, bias=True, activate=activate, place=place
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, hidden] -> [tokens, hidden]
        scores, chosen = self.router(x).topk(self.num_chosen, dim=-1)  # [tokens, k]
        return self.experts(x, chosen, scores.softmax(dim=-1, dtype=torch.float32))


class GptOssForCausalLM(PreNormLM):
    config_class: ClassVar = GptOssConfig
    family_name: ClassVar = "gpt-oss"
    examples: ClassVar = ("gpt-oss-20b", "gpt-oss-120b")
    attention: ClassVar = "full and sliding window, with sinks"

    @classmethod
    def make_shape(cls, hf: GptOssConfig, layer: int) -> AttentionShape:
        return AttentionShape.of(
            hf,
            qkv_bias=hf.attention_bias,
            o_bias=hf.attention_bias,
            sliding_window=hf.window_of(layer),
            has_sinks=True,
        )

    @classmethod
    def make_mlp(cls, hf: GptOssConfig, layer: int, *, place: Place) -> nn.Module:
        return GptOssMLP(hf, place=place)
