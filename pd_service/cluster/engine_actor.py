"""One engine as a Ray actor. Ray places and supervises it; requests never pass through Ray.

The node lives in a thread of its own with its own event loop, so that nothing Ray does holds it up. The actor outlives
the controller that made it; the next one finds it by name and looks at it. An engine that nobody has looked at for long
belongs to a service that is gone: it ends itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray

from pd_service.config import EngineConfig
from pd_service.errors import PdError
from pd_service.node.pulse import Pulse

if TYPE_CHECKING:
    from pd_service.node.node import EngineNode

logger = logging.getLogger(__name__)

ORPHAN_LOOKS = 10  # parts of the time without a controller; a process that was frozen misses one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """How others know an engine that serves. `host`: Ray's address of its node."""

    address: str
    incarnation: str
    host: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """`version` counts the changes of all but the pulse."""

    service_id: str  # of the service that made it
    version: int = 0
    progress: str = "starting"
    failure: str = ""  # why it will never be ready
    started: Started | None = None
    pulse: Pulse | None = None  # None: not started, or its event loop did not answer


class EngineActor:
    """Made into an actor with several threads. It starts by itself; `look` says how far it is."""

    def __init__(self, config: dict[str, Any], host: str | None, service_id: str, orphan_s: float) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
        self._config = EngineConfig.model_validate(config)
        self._host = host
        self._orphan_s = orphan_s
        self._placement_group = ray.util.get_current_placement_group()
        self._report = EngineReport(service_id=service_id)
        self._changed = threading.Condition()
        self._was_looked_at = True
        self._loop = asyncio.new_event_loop()
        for work in (self._run_node, self._end_when_orphaned):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def look(self, seen: int, wait_s: float) -> EngineReport:
        """As soon as its version is not `seen`, after `wait_s` at the latest."""
        with self._changed:
            self._was_looked_at = True
            self._changed.wait_for(lambda: self._report.version != seen, wait_s)
            report = self._report
        return report if report.started is None else replace(report, pulse=self._pulse(max(wait_s, 1.0)))

    def _pulse(self, timeout_s: float) -> Pulse | None:
        asked = asyncio.run_coroutine_threadsafe(self._node.pulse(), self._loop)
        try:
            return asked.result(timeout_s)
        except TimeoutError:
            return None

    def stop(self) -> None:
        """Ends streams, pulls and leases, then the engine. One that is not ready has nothing to end."""
        if self._report.started is not None:
            asyncio.run_coroutine_threadsafe(self._node.stop(), self._loop).result()

    # ---- the node's thread

    def _run_node(self) -> None:
        try:
            self._node = self._load()
            started = self._loop.run_until_complete(self._bind())
        except Exception as error:  # whatever it is, the controller has to hear of it
            logger.exception("the engine cannot start")
            self._tell(failure=str(error) if isinstance(error, PdError) else repr(error))
            return
        self._tell(started=started)
        logger.info("ready at %s", started.address)
        self._loop.run_forever()

    def _load(self) -> EngineNode:
        self._say("loading libraries")
        # OpenMP reads this once, when torch brings it in. An environment of the actor's own would say it as well, but
        # then Ray starts a process for it, instead of taking one that it keeps at hand.
        os.environ["OMP_NUM_THREADS"] = str(self._config.threads)
        from pd_service.node.node import EngineNode  # torch: for the engine, not for its controller

        return EngineNode(self._config, self._say, _end_process)

    async def _bind(self) -> Started:
        here = ray.util.get_node_ip_address()
        address = await self._node.start(self._host or here)
        return Started(address=address, incarnation=self._node.incarnation, host=here, pid=os.getpid())

    def _say(self, what: str) -> None:
        self._tell(progress=what)

    def _tell(self, **change: Any) -> None:
        with self._changed:
            self._report = replace(self._report, version=self._report.version + 1, **change)
            self._changed.notify_all()

    # ---- without a service

    def _end_when_orphaned(self) -> None:
        num_missed = 0
        while num_missed < ORPHAN_LOOKS:
            time.sleep(self._orphan_s / ORPHAN_LOOKS)
            num_missed = 0 if self._was_looked_at else num_missed + 1
            self._was_looked_at = False
        logger.critical("no controller has asked for %g s: ending", self._orphan_s)
        if self._placement_group is not None:
            ray.util.remove_placement_group(self._placement_group)  # ends this actor with it
        os._exit(1)


def _end_process(error: BaseException) -> None:
    """An engine without a loop holds streams and blocks for nothing: with its process everybody learns of it."""
    logger.critical("ending the process: %r", error)
    os._exit(1)
