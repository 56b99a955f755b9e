"""Rotary frequencies and amplitudes against those of transformers, for every kind, far beyond the original context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pd_service.models.layers import Place, RotaryEmbedding, inverse_frequencies
from pd_service.models.rope import RopeConfig
from pd_service.ops import get_ops
from pd_service.ops.metadata import ForwardMetadata

HEAD_DIM = 64
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": YARN,
    "yarn of gpt-oss": YARN | {"rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "yarn of deepseek": YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, other turns": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    "yarn, amplitude given": YARN | {"attention_factor": 1.3},
    "yarn, tiny context": YARN | {"original_max_position_embeddings": 4},
    "yarn, not stretched": YARN | {"factor": 1.0},
}


def config(given: dict[str, Any]) -> LlamaConfig:
    rope = {"rope_theta": 10000.0} | given
    return LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=131072, rope_parameters=rope)


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_amplitude_are_those_of_transformers(kind: str) -> None:
    expected, amplitude = ROPE_INIT_FUNCTIONS[KINDS[kind]["rope_type"]](config(KINDS[kind]), "cpu")
    rope = RopeConfig.model_validate({"original_max_position_embeddings": 131072} | KINDS[kind])
    torch.testing.assert_close(inverse_frequencies(rope, HEAD_DIM), expected, rtol=1e-6, atol=0.0)
    assert rope.amplitude == pytest.approx(amplitude, rel=1e-12)


def test_the_amplitude_multiplies_cosines_and_sines() -> None:
    place = Place(torch.float32, "cpu", get_ops("cpu"))
    rope = RopeConfig.model_validate(YARN | {"attention_factor": 1.3})
    metadata = ForwardMetadata(query_lens=[1], kv_lens=[8], block_size=4, block_table={}, slot_mapping={})
    cos, sin = RotaryEmbedding(rope, HEAD_DIM, 16, place=place)(torch.tensor([7]), metadata)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, 1.3**2))


def test_the_magnitude_of_yarn_grows_with_the_stretch_alone() -> None:
    assert RopeConfig.model_validate(YARN).yarn_mscale(1.0) == pytest.approx(1.3465735902799727)  # gpt-oss's
    assert RopeConfig.model_validate(YARN | {"factor": 0.5}).yarn_mscale(1.0) == 1.0
    assert RopeConfig.model_validate(YARN).yarn_mscale(0.0) == 1.0
