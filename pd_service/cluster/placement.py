"""Where an engine should stand, and what is lacking for it: a pure choice from what Ray says of its hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One living node of the Ray cluster. `resources`: all it has, whoever uses it now."""

    node_id: str
    resources: Mapping[str, float]

    def could_hold(self, demand: Mapping[str, float]) -> bool:
        return all(self.resources.get(name, 0) >= amount for name, amount in demand.items())


def preferred_host(
    hosts: Sequence[Host],
    demand: Mapping[str, float],
    standing: Sequence[str],
    others: Sequence[str],
    placement: Literal["spread", "pack"],
) -> str | None:
    """The node to try first; None when there is no choice to make.

    `standing` and `others`: the node of each engine of this pool, and of all other pools. Spreading takes the host with
    the fewest of this pool, packing that with the most; then the one with the fewest others.
    """
    possible = [host.node_id for host in hosts if host.could_hold(demand)]
    if len(possible) < 2:
        return None
    sign = 1 if placement == "spread" else -1
    return min(possible, key=lambda node: (sign * standing.count(node), others.count(node), node))


def lacking(demand: Mapping[str, float], hosts: Sequence[Host], free: Mapping[str, float]) -> str:
    """Why an engine waits, for people. `free`: of the whole cluster."""
    asked = _amounts(demand)
    if not any(host.could_hold(demand) for host in hosts):
        return f"needs {asked}, and no host of the cluster has that"
    short = [name for name, amount in demand.items() if free.get(name, 0) < amount]
    if short:
        total = {name: sum(host.resources.get(name, 0) for host in hosts) for name in short}
        left = ", ".join(f"{name} {free.get(name, 0):g} of {total[name]:g}" for name in short)
        return f"needs {asked}, free in the cluster: {left}"
    return f"needs {asked}, and no single host has that free"


def _amounts(demand: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in demand.items())
