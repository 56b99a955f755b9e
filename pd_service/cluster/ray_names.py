"""All that a service has in Ray has a name in its namespace: the controller, an actor and a placement for each engine.

A namespace belongs to one service at a time: whatever is found there is that service's own, so that any later
controller, or whoever stops the service, finds all of it. All calls here block for milliseconds.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from pd_service.config import PoolRole

CONTROLLER = "controller"
ROLES: tuple[PoolRole, ...] = ("prefill", "decode")
HEAD = "node:__internal_head__"  # a resource that Ray gives its head node


def role_of(name: str) -> PoolRole | None:
    """The role of the engine with this name; None: no engine has such a name."""
    return next((role for role in ROLES if name.startswith(f"{role}/")), None)


def placement_name(namespace: str, engine_id: str) -> str:
    """Ray's table of placements names no namespaces, so the name itself does."""
    return f"{namespace}/{engine_id}"


def placements(namespace: str) -> dict[str, str]:
    """Engine: the node of its placement, empty while it waits."""
    prefix = placement_name(namespace, "")
    return {
        group["name"].removeprefix(prefix): group["bundles_to_node_id"][0]
        for group in placement_group_table().values()
        if group["name"].startswith(prefix) and group["state"] != "REMOVED"
    }


def remove_placement(namespace: str, engine_id: str) -> None:
    """Gives its resources back, and kills an engine that stands on it. None there is no error."""
    with suppress(ValueError):
        ray.util.remove_placement_group(ray.util.get_placement_group(placement_name(namespace, engine_id)))


def find_actor(name: str) -> Any | None:
    """In the namespace this process has joined Ray with."""
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def remove_everything(namespace: str) -> list[str]:
    """Kills what there is, without asking it first, and returns the names of it.

    The controller goes first: it would replace the others.
    """
    names = sorted(ray.util.list_named_actors(), key=lambda name: name != CONTROLLER)
    for name in names:
        if (actor := find_actor(name)) is not None:
            ray.kill(actor)
    placed = placements(namespace)
    for engine_id in placed:
        remove_placement(namespace, engine_id)
    return sorted({*names, *placed})
