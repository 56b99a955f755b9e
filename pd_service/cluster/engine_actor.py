"""One engine as a Ray actor. Ray places and supervises it; requests never pass through Ray.

The node lives in a thread of its own with its own event loop, so that nothing Ray does holds it up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import Any

import ray

from pd_service.config import EngineConfig
from pd_service.errors import PdError


class EngineActor:
    """Made into an actor with several threads: `progress` answers while `start` loads, `wait` blocks until the end."""

    def __init__(self, config: dict[str, Any], host: str | None) -> None:
        self._config = EngineConfig.model_validate(config)
        self._host = host
        self._progress = "starting"
        self._loop = asyncio.new_event_loop()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="node", daemon=True)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")

    def progress(self) -> str:
        """What the engine is doing until `start` returns."""
        return self._progress

    def start(self) -> dict[str, str]:
        """Loads the model and binds; the address, incarnation, host and process id others know it by."""
        self._progress = "loading libraries"
        # OpenMP reads this once, when torch brings it in. An environment of the actor's own would say it as well, but
        # then Ray starts a process for it, instead of taking one that it keeps at hand.
        os.environ["OMP_NUM_THREADS"] = str(self._config.threads)
        from pd_service.node.node import EngineNode  # torch: for the engine, not for its controller

        try:
            self._node = EngineNode(self._config, self._set_progress, _end_process)
        except PdError as error:
            raise RuntimeError(str(error)) from error  # Ray ships the text, whatever classes the caller knows
        self._thread.start()
        host = self._host or ray.util.get_node_ip_address()
        address = asyncio.run_coroutine_threadsafe(self._node.start(host), self._loop).result()
        return {
            "address": address,
            "incarnation": self._node.incarnation,
            "host": ray.util.get_node_ip_address(),
            "pid": str(os.getpid()),
        }

    def wait(self) -> None:
        """Returns when the engine was stopped; an engine that dies raises in the caller instead."""
        self._ended.wait()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._node.stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._ended.set()

    def _set_progress(self, what: str) -> None:
        self._progress = what


def _end_process(error: BaseException) -> None:
    """An engine without a loop holds streams and blocks for nothing: with its process everybody learns of it."""
    logging.getLogger(__name__).critical("ending the process: %r", error)
    os._exit(1)
