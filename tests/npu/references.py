"""What torch_npu's operators compute, in plain torch on host tensors: our reading of their documentation.

`REFERENCES` has one function per operator that we call, with the operator's own parameters and defaults; those that
we never give are left out, so that giving one fails. Written from the documentation alone, not from `pd_service.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

REFERENCES: dict[str, Callable[..., Any]] = {}


def reference(function: Callable[..., Any]) -> Callable[..., Any]:
    REFERENCES[function.__name__] = function
    return function


@reference
def npu_rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    exact = input.float()
    reciprocal = (exact.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (exact * reciprocal * gamma.float()).to(input.dtype), reciprocal


@reference
def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = x1 + x2
    return *npu_rms_norm(total, gamma, epsilon), total


@reference
def npu_rotary_mul(input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half") -> torch.Tensor:
    if rotary_mode == "half":
        first, second = input.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    else:
        turned = torch.stack((-input[..., 1::2], input[..., 0::2]), dim=-1).flatten(-2)
    return (input.float() * r1.float() + turned.float() * r2.float()).to(input.dtype)


@reference
def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = input.chunk(2, dim=dim)
    return (F.silu(gate.float()) * up.float()).to(input.dtype)


@reference
def npu_geglu(
    input: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = input.chunk(2, dim=dim)
    gate, up = (left, right) if activate_left else (right, left)
    activated = F.gelu(gate.float(), approximate="tanh" if approximate else "none")
    return (activated * up.float()).to(input.dtype), activated.to(input.dtype)


@reference
def npu_clipped_swiglu(
    x: torch.Tensor,
    *,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> torch.Tensor:
    exact = x.float().movedim(dim, -1)
    gate, up = (exact[..., 0::2], exact[..., 1::2]) if interleaved else exact.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + bias)).movedim(-1, dim).to(x.dtype)


@reference
def npu_scatter_nd_update_(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    input[tuple(indices.long().unbind(-1))] = updates
    return input


@reference
def npu_moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    active_num: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    assert (drop_pad_mode, quant_mode, expert_tokens_num_type, expert_tokens_num_flag) == (0, -1, 1, True)
    assert list(active_expert_range) == [0, expert_num]
    by_expert = expert_idx.flatten().argsort(stable=True)
    where = torch.empty_like(by_expert)
    where[by_expert] = torch.arange(len(by_expert))
    rows = x[by_expert // expert_idx.shape[1]][:active_num]
    counts = expert_idx.flatten().bincount(minlength=expert_num)
    return rows, (by_expert if row_idx_type else where).int(), counts, x.new_empty(expert_idx.numel()).float()


@reference
def npu_grouped_matmul(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    bias: Sequence[torch.Tensor] | None = None,
    group_list: torch.Tensor,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
) -> list[torch.Tensor]:
    assert split_item in (2, 3)
    assert (group_type, group_list_type) == (0, 1)
    parts = x[0].split(group_list.tolist())
    biases = [None] * len(parts) if bias is None else bias[0].unbind()
    products = [
        part.float() @ matrix.float() + (0 if b is None else b.float())
        for part, matrix, b in zip(parts, weight[0].unbind(), biases, strict=True)
    ]
    return [torch.cat(products).to(x[0].dtype)]


@reference
def npu_moe_finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int = 0,
) -> torch.Tensor:
    assert skip1 is None
    assert skip2 is None
    assert bias is None
    tokens, k = scales.shape
    order = expanded_src_to_dst_row.long()
    index = {0: order.view(k, tokens).T, 2: order.view(tokens, k)}[drop_pad_mode]
    weighed = expanded_permuted_rows.float()[index] * scales.float().unsqueeze(-1)
    return weighed.sum(dim=1).to(expanded_permuted_rows.dtype)


@reference
def npu_fused_infer_attention_score_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: Sequence[int],
    actual_seq_kvlen: Sequence[int],
    block_table: torch.Tensor,
    learnable_sink: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = 2**31 - 1,
    next_tokens: int = 2**31 - 1,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads exactly the keys that are visible, so that what lies beside them shows if it is asked for."""
    assert input_layout == "TND"
    num_key_value_heads = num_key_value_heads or num_query_heads
    answers = torch.empty(*query.shape[:2], value.shape[2] // num_key_value_heads, dtype=query.dtype)
    start = 0
    for request, end in enumerate(actual_seq_qlen):
        kv_len = actual_seq_kvlen[request]
        for i in range(start, end):
            position = kv_len - end + i
            first, last = _band(sparse_mode, position, pre_tokens, next_tokens, kv_len)
            slots = torch.arange(first, last)
            rows = block_table[request, slots // block_size].long(), slots % block_size
            k, v = (t[rows].view(len(slots), num_key_value_heads, -1).float() for t in (key, value))
            q = query[i].float()
            if query_rope is not None and key_rope is not None:
                k = torch.cat((k, key_rope[rows].view(len(slots), num_key_value_heads, -1).float()), dim=-1)
                q = torch.cat((q, query_rope[i].float()), dim=-1)
            answers[i] = _one(q.view(num_key_value_heads, -1, q.shape[-1]), k, v, softmax_scale, learnable_sink)
        start = end
    return answers, torch.empty(0)


def _band(sparse_mode: int, position: int, before: int, after: int, kv_len: int) -> tuple[int, int]:
    """The keys [first, last) that a query at `position` sees."""
    if sparse_mode == 0:
        return 0, kv_len
    if sparse_mode == 3:
        return 0, position + 1
    assert sparse_mode == 4
    return max(0, position - before), min(kv_len, position + after + 1)


def _one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """[heads, dim] of one token: `query` [kv_heads, group, dim], `key` and `value` [keys, kv_heads, …]."""
    scores = torch.einsum("hgd,khd->hgk", query, key) * scale
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(*scores.shape[:2], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(key)]
    return torch.einsum("hgk,khd->hgd", weights, value).flatten(0, 1)
