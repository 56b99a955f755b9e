"""DeepSeek V2's and V3's keys of config.json, with transformers' defaults; what is not computed is refused."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeInt, model_validator

from pd_service.models.config import Count, HfConfig
from pd_service.models.deepseek_routing import BiasedSigmoidRouter, Router, Routing, SoftmaxRouter


class DeepseekConfig(HfConfig):
    """Keys that mean the same in V2 and V3."""

    router_class: ClassVar[type[Router]]

    intermediate_size: Count
    moe_intermediate_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    q_lora_rank: Count | None = 1536
    kv_lora_rank: Count = 512
    qk_nope_head_dim: Count = 128
    qk_rope_head_dim: Count = 64
    v_head_dim: Count = 128
    moe_layer_freq: Literal[1] = 1
    num_experts_per_tok: Count
    n_routed_experts: Count
    n_shared_experts: Count
    first_k_dense_replace: NonNegativeInt
    routed_scaling_factor: float
    norm_topk_prob: bool

    @property
    def is_interleaved(self) -> bool:
        """Whether the checkpoint's rotated planes are neighbours."""
        return True

    @property
    def has_mlp_bias(self) -> bool:
        return False

    @property
    def routing(self) -> Routing:
        raise NotImplementedError

    def model_post_init(self, context: object) -> None:
        self.read_rope()  # refused here, at the first look at the model

    @model_validator(mode="after")
    def _fit_heads(self) -> DeepseekConfig:
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            raise ValueError(
                f"num_key_value_heads ({self.num_key_value_heads}) must be num_attention_heads "
                f"({self.num_attention_heads}): in latent attention no heads share a key"
            )
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even for rotary embeddings, it is {self.qk_rope_head_dim}")
        if refusal := self.routing.refusal(self.router_class.least_per_group):
            raise ValueError(refusal)
        return self


class DeepseekV2Config(DeepseekConfig):
    router_class: ClassVar = SoftmaxRouter

    vocab_size: Count = 102_400
    hidden_size: Count = 4096
    num_hidden_layers: Count = 32
    intermediate_size: Count = 11_008
    moe_intermediate_size: Count = 1407
    num_attention_heads: Count = 32
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    mlp_bias: bool = False
    n_routed_experts: Count = 64
    n_shared_experts: Count = 2
    first_k_dense_replace: NonNegativeInt = 0
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = False
    scoring_func: Literal["softmax"] = "softmax"
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    n_group: Count | None = None
    topk_group: Count | None = None

    @property
    def has_mlp_bias(self) -> bool:
        return self.mlp_bias

    @property
    def routing(self) -> Routing:
        has_groups = self.topk_method == "group_limited_greedy"
        if has_groups and None in (self.n_group, self.topk_group):
            raise ValueError("topk_method 'group_limited_greedy' needs n_group and topk_group")
        return Routing(
            num_experts=self.n_routed_experts,
            num_chosen=self.num_experts_per_tok,
            num_groups=self.n_group if has_groups else 1,
            num_groups_chosen=self.topk_group if has_groups else 1,
            is_normalized=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
        )

    @model_validator(mode="after")
    def _refuse_what_sources_disagree_about(self) -> DeepseekV2Config:
        """Normalized weights are scaled in one published implementation and not in another."""
        if self.norm_topk_prob and self.routed_scaling_factor != 1.0:
            raise ValueError(
                f"norm_topk_prob is supported with routed_scaling_factor 1.0 only, not {self.routed_scaling_factor}"
            )
        return self


class DeepseekV3Config(DeepseekConfig):
    router_class: ClassVar = BiasedSigmoidRouter

    vocab_size: Count = 129_280
    hidden_size: Count = 7168
    num_hidden_layers: Count = 61
    intermediate_size: Count = 18_432
    moe_intermediate_size: Count = 2048
    num_attention_heads: Count = 128
    max_position_embeddings: Count = 4096
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    rope_interleave: bool = True
    num_experts_per_tok: Count = 8
    n_routed_experts: Count = 256
    n_shared_experts: Count = 1
    first_k_dense_replace: NonNegativeInt = 3
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    n_group: Count = 8
    topk_group: Count = 4
    num_nextn_predict_layers: NonNegativeInt = 1

    @property
    def is_interleaved(self) -> bool:
        return self.rope_interleave

    @property
    def num_draft_layers(self) -> int:
        """The checkpoint may hold more, each for one position further on; only the first is used."""
        return min(self.num_nextn_predict_layers, 1)

    @property
    def routing(self) -> Routing:
        return Routing(
            num_experts=self.n_routed_experts,
            num_chosen=self.num_experts_per_tok,
            num_groups=self.n_group,
            num_groups_chosen=self.topk_group,
            is_normalized=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
        )
