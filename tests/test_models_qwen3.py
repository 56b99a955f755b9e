"""Qwen3 against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import Qwen3Config

from pd_service.errors import ConfigError
from pd_service.models.config import load_model_config
from tests.model_parity import TINY, FamilyLaws, count_parameters, edit_json, save_random

WINDOWS = {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}
QWEN3_0_6B = {  # as released
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def config(**different: Any) -> Qwen3Config:
    return Qwen3Config(**(TINY | {"head_dim": 16} | different))


class TestQwen3(FamilyLaws):
    architecture = "Qwen3ForCausalLM"
    variants: ClassVar = {
        "full below, window above": config(**WINDOWS, num_hidden_layers=3),
        "full": config(),
        "tied, wide heads": config(tie_word_embeddings=True, head_dim=24),
        "bias": config(attention_bias=True),
        "sharded": config(),
    }
    shards: ClassVar = {"sharded": 3}


def test_heads_have_128_values_where_none_are_stated(tmp_path: Path) -> None:
    directory = edit_json(save_random(config(), tmp_path) / "config.json", {"head_dim": None})
    assert load_model_config(directory).hf.dim_per_head == Qwen3Config.from_pretrained(directory).head_dim == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, r"hidden_act.*'silu'.*'relu'"),
        ({"use_sliding_window": False}, r"'sliding_attention'.*use_sliding_window is false"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config \('fp8'\)"),
        ({"head_dim": 15}, r"even.*15"),
    ],
)
def test_what_we_would_compute_wrong_is_refused_by_name(change, message: str, tmp_path: Path) -> None:
    directory = edit_json(save_random(config(**WINDOWS), tmp_path) / "config.json", change)
    with pytest.raises(ConfigError, match=message):
        load_model_config(directory)


def test_a_released_model_has_its_number_of_parameters(tmp_path: Path) -> None:
    assert count_parameters(QWEN3_0_6B, tmp_path) == 596_049_920
