"""DeepSeek V2 and V3 against transformers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers import DeepseekV2Config, DeepseekV3Config

from tests.model_parity import FamilyLaws

torch.set_num_threads(1)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def v2(**different: Any) -> DeepseekV2Config:
    return DeepseekV2Config(**(SIZES | {"n_shared_experts": 2} | different))


def v3(**different: Any) -> DeepseekV3Config:
    return DeepseekV3Config(**(SIZES | {"n_group": 4, "topk_group": 2} | different))


class TestDeepseekV2(FamilyLaws):
    architecture = "DeepseekV2ForCausalLM"
    variants: ClassVar = {
        "greedy": v2(),
        "groups": v2(topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=4.0),
        "no query latent, yarn": v2(q_lora_rank=None, rope_parameters=YARN),
        "biases": v2(attention_bias=True, mlp_bias=True),
    }
    shards: ClassVar = {"groups": 3}


class TestDeepseekV3(FamilyLaws):
    architecture = "DeepseekV3ForCausalLM"
    variants: ClassVar = {
        "yarn": v3(rope_parameters=YARN),
        "one group, unscaled, tied": v3(
            n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0, tie_word_embeddings=True
        ),
        "halves": v3(rope_interleave=False, q_lora_rank=None, attention_bias=True),
        "bfloat16 checkpoint": v3(n_shared_experts=2),
    }
    shards: ClassVar = {"one group, unscaled, tied": 2}
    checkpoint_dtype: ClassVar = {"bfloat16 checkpoint": "bfloat16"}
