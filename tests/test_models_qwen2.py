"""Qwen2 and Qwen2.5 against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import Qwen2Config

from pd_service.errors import ConfigError
from pd_service.models.config import load_model_config
from tests.model_parity import TINY, FamilyLaws, count_parameters, edit_json, save_random

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN2_5_HALF_B = {  # as released
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def config(**different: Any) -> Qwen2Config:
    return Qwen2Config(**(TINY | different))


def windows(**different: Any) -> Qwen2Config:
    return config(**({"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1} | different))


class TestQwen2(FamilyLaws):
    architecture = "Qwen2ForCausalLM"
    variants: ClassVar = {
        "full below, window above": windows(num_hidden_layers=3),
        "window below, full above": windows(layer_types=[SLIDING, FULL]),
        "window everywhere": windows(max_window_layers=0),
        "full": config(),
        "tied": config(tie_word_embeddings=True),
        "yarn": config(rope_parameters=YARN),
        "sharded": config(),
    }
    shards: ClassVar = {"sharded": 3}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [FULL, SLIDING, SLIDING]),
        ({"layer_types": None}, [FULL, SLIDING, SLIDING]),
        ({"layer_types": None, "max_window_layers": 2}, [FULL, FULL, SLIDING]),
        ({"layer_types": None, "max_window_layers": None}, [FULL, FULL, FULL]),
        ({"layer_types": None, "use_sliding_window": False}, [FULL, FULL, FULL]),
        ({"layer_types": None, "use_sliding_window": None}, [FULL, FULL, FULL]),
        ({"layer_types": [SLIDING, FULL, FULL]}, [SLIDING, FULL, FULL]),
    ],
)
def test_layer_types_are_those_of_transformers(change, expected: list[str], tmp_path: Path) -> None:
    directory = edit_json(save_random(windows(num_hidden_layers=3), tmp_path) / "config.json", change)
    assert Qwen2Config.from_pretrained(directory).layer_types == expected
    hf = load_model_config(directory).hf
    assert hf.type_of_layers() == expected
    assert [hf.window_of(layer) for layer in range(3)] == [21 if kind == SLIDING else None for kind in expected]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, r"hidden_act.*'silu'.*'relu'"),
        ({"use_sliding_window": False}, r"'sliding_attention'.*use_sliding_window is false"),
        ({"sliding_window": None, "layer_types": [FULL]}, r"layer_types names 1 layers, num_hidden_layers is 2"),
        ({"layer_types": [FULL, "linear_attention"]}, r"layer_types.*'full_attention'.*'linear_attention'"),
        ({"max_window_layers": -1}, r"max_window_layers.*-1"),
    ],
)
def test_what_we_would_compute_wrong_is_refused_by_name(change, message: str, tmp_path: Path) -> None:
    directory = edit_json(save_random(windows(), tmp_path) / "config.json", change)
    with pytest.raises(ConfigError, match=message):
        load_model_config(directory)


def test_a_released_model_has_its_number_of_parameters(tmp_path: Path) -> None:
    assert count_parameters(QWEN2_5_HALF_B, tmp_path) == 494_032_768
