"""Engines as Ray sees them: placed, started, found again and removed. Knows nothing of why."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import NODE_ID_LABEL_KEY, PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pd_service.cluster.engine_actor import EngineActor
from pd_service.cluster.placement import Host, lacking, preferred_host
from pd_service.cluster.ray_names import find_actor, placement_name, placements, remove_placement, role_of
from pd_service.config import PoolRole, PoolSettings, ServiceConfig

logger = logging.getLogger(__name__)

PREFERENCE_S = 1.0  # for the preferred host to have room; then any host will do
MAX_POLL_S = 1.0  # between looks at a placement that waits
STOP_TIMEOUT_S = 1.5  # for an engine to end by itself


class RayEngines:
    """All engines of one service."""

    def __init__(
        self, config: ServiceConfig, model_dir: Path, host: str | None, namespace: str, service_id: str
    ) -> None:
        self._config = config
        self._model_dir = model_dir
        self._host = host
        self._namespace = namespace
        self._service_id = service_id
        self._nodes: dict[str, str] = {}  # engine: the node it stands on, or is meant for

    async def living(self) -> dict[str, Any]:
        """The actors of all engines that are there, by name. Placements of engines that are not are removed."""
        return await asyncio.to_thread(self._find_living)

    def _find_living(self) -> dict[str, Any]:
        found = {name: find_actor(name) for name in ray.util.list_named_actors() if role_of(name)}
        actors = {name: actor for name, actor in found.items() if actor is not None}
        for engine_id, node in placements(self._namespace).items():
            if engine_id in actors:
                self._nodes[engine_id] = node
            else:
                remove_placement(self._namespace, engine_id)
        return actors

    async def start(self, engine_id: str, role: PoolRole, waits: Callable[[str], None]) -> Any:
        """The actor, when it has its resources; it may still load. `waits` is told what is lacking meanwhile."""
        settings = self._config.pool(role)
        group = await self._place(engine_id, role, settings, waits)
        environment = {"runtime_env": {"env_vars": settings.env}} if settings.env else {}
        config = self._config.engine_config(role, self._model_dir).model_dump(mode="json")
        actor_class: Any = ray.remote(EngineActor)
        return actor_class.options(
            name=engine_id,
            lifetime="detached",
            num_cpus=settings.num_cpus,
            resources=settings.resources,
            max_restarts=0,  # another life is another engine, with a name of its own
            max_concurrency=8,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            **environment,
        ).remote(config, self._host, self._service_id, self._config.supervision.orphan_s)

    async def _place(
        self, engine_id: str, role: PoolRole, settings: PoolSettings, waits: Callable[[str], None]
    ) -> PlacementGroup:
        demand, hosts = settings.demand, await asyncio.to_thread(_hosts)
        standing = [node for name, node in self._nodes.items() if role_of(name) == role]
        others = [node for name, node in self._nodes.items() if role_of(name) != role]
        node = preferred_host(hosts, demand, standing, others, settings.placement)
        if node is not None:
            self._nodes[engine_id] = node  # at once: the next one is placed beside this one
            group = self._reserve(engine_id, demand, node)
            if await _is_created(group, PREFERENCE_S):
                return group
            await asyncio.to_thread(ray.util.remove_placement_group, group)
        group = self._reserve(engine_id, demand, None)
        while not await _is_created(group, MAX_POLL_S):
            free = await asyncio.to_thread(ray.available_resources)
            waits(lacking(demand, await asyncio.to_thread(_hosts), free))
        table = await asyncio.to_thread(placement_group_table, group)
        self._nodes[engine_id] = table["bundles_to_node_id"][0]
        return group

    def _reserve(self, engine_id: str, demand: dict[str, float], node: str | None) -> PlacementGroup:
        """Ray's autoscaler sees what waits here, and adds hosts if it may.

        In the event loop, for some milliseconds: a thread would go on when the start is cancelled, and what it reserves
        would be found by nobody.
        """
        where = {} if node is None else {"bundle_label_selector": [{NODE_ID_LABEL_KEY: node}]}
        name = placement_name(self._namespace, engine_id)
        return ray.util.placement_group([demand], strategy="STRICT_PACK", name=name, lifetime="detached", **where)

    async def remove(self, engine_id: str, *, is_dead: bool) -> None:
        """Nothing of it is left afterwards, whatever state it was in."""
        self._nodes.pop(engine_id, None)
        actor = await asyncio.to_thread(find_actor, engine_id)
        if actor is not None:
            if not is_dead:
                await _ask_to_stop(engine_id, actor)
            ray.kill(actor)
        await asyncio.to_thread(remove_placement, self._namespace, engine_id)


async def _ask_to_stop(engine_id: str, actor: Any) -> None:
    try:
        await asyncio.wait_for(actor.stop.remote(), STOP_TIMEOUT_S)
    except (TimeoutError, ray.exceptions.RayError) as error:
        logger.warning("%s did not stop by itself: %r", engine_id, error)


async def _is_created(group: PlacementGroup, patience_s: float) -> bool:
    """Asks again and again, less and less often: Ray offers no event that costs no worker process."""
    loop = asyncio.get_running_loop()
    end, pause_s = loop.time() + patience_s, 0.01
    while True:
        table = await asyncio.to_thread(placement_group_table, group)
        if table["state"] == "CREATED":
            return True
        if loop.time() >= end:
            return False
        await asyncio.sleep(min(pause_s, max(0.0, end - loop.time())))
        pause_s *= 2


def _hosts() -> list[Host]:
    return [Host(node_id=node["NodeID"], resources=node["Resources"]) for node in ray.nodes() if node["Alive"]]
