"""The operators of `cpu.py` by the C kernels beside this file; shapes and rules stand there.

Every function answers None when the kernels cannot do it: there are none (see `build.py`), or not for this type, shape
or layout. That depends on the model alone, never on the batch, so a model always computes in the same way.
"""

from __future__ import annotations

import torch

from pd_service.ops.native import build
from pd_service.ops.native.attention import paged_attention as paged_attention
from pd_service.ops.native.attention import rotate_write_attend as rotate_write_attend
from pd_service.ops.native.attention import side_by_side as side_by_side
from pd_service.ops.native.attention import write_kv as write_kv
from pd_service.ops.native.build import KINDS, LANES
from pd_service.ops.native.build import kernels as kernels
from pd_service.ops.native.dense_layer import dense_layer as dense_layer

_PANEL = 32  # of panels.h


def pack_linear(weight: torch.Tensor) -> torch.Tensor | None:
    """`weight` [out, in] in panels: [out / 32, in, 32], in bfloat16 [out / 32, in / 2, 64]."""
    library = build.kernels()
    if library is None or weight.dtype not in KINDS or weight.shape[0] % _PANEL:
        return None
    pair = 4 // weight.dtype.itemsize
    if pair == 2 and (weight.shape[1] % 2 or not library.pd_has_bfloat16()):
        return None
    num_panels, depth = weight.shape[0] // _PANEL, weight.shape[1] // pair
    packed = torch.empty(num_panels, depth, _PANEL * pair, dtype=weight.dtype)
    library.pd_use_large_pages(packed.data_ptr(), packed.nbytes)
    panels = weight.detach().view(num_panels, _PANEL, depth, pair).transpose(1, 2)
    packed.view(num_panels, depth, _PANEL, pair).copy_(panels)
    return packed


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`packed` comes from `pack_linear` above, so the kernels are there."""
    library = build.kernels()
    assert library is not None
    x, stride = _even_rows(x)
    rows, depth = x.shape
    width = packed.shape[0] * _PANEL
    out = x.new_empty(rows, width)
    library.pd_linear(
        KINDS[x.dtype],
        x.data_ptr(),
        stride,
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        depth,
        width,
        torch.get_num_threads(),
    )
    return out


def gated_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor | None:
    library = build.kernels()
    if library is None or gate_up.dim() != 3 or down.dim() != 3 or gate_up.shape[0] % 2:  # not both in panels
        return None
    x, stride = _even_rows(x)
    rows, depth = x.shape
    dim, width = gate_up.shape[0] * _PANEL // 2, down.shape[0] * _PANEL
    inner, out = x.new_empty(rows, dim), x.new_empty(rows, width)
    library.pd_gated_mlp(
        KINDS[x.dtype],
        x.data_ptr(),
        stride,
        gate_up.data_ptr(),
        down.data_ptr(),
        inner.data_ptr(),
        out.data_ptr(),
        rows,
        depth,
        dim,
        width,
        torch.get_num_threads(),
    )
    return out


def _even_rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`x` [rows, depth] with its depth side by side, and the elements from row to row: whole pairs of bfloat16."""
    if x.is_contiguous():
        return x, x.shape[1]
    stride, step = x.stride()
    return (x, stride) if step == 1 and stride % 2 == 0 else (x.contiguous(), x.shape[1])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    library = build.kernels()
    dim = x.shape[-1]
    if library is None or x.dtype not in KINDS or weight.dtype not in KINDS or dim % LANES:
        return None
    outer, inner = x.numel() // dim, 1
    outer_stride, inner_stride = dim, 0
    if not x.is_contiguous():  # such as the queries among the heads of a projection
        if x.dim() != 3 or x.stride(2) != 1:
            x = x.contiguous()
        else:
            (outer, inner, _), (outer_stride, inner_stride, _) = x.shape, x.stride()
    out = x.new_empty(x.shape)
    library.pd_rms_norm(
        KINDS[x.dtype],
        x.data_ptr(),
        outer_stride,
        inner_stride,
        KINDS[weight.dtype],
        weight.data_ptr(),
        out.data_ptr(),
        outer,
        inner,
        dim,
        eps,
        torch.get_num_threads(),
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    library = build.kernels()
    dim = x.shape[-1]
    if library is None or x.dtype not in KINDS or weight.dtype not in KINDS or dim % LANES:
        return None
    x, residual = x.contiguous(), residual.contiguous()
    normed, total = torch.empty_like(x), torch.empty_like(x)
    library.pd_add_rms_norm(
        KINDS[x.dtype],
        x.data_ptr(),
        residual.data_ptr(),
        KINDS[weight.dtype],
        weight.data_ptr(),
        normed.data_ptr(),
        total.data_ptr(),
        x.numel() // dim,
        dim,
        eps,
        torch.get_num_threads(),
    )
    return normed, total


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
    library = build.kernels()
    tokens, heads, dim = x.shape
    if library is None or x.dtype not in KINDS or dim % (2 * LANES) or cos.dtype != x.dtype:
        return None
    x = side_by_side(x)
    out = x.new_empty(tokens, heads, dim)
    library.pd_rotary(
        KINDS[x.dtype],
        x.data_ptr(),
        x.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        tokens,
        heads,
        dim,
        torch.get_num_threads(),
    )
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor | None:
    library = build.kernels()
    if library is None or x.dtype not in KINDS or x.dim() != 2 or x.shape[1] % (2 * LANES):
        return None
    x = x.contiguous()
    tokens, dim = x.shape[0], x.shape[1] // 2
    out = x.new_empty(tokens, dim)
    library.pd_silu_and_mul(KINDS[x.dtype], x.data_ptr(), out.data_ptr(), tokens, dim, torch.get_num_threads())
    return out
