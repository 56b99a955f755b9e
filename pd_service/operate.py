"""What an operator asks of a running service, and the watching until it is so: scale, drain, stop.

A client of `pd.v1.Admin` and nothing else. The controller may be restarted while we watch: the membership is then asked
for again, until the time is over.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import grpc

from pd_service.channels import channel_options
from pd_service.errors import ConfigError, Unavailable
from pd_service.progress import Progress
from pd_service.rpc import admin_pb2 as pb
from pd_service.rpc import admin_pb2_grpc

ANSWER_S = 5.0  # for calls that return at once
RETRY_S = 0.5  # between attempts at a controller that is away


def parse_sizes(words: Iterable[str]) -> dict[str, int]:
    """From "prefill=3" and the like. Raises ConfigError naming what is no such thing."""
    sizes: dict[str, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        if not name or not number.isdecimal():
            raise ConfigError(f"{word!r} given; POOL=NUMBER is allowed, such as prefill=3")
        if name in sizes:
            raise ConfigError(f"{name!r} is given twice")
        sizes[name] = int(number)
    return sizes


def scale(address: str, sizes: dict[str, int], timeout_s: float, tell: Progress) -> None:
    """Returns when the cluster is as asked. Raises Unavailable, saying what it waits for, when it is not in time."""
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        admin.Scale(pb.ScaleRequest(replicas=sizes), timeout=ANSWER_S)
        missing: list[str] = []
        for membership in _memberships(admin, timeout_s):
            missing = missing_of(membership, sizes)
            for member in membership.members:
                if member.role in sizes:
                    tell(member.engine_id, describe(member))
            for pool in membership.pools:
                if pool.role in sizes and pool.waits_for:
                    tell(pool.role, pool.waits_for)
            if not missing:
                return
    raise Unavailable(f"not as asked within {timeout_s:g} s: {'; '.join(missing) or 'the controller is away'}")


def missing_of(membership: pb.Membership, sizes: dict[str, int]) -> list[str]:
    """What is not as asked; empty when everything is. Raises Unavailable when somebody has asked for something else."""
    missing = []
    for pool in membership.pools:
        if pool.role not in sizes:
            continue
        if pool.desired != sizes[pool.role]:
            raise Unavailable(f"somebody else has scaled {pool.role} to {pool.desired} meanwhile")
        leaving = [m for m in membership.members if m.role == pool.role and m.state != "ready"]
        if pool.ready != pool.desired or leaving:
            failure = f"last failure: {pool.last_failure}" if pool.last_failure and pool.ready < pool.desired else ""
            states = [f"{m.engine_id} {describe(m)}" for m in leaving]
            details = [*states, *filter(None, (pool.waits_for, failure))]
            missing.append(f"{pool.role} has {pool.ready} of {pool.desired} ready ({'; '.join(details) or 'soon'})")
    return missing


def describe(member: pb.Member) -> str:
    """One engine's state in a few words."""
    if member.state == "starting":
        return member.progress or member.state
    if member.state == "draining":
        return f"draining, {member.held} requests, leases and pulls left"
    return f"{member.state}: {member.reason}" if member.reason else member.state


def drain(address: str, engine_id: str, limit_s: float | None, tell: Progress) -> str:
    """Returns why the engine left, once nothing of it is there any more."""
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        admin.Drain(pb.DrainRequest(engine_id=engine_id, limit_s=limit_s), timeout=ANSWER_S)
        reason = ""
        for membership in _memberships(admin, None):
            member = next((one for one in membership.members if one.engine_id == engine_id), None)
            if member is None:
                return reason or "it is gone"
            reason = member.reason
            tell(engine_id, describe(member))
    raise AssertionError("without a limit, memberships never end")


def stop(address: str, tell: Progress) -> None:
    """Returns when the controller has nothing left; its own process ends a moment later."""
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        answer = admin_pb2_grpc.AdminStub(channel).Stop(pb.StopRequest(), timeout=ANSWER_S)
    with grpc.insecure_channel(answer.controller, options=channel_options()) as channel:
        try:
            for membership in admin_pb2_grpc.AdminStub(channel).WatchMembership(pb.WatchMembershipRequest()):
                tell("engines", f"{len(membership.members)} left")
                if membership.is_stopping and not membership.members:
                    return
        except grpc.RpcError:  # with the last engine the controller goes
            return


def _memberships(admin: admin_pb2_grpc.AdminStub, timeout_s: float | None) -> Iterator[pb.Membership]:
    """The present one, then each change, until the time is over; None: for ever."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while deadline is None or time.monotonic() < deadline:
        left_s = None if deadline is None else deadline - time.monotonic()
        try:
            yield from admin.WatchMembership(pb.WatchMembershipRequest(), timeout=left_s)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                return
        time.sleep(RETRY_S)


def rates(before: pb.StatusResponse, after: pb.StatusResponse, seconds: float) -> dict[str, float]:
    """Tokens computed per second, by engine, between two answers of Status."""
    earlier = {engine.status.incarnation: engine.status.computed_tokens for engine in before.engines}
    return {
        engine.member.engine_id: (engine.status.computed_tokens - earlier[engine.status.incarnation]) / seconds
        for engine in after.engines
        if engine.status.incarnation in earlier
    }
