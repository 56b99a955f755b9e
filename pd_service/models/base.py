"""What every model is to the engine: hidden states, logits and a description of its caches.

A family's file defines its config, its layers where they differ from the shared ones, and one subclass of `CausalLM`
for each architecture it computes. Nothing else in the engine knows a family.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from kv_cache.cache_info import CacheEntry, LayerCacheInfo, ModelCacheInfo
from pd_service.models.config import HfConfig
from pd_service.models.layers import Embedding, Linear, Place
from pd_service.ops.metadata import ForwardMetadata


class HasCaches(Protocol):
    """An attention module: it names its caches, whose tensors are handed in through each entry's `tensor_setter`."""

    cache_entries: list[CacheEntry]


class Decoder(nn.Module):
    """Embedding, layers, final norm. `embedding_scale` multiplies the embeddings (Gemma)."""

    def __init__(
        self, hf: HfConfig, layers: Iterable[nn.Module], norm: nn.Module, *, place: Place, embedding_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(hf.vocab_size, hf.hidden_size, place=place, scale=embedding_scale)
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: ForwardMetadata) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, positions, metadata)
        return self.norm(x)


class CausalLM(nn.Module):
    """A model under the attribute paths of its checkpoint.

    `forward` and `compute_logits` are apart because logits are wanted for few of the tokens of a step.
    """

    config_class: ClassVar[type[HfConfig]]
    family_name: ClassVar[str]  # for people to read, as are the two below
    examples: ClassVar[tuple[str, ...]]
    attention: ClassVar[str]
    # Checkpoint names are the attribute paths here, but for these merged matrices: ours, and its parts in order.
    merged_weights: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    # Endings of checkpoint tensors that carry nothing: older conversions saved the rotary table of each layer.
    ignored_weights: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)
    # Where the checkpoint holds more than the text model: its beginnings of names and ours, and those of other parts.
    renamed_prefixes: ClassVar[dict[str, str]] = {}
    ignored_prefixes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, hf: HfConfig, model: Decoder, *, place: Place, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.model = model
        self.lm_head = Linear(hf.hidden_size, hf.vocab_size, place=place)
        if hf.tie_word_embeddings:
            self.lm_head.weight = model.embed_tokens.weight

    def name_here(self, name: str) -> str:
        """The attribute path of the checkpoint tensor `name`."""
        for prefix, ours in self.renamed_prefixes.items():
            if name.startswith(prefix):
                return ours + name.removeprefix(prefix)
        return name

    def copies(self) -> dict[str, str]:
        """Tensors that a checkpoint may hold a second time and the model does not: theirs and the original's paths."""
        return {}

    def describe_missing(self, paths: list[str]) -> str:
        """What is said of a checkpoint without the tensors of these attribute paths."""
        return f"the checkpoint lacks {len(paths)} tensors: {', '.join(paths[:5])}"

    @classmethod
    def is_ignored(cls, name: str, hf: HfConfig) -> bool:
        """Whether the tensor `name`, an attribute path, has no place in the model and needs none."""
        if hf.tie_word_embeddings and name == "lm_head.weight":
            return True
        return name.endswith(cls.ignored_weights) or name.startswith(cls.ignored_prefixes)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: ForwardMetadata) -> torch.Tensor:
        """`input_ids` and `positions` [tokens] to the last hidden states [tokens, hidden]; writes the KV cache."""
        hidden: torch.Tensor = self.model(input_ids, positions, metadata)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [rows, hidden] to float32 [rows, vocab]."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits.float()

    def attentions(self) -> list[HasCaches]:
        """The modules that have caches, in the order of their layers; draft layers follow the model's own."""
        layers: Any = self.model.layers
        return [layer.self_attn for layer in layers]

    def get_cache_info(self) -> ModelCacheInfo:
        infos = [
            LayerCacheInfo(layer_idx=i, caches=list(attention.cache_entries))
            for i, attention in enumerate(self.attentions())
        ]
        return ModelCacheInfo(num_layers=len(infos), block_size=self.block_size, layer_infos=infos)


class DraftingLM(CausalLM):
    """A model with a layer for multi-token prediction, which drafts for speculative decoding.

    `with_draft` False builds it without that layer. At position i the draft layer sees the hidden state of position i
    and the token of position i + 1, and predicts the token of position i + 2 (DeepSeek-V3 report, section 2.2). Its
    caches are ordinary ones, behind those of the model's own layers.
    """

    def draft(
        self, hidden: torch.Tensor, next_ids: torch.Tensor, positions: torch.Tensor, metadata: ForwardMetadata
    ) -> torch.Tensor:
        """Draft hidden states [tokens, hidden]; writes the draft layer's cache at `positions`.

        `hidden` [tokens, hidden] is what `forward`, or `draft` itself one position before, gave for `positions`
        [tokens]; `next_ids` [tokens] are the tokens one position on.
        """
        raise NotImplementedError

    def compute_draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Draft `hidden` [rows, hidden] to float32 [rows, vocab]: the tokens two positions on."""
        raise NotImplementedError
