"""Whether decode engines can read from prefill engines: each pair is asked for by the decode engine that would read."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from pd_service.channels import channel_options
from pd_service.gateway.engines import EngineMember
from pd_service.rpc import engine_pb2, engine_pb2_grpc
from pd_service.rpc.admin_pb2 import CheckedPair

TIMEOUT_S = 20.0  # of one pair: a handshake that fails takes up to five seconds, the slowest plane no longer


def pairs_of(members: Sequence[EngineMember], prefill: str, decode: str) -> list[tuple[EngineMember, EngineMember]]:
    """(holder, reader) of every pair, or of those with the named engines. Raises ValueError for a name that is none."""
    holders = _named([member for member in members if member.role != "decode"], prefill, "prefill")
    readers = _named([member for member in members if member.role != "prefill"], decode, "decode")
    return [(holder, reader) for holder in holders for reader in readers if holder is not reader]


def _named(members: Sequence[EngineMember], name: str, role: str) -> list[EngineMember]:
    found = [member for member in members if name in ("", member.engine_id)]
    if name and not found:
        known = ", ".join(member.engine_id for member in members) or "none"
        raise ValueError(f"{role}: no {role} engine {name!r} serves; there are: {known}")
    return found


async def check_pair(holder: EngineMember, reader: EngineMember) -> CheckedPair:
    asked = engine_pb2.CheckPeerRequest(address=holder.address, incarnation=holder.incarnation)
    try:
        async with grpc.aio.insecure_channel(reader.address, options=channel_options()) as channel:
            report = await engine_pb2_grpc.EngineStub(channel).CheckPeer(asked, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        problem = f"{reader.engine_id} did not answer: {error.code().name}: {error.details()}"
        report = engine_pb2.PeerReport(problem=problem)
    return CheckedPair(prefill=holder.engine_id, decode=reader.engine_id, report=report)
