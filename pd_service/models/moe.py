"""Mixture-of-experts layers: the experts' weights. Which experts a token takes is each family's own rule.

A checkpoint names the matrices of each expert alone; here they lie side by side, [experts, out, in], until they are
packed for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from pd_service.models.layers import Place
from pd_service.ops import ExpertWeights


class Experts(nn.Module):
    """Gated MLPs of `intermediate_size`; `activate` takes gate and up side by side, by default to silu(gate) * up."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
        place: Place,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.ops = place.ops
        self.activate = activate or place.ops.silu_and_mul
        self.gate_up_proj = place.empty(num_experts, 2 * intermediate_size, hidden_size)
        self.down_proj = place.empty(num_experts, hidden_size, intermediate_size)
        self.gate_up_proj_bias = place.empty(num_experts, 2 * intermediate_size) if bias else None
        self.down_proj_bias = place.empty(num_experts, hidden_size) if bias else None
        self.weights: ExpertWeights | None = None  # after loading, instead of the matrices above

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """As most families name them, such as "3.gate_proj.weight" of expert 3."""
        named = {"weight": (self.gate_up_proj, self.down_proj), "bias": (self.gate_up_proj_bias, self.down_proj_bias)}
        places: dict[str, torch.Tensor] = {}
        for kind, (gate_up, down) in named.items():
            if gate_up is None or down is None:
                continue
            for expert in range(self.num_experts):
                gate, up = gate_up.data[expert].chunk(2)
                places[f"{expert}.gate_proj.{kind}"] = gate
                places[f"{expert}.up_proj.{kind}"] = up
                places[f"{expert}.down_proj.{kind}"] = down.data[expert]
        return places

    def finish_loading(self) -> None:
        """Pack one stack of matrices after the other, so that no more than one is held twice."""
        gate_up = self.ops.pack_experts(self.gate_up_proj)
        del self.gate_up_proj
        down = self.ops.pack_experts(self.down_proj)
        del self.down_proj
        self.weights = ExpertWeights(
            num_experts=self.num_experts,
            gate_up=gate_up,
            down=down,
            gate_up_bias=self.gate_up_proj_bias,
            down_bias=self.down_proj_bias,
        )

    def forward(
        self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:  # [tokens, hidden], [tokens, k] int64, [tokens, k] float32 -> [tokens, hidden]
        assert self.weights is not None, "used before it was loaded"
        return self.ops.experts(x, chosen, shares, self.weights, self.activate)
