"""Which experts a token goes to, and how much each of them counts (DeepSeek-V2 report 2.2.1, DeepSeek-V3 report 2.1.2).

Computed in float32 whatever the model's type: the choice hangs on scores that lie close together. Experts may be in
groups of equal size, of which a token reaches the best few only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from pd_service.models.layers import Linear, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """`num_chosen` of `num_experts` per token, from the best `num_groups_chosen` of `num_groups` groups.

    `is_normalized`: the shares of a token's experts add up to 1 before `scale` multiplies them.
    """

    num_experts: int
    num_chosen: int
    num_groups: int
    num_groups_chosen: int
    is_normalized: bool
    scale: float

    def refusal(self, least_per_group: int) -> str | None:
        """Why this cannot be computed, None if it can. A group must have `least_per_group` experts."""
        per_group, odd = divmod(self.num_experts, self.num_groups)
        if odd or per_group < least_per_group:
            return (
                f"n_routed_experts ({self.num_experts}) must make n_group ({self.num_groups}) equal groups of at least "
                f"{least_per_group}"
            )
        if self.num_groups_chosen > self.num_groups:
            return f"topk_group ({self.num_groups_chosen}) is more than n_group ({self.num_groups})"
        if self.num_chosen > (reached := per_group * self.num_groups_chosen):
            return f"num_experts_per_tok ({self.num_chosen}) is more than the {reached} experts a token reaches"
        return None


class Router(Linear):
    """The gate's matrix, [experts, hidden], and the choice made with it."""

    least_per_group: ClassVar[int] = 1

    def __init__(self, hidden_size: int, routing: Routing, *, place: Place) -> None:
        super().__init__(hidden_size, routing.num_experts, place=replace(place, dtype=torch.float32))
        self.routing = routing

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For `x` [tokens, hidden] the chosen experts and their shares, float32: both [tokens, chosen]."""
        scores = self.score(self(x.float()))
        chosen = self._within_best_groups(self.preference(scores)).topk(self.routing.num_chosen, sorted=False).indices
        shares = scores.gather(1, chosen)
        if self.routing.is_normalized:
            shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen, shares * self.routing.scale

    def score(self, logits: torch.Tensor) -> torch.Tensor:  # [tokens, experts]
        raise NotImplementedError

    def preference(self, scores: torch.Tensor) -> torch.Tensor:
        """What experts are chosen by, [tokens, experts]."""
        return scores

    def group_preference(self, preference: torch.Tensor) -> torch.Tensor:
        """What groups are chosen by: [tokens, groups, experts of a group] to [tokens, groups]."""
        raise NotImplementedError

    def _within_best_groups(self, preference: torch.Tensor) -> torch.Tensor:
        if self.routing.num_groups == self.routing.num_groups_chosen:
            return preference
        grouped = preference.view(preference.shape[0], self.routing.num_groups, -1)
        best = self.group_preference(grouped).topk(self.routing.num_groups_chosen, sorted=False).indices
        is_lost = torch.ones(grouped.shape[:2], dtype=torch.bool, device=grouped.device).scatter_(1, best, False)
        return grouped.masked_fill(is_lost.unsqueeze(-1), -torch.inf).flatten(1)


class SoftmaxRouter(Router):
    """V2: by probability; a group is as good as its best expert."""

    def score(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(dim=-1)

    def group_preference(self, preference: torch.Tensor) -> torch.Tensor:
        return preference.amax(dim=-1)


class BiasedSigmoidRouter(Router):
    """V3: each expert by itself. A bias that keeps the load even takes part in the choice, not in the shares."""

    least_per_group: ClassVar[int] = 2  # a group is as good as its best two

    def __init__(self, hidden_size: int, routing: Routing, *, place: Place) -> None:
        super().__init__(hidden_size, routing, place=place)
        self.e_score_correction_bias = replace(place, dtype=torch.float32).empty(routing.num_experts)

    def score(self, logits: torch.Tensor) -> torch.Tensor:
        # The sigmoid of x is the softmax of (x, 0). torch.sigmoid rounds an element by its place in memory, which would
        # make a row depend on the batch.
        return F.pad(logits.unsqueeze(-1), (0, 1)).softmax(dim=-1)[..., 0]

    def preference(self, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.e_score_correction_bias

    def group_preference(self, preference: torch.Tensor) -> torch.Tensor:
        return preference.topk(2, dim=-1).values.sum(dim=-1)
