"""Qwen3-MoE against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import Qwen3MoeConfig

from pd_service.errors import ConfigError
from pd_service.models.config import load_model_config
from tests.model_parity import TINY, FamilyLaws, count_parameters, edit_json, save_random

MOE = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
QWEN3_30B_A3B = {  # as released
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def config(**different: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**(TINY | MOE | different))


class TestQwen3Moe(FamilyLaws):
    architecture = "Qwen3MoeForCausalLM"
    variants: ClassVar = {
        "experts": config(),
        "shares of all": config(norm_topk_prob=False),
        "every other layer": config(decoder_sparse_step=2),
        "one layer dense": config(mlp_only_layers=[0]),
        "all layers dense": config(num_experts=0),
        "one expert": config(num_experts_per_tok=1),
        "all experts": config(num_experts_per_tok=6),
        "window": config(use_sliding_window=True, sliding_window=21),
        "bias": config(attention_bias=True),
        "sharded": config(),
    }
    shards: ClassVar = {"sharded": 3}


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_both_names_of_the_number_of_experts_are_read(name: str, tmp_path: Path) -> None:
    directory = save_random(config(), tmp_path)
    edit_json(directory / "config.json", {"num_experts": None, "num_local_experts": None} | {name: 6})
    assert load_model_config(directory).hf.num_experts == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, r"hidden_act.*'silu'.*'relu'"),
        ({"num_experts_per_tok": 7}, r"num_experts_per_tok \(7\).*num_experts \(6\)"),
        ({"decoder_sparse_step": 0}, r"decoder_sparse_step.*0"),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 2}, r"'qwen3_moe'.*8"),
    ],
)
def test_what_we_would_compute_wrong_is_refused_by_name(change, message: str, tmp_path: Path) -> None:
    directory = edit_json(save_random(config(), tmp_path) / "config.json", change)
    with pytest.raises(ConfigError, match=message):
        load_model_config(directory)


def test_a_released_model_has_its_number_of_parameters(tmp_path: Path) -> None:
    assert count_parameters(QWEN3_30B_A3B, tmp_path) == 30_532_122_624
