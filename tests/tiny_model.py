"""A Llama with random weights and a byte-level tokenizer, written as a Hugging Face directory in under two seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT = [
    "The quick brown fox jumps over the lazy dog; then the dog, not so lazy after all, jumps over the fox.",
    "A prefill engine turns prompts into a cache, and a decode engine turns the cache into tokens, one by one.",
    "In the beginning there was nothing, and it was paged. Grüße, naïve café, 你好世界, привет мир 🙂",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, 1))\n",
    " ".join(str(n * n) for n in range(400)),  # enough pairs to merge for any vocabulary used in tests
]


def make_tiny_llama(
    dir: Path,
    *,
    seed: int = 0,
    vocab_size: int = 512,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    max_position: int = 512,
    tie: bool = True,
    shards: int = 1,
    dtype: str = "float32",
    rope: dict[str, Any] | None = None,
    bias: bool = False,
) -> Path:
    """Write the model to `dir` and return it. `rope` is transformers' `rope_parameters`; eos is 2, bos is 1."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 5 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_position,
        tie_word_embeddings=tie,
        attention_bias=bias,
        mlp_bias=bias,
        rope_parameters=rope,
        initializer_range=0.3,  # wide enough that the next token depends on the whole prompt
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts these at zero, where an unused one would go unseen
                torch.nn.init.normal_(parameter, std=0.3)
    model = model.to(getattr(torch, dtype))
    total_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(dir, max_shard_size="1GB" if shards == 1 else -(-total_bytes // shards))
    make_tokenizer(vocab_size).save_pretrained(dir)
    return dir


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most `vocab_size` tokens (at least 259): every text comes back unchanged."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
