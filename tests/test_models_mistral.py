"""Mistral against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import MistralConfig

from pd_service.errors import ConfigError
from pd_service.models.config import load_model_config
from tests.model_parity import TINY, FamilyLaws, count_parameters, edit_json, save_random
from tests.model_runner import load

WINDOW = 21  # in no step with any block or chunk
MISTRAL_7B = {  # v0.1, as released
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}


def config(**different: Any) -> MistralConfig:
    return MistralConfig(**(TINY | {"sliding_window": WINDOW} | different))


class TestMistral(FamilyLaws):
    architecture = "MistralForCausalLM"
    variants: ClassVar = {
        "window": config(),
        "no window": config(sliding_window=None),
        "window of one": config(sliding_window=1),
        "window of a block": config(sliding_window=16),
        "tied, wide heads": config(tie_word_embeddings=True, head_dim=24),
        "sharded": config(),
    }
    shards: ClassVar = {"sharded": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act.*'silu'.*'gelu'"),
        ({"sliding_window": 0}, r"sliding_window.*greater than or equal to 1.*0"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types \['full_attention', 'sliding_attention'\].*'mistral'.*sliding_window 21.*'sliding_attention'",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, r"rope_type.*'longrope'"),
    ],
)
def test_what_we_would_compute_wrong_is_refused_by_name(change, message: str, tmp_path: Path) -> None:
    directory = save_random(config(), tmp_path)
    edit_json(directory / "config.json", change)
    with pytest.raises(ConfigError, match=message):
        load_model_config(directory)


@pytest.mark.parametrize(("change", "expected"), [({}, 21), ({"sliding_window": None}, 4096)], ids=["stated", "absent"])
def test_the_window_is_the_stated_one_or_the_familys(change, expected: int, tmp_path: Path) -> None:
    directory = edit_json(save_random(config(), tmp_path) / "config.json", change)
    entries = [entry for layer in load(directory).get_cache_info().layer_infos for entry in layer.caches]
    assert {(entry.attn_type, entry.sliding_window) for entry in entries} == {("SlidingWindow", expected)}


def test_a_released_model_has_its_number_of_parameters(tmp_path: Path) -> None:
    assert count_parameters(MISTRAL_7B, tmp_path) == 7_241_732_096
