"""Calls of torch_npu's operators, built and not made: name, positional and keyword arguments.

One pure function per operator, so that what would be called can be looked at on any host. Whatever has a default that
depends on the library's version, or is wrong for most models (layout, scale, mode), is said. Lengths are Python
integers. `pd_service.ops.npu` makes the calls, `contracts` and `contracts_attention` hold their limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from pd_service.ops.contracts import Call
from pd_service.ops.contracts_attention import OPERATOR as ATTENTION


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Call:
    """Returns (norm, reciprocal root mean square)."""
    return Call("npu_rms_norm", (x, weight, eps), {})


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Call:
    """Returns (norm of the sum, reciprocal root mean square, sum)."""
    return Call("npu_add_rms_norm", (x, residual, weight, eps), {})


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Call:
    """x * cos + (-second half, first half) * sin, for `x` [tokens, heads, dim], cos and sin [tokens, 1, dim]."""
    return Call("npu_rotary_mul", (x, cos, sin, "half"), {})


def swiglu(x: torch.Tensor) -> Call:
    """silu(first half) * second half of the last dimension."""
    return Call("npu_swiglu", (x.contiguous(), -1), {})


def geglu(x: torch.Tensor) -> Call:
    """Returns (gelu(first half) * second half, gelu of the first half), with gelu in its tanh form."""
    return Call("npu_geglu", (x.contiguous(), -1, 1, True), {})


def clipped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> Call:
    """The gated unit of gpt-oss, of gates and ups in turns."""
    said = {"dim": -1, "alpha": alpha, "limit": limit, "bias": 1.0, "interleaved": True}
    return Call("npu_clipped_swiglu", (x.contiguous(),), said)


def write_rows(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> Call:
    """Row i of `rows` [tokens, heads, dim] goes to slot `slots[i]` of `cache` [blocks, block_size, heads, dim]."""
    by_slot = cache.view(-1, cache.shape[2] * cache.shape[3])
    return Call("npu_scatter_nd_update_", (by_slot, slots.view(-1, 1), rows.reshape(rows.shape[0], -1)), {})


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    block_table: torch.Tensor,
    scale: float,
    triangle: torch.Tensor,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> Call:
    """`query` [tokens, heads, dim] over caches [blocks, block_size, kv_heads, dim]. Returns (answers, log sums).

    `triangle` is `causal_triangle` of the device. See `visibility` for `window`.
    """
    said = {
        "actual_seq_qlen": list(accumulate(query_lens)),
        "actual_seq_kvlen": list(kv_lens),
        "block_table": block_table,
        "learnable_sink": sinks,
        "num_query_heads": query.shape[1],
        "num_key_value_heads": key.shape[2],
        "softmax_scale": scale,
        "input_layout": "TND",
        "block_size": key.shape[1],
    }
    said |= visibility(query_lens, window, triangle)
    return Call(ATTENTION, (query.contiguous(), _by_block(key), _by_block(value)), said)


def latent_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    nope_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    *,
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    block_table: torch.Tensor,
    scale: float,
    triangle: torch.Tensor,
) -> Call:
    """As `attention`; the caches' rows, side by side, are every head's key, those of `nope_cache` also its value."""
    plain = attention(
        q_latent,
        nope_cache,
        nope_cache,
        query_lens=query_lens,
        kv_lens=kv_lens,
        block_table=block_table,
        scale=scale,
        triangle=triangle,
    )
    ropes = {"query_rope": q_rope.contiguous(), "key_rope": _by_block(rope_cache)}
    return Call(plain.name, plain.args, {**plain.kwargs, **ropes})


def visibility(query_lens: Sequence[int], window: int | None, triangle: torch.Tensor) -> dict[str, object]:
    """Which keys a new token sees, as arguments: the last new token of a request stands at its last key.

    A window of W counts the token that asks, so it looks at W - 1 tokens before itself. The operator's band (mode 4)
    keeps keys j >= i - pre_tokens, by the mask that op-plugin's documentation of the sibling `npu_fusion_attention`
    spells out: W keys for pre_tokens = W - 1. Other services pass W and see one key more, which here may be in a block
    that was given back.

    To be settled on hardware: the documentation says that the band is ignored when each request has one new token,
    while published recipes rely on it there. If it is, a token sees up to block_size - 1 keys too many: real ones of
    its own request, because tables begin with the first block that the window touches.
    """
    if window is not None:
        return {"sparse_mode": 4, "atten_mask": triangle, "pre_tokens": window - 1, "next_tokens": 0}
    if max(query_lens) > 1:
        return {"sparse_mode": 3, "atten_mask": triangle}
    return {"sparse_mode": 0}


def route_tokens(x: torch.Tensor, chosen: torch.Tensor, num_experts: int) -> Call:
    """`x` [tokens, hidden], a row for each of its `chosen` experts int32 [tokens, k], sorted by expert.

    Returns (rows [tokens * k, hidden], where row i * k + j of the unsorted went to, rows per expert int64, nothing).
    """
    said = {
        "active_num": chosen.numel(),
        "expert_num": num_experts,
        "drop_pad_mode": 0,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "quant_mode": -1,
        "active_expert_range": [0, num_experts],
        "row_idx_type": 0,
    }
    return Call("npu_moe_init_routing_v2", (x.contiguous(), chosen), said)


def expert_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, counts: torch.Tensor) -> Call:
    """The next `counts[e]` rows of `x` times `weight[e]` of [experts, in, out], plus `bias[e]`. Returns a list of one.

    The operator wants the bias in float32 where `x` is bfloat16.
    """
    is_wider = bias is not None and x.dtype == torch.bfloat16
    said = {
        "bias": None if bias is None else [bias.float() if is_wider else bias],
        "group_list": counts,
        "split_item": 3,
        "group_type": 0,
        "group_list_type": 1,
    }
    return Call("npu_grouped_matmul", ([x], [weight]), said)


def sum_experts(rows: torch.Tensor, shares: torch.Tensor, index: torch.Tensor) -> Call:
    """Back to tokens: the sum of rows `index[i * k + j]`, weighed with `shares` [tokens, k] of their type."""
    args = (rows, None, None, None, shares, index, None)
    return Call("npu_moe_finalize_routing", args, {"drop_pad_mode": 2})


def _by_block(cache: torch.Tensor) -> torch.Tensor:
    """[blocks, block_size, heads, dim] as [blocks, block_size, heads * dim], the one form that every case allows."""
    return cache.view(cache.shape[0], cache.shape[1], -1)
