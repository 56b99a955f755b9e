"""The operators in plain torch: what runs on a CPU, and the specification for every other device.

Where this machine can compile them, the kernels of `native` do the same faster, but for rounding.

Each function is pure except those that write the cache, `write_kv`, `rotate_write_attend` and `dense_layer`. With
oneDNN, a row (token) of a result never depends on the other rows of the batch, to the last bit: a request gets the same
tokens alone and among others. The functions of several steps are those steps in one call, also to the last bit.
"""

from __future__ import annotations

import torch

from pd_service.ops import LayerWeights, composed, get_ops, native
from pd_service.ops.cpu_attention import latent_attention as latent_attention
from pd_service.ops.cpu_attention import paged_attention as paged_attention
from pd_service.ops.cpu_attention import rotate_write_attend as rotate_write_attend
from pd_service.ops.cpu_attention import write_kv as write_kv
from pd_service.ops.cpu_linear import experts as experts
from pd_service.ops.cpu_linear import gated_mlp as gated_mlp
from pd_service.ops.cpu_linear import head_linear as head_linear
from pd_service.ops.cpu_linear import linear as linear
from pd_service.ops.cpu_linear import pack_experts as pack_experts
from pd_service.ops.cpu_linear import pack_head_linear as pack_head_linear
from pd_service.ops.cpu_linear import pack_linear as pack_linear
from pd_service.ops.cpu_pointwise import add_rms_norm as add_rms_norm
from pd_service.ops.cpu_pointwise import clipped_swiglu as clipped_swiglu
from pd_service.ops.cpu_pointwise import gelu_and_mul as gelu_and_mul
from pd_service.ops.cpu_pointwise import rms_norm as rms_norm
from pd_service.ops.cpu_pointwise import rotary as rotary
from pd_service.ops.cpu_pointwise import rotary_tables as rotary_tables
from pd_service.ops.cpu_pointwise import silu_and_mul as silu_and_mul
from pd_service.ops.metadata import ForwardMetadata

PAGED_ATTENTION = "paged, C kernels or torch SDPA"  # for people to read


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
    """In place: x + residual [tokens, hidden] is the layer's input, and x + residual is its output.

    Norm, projections, `rotate_write_attend`, norm, `gated_mlp`. What a part adds to `residual` is added by the norm
    behind it, so the layer leaves its last sum to its successor.
    """
    if native.dense_layer(x, residual, weights, cos, sin, k_cache, v_cache, metadata):
        return
    composed.dense_layer(get_ops("cpu"), x, residual, weights, cos, sin, k_cache, v_cache, metadata)
