"""One gateway: both doors, the story, and the membership it follows. Holds no state that another gateway needs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import grpc
import uvicorn

from pd_service.channels import channel_options, end
from pd_service.config import GatewaySettings, Role
from pd_service.errors import InvalidRequest
from pd_service.gateway import admin_door
from pd_service.gateway.admin_door import AdminServicer
from pd_service.gateway.doors import Doors
from pd_service.gateway.engines import Directory, EngineMember
from pd_service.gateway.generation import Generation
from pd_service.gateway.grpc_door import SERVICE_NAME, GenerationServicer, add_standard_services
from pd_service.gateway.http_door import make_app
from pd_service.gateway.intake import Intake
from pd_service.gateway.recent import RecentRequests
from pd_service.gateway.scrape import ServiceScrape
from pd_service.gateway.story import RequestStory
from pd_service.gateway.tokenizer import Tokenizer
from pd_service.metrics import GatewayMetrics
from pd_service.models.config import ModelConfig, fingerprint
from pd_service.request import ChatMessage
from pd_service.rpc import admin_pb2, admin_pb2_grpc, generation_pb2_grpc

logger = logging.getLogger(__name__)

RECONNECT_S = 0.5  # between attempts at a controller that is away
STOP_GRACE_S = 0.5


class Gateway:
    def __init__(
        self,
        settings: GatewaySettings,
        doors: Doors,
        *,
        model_dir: Path,
        model_config: ModelConfig,
        model_name: str,
        max_model_len: int,
    ) -> None:
        self._doors = doors
        self.grpc_address, self.http_address = doors.grpc_address, doors.http_address
        self.model_name = model_name
        self._tokenizer = Tokenizer(model_dir)
        self.metrics = GatewayMetrics()
        self.directory = Directory(fingerprint(model_dir))
        intake = Intake(
            model_name=model_name,
            max_model_len=max_model_len,
            vocab_size=model_config.vocab_size,
            eos_token_ids=self._tokenizer.end_token_ids.union(model_config.eos_token_ids),
            tokenizer=self._tokenizer,
            max_requests=settings.max_requests,
        )
        story = RequestStory(self.directory, settings, self.metrics)
        self._recent = RecentRequests(settings.recent_requests)
        self.generation = Generation(intake=intake, story=story, metrics=self.metrics, recent=self._recent)
        self._is_stopped = False

    def unready_reason(self) -> str | None:
        """Why requests cannot be answered now; None when each pool has a connected engine."""
        roles: tuple[Role, ...] = ("prefill", "decode")
        missing = [role for role in roles if not self.directory.ready(role)]
        reasons = [f"no engine is connected for: {', '.join(missing)}", *self.directory.refusals()]
        return "; ".join(reasons) if missing else None

    async def start(self, admin_address: str) -> None:
        """Opens both doors, which refuse until engines are there, and follows the controller's membership."""
        with suppress(
            InvalidRequest
        ):  # the first chat compiles the template; a model without one has nothing to compile
            await self._tokenizer.encode_chat([ChatMessage(role="user", content="warm-up")])
        self._admin = grpc.aio.insecure_channel(admin_address, options=channel_options())
        generation_pb2_grpc.add_GenerationServicer_to_server(
            GenerationServicer(self.generation), self._doors.grpc_server
        )
        admin_pb2_grpc.add_AdminServicer_to_server(
            AdminServicer(self._admin, self._recent, self.directory.members), self._doors.grpc_server
        )
        self._health = await add_standard_services(self._doors.grpc_server, [SERVICE_NAME, admin_door.SERVICE_NAME])
        await self._doors.grpc_server.start()
        app = make_app(self.generation, self.unready_reason, ServiceScrape(self.metrics, self.directory.members))
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="off")
        self._http_server = _Uvicorn(config)
        self._serving = asyncio.create_task(self._http_server.serve(sockets=[self._doors.http_socket]))
        self._following = asyncio.create_task(self._follow(admin_address))
        self._reporting = asyncio.create_task(self._report_health())

    async def _follow(self, admin_address: str) -> None:
        """Takes over each membership; while the controller is away the last one stays in use."""
        while True:
            try:
                stream = admin_pb2_grpc.AdminStub(self._admin).WatchMembership(admin_pb2.WatchMembershipRequest())
                async for membership in stream:
                    await self.directory.update(_serving_members(membership))
                reason = "it ended the stream"
            except grpc.aio.AioRpcError as error:
                reason = error.code().name
            logger.warning("the controller at %s is away (%s); the engines known stay", admin_address, reason)
            await asyncio.sleep(RECONNECT_S)

    async def wait_until_ready(self, roles: Collection[Role]) -> None:
        """Returns when each of these pools has an engine that is connected."""
        for role in roles:
            await self.directory.wait_for(role, timeout_s=float("inf"))

    async def _report_health(self) -> None:
        """grpc.health.v1 says what /health says."""
        while True:
            changed = self.directory.changed
            await self._health.report(is_serving=self.unready_reason() is None)
            await changed.wait()

    async def stop(self) -> None:
        """Takes nothing new; streams that have not ended after a short grace end with UNAVAILABLE. Twice is once."""
        if self._is_stopped:
            return
        self._is_stopped = True
        await end(self._reporting)
        await self._health.report(is_serving=False)
        self._http_server.should_exit = True
        stopping = asyncio.ensure_future(self._doors.grpc_server.stop(2 * STOP_GRACE_S))
        await asyncio.wait((stopping,), timeout=STOP_GRACE_S)
        await self.directory.close()
        await stopping
        self._following.cancel()
        await asyncio.gather(self._serving, self._following, return_exceptions=True)
        await self._admin.close(None)
        self._tokenizer.close()


class _Uvicorn(uvicorn.Server):
    """Signals belong to the process, not to its HTTP door."""

    @contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def _serving_members(membership: admin_pb2.Membership) -> list[EngineMember]:
    return [
        EngineMember(
            engine_id=member.engine_id,
            role=cast(Role, member.role),
            address=member.address,
            incarnation=member.incarnation,
            is_draining=member.state == "draining",
        )
        for member in membership.members
        if member.state in ("ready", "draining")
    ]
