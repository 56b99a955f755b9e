"""A whole layer in one call of the C kernels; shapes and rules stand at `dense_layer` of `cpu.py`."""

from __future__ import annotations

import ctypes
from typing import cast

import torch

from pd_service.ops import LayerWeights
from pd_service.ops.metadata import ForwardMetadata
from pd_service.ops.native import build
from pd_service.ops.native.attention import MAX_DIM, NO_WINDOW, NewTokens, attention_of_step
from pd_service.ops.native.build import KINDS, LANES


class _Layer(ctypes.Structure):
    """`struct dense_layer` of dense_layer.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "qkv", "qkv_bias", "o", "o_bias")),
        *((name, ctypes.c_void_p) for name in ("mlp_norm", "gate_up", "down")),
        *((name, ctypes.c_int64) for name in ("hidden", "heads", "kv_heads", "dim", "inner", "norm_kind", "window")),
        ("eps", ctypes.c_double),
        ("scale", ctypes.c_float),
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
) -> bool:
    """Whether the kernels have computed it."""
    library = build.kernels()
    if library is None:
        return False
    if "native" not in weights.prepared:
        weights.prepared["native"] = _prepare(weights, k_cache, v_cache)
    layer = cast(_Layer | None, weights.prepared["native"])
    if layer is None or cos.dtype != x.dtype or not (x.is_contiguous() and residual.is_contiguous()):
        return False
    call, new, work = _step(x, weights, metadata)
    call.k_cache, call.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
    new.cos, new.sin = cos.data_ptr(), sin.data_ptr()
    is_done = library.pd_dense_layer(
        KINDS[x.dtype],
        ctypes.byref(layer),
        ctypes.byref(new),
        ctypes.byref(call),
        x.data_ptr(),
        residual.data_ptr(),
        work.data_ptr(),
        torch.get_num_threads(),
    )
    if not is_done:
        raise MemoryError("no memory for what attention works in")
    return True


def _prepare(w: LayerWeights, k_cache: torch.Tensor, v_cache: torch.Tensor) -> _Layer | None:
    """The arguments that never change, or None where the kernels cannot compute such a layer."""
    if any(packed.dim() != 3 for packed in (w.qkv, w.o, w.gate_up, w.down)) or w.gate_up.shape[0] % 2:
        return None  # not in panels
    hidden, kind = w.input_norm.shape[0], w.qkv.dtype
    if hidden % LANES or w.head_dim % (2 * LANES) or w.head_dim > MAX_DIM:
        return None
    if w.input_norm.dtype not in KINDS or k_cache.dtype != kind or v_cache.dtype != kind:
        return None
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        return None
    return _Layer(
        *(None if t is None else t.data_ptr() for t in (w.input_norm, w.qkv, w.qkv_bias, w.o, w.o_bias)),
        *(t.data_ptr() for t in (w.mlp_norm, w.gate_up, w.down)),
        hidden,
        w.num_heads,
        w.num_kv_heads,
        w.head_dim,
        w.inner_size,
        KINDS[w.input_norm.dtype],
        w.sliding_window or NO_WINDOW,
        w.eps,
        w.scale,
    )


def _step(
    x: torch.Tensor, w: LayerWeights, metadata: ForwardMetadata
) -> tuple[ctypes.Structure, ctypes.Structure, torch.Tensor]:
    """The arguments that layers of one attention type and these sizes share in a step, and what they work in."""
    elements = x.shape[1] + w.inner_size + 2 * (w.num_heads + w.num_kv_heads) * w.head_dim  # per token
    memo = ("native.dense_layer", w.attn_type, elements)
    if memo not in metadata.scratch:
        slots = metadata.slot_mapping[w.attn_type].int().contiguous()
        new = NewTokens(slots=slots.data_ptr(), tokens=x.shape[0])
        work = x.new_empty(x.shape[0] * elements)
        metadata.scratch[memo] = (attention_of_step(metadata, w.attn_type), new, work), slots
    shared = cast(tuple[tuple[ctypes.Structure, ctypes.Structure, torch.Tensor], object], metadata.scratch[memo])
    return shared[0]
