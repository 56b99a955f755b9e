"""The operators on an Ascend NPU: fused ones of torch_npu where these are documented for the case, else torch's own.

`cpu.py` is the specification of each. Nothing here reads a tensor back from the device. Each fused operator is a call
built by `npu_calls` and made by `_run`; with the environment variable PD_SERVICE_CHECK_CALLS=1 its documented limits
are checked first. torch_npu must have been imported, which `pd_service.device` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F

from pd_service.ops import ExpertWeights, LayerWeights, Ops, composed, contracts, get_ops, npu_calls, npu_composed
from pd_service.ops.contracts_attention import LATENT_DIM, LATENT_HEADS, ROPE_DIM
from pd_service.ops.metadata import ForwardMetadata
from pd_service.ops.npu_tables import causal_triangle, visible_tables

PAGED_ATTENTION = "paged, npu_fused_infer_attention_score_v2 or torch"  # for people to read

_IS_CHECKED = os.environ.get("PD_SERVICE_CHECK_CALLS") == "1"


def _run(call: contracts.Call) -> Any:
    if _IS_CHECKED:
        contracts.check(call)
    return getattr(torch.ops.npu, call.name)(*call.args, **call.kwargs)


# ---- products with weights


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    return weight


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, packed, bias)


def gated_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return linear(silu_and_mul(linear(x, gate_up, None)), down, None)


def pack_head_linear(weight: torch.Tensor) -> list[torch.Tensor]:
    """One matrix for each head, transposed: [heads, in, out]."""
    return [weight.transpose(1, 2).contiguous()]


def head_linear(x: torch.Tensor, packed: list[torch.Tensor]) -> torch.Tensor:
    return torch.bmm(x.transpose(0, 1), packed[0]).transpose(0, 1)


def pack_experts(weight: torch.Tensor) -> list[torch.Tensor]:
    """One matrix for each expert, transposed: [experts, in, out]."""
    return [weight.transpose(1, 2).contiguous()]


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    weights: ExpertWeights,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Shares are rounded to the type of `x`, which the operator that sums wants."""
    rows, index, counts, _ = _run(npu_calls.route_tokens(x, chosen.int(), weights.num_experts))
    inner = activate(_run(npu_calls.expert_matmul(rows, weights.gate_up[0], weights.gate_up_bias, counts))[0])
    rows = _run(npu_calls.expert_matmul(inner, weights.down[0], weights.down_bias, counts))[0]
    return cast(torch.Tensor, _run(npu_calls.sum_experts(rows, shares.to(rows.dtype), index)))


# ---- between the products


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype == weight.dtype:
        return cast(torch.Tensor, _run(npu_calls.rms_norm(x, weight, eps))[0])
    return cast(torch.Tensor, _run(npu_calls.rms_norm(x.float(), weight, eps))[0]).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.dtype == weight.dtype:
        normed, _, total = _run(npu_calls.add_rms_norm(x, residual, weight, eps))
        return normed, total
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary_tables(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator negates the half that is to be negated by itself."""
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, _run(npu_calls.rotary(x, cos, sin)))


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, _run(npu_calls.swiglu(x)))


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, _run(npu_calls.geglu(x))[0])


def clipped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    return cast(torch.Tensor, _run(npu_calls.clipped_swiglu(x, alpha, limit)))


# ---- cache and attention


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    _run(npu_calls.write_rows(k_cache, slot_mapping, key))
    _run(npu_calls.write_rows(v_cache, slot_mapping, value))


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: ForwardMetadata,
    attn_type: str,
    scale: float,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fused for head sizes that are documented: 128, and 64 where no two query heads share a key head."""
    _, num_heads, dim = query.shape
    if dim != 128 and not (dim == 64 and num_heads == k_cache.shape[2]):
        return npu_composed.attend(query, (k_cache,), v_cache, metadata, attn_type, scale, sliding_window, sinks)
    tables = visible_tables(metadata, attn_type, sliding_window)
    call = npu_calls.attention(
        query,
        k_cache,
        v_cache,
        query_lens=metadata.query_lens,
        kv_lens=tables.kv_lens,
        block_table=tables.block_table,
        scale=scale,
        triangle=causal_triangle(query.device),
        window=sliding_window,
        sinks=sinks,
    )
    return cast(torch.Tensor, _run(call)[0])


def latent_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    nope_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    metadata: ForwardMetadata,
    attn_type: str,
    scale: float,
) -> torch.Tensor:
    """Fused for the sizes of DeepSeek's models, which are the documented ones."""
    _, num_heads, rank = q_latent.shape
    if (rank, q_rope.shape[2]) != (LATENT_DIM, ROPE_DIM) or num_heads not in LATENT_HEADS:
        query = torch.cat((q_latent, q_rope), dim=-1)
        keys = nope_cache, rope_cache
        return npu_composed.attend(query, keys, nope_cache, metadata, attn_type, scale, None, None)
    tables = visible_tables(metadata, attn_type, None)
    call = npu_calls.latent_attention(
        q_latent,
        q_rope,
        nope_cache,
        rope_cache,
        query_lens=metadata.query_lens,
        kv_lens=tables.kv_lens,
        block_table=tables.block_table,
        scale=scale,
        triangle=causal_triangle(q_latent.device),
    )
    return cast(torch.Tensor, _run(call)[0])


def rotate_write_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: ForwardMetadata,
    attn_type: str,
    scale: float,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    ops = _own()
    return composed.rotate_write_attend(
        ops, query, key, value, cos, sin, k_cache, v_cache, metadata, attn_type, scale, sliding_window, sinks
    )


def dense_layer(
    x: torch.Tensor,
    residual: torch.Tensor,
    weights: LayerWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: ForwardMetadata,
) -> None:
    composed.dense_layer(_own(), x, residual, weights, cos, sin, k_cache, v_cache, metadata)


def _own() -> Ops:
    return get_ops("npu")
