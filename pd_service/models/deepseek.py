"""DeepSeek V2 and V3 (R1 too): latent attention, a few dense layers, then experts; V3 can draft.

V2 and V3 differ in how a token finds its experts: see `deepseek_routing.py`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from pd_service.models.base import CausalLM, DraftingLM, HasCaches
from pd_service.models.config import HfConfig, ModelConfig
from pd_service.models.deepseek_config import DeepseekConfig, DeepseekV2Config, DeepseekV3Config
from pd_service.models.latent_attention import LatentAttention, LatentShape
from pd_service.models.layers import GatedMLP, Linear, Place, RMSNorm, RotaryEmbedding
from pd_service.models.llama import PreNormDecoder, PreNormLayer
from pd_service.models.moe import Experts
from pd_service.ops.metadata import ForwardMetadata


class DeepseekMoE(nn.Module):
    """Every token's own experts, and those all tokens share."""

    def __init__(self, hf: DeepseekConfig, *, place: Place) -> None:
        super().__init__()
        size = hf.moe_intermediate_size
        self.gate = hf.router_class(hf.hidden_size, hf.routing, place=place)
        self.experts = Experts(hf.n_routed_experts, hf.hidden_size, size, place=place)
        self.shared_experts = GatedMLP(hf.hidden_size, size * hf.n_shared_experts, bias=hf.has_mlp_bias, place=place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, hidden] -> [tokens, hidden]
        chosen, shares = self.gate.route(x)
        return self.experts(x, chosen, shares) + self.shared_experts(x)


class DraftLayer(PreNormLayer):
    """A layer more, that reads the hidden state of a position together with the token of the next one.

    It predicts the token after that through the model's own embedding and head.
    """

    def __init__(self, hf: DeepseekConfig, self_attn: nn.Module, mlp: nn.Module, *, place: Place) -> None:
        super().__init__(hf, self_attn, mlp, place=place)
        self.enorm = RMSNorm(hf.hidden_size, hf.rms_norm_eps, place=place)
        self.hnorm = RMSNorm(hf.hidden_size, hf.rms_norm_eps, place=place)
        self.eh_proj = Linear(2 * hf.hidden_size, hf.hidden_size, place=place)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(hf.hidden_size, hf.rms_norm_eps, place=place)})

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, metadata: ForwardMetadata
    ) -> torch.Tensor:  # both [tokens, hidden] -> [tokens, hidden]
        # The released weights want them in this order, not in that of formula 21 of the V3 report.
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        x, residual = super().forward(x, None, positions, metadata)
        return self.shared_head["norm"].add(x, residual)[0]


class DeepseekV2ForCausalLM(CausalLM):
    config_class: ClassVar = DeepseekV2Config
    family_name: ClassVar = "DeepSeek V2"
    examples: ClassVar = ("DeepSeek-V2", "DeepSeek-V2-Lite", "DeepSeek-V2.5", "DeepSeek-Coder-V2")
    attention: ClassVar = "full, multi-head latent"

    def __init__(self, config: ModelConfig, *, place: Place, block_size: int) -> None:
        hf = config.hf
        assert isinstance(hf, DeepseekV2Config)
        rotary = _rotary(config, hf, place=place)
        super().__init__(hf, _decoder(hf, rotary, place=place), place=place, block_size=block_size)


