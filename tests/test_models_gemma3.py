"""Gemma 3 against transformers, alone and as the text part of a model with vision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3TextConfig

from pd_service.errors import ConfigError
from pd_service.models.config import load_model_config
from pd_service.models.gemma3 import Gemma3Config as OurConfig
from tests.model_parity import FamilyLaws, count_parameters, edit_json, reference_logits, save_random, some_prompts
from tests.model_runner import Runner, load

LINEAR = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}


def config(**different: Any) -> Gemma3TextConfig:
    sizes = {
        "vocab_size": 512,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "sliding_window_pattern": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "max_position_embeddings": 256,
        "initializer_range": 0.05,  # post-norms undo the scale of all but the embedding, which must not drown the rest
    }
    return Gemma3TextConfig(**(sizes | different))


def with_vision(**different: Any) -> Gemma3Config:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    return Gemma3Config(text_config=config(**different).to_dict(), vision_config=vision, initializer_range=0.3)


class TestGemma3(FamilyLaws):
    architecture = "Gemma3ForCausalLM"
    variants: ClassVar = {
        "untied": config(tie_word_embeddings=False),
        "tied, linear, bias, sharded": config(
            rope_parameters=LINEAR,
            attention_bias=True,
            num_key_value_heads=1,
            layer_types=["full_attention", "sliding_attention"],
            num_hidden_layers=2,
        ),
    }
    shards: ClassVar = {"tied, linear, bias, sharded": 3}


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_one_with_vision_is_computed(prefix: str, tmp_path: Path) -> None:
    directory = save_random(with_vision(), tmp_path)
    names = load_file(directory / "model.safetensors")
    assert any("vision_tower" in name for name in names)
    renamed = {name.replace("language_model.model.", prefix): tensor for name, tensor in names.items()}
    save_file(renamed, directory / "model.safetensors")
    prompts = some_prompts(3, 60)
    ours = Runner(load(directory), block_size=4, is_scattered=True).logits(prompts, 7)
    for mine, theirs in zip(ours, reference_logits(directory, prompts), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_released_models_have_their_number_of_parameters(tmp_path: Path) -> None:
    gemma_3_1b = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 512,
    }
    text_of_4b = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    gemma_3_4b = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text_of_4b,
    }
    assert count_parameters(gemma_3_1b, tmp_path) == 999_885_952
    assert count_parameters(gemma_3_4b, tmp_path) == 3_880_263_168


def test_the_end_of_the_whole_model_prevails_over_that_of_its_text(tmp_path: Path) -> None:
    directory = save_random(with_vision(), tmp_path)
    (directory / "generation_config.json").unlink()
    assert load_model_config(directory).eos_token_ids == (1,)
    edit_json(directory / "config.json", {"eos_token_id": [1, 106]})
    assert load_model_config(directory).eos_token_ids == (1, 106)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))
    assert load_model_config(directory).eos_token_ids == (1,)


def test_what_a_released_file_leaves_out_is_what_transformers_takes() -> None:
    stated = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 12,
        "rope_scaling": {"rope_type": "linear", "factor": 8},
    }
    ours, theirs = OurConfig.model_validate(stated), Gemma3TextConfig(**stated)
    assert ours.type_of_layers() == theirs.layer_types
    for layer_type, expected in theirs.rope_parameters.items():
        rope = ours.rope_of(layer_type)
        assert (rope.rope_type, rope.rope_theta) == (expected["rope_type"], expected["rope_theta"])
        assert rope.factor == expected.get("factor", 1)
    for key in OurConfig.model_fields.keys() & theirs.to_dict().keys() - {"rope_parameters", "layer_types"}:
        assert getattr(ours, key) == getattr(theirs, key), key


def test_older_spellings_of_both_rope_bases_are_read() -> None:
    stated = {"model_type": "gemma3_text", "rope_theta": 5e5, "rope_local_base_freq": 2e4}
    ours = OurConfig.model_validate(stated)
    assert (ours.rope_of("full_attention").rope_theta, ours.rope_of("sliding_attention").rope_theta) == (5e5, 2e4)


def test_the_embedding_scale_is_rounded_to_the_type_of_the_model(tmp_path: Path) -> None:
    directory = save_random(config(), tmp_path)
    ids = torch.arange(512)
    for dtype in (torch.float32, torch.bfloat16):
        theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).model.embed_tokens
        assert torch.equal(load(directory, dtype=dtype).model.embed_tokens(ids), theirs(ids))


def test_norms_in_bfloat16_give_the_same_bits_as_those_of_transformers(tmp_path: Path) -> None:
    directory = save_random(config(), tmp_path, dtype="bfloat16")
    x = torch.randn(20, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).model.norm
    assert torch.equal(load(directory, dtype=torch.bfloat16).model.norm(x), theirs(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping.*None.*30"),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping.*None.*50"),
        ({"use_bidirectional_attention": True}, r"use_bidirectional_attention.*False.*True"),
        ({"hidden_activation": "gelu"}, r"hidden_activation.*'gelu_pytorch_tanh'.*'gelu'"),
        ({"query_pre_attn_scalar": 0}, r"query_pre_attn_scalar.*greater than 0.*0"),
        ({"sliding_window": None}, r"sliding_attention.*sliding_window"),
        ({"layer_types": ["full_attention"]}, r"1 layers.*num_hidden_layers is 3"),
        ({"layer_types": ["full_attention", "linear_attention"]}, r"layer_types\.1.*'linear_attention'"),
        ({"rope_parameters": {"rope_type": "default"}}, r"rope_type.*full_attention, sliding_attention"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, r"rope_type.*'dynamic'"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config().to_dict() | {"architectures": ["Gemma3ForCausalLM"]} | change))
    with pytest.raises(ConfigError, match=message):
        load_model_config(tmp_path)


def test_a_model_with_vision_but_without_text_is_refused(tmp_path: Path) -> None:
    stated = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    with pytest.raises(ConfigError, match=r"text_config is None"):
        load_model_config(tmp_path)
