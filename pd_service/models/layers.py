"""The layers that model families share. They know shapes and weights; everything device-dependent goes through `ops`.

Parameters are made empty and without gradient; `loader.py` fills and packs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from pd_service.models.rope import RopeConfig
from pd_service.ops import Ops
from pd_service.ops.metadata import ForwardMetadata


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how a model computes."""

    dtype: torch.dtype
    device: str
    ops: Ops

    def empty(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


class Linear(nn.Module):
    """One matrix, or several of the same input side by side (`out_sizes`), read in one go."""

    def __init__(self, in_size: int, *out_sizes: int, bias: bool = False, place: Place) -> None:
        super().__init__()
        self.out_sizes = out_sizes
        self.ops = place.ops
        self.weight = place.empty(sum(out_sizes), in_size)
        self.bias = place.empty(sum(out_sizes)) if bias else None

    def finish_loading(self) -> None:
        """Bring the filled weight into the device's fastest layout; a shared weight stays as it is elsewhere."""
        self.weight = nn.Parameter(self.ops.pack_linear(self.weight), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, in] -> [tokens, sum(out_sizes)]
        return self.ops.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    def __init__(self, num_rows: int, dim: int, *, place: Place, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight = place.empty(num_rows, dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # [tokens] -> [tokens, dim]
        x = F.embedding(ids, self.weight)
        return x if self.scale == 1.0 else x * self.scale


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float, *, place: Place) -> None:
        super().__init__()
        self.eps = eps
        self.ops = place.ops
        self.weight = place.empty(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., dim] -> [..., dim]
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and x + residual itself, all [..., dim]."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), or another activation of gate and up side by side."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
        place: Place,
    ) -> None:
        super().__init__()
        self.ops = place.ops
        self.activate = place.ops.silu_and_mul if bias and activate is None else activate
        self.gate_up_proj = Linear(hidden_size, intermediate_size, intermediate_size, bias=bias, place=place)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, place=place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, hidden] -> [tokens, hidden]
        if self.activate is None:
            return self.ops.gated_mlp(x, self.gate_up_proj.weight, self.down_proj.weight)
        return self.down_proj(self.activate(self.gate_up_proj(x)))


class RotaryEmbedding:
    """Cosines and sines for every position below `max_model_len`, in float32; `ops.rotary` says how halves lie."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_model_len: int, *, place: Place) -> None:
        self.dtype = place.dtype
        if place.device == "meta":  # a plan needs shapes only; arithmetic there would import torch's compiler
            self.cos, self.sin = (torch.empty(max_model_len, 1, head_dim, device="meta") for _ in range(2))
            return
        angles = torch.outer(torch.arange(max_model_len).float(), inverse_frequencies(rope, head_dim))
        cos, sin = angles.cos() * rope.amplitude, angles.sin() * rope.amplitude  # [positions, head_dim / 2]
        tables = place.ops.rotary_tables(cos, sin)
        self.cos, self.sin = (t.unsqueeze(1).to(place.device) for t in tables)  # [max_model_len, 1, head_dim]

    def __call__(self, positions: torch.Tensor, metadata: ForwardMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [tokens, 1, head_dim] of `positions` [tokens], once per step for all layers."""
        memo = ("rotary", id(self))
        if memo not in metadata.scratch:
            cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
            metadata.scratch[memo] = cos.to(self.dtype), sin.to(self.dtype)
        return metadata.scratch[memo]  # type: ignore[return-value]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each plane, [head_dim / 2], float32.

    "llama3" is the formula published with Llama 3.1 (`apply_scaling` of Meta's llama-models): wavelengths the original
    context never completed are stretched by `factor`, short ones stay, and those between are interpolated. "yarn" does
    so along the planes (section 3.2 of arXiv 2309.00071).
    """
    plain = 1.0 / rope.rope_theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    stretched = plain / rope.factor
    match rope.rope_type:
        case "default":
            return plain
        case "linear":
            return stretched
        case "llama3":
            turns = rope.original_max_position_embeddings * plain / (2 * math.pi)  # in the original context
            kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        case "yarn":
            first, last = _yarn_planes(rope, head_dim)
            kept = 1 - (torch.arange(head_dim // 2).float() - first) / (last - first or 0.001)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * stretched + kept * plain


def _yarn_planes(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    """The planes between which yarn interpolates: the last to stay as it is, the first to be stretched in full.

    These turn `beta_fast` and `beta_slow` times in the original context; fractions of planes unless `truncate`.
    """

    def plane_of(turns: float) -> float:
        slowdown = rope.original_max_position_embeddings / (turns * 2 * math.pi)  # of this plane to the first
        return head_dim * math.log(slowdown) / (2 * math.log(rope.rope_theta))

    first, last = plane_of(rope.beta_fast), plane_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    return max(first, 0), min(last, head_dim - 1)