class DeepseekV3ForCausalLM(DraftingLM):
    """Hidden states have passed a norm: the model's the final one, the draft layer's its own, also on their way back.

    Published implementations agree about the first. What goes into a further guess some take from before that norm;
    here it is as in transformers, so that both kinds of hidden state look alike to the layer.
    """

    config_class: ClassVar = DeepseekV3Config
    family_name: ClassVar = "DeepSeek V3"
    examples: ClassVar = ("DeepSeek-V3", "DeepSeek-V3.1", "DeepSeek-R1", "Moonlight-16B-A3B")
    attention: ClassVar = "full, multi-head latent"

    def __init__(self, config: ModelConfig, *, place: Place, block_size: int, with_draft: bool = False) -> None:
        hf = config.hf
        assert isinstance(hf, DeepseekV3Config)
        rotary = _rotary(config, hf, place=place)
        super().__init__(hf, _decoder(hf, rotary, place=place), place=place, block_size=block_size)
        self.draft_path = f"model.layers.{hf.num_hidden_layers}."  # in the checkpoint
        parts = _parts(hf, hf.num_hidden_layers, rotary, place=place) if with_draft else None
        self.draft_layer = DraftLayer(hf, *parts, place=place) if parts else None

    def name_here(self, name: str) -> str:
        if self.draft_layer is None or not name.startswith(self.draft_path):
            return name
        return "draft_layer." + name.removeprefix(self.draft_path)

    @classmethod
    def is_ignored(cls, name: str, hf: HfConfig) -> bool:
        assert isinstance(hf, DeepseekV3Config)
        ends = (hf.num_hidden_layers + i for i in range(hf.num_nextn_predict_layers))
        return super().is_ignored(name, hf) or name.startswith(tuple(f"model.layers.{i}." for i in ends))

    def copies(self) -> dict[str, str]:
        # The released weights repeat the embedding and the head that the draft layer shares with the model.
        if self.draft_layer is None:
            return {}
        embedding = "model.embed_tokens.weight"
        is_tied = self.lm_head.weight is self.model.embed_tokens.weight
        return {
            "draft_layer.embed_tokens.weight": embedding,
            "draft_layer.shared_head.head.weight": embedding if is_tied else "lm_head.weight",
        }

    def describe_missing(self, paths: list[str]) -> str:
        if not all(path.startswith("draft_layer.") for path in paths):
            return super().describe_missing(paths)
        return (
            f"the checkpoint has no complete layer for multi-token prediction: {len(paths)} tensors are missing of "
            f"{self.draft_path}*; use it without, or with another method of speculation"
        )

    def attentions(self) -> list[HasCaches]:
        own = super().attentions()
        return own if self.draft_layer is None else [*own, self.draft_layer.self_attn]

    def draft(
        self, hidden: torch.Tensor, next_ids: torch.Tensor, positions: torch.Tensor, metadata: ForwardMetadata
    ) -> torch.Tensor:
        assert self.draft_layer is not None, "built without its draft layer"
        return self.draft_layer(self.model.embed_tokens(next_ids), hidden, positions, metadata)

    def compute_draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.compute_logits(hidden)


def _rotary(config: ModelConfig, hf: DeepseekConfig, *, place: Place) -> RotaryEmbedding:
    return RotaryEmbedding(hf.read_rope(), hf.qk_rope_head_dim, config.max_model_len, place=place)


def _decoder(hf: DeepseekConfig, rotary: RotaryEmbedding, *, place: Place) -> PreNormDecoder:
    layers = [PreNormLayer(hf, *_parts(hf, i, rotary, place=place), place=place) for i in range(hf.num_hidden_layers)]
    return PreNormDecoder(hf, layers, RMSNorm(hf.hidden_size, hf.rms_norm_eps, place=place), place=place)


def _parts(
    hf: DeepseekConfig, layer_idx: int, rotary: RotaryEmbedding, *, place: Place
) -> tuple[LatentAttention, nn.Module]:
    """Attention and MLP of one layer; a draft layer counts on behind the model's own."""
    attention = LatentAttention(_latent_shape(hf), rotary, place=place)
    if layer_idx < hf.first_k_dense_replace:
        return attention, GatedMLP(hf.hidden_size, hf.intermediate_size, bias=hf.has_mlp_bias, place=place)
    return attention, DeepseekMoE(hf, place=place)


def _latent_shape(hf: DeepseekConfig) -> LatentShape:
    rope = hf.read_rope()
    scale = (hf.qk_nope_head_dim + hf.qk_rope_head_dim) ** -0.5
    # Both factors of a score grow with the context, also where nothing is rotated.
    if rope.rope_type == "yarn" and rope.mscale_all_dim:
        scale *= rope.yarn_mscale(rope.mscale_all_dim) ** 2
    return LatentShape(
        hidden_size=hf.hidden_size,
        num_heads=hf.num_attention_heads,
        query_rank=hf.q_lora_rank,
        kv_rank=hf.kv_lora_rank,
        nope_dim=hf.qk_nope_head_dim,
        rope_dim=hf.qk_rope_head_dim,
        value_dim=hf.v_head_dim,
        scale=scale,
        bias=hf.attention_bias,
        is_interleaved=hf.is_interleaved,
    )
