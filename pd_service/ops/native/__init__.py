"""The operators of `cpu.py` by the C kernels beside this file; shapes and rules stand there.

Every function answers None when the kernels cannot do it: there are none (see `build.py`), or not for this type, shape
or layout. That depends on the model alone, never on the batch, so a model always computes in the same way.
"""

from __future__ import annotations

import ctypes
from typing import cast

import torch

from pd_service.ops.metadata import ForwardMetadata
from pd_service.ops.native.build import kernels

_KINDS = {torch.float32: 0, torch.bfloat16: 1}  # of vectors.h
_LANES, _PANEL = 16, 32  # of vectors.h and linear.c
_MAX_DIM = 512  # of a head: bounds what a thread works in
_NO_WINDOW = 2**31 - 1


class _Attention(ctypes.Structure):
    """`struct attention` of attention.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "k_cache", "v_cache", "out")),
        *((name, ctypes.c_void_p) for name in ("starts", "query_lens", "kv_lens", "tables", "sinks")),
        *((name, ctypes.c_int64) for name in ("requests", "table_width", "block_size", "heads", "kv_heads", "dim")),
        *((name, ctypes.c_int64) for name in ("query_stride", "window")),
        ("scale", ctypes.c_float),
    )


def pack_linear(weight: torch.Tensor) -> torch.Tensor | None:
    """`weight` [out, in] in panels: [out / 32, in, 32], in bfloat16 [out / 32, in / 2, 64]."""
    library = kernels()
    if library is None or weight.dtype not in _KINDS or weight.shape[0] % _PANEL:
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
    library = kernels()
    assert library is not None
    stride, step = x.stride()
    if step != 1 or stride % 2:
        x = x.contiguous()
        stride = x.stride(0)
    rows, depth = x.shape
    width = packed.shape[0] * _PANEL
    out = x.new_empty(rows, width)
    library.pd_linear(
        _KINDS[x.dtype],
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


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    library = kernels()
    dim = x.shape[-1]
    if library is None or x.dtype not in _KINDS or weight.dtype not in _KINDS or dim % _LANES:
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
        _KINDS[x.dtype],
        x.data_ptr(),
        outer_stride,
        inner_stride,
        _KINDS[weight.dtype],
        weight.data_ptr(),
        out.data_ptr(),
        outer,
        inner,
        dim,
        eps,
        torch.get_num_threads(),
    )
    return out


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
    library = kernels()
    tokens, heads, dim = x.shape
    if library is None or x.dtype not in _KINDS or dim % (2 * _LANES) or cos.dtype != x.dtype:
        return None
    x = _rows(x)
    out = x.new_empty(tokens, heads, dim)
    library.pd_rotary(
        _KINDS[x.dtype],
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
    library = kernels()
    if library is None or x.dtype not in _KINDS or x.dim() != 2 or x.shape[1] % (2 * _LANES):
        return None
    x = x.contiguous()
    tokens, dim = x.shape[0], x.shape[1] // 2
    out = x.new_empty(tokens, dim)
    library.pd_silu_and_mul(_KINDS[x.dtype], x.data_ptr(), out.data_ptr(), tokens, dim, torch.get_num_threads())
    return out


def write_kv(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> bool:
    """Whether the kernels have written it."""
    library = kernels()
    if library is None or key.dtype != k_cache.dtype or value.dtype != v_cache.dtype:
        return False
    if not (slot_mapping.dtype == torch.int32 and k_cache.is_contiguous() and v_cache.is_contiguous()):
        return False
    key, value = _rows(key), _rows(value)
    size = key.itemsize
    library.pd_write_kv(
        key.data_ptr(),
        key.stride(0) * size,
        value.data_ptr(),
        value.stride(0) * size,
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slot_mapping.contiguous().data_ptr(),
        key.shape[0],
        key.shape[1] * key.shape[2] * size,
        value.shape[1] * value.shape[2] * size,
        torch.get_num_threads(),
    )
    return True


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: ForwardMetadata,
    attn_type: str,
    scale: float,
    *,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor | None:
    library = kernels()
    dim = query.shape[2]
    if library is None or query.dtype not in _KINDS or query.dtype != k_cache.dtype or k_cache.shape != v_cache.shape:
        return None
    if dim % _LANES or dim > _MAX_DIM or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        return None
    query = _rows(query)
    out = query.new_empty(query.shape)
    call = _step(metadata, attn_type)
    call.query, call.k_cache, call.v_cache = query.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()
    call.out, call.query_stride = out.data_ptr(), query.stride(0)
    call.heads, call.kv_heads, call.dim, call.scale = query.shape[1], k_cache.shape[2], dim, scale
    call.window = sliding_window or _NO_WINDOW
    if sinks is not None:
        sinks = sinks.float().contiguous()
    call.sinks = None if sinks is None else sinks.data_ptr()
    if not library.pd_attention(_KINDS[query.dtype], ctypes.byref(call), torch.get_num_threads()):
        raise MemoryError("no memory for what attention works in")
    return out


def _step(metadata: ForwardMetadata, attn_type: str) -> _Attention:
    """The arguments that all layers of a step share, made by the first that asks; the tensors behind them live on."""
    memo = ("native.attention", attn_type)
    if memo not in metadata.scratch:
        query_lens = torch.tensor(metadata.query_lens, dtype=torch.int32)
        kv_lens = torch.tensor(metadata.kv_lens, dtype=torch.int32)
        starts = (query_lens.cumsum(0) - query_lens).int()
        table = metadata.block_table[attn_type].int().contiguous()
        call = _Attention(
            starts=starts.data_ptr(),
            query_lens=query_lens.data_ptr(),
            kv_lens=kv_lens.data_ptr(),
            tables=table.data_ptr(),
            requests=table.shape[0],
            table_width=table.shape[1],
            block_size=metadata.block_size,
        )
        metadata.scratch[memo] = call, (query_lens, kv_lens, starts, table)
    return cast(tuple[_Attention, object], metadata.scratch[memo])[0]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` [tokens, heads, dim] with each token's heads and dims side by side."""
    _, head_stride, step = x.stride()
    return x if step == 1 and head_stride == x.shape[2] else x.contiguous()
