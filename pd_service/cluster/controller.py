"""Makes the cluster what operators ask for, and tells gateways and operators what it is.

The decisions are `reconcile.Fleet`'s; here they are carried out, one task for each engine, and what the engines say is
reported back. Ray restarts this actor whenever it dies: its next life reads what was asked for from a file, finds the
engines by their names, looks at each, and only then serves again, under the same address. Until then gateways use the
last membership, which is versioned within each life.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from pathlib import Path
from typing import Any

import grpc
import ray

from pd_service.channels import Context, end, server_options
from pd_service.cluster import admin_messages
from pd_service.cluster.desired import Desired, DesiredFile
from pd_service.cluster.engine_actor import EngineReport, Started
from pd_service.cluster.ray_engines import RayEngines
from pd_service.cluster.ray_names import ROLES, role_of
from pd_service.cluster.reconcile import Fleet, Remove, Start, State
from pd_service.config import PoolRole, ServiceConfig
from pd_service.errors import InvalidRequest
from pd_service.rpc import admin_pb2 as pb
from pd_service.rpc import admin_pb2_grpc

logger = logging.getLogger(__name__)

ADOPTION_S = 5.0  # for engines of an earlier life to say that they live; who needs longer is a member later
DRAIN_LOOK_S = 0.25  # between looks at an engine that drains
START_LOOK_S = 0.1  # between looks at an engine that starts, at least
ANSWER_S = 2.0  # for the answer to a look, beyond the time it was told to wait
BIND_ATTEMPTS = 40  # at the port of an earlier life
BIND_PAUSE_S = 0.25


class Controller(admin_pb2_grpc.AdminServicer):
    """Made into a detached, named actor. `host` None: engines listen on the address Ray knows their node by.

    `service_id` distinguishes this service from earlier ones of the same name: their engines are none of ours.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, config: dict[str, Any], model_dir: str, model_name: str, host: str | None, service_id: str
    ) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
        self._config = ServiceConfig.model_validate(config)
        self._model_name = model_name
        self._host = host
        self._service_id = service_id
        namespace = ray.get_runtime_context().namespace
        self._engines = RayEngines(self._config, Path(model_dir), host, namespace, service_id)
        self._file = DesiredFile(service_id)
        self._desired = self._file.load() or Desired(
            replicas={role: self._config.pool(role).replicas for role in ROLES}
        )
        self._desired.life += 1
        self._fleet = Fleet(
            {role: self._config.pool(role) for role in ROLES},
            {role: self._desired.replicas[role] for role in ROLES},
            self._config.supervision,
            lambda: secrets.token_hex(2),
        )
        self._started: dict[str, Started] = {}
        self._membership = pb.Membership(controller_life=self._desired.life)
        self._changed = asyncio.Condition()
        self._woken = asyncio.Event()
        self._is_over = asyncio.Event()
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._run())
        self._running.add_done_callback(_end_process_after_failure)

    async def address(self) -> str:
        """host:port of `pd.v1.Admin`, once engines of an earlier life are known."""
        return await asyncio.shield(self._address)

    async def stop(self) -> None:
        """Returns when no engine is left. Those that do not end by themselves in time are killed."""
        self._stop()
        await self._is_over.wait()

    def _stop(self) -> None:
        if not self._fleet.is_stopping:
            self._fleet.stop(time.monotonic())
        self._wake()

    # ---- the loop

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            await self._adopt(tasks)
            self._carry_out(tasks)
            self._address.set_result(await self._serve())
            self._desired.port = int(self._address.result().rpartition(":")[2])
            while not (self._fleet.is_stopping and not self._fleet.engines):
                self._carry_out(tasks)
                self._save()
                await self._tell()
                await self._until_woken()
            await self._tell()
        self._file.delete()
        self._is_over.set()

    def _carry_out(self, tasks: asyncio.TaskGroup) -> None:
        for decision in self._fleet.decide(time.monotonic()):
            match decision:
                case Start(engine_id=engine_id, role=role):
                    self._lives[engine_id] = tasks.create_task(self._start(engine_id, role))
                case Remove(engine_id=engine_id, is_dead=is_dead):
                    logger.info("%s leaves: %s", engine_id, self._fleet.engines[engine_id].reason)
                    tasks.create_task(self._remove(engine_id, is_dead=is_dead))

    def _wake(self) -> None:
        self._woken.set()

    async def _until_woken(self) -> None:
        now = time.monotonic()
        due = self._fleet.next_look(now)
        try:
            async with asyncio.timeout(None if due is None else due - now):
                await self._woken.wait()
        except TimeoutError:
            return
        self._woken.clear()

    def _save(self) -> None:
        """What the next life has to know, before anybody is told."""
        to_unix = time.time() - time.monotonic()
        fleet, desired = self._fleet, self._desired
        desired.replicas = {role: pool.desired for role, pool in fleet.pools.items()}
        desired.drains = {
            engine.engine_id: desired.drains.get(engine.engine_id, engine.drain_until + to_unix)
            for engine in fleet.engines.values()
            if engine.state is State.DRAINING
        }
        desired.is_stopping = fleet.is_stopping
        self._file.save(desired)

    # ---- engines

    async def _adopt(self, tasks: asyncio.TaskGroup) -> None:
        """Takes over the engines of earlier lives, in the state they are in."""
        actors = await self._engines.living()
        for engine_id in actors:
            role = role_of(engine_id)
            assert role is not None
            self._fleet.adopt(engine_id, role, time.monotonic())
        await asyncio.gather(*(self._adopt_one(engine_id, actor) for engine_id, actor in actors.items()))
        if self._desired.is_stopping:
            self._fleet.stop(time.monotonic())
        for engine_id, actor in actors.items():
            self._lives[engine_id] = tasks.create_task(self._watch(engine_id, actor))

    async def _adopt_one(self, engine_id: str, actor: Any) -> None:
        try:
            report = await asyncio.wait_for(actor.look.remote(-1, 0.0), ADOPTION_S)
        except TimeoutError:
            return
        except ray.exceptions.RayError as error:
            self._fleet.died(engine_id, _reason(error), time.monotonic())
            return
        if report.service_id != self._service_id:
            self._fleet.died(engine_id, "left behind by an earlier service", time.monotonic())
            return
        self._take(engine_id, report, 0.0)
        logger.info("%s is adopted: %s", engine_id, self._fleet.engines[engine_id].state.value)

    async def _start(self, engine_id: str, role: PoolRole) -> None:
        def waits(for_what: str) -> None:
            self._fleet.starting(engine_id, for_what)
            self._wake()

        try:
            actor = await self._engines.start(engine_id, role, waits)
        except Exception as error:  # whatever Ray raises, the pool must not stay short of an engine
            self._died(engine_id, error)
            return
        self._fleet.placed(engine_id, time.monotonic())
        await self._watch(engine_id, actor)

    async def _watch(self, engine_id: str, actor: Any) -> None:
        """Looks at an engine until it has died. Its removal cancels this."""
        version, engine = -1, self._fleet.engines[engine_id]
        try:
            while engine.state in (State.STARTING, State.READY, State.DRAINING):
                look_s = DRAIN_LOOK_S if engine.state is State.DRAINING else self._config.supervision.probe_s
                report = await self._look(actor, version, look_s)
                if report is not None:
                    version = report.version
                    self._take(engine_id, report, look_s)
                elif engine.state is not State.STARTING:
                    self._fleet.unanswered(engine_id, time.monotonic(), look_s + ANSWER_S)
                self._wake()
                if engine.state is State.STARTING:
                    await asyncio.sleep(START_LOOK_S)
        except Exception as error:  # whatever it was, the pool must not stay short of an engine
            self._died(engine_id, error)

    async def _look(self, actor: Any, version: int, look_s: float) -> EngineReport | None:
        try:
            report: EngineReport = await asyncio.wait_for(actor.look.remote(version, look_s), look_s + ANSWER_S)
        except TimeoutError:
            return None
        return report

    def _take(self, engine_id: str, report: EngineReport, look_s: float) -> None:
        now = time.monotonic()
        if report.failure:
            self._fleet.died(engine_id, report.failure, now)
        elif report.started is None:
            self._fleet.starting(engine_id, report.progress)
        elif engine_id not in self._started:
            self._became_ready(engine_id, report.started, now)
        elif report.pulse is None:
            self._fleet.unanswered(engine_id, now, look_s)
        else:
            self._fleet.answered(engine_id, report.pulse, now, look_s)

    def _became_ready(self, engine_id: str, started: Started, now: float) -> None:
        self._started[engine_id] = started
        self._fleet.became_ready(engine_id, now)
        logger.info("%s is ready at %s, process %s", engine_id, started.address, started.pid)
        if engine_id in self._desired.drains:  # asked in an earlier life
            self._fleet.drain(engine_id, now, self._desired.drains[engine_id] - time.time())

    def _died(self, engine_id: str, error: Exception) -> None:
        reason = _reason(error)
        logger.warning("%s is gone: %s", engine_id, reason)
        self._fleet.died(engine_id, reason, time.monotonic())
        self._wake()

    async def _remove(self, engine_id: str, *, is_dead: bool) -> None:
        if (life := self._lives.pop(engine_id, None)) is not None:
            await end(life)
        await self._engines.remove(engine_id, is_dead=is_dead)
        self._started.pop(engine_id, None)
        self._fleet.removed(engine_id)
        self._wake()

    # ---- operators and gateways

    async def _serve(self) -> str:
        """host:port, the port of the earlier life if there was one: gateways come back to it."""
        host = self._host or ray.util.get_node_ip_address()
        for _ in range(BIND_ATTEMPTS):
            self._server = grpc.aio.server(options=server_options())
            admin_pb2_grpc.add_AdminServicer_to_server(self, self._server)
            try:
                port = self._server.add_insecure_port(f"{host}:{self._desired.port}")
            except RuntimeError as error:  # for a moment another socket's
                logger.warning("port %d cannot be had yet: %s", self._desired.port, error)
                await asyncio.sleep(BIND_PAUSE_S)
                continue
            await self._server.start()
            return f"{host}:{port}"
        raise RuntimeError(f"port {self._desired.port} of {host} cannot be had")

    async def _tell(self) -> None:
        """A new version if anything differs from the last one."""
        fresh = admin_messages.membership(self._fleet, self._started, self._membership, time.monotonic())
        if fresh == self._membership:
            return
        async with self._changed:
            fresh.version += 1
            self._membership = fresh
            self._changed.notify_all()

    async def WatchMembership(self, request: pb.WatchMembershipRequest, context: Context) -> None:
        told = -1
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._membership.version != told)  # noqa: B023
                membership = self._membership
            told = membership.version
            await context.write(membership)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        membership = self._membership
        engines = await asyncio.gather(*(admin_messages.ask(member) for member in membership.members))
        return pb.StatusResponse(
            model=self._model_name,
            membership_version=membership.version,
            controller_life=membership.controller_life,
            pools=membership.pools,
            engines=engines,
        )

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleResponse:
        try:
            self._fleet.scale(dict(request.replicas))
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        await self._asked()
        return pb.ScaleResponse(pools=admin_messages.pools(self._fleet, time.monotonic()))

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        limit_s = request.limit_s if request.HasField("limit_s") else self._config.supervision.drain_s
        try:
            if not limit_s >= 0:
                raise InvalidRequest(f"limit_s: {limit_s:g} given, 0 or more allowed", "limit_s")
            self._desired.drains.pop(request.engine_id, None)  # a new limit replaces the one that was kept
            engine = self._fleet.drain(request.engine_id, time.monotonic(), limit_s)
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        await self._asked()
        return pb.DrainResponse(member=admin_messages.member(engine, self._started.get(engine.engine_id)))

    async def _asked(self) -> None:
        """What was asked for is kept and told before anybody hears that it was taken."""
        self._save()
        await self._tell()
        self._wake()

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.StopResponse:
        self._stop()
        return pb.StopResponse(controller=await self.address())


def _end_process_after_failure(running: asyncio.Task[None]) -> None:
    """A controller whose loop has failed is of no use; Ray starts the next life."""
    if not running.cancelled() and running.exception() is not None:
        logger.critical("the controller's loop failed", exc_info=running.exception())
        os._exit(1)


def _reason(error: Exception) -> str:
    """What an operator needs: the cause's own words, or Ray's first line."""
    cause = getattr(error, "cause", None)
    return str(cause or error).strip().partition("\n")[0] or repr(error)
