"""What one engine needs of memory, worked out before anything is loaded.

The model is built on the meta device, where tensors have shapes and no bytes, and says by itself what it will hold; the
blocks come from the function that the engine itself asks. So the plan that is printed and the engine that starts cannot
disagree. Only the amount for a step is an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from kv_cache import (
    FIXED_BLOCK_ATTN_TYPES,
    ModelCacheInfo,
    calculate_block_num,
    calculate_cache_bytes,
    create_single_type_managers,
    get_entries_in_export_order,
    validate_cache_info,
)
from pd_service.config import EngineConfig, PoolRole, ServiceConfig
from pd_service.errors import ConfigError
from pd_service.models.base import CausalLM
from pd_service.models.config import ModelConfig, limit_length, load_model_config
from pd_service.models.layers import Linear
from pd_service.models.loader import build_model
from pd_service.models.moe import Experts
from pd_service.ops import get_ops

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """The caches that share block tables. `num_blocks` can be used; a request of the greatest length takes
    `blocks_per_request` at once. `window` in tokens, None when every token is kept.
    """

    key: str
    num_caches: int
    bytes_per_token: int
    num_blocks: int
    blocks_per_request: int
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one engine. `loading_bytes` are needed beside the weights for a moment, while they are packed."""

    weight_bytes: int
    loading_bytes: int
    kv_bytes: int
    step_bytes: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    groups: tuple[GroupPlan, ...]

    @property
    def total_bytes(self) -> int:
        """The most that is needed at once."""
        return self.weight_bytes + self.kv_bytes + max(self.step_bytes, self.loading_bytes)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV fits, of all requests together, where every token's KV is kept; 0 when none is."""
        return min((g.num_blocks * self.block_size for g in self.groups if g.window is None), default=0)

    @property
    def num_longest_requests(self) -> int:
        """Requests of `max_model_len` tokens that can be held at once."""
        return min(self.max_num_seqs, *(group.num_blocks // group.blocks_per_request for group in self.groups))

    def describe(self) -> str:
        """One line."""
        parts = [
            f"weights {self.weight_bytes / GIB:.2f}",
            f"KV cache {self.kv_bytes / GIB:.2f}",
            f"a step {self.step_bytes / GIB:.2f}",
        ]
        return f"{self.total_bytes / GIB:.2f} GiB: {', '.join(parts)}"


def require_memory(config: EngineConfig, available: int) -> MemoryPlan:
    """The plan of an engine that starts in this process, with `available` bytes; ConfigError if it needs more."""
    plan = plan_memory(config, load_model_config(config.model_dir))
    if plan.total_bytes > available:
        raise ConfigError(
            f"this engine needs {plan.describe()}; {available / GIB:.2f} GiB are free: lower "
            f"pools.{config.role}.kv_cache_bytes, or give it a device with more memory"
        )
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """One pool: `replicas` engines of this plan."""

    role: PoolRole
    replicas: int
    plan: MemoryPlan


def plan_pools(config: ServiceConfig, model_dir: Path, model: ModelConfig) -> list[PoolPlan]:
    """Raises ConfigError when an engine's cache holds no whole request."""
    roles: tuple[PoolRole, ...] = ("prefill", "decode")
    return [
        PoolPlan(
            role=role,
            replicas=config.pool(role).replicas,
            plan=plan_memory(config.engine_config(role, model_dir), model),
        )
        for role in roles
    ]


def lack_of_memory(pools: Sequence[PoolPlan], available: int) -> str | None:
    """Why engines of all pools do not fit one host with that many bytes, and what to change; None when they do."""
    needed = sum(pool.replicas * pool.plan.total_bytes for pool in pools)
    if needed <= available:
        return None
    each = "; ".join(f"{pool.replicas} x {pool.role} {pool.plan.describe()}" for pool in pools)
    return (
        f"the engines need {needed / GIB:.2f} GiB, {available / GIB:.2f} are free ({each}): "
        "lower pools.*.kv_cache_bytes or pools.*.replicas"
    )


def plan_memory(config: EngineConfig, model: ModelConfig) -> MemoryPlan:
    """The plan of an engine of `config` with `model`. Raises ConfigError when its cache holds no whole request."""
    model = limit_length(model, config.settings.max_model_len)
    settings = config.settings
    has_draft_layer = settings.speculative.method == "mtp"
    dtype: torch.dtype = getattr(torch, config.dtype)
    skeleton = build_model(
        model, dtype=dtype, device="meta", block_size=settings.block_size, with_draft=has_draft_layer
    ).eval()
    cache_info = skeleton.get_cache_info()
    block_nums = plan_blocks(cache_info, config, model.max_model_len)
    unpacked = {id(tensor): tensor.nbytes for tensor in _held_tensors(skeleton)}
    packed = [m.weight for m in skeleton.modules() if isinstance(m, Linear)]
    packed += [m.gate_up_proj for m in skeleton.modules() if isinstance(m, Experts)]
    return MemoryPlan(
        weight_bytes=sum(unpacked.values()) + _copied_bytes(skeleton, config.device, dtype),
        loading_bytes=max((weight.nbytes for weight in packed), default=0),
        kv_bytes=calculate_cache_bytes(cache_info, block_nums),
        step_bytes=_step_bytes(skeleton, config, model, dtype),
        block_size=settings.block_size,
        max_model_len=model.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        groups=_plan_groups(cache_info, block_nums, model.max_model_len, settings.max_step_tokens),
    )


def plan_blocks(cache_info: ModelCacheInfo, config: EngineConfig, max_model_len: int) -> Mapping[str, int]:
    """Blocks per group_key, the null block included. Raises ConfigError naming the settings that decide."""
    settings = config.settings
    try:
        validate_cache_info(cache_info)
        return calculate_block_num(
            cache_info,
            max_concurrency=settings.max_num_seqs,
            max_model_len=max_model_len,
            max_step_tokens=settings.max_step_tokens,
            available_bytes=int(config.kv_cache_bytes),
        )
    except ValueError as error:
        raise ConfigError(
            f"KV cache: {error}. These are the settings pools.{config.role}.kv_cache_bytes, engine.max_model_len, "
            "engine.max_num_seqs and engine.max_num_batched_tokens"
        ) from error


def _plan_groups(
    cache_info: ModelCacheInfo, block_nums: Mapping[str, int], max_model_len: int, max_step_tokens: int
) -> tuple[GroupPlan, ...]:
    entries = [entry for _, entry in get_entries_in_export_order(cache_info)]
    groups = []
    for key, manager in create_single_type_managers(cache_info, block_nums, max_model_len).items():
        members = [entry for entry in entries if entry.group_key == key]
        first = members[0]
        groups.append(
            GroupPlan(
                key=key,
                num_caches=len(members),
                bytes_per_token=sum(entry.bytes_per_token for entry in members),
                num_blocks=block_nums[key] - 1,
                blocks_per_request=manager.get_peak_num_blocks(max_model_len, max_step_tokens),
                window=(first.sliding_window or first.attention_chunk or 1)
                if first.attn_type in FIXED_BLOCK_ATTN_TYPES
                else None,
            )
        )
    return tuple(groups)


def _held_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and what modules keep beside them, such as tables of the rotary embedding."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor):
                yield value
            elif not isinstance(value, nn.Module):
                yield from (one for one in getattr(value, "__dict__", {}).values() if isinstance(one, torch.Tensor))


def _copied_bytes(model: CausalLM, device: str, dtype: torch.dtype) -> int:
    """Packed copies of weights that another module keeps as they are: the output matrix that is the embedding as well.

    Any other weight makes room for its packed form, which is as large; the checkpoint is mapped, never held.
    """
    sample = torch.empty(16, 16, dtype=dtype)  # on the host, which may not have that device
    if get_ops(device).pack_linear(sample) is sample:
        return 0
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    linears = (module.weight for module in model.modules() if isinstance(module, Linear))
    return sum(weight.nbytes for weight in linears if owners[id(weight)] > 1)


def _step_bytes(model: CausalLM, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype) -> int:
    """About what the largest step holds at once beside weights and cache, in the layer that holds most.

    Hidden states before and after the layer's norm and residual; the widest product with its activation; the keys and
    values of one request of the greatest length, gathered; logits in float32 with a copy to sample from.
    """
    settings, hf = config.settings, model_config.hf
    tokens = settings.max_num_batched_tokens
    linears = [m for m in model.modules() if isinstance(m, Linear) and m is not model.lm_head]
    num_chosen = getattr(hf, "num_experts_per_tok", 0)
    experts = [m.gate_up_proj.shape[1] * num_chosen for m in model.modules() if isinstance(m, Experts)]
    widest = max([sum(linear.out_sizes) for linear in linears] + experts)
    layers = model.get_cache_info().layer_infos
    gathered = max(sum(entry.bytes_per_token for entry in layer.caches) for layer in layers)
    per_request = settings.speculative.num_tokens + 1 if settings.speculative.method != "none" else 1
    num_logits = settings.max_num_seqs * per_request
    return (
        tokens * (4 * hf.hidden_size + 2 * widest) * dtype.itemsize
        + gathered * model_config.max_model_len
        + 2 * num_logits * model_config.vocab_size * torch.float32.itemsize
    )
