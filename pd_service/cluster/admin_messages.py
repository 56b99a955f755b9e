"""The controller's picture of the cluster as messages for gateways and operators."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from pd_service.channels import channel_options
from pd_service.cluster.engine_actor import Started
from pd_service.cluster.reconcile import Engine, Fleet, State
from pd_service.rpc import admin_pb2 as pb
from pd_service.rpc import engine_pb2, engine_pb2_grpc

STATUS_TIMEOUT_S = 2.0


def membership(fleet: Fleet, started: Mapping[str, Started], last: pb.Membership, now: float) -> pb.Membership:
    """What there is now, under the version of `last`: equal to it if nothing has changed."""
    return pb.Membership(
        version=last.version,
        controller_life=last.controller_life,
        is_stopping=fleet.is_stopping,
        pools=pools(fleet, now),
        members=[member(engine, started.get(name)) for name, engine in fleet.engines.items()],
    )


def pools(fleet: Fleet, now: float) -> list[pb.PoolStatus]:
    return [
        pb.PoolStatus(
            role=role,
            desired=pool.desired,
            ready=sum(e.role == role and e.state is State.READY for e in fleet.engines.values()),
            replaced=pool.replaced,
            last_failure=pool.last_failure,
            min_replicas=pool.settings.min_replicas,
            max_replicas=pool.settings.max_replicas,
            waits_for=fleet.waits_for(role, now),
        )
        for role, pool in fleet.pools.items()
    ]


def member(engine: Engine, started: Started | None) -> pb.Member:
    is_starting = engine.state is State.STARTING
    found = pb.Member(
        engine_id=engine.engine_id,
        role=engine.role,
        state=engine.state.value,
        progress=engine.reason if is_starting else "",
        reason="" if is_starting else engine.reason,
        held=engine.held if engine.state is State.DRAINING else 0,
    )
    if started is not None:
        found.address, found.incarnation, found.host = started.address, started.incarnation, started.host
    return found


async def ask(member: pb.Member) -> pb.EngineMemberStatus:
    """What an engine says of itself, if it serves."""
    if member.state not in (State.READY.value, State.DRAINING.value):
        problem = ": ".join(filter(None, (member.state, member.progress or member.reason)))
        return pb.EngineMemberStatus(member=member, problem=problem)
    try:
        async with grpc.aio.insecure_channel(member.address, options=channel_options()) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            status = await stub.GetStatus(engine_pb2.EngineStatusRequest(), timeout=STATUS_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return pb.EngineMemberStatus(member=member, problem=f"no answer: {error.code().name}")
    return pb.EngineMemberStatus(member=member, status=status)
