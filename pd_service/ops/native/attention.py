"""Attention over the cache's blocks by the C kernels, alone or with all that is done to a step's new tokens before it.

Shapes and rules stand at the functions of `cpu.py`; None (or False) means that the kernels cannot do it, see above.
"""

from __future__ import annotations

import ctypes
from typing import cast

import torch

from pd_service.ops.metadata import ForwardMetadata
from pd_service.ops.native import build
from pd_service.ops.native.build import KINDS, LANES

MAX_DIM = 512  # of a head: bounds what a thread works in
NO_WINDOW = 2**31 - 1


class Attention(ctypes.Structure):
    """`struct attention` of attention.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "k_cache", "v_cache", "out")),
        *((name, ctypes.c_void_p) for name in ("starts", "query_lens", "kv_lens", "tables", "sinks")),
        *((name, ctypes.c_int64) for name in ("requests", "table_width", "block_size", "heads", "kv_heads", "dim")),
        *((name, ctypes.c_int64) for name in ("query_stride", "window")),
        ("scale", ctypes.c_float),
    )


class NewTokens(ctypes.Structure):
    """`struct new_tokens` of attention.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "cos", "sin", "slots")),
        *((name, ctypes.c_int64) for name in ("tokens", "query_stride", "key_stride", "value_stride")),
    )


def write_kv(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> bool:
    """Whether the kernels have written it."""
    library = build.kernels()
    if library is None or key.dtype != k_cache.dtype or value.dtype != v_cache.dtype:
        return False
    if not (slot_mapping.dtype == torch.int32 and k_cache.is_contiguous() and v_cache.is_contiguous()):
        return False
    key, value = side_by_side(key), side_by_side(value)
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
    library = build.kernels()
    if library is None or not _is_attended(query, k_cache, v_cache):
        return None
    query = side_by_side(query)
    out = query.new_empty(query.shape)
    call = attention_of_step(metadata, attn_type)
    call.query, call.out, call.query_stride = query.data_ptr(), out.data_ptr(), query.stride(0)
    sinks = _of_layer(call, query, k_cache, v_cache, scale, sliding_window, sinks)
    if not library.pd_attention(KINDS[query.dtype], ctypes.byref(call), torch.get_num_threads()):
        raise MemoryError("no memory for what attention works in")
    return out


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
    *,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor | None:
    library = build.kernels()
    slots = metadata.slot_mapping[attn_type]
    if library is None or not _is_attended(query, k_cache, v_cache):
        return None
    if cos.dtype != query.dtype or slots.dtype != torch.int32 or query.shape[2] % (2 * LANES):
        return None
    query, key, value, slots = side_by_side(query), side_by_side(key), side_by_side(value), slots.contiguous()
    out = query.new_empty(query.shape)  # holds the rotated queries first
    new = NewTokens(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        slots.data_ptr(),
        out.shape[0],
        query.stride(0),
        key.stride(0),
        value.stride(0),
    )
    call = attention_of_step(metadata, attn_type)
    call.query = call.out = out.data_ptr()
    call.query_stride = out.stride(0)
    sinks = _of_layer(call, query, k_cache, v_cache, scale, sliding_window, sinks)
    kind, threads = KINDS[query.dtype], torch.get_num_threads()
    if not library.pd_rotate_write_attend(kind, ctypes.byref(new), ctypes.byref(call), threads):
        raise MemoryError("no memory for what attention works in")
    return out


def _is_attended(query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether the kernels attend to such caches."""
    dim, dtype = query.shape[2], query.dtype
    if dim % LANES or dim > MAX_DIM or dtype not in KINDS or dtype != k_cache.dtype:
        return False
    return k_cache.shape == v_cache.shape and k_cache.is_contiguous() and v_cache.is_contiguous()


def _of_layer(
    call: Attention,
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor | None:
    """Fills in what is one layer's own. Returns the sinks as they are read: they must live as long as the call."""
    call.k_cache, call.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
    _, call.heads, call.dim = query.shape
    call.kv_heads, call.scale, call.window = k_cache.shape[2], scale, sliding_window or NO_WINDOW
    if sinks is not None:
        sinks = sinks.float().contiguous()
    call.sinks = None if sinks is None else sinks.data_ptr()
    return sinks


def attention_of_step(metadata: ForwardMetadata, attn_type: str) -> Attention:
    """The arguments that all layers of a step share, made by the first that asks; the tensors behind them live on."""
    memo = ("native.attention", attn_type)
    if memo not in metadata.scratch:
        query_lens = torch.tensor(metadata.query_lens, dtype=torch.int32)
        kv_lens = torch.tensor(metadata.kv_lens, dtype=torch.int32)
        starts = (query_lens.cumsum(0) - query_lens).int()
        table = metadata.block_table[attn_type].int().contiguous()
        call = Attention(
            starts=starts.data_ptr(),
            query_lens=query_lens.data_ptr(),
            kv_lens=kv_lens.data_ptr(),
            tables=table.data_ptr(),
            requests=table.shape[0],
            table_width=table.shape[1],
            block_size=metadata.block_size,
        )
        metadata.scratch[memo] = call, (query_lens, kv_lens, starts, table)
    return cast(tuple[Attention, object], metadata.scratch[memo])[0]


def side_by_side(x: torch.Tensor) -> torch.Tensor:
    """`x` [tokens, heads, dim] with each token's heads and dims side by side."""
    _, head_stride, step = x.stride()
    return x if step == 1 and head_stride == x.shape[2] else x.contiguous()
