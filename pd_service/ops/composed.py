"""Operators of several steps as these steps, for a device that has no kernel for the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pd_service.ops.metadata import ForwardMetadata

if TYPE_CHECKING:
    from pd_service.ops import LayerWeights, Ops


def rotate_write_attend(
    ops: Ops,
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
    sliding_window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """See `cpu.rotate_write_attend`."""
    rotated = ops.rotary(torch.cat((query, key), dim=1), cos, sin)
    query, key = rotated[:, : query.shape[1]], rotated[:, query.shape[1] :]
    ops.write_kv(key, value, k_cache, v_cache, metadata.slot_mapping[attn_type])
    return ops.paged_attention(query, k_cache, v_cache, metadata, attn_type, scale, sliding_window, sinks)


def dense_layer(
    ops: Ops,
    x: torch.Tensor,
    residual: torch.Tensor,
    weights: LayerWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: ForwardMetadata,
) -> None:
    """See `cpu.dense_layer`."""
    w, num_kv = weights, weights.num_kv_heads
    normed, before_mlp = ops.add_rms_norm(x, residual, w.input_norm, w.eps)
    heads = ops.linear(normed, w.qkv, w.qkv_bias).view(x.shape[0], -1, w.head_dim)
    q, k, v = heads.tensor_split((w.num_heads, w.num_heads + num_kv), dim=1)
    o = ops.rotate_write_attend(q, k, v, cos, sin, k_cache, v_cache, metadata, w.attn_type, w.scale, w.sliding_window)
    attended = ops.linear(o.flatten(1), w.o, w.o_bias)
    normed, total = ops.add_rms_norm(attended, before_mlp, w.mlp_norm, w.eps)
    x.copy_(ops.gated_mlp(normed, w.gate_up, w.down))
    residual.copy_(total)
