"""Keeps the asked number of engines alive, and tells who they are.

One coroutine per seat of a pool: start an engine, publish it, wait until it is gone, say why, start the next. The
membership is versioned; each change is streamed to the gateways, which go on with the last one when this actor is away.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import ray

from pd_service.channels import Context, beside, channel_options, server_options
from pd_service.cluster.engine_actor import EngineActor
from pd_service.config import PoolRole, ServiceConfig
from pd_service.rpc import admin_pb2 as pb
from pd_service.rpc import admin_pb2_grpc, engine_pb2, engine_pb2_grpc

logger = logging.getLogger(__name__)

MIN_RESTART_S = 0.1  # doubled with each failure before an engine became ready
MAX_RESTART_S = 10.0
PROGRESS_S = 0.2  # between questions to an engine that starts
STATUS_TIMEOUT_S = 2.0
STOP_TIMEOUT_S = 1.5  # for an engine to end by itself
ROLES: tuple[PoolRole, ...] = ("prefill", "decode")


@dataclass(slots=True)
class _Pool:
    desired: int
    replaced: int = 0
    last_failure: str = ""


class Controller(admin_pb2_grpc.AdminServicer):
    """Made into a detached, named actor. `host` None: each engine listens on the address Ray knows its node by."""

    def __init__(self, config: dict[str, Any], model_dir: str, model_name: str, host: str | None) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
        self._config = ServiceConfig.model_validate(config)
        self._model_dir = Path(model_dir)
        self._model_name = model_name
        self._host = host
        self._pools = {role: _Pool(self._config.pool(role).replicas) for role in ROLES}
        self._members: dict[str, pb.Member] = {}
        self._actors: dict[str, Any] = {}
        self._version = 0
        self._changed = asyncio.Condition()
        self._seats: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Fills every seat, in the background; returns host:port of `pd.v1.Admin`."""
        host = self._host or ray.util.get_node_ip_address()
        self._server = grpc.aio.server(options=server_options())
        admin_pb2_grpc.add_AdminServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(f"{host}:0")
        await self._server.start()
        for role, pool in self._pools.items():
            self._seats += [asyncio.create_task(self._keep_seat(role)) for _ in range(pool.desired)]
        return f"{host}:{port}"

    async def stop(self) -> None:
        """Stops every engine; those that do not end by themselves in time are killed."""
        for seat in self._seats:
            seat.cancel()
        await asyncio.gather(*self._seats, return_exceptions=True)
        await asyncio.gather(*(self._stop_engine(actor) for actor in self._actors.values()))
        await self._server.stop(None)

    async def _stop_engine(self, actor: Any) -> None:
        try:
            await asyncio.wait_for(actor.stop.remote(), STOP_TIMEOUT_S)
        except (TimeoutError, ray.exceptions.RayError) as error:
            logger.warning("an engine did not stop by itself: %r", error)
        ray.kill(actor)

    # ---- seats

    async def _keep_seat(self, role: PoolRole) -> None:
        pool, pause_s = self._pools[role], MIN_RESTART_S
        while True:
            engine_id = f"{role}/{secrets.token_hex(2)}"
            try:
                actor = await self._start_engine(engine_id, role)
                pause_s = MIN_RESTART_S
                await actor.wait.remote()
                pool.last_failure = "it was stopped"
            except Exception as error:  # whatever it was, the seat must not stay empty
                pool.last_failure = _reason(error)
            logger.warning("%s is gone: %s", engine_id, pool.last_failure)
            pool.replaced += 1
            await self._remove(engine_id)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RESTART_S)

    async def _start_engine(self, engine_id: str, role: PoolRole) -> Any:
        settings = self._config.pool(role)
        actor = (
            ray.remote(EngineActor)
            .options(
                num_cpus=settings.num_cpus,
                max_restarts=0,
                max_concurrency=4,
                scheduling_strategy="SPREAD",
            )
            .remote(self._config.engine_config(role, self._model_dir).model_dump(mode="json"), self._host)
        )
        self._actors[engine_id] = actor
        await self._publish(pb.Member(engine_id=engine_id, role=role, state="starting"))
        async with beside(self._watch_progress(engine_id, role, actor)):
            started = await actor.start.remote()
        await self._publish(
            pb.Member(
                engine_id=engine_id,
                role=role,
                state="ready",
                address=started["address"],
                incarnation=started["incarnation"],
                host=started["host"],
            )
        )
        logger.info("%s is ready at %s, process %s", engine_id, started["address"], started["pid"])
        return actor

    async def _watch_progress(self, engine_id: str, role: PoolRole, actor: Any) -> None:
        shown = ""
        with suppress(ray.exceptions.RayError):  # an actor that died says so to whoever started it
            while True:
                progress = await actor.progress.remote()
                if progress != shown:
                    shown = progress
                    await self._publish(pb.Member(engine_id=engine_id, role=role, state="starting", progress=progress))
                await asyncio.sleep(PROGRESS_S)

    # ---- membership

    async def _publish(self, member: pb.Member) -> None:
        self._members[member.engine_id] = member
        await self._tell()

    async def _remove(self, engine_id: str) -> None:
        actor = self._actors.pop(engine_id, None)
        if actor is not None:
            ray.kill(actor)  # an engine that failed to start still has a process
        if self._members.pop(engine_id, None) is not None:
            await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    async def WatchMembership(self, request: pb.WatchMembershipRequest, context: Context) -> None:
        told = -1
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._version != told)  # noqa: B023
                told = self._version
                membership = pb.Membership(version=told, members=self._members.values())
            await context.write(membership)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        members = list(self._members.values())
        pools = [
            pb.PoolStatus(
                role=role,
                desired=pool.desired,
                ready=sum(member.role == role and member.state == "ready" for member in members),
                replaced=pool.replaced,
                last_failure=pool.last_failure,
            )
            for role, pool in self._pools.items()
        ]
        engines = await asyncio.gather(*(_ask(member) for member in members))
        return pb.StatusResponse(model=self._model_name, membership_version=self._version, pools=pools, engines=engines)


async def _ask(member: pb.Member) -> pb.EngineMemberStatus:
    if not member.address:
        return pb.EngineMemberStatus(member=member, problem=member.progress or member.state)
    try:
        async with grpc.aio.insecure_channel(member.address, options=channel_options()) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            status = await stub.GetStatus(engine_pb2.EngineStatusRequest(), timeout=STATUS_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return pb.EngineMemberStatus(member=member, problem=f"no answer: {error.code().name}")
    return pb.EngineMemberStatus(member=member, status=status)


def _reason(error: Exception) -> str:
    """What an operator needs: the cause's own words, or Ray's first line."""
    cause = getattr(error, "cause", None)
    return str(cause or error).strip().partition("\n")[0] or repr(error)
