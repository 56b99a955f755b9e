"""The operator's door of a gateway: passes the controller's calls on, and answers what only a gateway knows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import chain, pairwise
from typing import TypeVar

import grpc

from pd_service.channels import Context
from pd_service.gateway.engines import EngineMember
from pd_service.gateway.grpc_door import phase_times
from pd_service.gateway.peer_checks import check_pair, pairs_of
from pd_service.gateway.recent import RecentAnswer, RecentRequest, RecentRequests
from pd_service.gateway.usual import Guilt, guilty_hop, usual_ms
from pd_service.rpc import admin_pb2 as pb
from pd_service.rpc import admin_pb2_grpc

T = TypeVar("T")

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Admin"].full_name


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """An operator needs one address."""

    def __init__(
        self, controller: grpc.aio.Channel, recent: RecentRequests, members: Callable[[], Sequence[EngineMember]]
    ) -> None:
        self._controller = admin_pb2_grpc.AdminStub(controller)
        self._recent = recent
        self._members = members

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        answer: pb.StatusResponse = await _passed_on(self._controller.Status, request, context)
        return answer

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleResponse:
        answer: pb.ScaleResponse = await _passed_on(self._controller.Scale, request, context)
        return answer

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        answer: pb.DrainResponse = await _passed_on(self._controller.Drain, request, context)
        return answer

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.StopResponse:
        answer: pb.StopResponse = await _passed_on(self._controller.Stop, request, context)
        return answer

    async def WatchMembership(self, request: pb.WatchMembershipRequest, context: Context) -> None:
        try:
            async for membership in self._controller.WatchMembership(request):
                await context.write(membership)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), f"the controller is away: {error.details()}")

    async def CheckPeers(self, request: pb.CheckPeersRequest, context: Context) -> pb.CheckPeersResponse:
        try:
            pairs = pairs_of(self._members(), request.prefill, request.decode)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return pb.CheckPeersResponse(pairs=[await check_pair(holder, reader) for holder, reader in pairs])

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        found = self._recent.newest_first()[: request.limit or None]
        if request.request_id:
            one = self._recent.find(request.request_id)
            if one is None:
                reason = f"no request {request.request_id!r} is known; this gateway knows {self._recent.reach()}"
                await context.abort(grpc.StatusCode.NOT_FOUND, reason)
            found = [one]
        usual = usual_ms(self._recent.finished_answers())
        return pb.ExplainResponse(
            requests=[_explained(one, usual, with_hops=bool(request.request_id)) for one in found],
            usual=[pb.UsualPhase(phase=phase, median_ms=ms) for phase, ms in usual.items()],
            reach=self._recent.reach(),
        )


async def _passed_on(call: Callable[..., Awaitable[T]], request: object, context: Context) -> T:
    """The controller's answer. Its refusals reach the caller as they are; that it is away is said in our own words."""
    try:
        return await call(request, timeout=context.time_remaining())
    except grpc.aio.AioRpcError as error:
        is_refusal = error.code() is grpc.StatusCode.INVALID_ARGUMENT
        why = error.details() if is_refusal else f"the controller did not answer: {error.details()}"
        await context.abort(error.code(), why or "")
        raise  # abort has raised already


def _explained(request: RecentRequest, usual: dict[str, float], *, with_hops: bool) -> pb.ExplainedRequest:
    return pb.ExplainedRequest(
        request_id=request.request_id,
        accepted_unix=request.accepted_unix,
        outcome=request.outcome.value if request.outcome else "live",
        error=request.error,
        prompt_tokens=request.num_prompt_tokens,
        answers=[_answer(one, request.accepted_at, usual, with_hops=with_hops) for one in request.answers],
    )


def _answer(
    answer: RecentAnswer, accepted_at: float, usual: dict[str, float], *, with_hops: bool
) -> pb.ExplainedAnswer:
    timeline = answer.timeline
    return pb.ExplainedAnswer(
        index=answer.index,
        completion_tokens=timeline.num_tokens,
        cached_tokens=answer.phases.cached_tokens,
        retries=answer.phases.retries,
        ttft_ms=None if timeline.first_token_at is None else (timeline.first_token_at - accepted_at) * 1e3,
        phases=phase_times(answer.phases),
        hops=_hops(answer, accepted_at) if with_hops else [],
        guilty=_guilty(guilty_hop(answer, usual)),
    )


def _hops(answer: RecentAnswer, accepted_at: float) -> list[pb.Hop]:
    hops = answer.timeline.hops
    moments = chain((accepted_at,), (hop.at for hop in hops))
    return [
        pb.Hop(
            at_ms=(at - accepted_at) * 1e3,
            ms=(at - before) * 1e3,
            what=hop.what,
            engine_id=hop.engine_id,
            detail=hop.detail,
        )
        for hop, (before, at) in zip(hops, pairwise(moments), strict=True)
    ]


def _guilty(guilt: Guilt | None) -> pb.GuiltyHop | None:
    if guilt is None:
        return None
    return pb.GuiltyHop(phase=guilt.phase, usual_ms=guilt.usual_ms, excess_ms=guilt.excess_ms)
