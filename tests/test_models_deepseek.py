"""DeepSeek V2 and V3 against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config

from pd_service.errors import ConfigError
from pd_service.models.config import load_model_config
from pd_service.models.deepseek_routing import Routing, SoftmaxRouter
from pd_service.models.layers import Place
from pd_service.ops import get_ops
from tests.model_parity import FamilyLaws, count_parameters, edit_json, save_random
from tests.model_runner import load

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

SHARED = {  # by released models
    "hidden_act": "silu",
    "attention_bias": False,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
}
YARN_40 = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
DEEPSEEK_V2_LITE = SHARED | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rope_scaling": YARN_40 | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
DEEPSEEK_V3 = SHARED | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rope_scaling": YARN_40 | {"mscale": 1.0, "mscale_all_dim": 1.0},
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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    configs = {"v2": v2(), "v3": v3()}
    return {name: save_random(config, tmp_path_factory.mktemp(name)) for name, config in configs.items()}


def test_released_sizes_cache_576_values_per_token_and_layer_and_nothing_else(tmp_path: Path) -> None:
    released = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 32, "num_hidden_layers": 2}
    info = load(save_random(v3(**released), tmp_path), block_size=8).get_cache_info()
    assert (info.num_layers, info.block_size) == (2, 8)
    for layer in info.layer_infos:
        assert [(c.cache_name, c.attn_type, c.num_head, c.dim, c.needs_block) for c in layer.caches] == [
            ("nope_cache", "FullAttention", 1, 512, True),
            ("rope_cache", "FullAttention", 1, 64, True),
        ]


@pytest.mark.parametrize(
    ("version", "change", "message"),
    [
        ("v2", {"hidden_act": "gelu"}, "hidden_act.*'silu'.*'gelu'"),
        ("v2", {"moe_layer_freq": 2}, "moe_layer_freq.*1.*2"),
        ("v2", {"num_key_value_heads": 2}, r"num_key_value_heads \(2\).*num_attention_heads \(4\)"),
        ("v2", {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even.*7"),
        ("v2", {"topk_method": "noaux_tc"}, "topk_method.*'greedy'.*'group_limited_greedy'.*'noaux_tc'"),
        ("v2", {"topk_method": "group_limited_greedy"}, "'group_limited_greedy' needs n_group and topk_group"),
        ("v2", {"scoring_func": "sigmoid"}, "scoring_func.*'softmax'.*'sigmoid'"),
        ("v2", {"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\).*8 experts"),
        ("v2", {"norm_topk_prob": True, "routed_scaling_factor": 16.0}, r"norm_topk_prob.*1\.0 only, not 16\.0"),
        ("v3", {"topk_method": "greedy"}, "topk_method.*'noaux_tc'.*'greedy'"),
        ("v3", {"scoring_func": "softmax"}, "scoring_func.*'sigmoid'.*'softmax'"),
        ("v3", {"n_group": 3}, r"n_routed_experts \(8\).*n_group \(3\)"),
        ("v3", {"n_group": 8}, r"n_group \(8\) equal groups of at least 2"),
        ("v3", {"topk_group": 5}, r"topk_group \(5\).*n_group \(4\)"),
        ("v3", {"num_experts_per_tok": 5}, r"num_experts_per_tok \(5\).*4 experts"),
        ("v3", {"first_k_dense_replace": -1}, "first_k_dense_replace.*-1"),
        ("v3", {"quantization_config": {"quant_method": "fp8"}}, r"quantization_config \('fp8'\)"),
        ("v3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type.*'dynamic'"),
    ],
)
def test_what_we_would_compute_wrong_is_refused_by_name(
    version: str, change: dict[str, object], message: str, made: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((made[version] / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        load_model_config(edit_json(tmp_path / "config.json", change))


def test_a_v2_router_that_normalizes_makes_shares_add_up_to_one() -> None:
    torch.manual_seed(0)
    sizes = {"num_experts": 8, "num_chosen": 3, "num_groups": 1, "num_groups_chosen": 1}
    routing = Routing(**sizes, is_normalized=True, scale=1.0)
    router = SoftmaxRouter(16, routing, place=Place(torch.bfloat16, "cpu", get_ops("cpu")))
    router.weight.data.normal_()
    x = torch.randn(5, 16).bfloat16()
    chosen, shares = router.route(x)
    best = (x.float() @ router.weight.T).softmax(-1).topk(3)
    expected = best.values / best.values.sum(-1, keepdim=True)
    assert shares.dtype == torch.float32
    assert torch.equal(chosen.sort().values, best.indices.sort().values)
    torch.testing.assert_close(shares.sort(descending=True).values, expected)


def test_released_models_have_their_number_of_parameters(tmp_path: Path) -> None:
    assert count_parameters(DEEPSEEK_V2_LITE, tmp_path) == 15_706_484_224
    assert count_parameters(DEEPSEEK_V3, tmp_path) == 671_026_419_200
