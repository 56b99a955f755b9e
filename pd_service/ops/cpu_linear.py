"""Products with weights on a CPU: one matrix, a whole MLP, one matrix for each head, the experts each token chose.

With oneDNN, a row of a result never depends on the other rows of the batch, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F

from pd_service.ops import ExpertWeights, native
from pd_service.ops.cpu_pointwise import silu_and_mul


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [out, in] in the layout that `linear` reads fastest; a copy, for inference only.

    oneDNN's blocked layout reads the weights of a decode step at memory speed: about twice as fast as F.linear, for any
    number of rows. Its operators are private in torch, hence the exact version in pyproject.toml.
    """
    if (panels := native.pack_linear(weight)) is not None:
        return panels
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return weight
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    return cast(torch.Tensor, torch.ops.mkldnn._reorder_linear_weight(weight.detach()))


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x` [rows, in] times `packed` [out, in] transposed, plus `bias` [out]: [rows, out].

    `packed` comes from `pack_linear`; a plain weight works too. For a single row oneDNN splits long sums, which would
    make the result depend on the batch; a second row prevents that and costs little, as reading `packed` is the work.
    """
    if packed.dim() == 3:  # panels
        return native.linear(x, packed, bias)
    if not packed.is_mkldnn:
        return F.linear(x, packed, bias)
    rows = x.shape[0]
    if rows == 1:
        x = x.expand(2, -1).contiguous()
    result = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return cast(torch.Tensor, result[:rows])


def gated_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) for `x` [rows, hidden]; both weights come from `pack_linear`. Returns [rows, out].

    Before packing, `gate_up` is [2 * dim, hidden] with all gates first, `down` [out, dim].
    """
    if (result := native.gated_mlp(x, gate_up, down)) is not None:
        return result
    return linear(silu_and_mul(linear(x, gate_up, None)), down, None)


def pack_head_linear(weight: torch.Tensor) -> list[torch.Tensor]:
    """`weight` [heads, out, in], a matrix for each head, as `head_linear` takes it; a copy, for inference only."""
    return [pack_linear(matrix.contiguous()) for matrix in weight]


def head_linear(x: torch.Tensor, packed: list[torch.Tensor]) -> torch.Tensor:
    """`x` [tokens, heads, in], each head times its own matrix [out, in] transposed: [tokens, heads, out].

    Head by head, because the result of torch.bmm depends on the other tokens of the batch when these are few.
    """
    return torch.stack([linear(x[:, i].contiguous(), matrix, None) for i, matrix in enumerate(packed)], dim=1)


def pack_experts(weight: torch.Tensor) -> list[torch.Tensor]:
    """`weight` [experts, out, in] as `experts` reads it fastest: here one packed matrix for each expert."""
    return [pack_linear(of_expert) for of_expert in weight.unbind()]


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    weights: ExpertWeights,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`x` [tokens, hidden] through the `chosen` experts [tokens, k] (int64, no expert twice in a row), summed.

    `shares` [tokens, k] float32 weigh the sum; `activate` is an operator from [rows, 2 * dim] to [rows, dim]. Rows are
    sorted by expert, so that the weights of each expert that is hit are read once. Sums are float32, in the order of
    the experts' numbers: no row depends on another. Beside x and the result, in float32, the temporaries are those of
    one dense MLP of an expert's size, whatever k is. Returns [tokens, hidden].
    """
    pairs = chosen.flatten()
    order = pairs.argsort(stable=True)
    rows, shares = order // chosen.shape[1], shares.flatten()[order].unsqueeze(1)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    start = 0
    for expert, count in enumerate(pairs.bincount(minlength=weights.num_experts).tolist()):
        if count:
            of_expert = slice(start, start + count)
            y = _expert(x[rows[of_expert]], expert, weights, activate)
            out.index_add_(0, rows[of_expert], y.float() * shares[of_expert])
            start += count
    return out.to(x.dtype)


def _expert(
    x: torch.Tensor, expert: int, weights: ExpertWeights, activate: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`x` [rows, hidden] through one expert."""
    gate_up_bias = None if weights.gate_up_bias is None else weights.gate_up_bias[expert]
    down_bias = None if weights.down_bias is None else weights.down_bias[expert]
    inner = activate(linear(x, weights.gate_up[expert], gate_up_bias))
    return linear(inner, weights.down[expert], down_bias)
