"""Every model family, small, with the head sizes that NPUs have fused attention for and with others, and what holds.

Prompts are longer than a block, windows longer and shorter than one, so that blocks are given back on the way.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedConfig

from tests import (
    test_models_deepseek,
    test_models_gemma3,
    test_models_gpt_oss,
    test_models_llama,
    test_models_mistral,
    test_models_qwen2,
    test_models_qwen3,
    test_models_qwen3_moe,
)
from tests.model_parity import cosine_distances, some_prompts
from tests.model_runner import Runner, load

BLOCK = 128
_DEEPSEEK = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2}

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": test_models_llama.config(head_dim=128),
    "llama, other heads": test_models_llama.config(tie_word_embeddings=True),
    "llama, no shared heads": test_models_llama.config(head_dim=64, num_key_value_heads=4, attention_bias=True),
    "mistral": test_models_mistral.config(head_dim=128, sliding_window=150),
    "qwen2": test_models_qwen2.windows(head_dim=128, sliding_window=30, num_hidden_layers=3),
    "qwen3": test_models_qwen3.config(head_dim=128),
    "qwen3-moe": test_models_qwen3_moe.config(head_dim=128),
    "gpt-oss": test_models_gpt_oss.config(head_dim=128, sliding_window=40),
    "gpt-oss, released heads": test_models_gpt_oss.config(head_dim=64, num_hidden_layers=2),
    "gemma3": test_models_gemma3.config(head_dim=128, sliding_window=130),
    "gemma3, released heads": test_models_gemma3.config(head_dim=256),
    "deepseek-v2": test_models_deepseek.v2(**_DEEPSEEK),
    "deepseek-v3": test_models_deepseek.v3(**_DEEPSEEK),
    "deepseek-v3, other ranks": test_models_deepseek.v3(num_hidden_layers=2),
}


def answer(model: torch.nn.Module, device: str, prompts: list[list[int]], chunk: int | None) -> torch.Tensor:
    """The logits [tokens, vocab] of all prompts, on the host."""
    runner = Runner(model, block_size=BLOCK, is_scattered=True, num_blocks=40, device=device)
    return torch.cat([logits.cpu() for logits in runner.logits(prompts, chunk)])


def assert_as_near_as_on_a_cpu(directory: Path, model: torch.nn.Module, device: str) -> None:
    """`model` is that of `directory` in bfloat16: its answers are as near to float32's as those of a CPU's bfloat16.

    In one chunk, and in two of which the second is, for the longest prompt, a single token.
    """
    prompts = some_prompts(4, 200)
    exact = answer(load(directory, block_size=BLOCK), "cpu", prompts, None)
    half = answer(load(directory, block_size=BLOCK, dtype=torch.bfloat16), "cpu", prompts, None)
    expected = cosine_distances(exact, half)
    for chunk in (None, 199):
        distances = cosine_distances(exact, answer(model, device, prompts, chunk))
        assert not distances.isnan().any()
        assert distances.median() <= 1.5 * expected.median() + 1e-5
        assert distances.mean() <= 2 * expected.mean() + 1e-5
        assert distances.max() <= 4 * expected.max() + 1e-4
