"""gpt-oss against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import GptOssConfig

from pd_service.errors import ConfigError
from pd_service.models.config import load_model_config
from pd_service.models.gpt_oss import GptOssConfig as OurConfig
from tests.model_parity import FamilyLaws, count_parameters

YARN = {  # as released, but for a context short enough that tests leave it
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}


def config(**different: Any) -> GptOssConfig:
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 24,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,  # at 0.3 float32 is off by 3e-4 itself
        "rope_parameters": YARN,
        "swiglu_limit": 2.0,
    }
    return GptOssConfig(**(sizes | different))


class TestGptOss(FamilyLaws):
    architecture = "GptOssForCausalLM"
    variants: ClassVar = {
        "as released": config(),
        "other types, no bias, sharded": config(
            layer_types=["full_attention", "sliding_attention"],
            num_hidden_layers=2,
            attention_bias=False,
            tie_word_embeddings=True,
            rope_parameters=None,
            num_experts_per_tok=1,
            swiglu_alpha=1.0,
            num_key_value_heads=4,
        ),
    }
    shards: ClassVar = {"other types, no bias, sharded": 3}


def test_released_models_have_their_number_of_parameters(tmp_path: Path) -> None:
    gpt_oss_120b = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    gpt_oss_20b = gpt_oss_120b | {"num_hidden_layers": 24, "num_local_experts": 32}
    assert count_parameters(gpt_oss_120b, tmp_path) == 116_829_156_672
    assert count_parameters(gpt_oss_20b, tmp_path) == 20_914_757_184


def test_what_a_file_leaves_out_is_what_transformers_takes() -> None:
    ours, theirs = OurConfig.model_validate({"model_type": "gpt_oss"}), GptOssConfig()
    assert ours.type_of_layers() == theirs.layer_types
    rope = ours.read_rope().model_dump()
    assert {key: rope[key] for key in theirs.rope_parameters} == theirs.rope_parameters
    for key in OurConfig.model_fields.keys() & theirs.to_dict().keys() - {"rope_parameters", "layer_types"}:
        assert getattr(ours, key) == getattr(theirs, key), key


def test_the_rope_of_released_files_is_read() -> None:
    stated = {"model_type": "gpt_oss", "rope_theta": 1000, "rope_scaling": YARN | {"rope_theta": None}}
    rope = OurConfig.model_validate(stated).read_rope()
    assert (rope.rope_type, rope.rope_theta, rope.truncate, rope.factor) == ("yarn", 1000.0, False, 8.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"quantization_config \('mxfp4'\).*dequantize=True"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config \('awq'\)"),
        ({"num_experts_per_tok": 7}, r"num_experts_per_tok \(7\).*num_local_experts \(6\)"),
        ({"swiglu_limit": 0}, r"swiglu_limit.*greater than 0.*0"),
        ({"hidden_act": "gelu"}, r"hidden_act.*'silu'.*'gelu'"),
        ({"sliding_window": None}, r"sliding_attention.*sliding_window"),
        ({"rope_parameters": {"rope_type": "longrope"}}, r"rope_type.*'longrope'"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config().to_dict() | {"architectures": ["GptOssForCausalLM"]} | change))
    with pytest.raises(ConfigError, match=message):
        load_model_config(tmp_path)
