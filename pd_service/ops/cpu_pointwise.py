"""What stands between a model's products, on a CPU: norms, rotation, activations. Every row is computed alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pd_service.ops import native


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` [..., dim] divided by its root mean square over `dim`, times `weight` [dim].

    The result is rounded once, to the type of `x`; the weight may be float32 where `x` is not.
    """
    if (normed := native.rms_norm(x, weight, eps)) is not None:
        return normed
    if x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of x + residual, and x + residual itself, all [..., dim]; the norm is of the sum as it was rounded."""
    if (both := native.add_rms_norm(x, residual, weight, eps)) is not None:
        return both
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary_tables(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`cos` and `sin` [positions, dim / 2] of each plane, as `rotary` takes their rows: [positions, dim]."""
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [tokens, heads, dim] in the planes (i, i + dim/2), the order of GPT-NeoX.

    `cos` and `sin` [tokens, 1, dim] are rows of `rotary_tables`: both halves alike except that the first half of `sin`
    is negated, so that swapping the halves of `x` is all that is left to do.
    """
    if (rotated := native.rotary(x, cos, sin)) is not None:
        return rotated
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`x` [tokens, 2 * dim] holds gate and up side by side: silu(gate) * up, [tokens, dim]."""
    if (activated := native.silu_and_mul(x)) is not None:
        return activated
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`x` [tokens, 2 * dim] holds gate and up side by side: gelu(gate) * up, [tokens, dim]. Gelu in its tanh form."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clipped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """`x` [tokens, 2 * dim] holds gate and up in turns: gate * sigmoid(alpha * gate) * (up + 1), [tokens, dim].

    Both are cut at `limit`, up at -`limit` as well (gpt-oss model card, arXiv 2508.10925).
    """
    # torch's exponential has other last bits at the end of a run of memory; the rows of `gate` lie apart, each is one.
    gate, up = x.reshape(x.shape[0], x.shape[1] // 2, 2).mT.clone(memory_format=torch.contiguous_format).unbind(1)
    scaled = gate.clamp_(max=limit).mul_(alpha)
    return F.silu(scaled).mul_(up.clamp_(-limit, limit).add_(1.0)).div_(alpha)
