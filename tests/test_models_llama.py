"""Llama against transformers."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import LlamaConfig

from tests.model_parity import TINY, FamilyLaws

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def config(**different: Any) -> LlamaConfig:
    return LlamaConfig(**(TINY | different))


class TestLlama(FamilyLaws):
    architecture = "LlamaForCausalLM"
    variants: ClassVar = {
        "tied": config(tie_word_embeddings=True),
        "untied": config(),
        "mha": config(num_key_value_heads=4),
        "mqa": config(num_key_value_heads=1),
        "wide heads": config(head_dim=24),
        "llama3": config(rope_parameters=LLAMA3),
        "linear": config(rope_parameters=LINEAR),
        "sharded": config(),
        "bias": config(attention_bias=True, mlp_bias=True),
        "bfloat16 checkpoint": config(),
        "float16 checkpoint": config(),
    }
    shards: ClassVar = {"sharded": 3}
    checkpoint_dtype: ClassVar = {"bfloat16 checkpoint": "bfloat16", "float16 checkpoint": "float16"}
