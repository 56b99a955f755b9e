"""A cluster under virtual time: real stories on fake engine clients, over links that are late, stall and break.

`SimClient` and `SimGateway` stand for the gateway's `EngineClient` and `Directory` and satisfy the story's protocols.
Everything random is drawn from the cluster's seed, so a course of events can be had again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any

from pd_service.config import GatewaySettings, RetrySettings
from pd_service.errors import DeadlineExceeded, EngineLost, Unavailable
from pd_service.gateway.story import RequestStory
from pd_service.metrics import GatewayMetrics
from pd_service.request import EngineRequest, Load, RequestId, TokenEvent
from tests.sim_engine import SimEngine
from tests.sim_network import Connection, SimSettings, now

RECONNECT_S = 0.2


class SimClient:
    """A gateway's view of one life of one engine."""

    def __init__(self, gateway: SimGateway, engine: SimEngine) -> None:
        self._gateway = gateway
        self.engine = engine
        self.load = Load()
        self.connection: Connection | None = None
        self._requests: dict[RequestId, asyncio.Queue[TokenEvent]] = {}
        self._unanswered: dict[RequestId, int] = {}
        self.connect()

    @property
    def engine_id(self) -> str:
        return self.engine.engine_id

    @property
    def num_live(self) -> int:
        return len(self._requests)

    @property
    def pending_tokens(self) -> int:
        return sum(self._unanswered.values())

    def connect(self) -> None:
        cluster = self._gateway.cluster
        if cluster.engines.get(self.engine_id) is not self.engine:
            self._gateway.forget(self)  # the membership says so by now
            return
        connection = self.connection = cluster.connect(self, self.engine)
        self._session = self.engine.open_session(connection, self)
        self.load = self.engine.load
        connection.on_cut(self._disconnected)
        self._gateway.changed.set()

    async def run(self, request: EngineRequest, deadline: float | None) -> AsyncGenerator[TokenEvent, None]:
        if self.connection is None:
            raise EngineLost(f"{self.engine_id} is not connected")
        if deadline is not None and deadline <= now():
            raise DeadlineExceeded("the deadline passed before the request reached an engine")
        inbox = self._requests[request.request_id] = asyncio.Queue()
        self._unanswered[request.request_id] = len(request.token_ids)
        remaining_s = None if deadline is None else deadline - now()
        self.connection.up.send(self.engine.submit, self._session, request, remaining_s)
        has_ended = False
        try:
            while not has_ended:
                event = await inbox.get()
                has_ended = event.finish is not None or event.error is not None
                if event.error is not None:
                    raise event.error
                yield event
        finally:
            self._requests.pop(request.request_id, None)
            self._unanswered.pop(request.request_id, None)
            if not has_ended and self.connection is not None:
                self.connection.up.send(self.engine.cancel, self._session, request.request_id)

    def release(self, lease_id: str) -> None:
        if self.connection is not None:
            self.connection.up.send(self.engine.release, lease_id)

    def deliver(self, connection: Connection, events: Sequence[TokenEvent], load: Load) -> None:
        if connection is not self.connection:
            return
        self.load = load
        for event in events:
            if event.token_ids or event.finish is not None or event.error is not None:
                self._unanswered.pop(event.request_id, None)
            inbox = self._requests.get(event.request_id)
            if inbox is not None:
                inbox.put_nowait(event)

    def _disconnected(self) -> None:
        self.connection = None
        for request_id, inbox in self._requests.items():
            inbox.put_nowait(TokenEvent(request_id=request_id, error=EngineLost(f"{self.engine_id} was lost")))
        asyncio.get_running_loop().call_later(RECONNECT_S, self.connect)


class SimGateway:
    """One gateway: its view of the members, and the product's story on top."""

    def __init__(self, cluster: SimCluster, settings: SimSettings) -> None:
        self.cluster = cluster
        self.changed = asyncio.Event()
        self.clients: dict[str, SimClient] = {}
        self.metrics = GatewayMetrics()
        gateway = GatewaySettings(
            local_prefill_max_tokens=settings.local_prefill_max_tokens,
            retry=RetrySettings(engine_wait_s=settings.engine_wait_s),
        )
        self.story = RequestStory(self, gateway, self.metrics)

    def meet(self, engine: SimEngine) -> None:
        self.clients[engine.engine_id] = SimClient(self, engine)

    def forget(self, client: SimClient) -> None:
        if self.clients.get(client.engine_id) is client:
            del self.clients[client.engine_id]

    async def wait_for(self, role: str, timeout_s: float) -> list[SimClient]:
        try:
            async with asyncio.timeout(timeout_s):
                while not (ready := self._ready(role)):
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError as error:
            raise Unavailable(f"no {role} engine came within {timeout_s:g} s") from error
        return ready

    def _ready(self, role: str) -> list[SimClient]:
        return [c for c in self.clients.values() if c.connection is not None and c.engine.role in (role, "mixed")]


class SimCluster:
    """`async with` starts it; leaving it ends every engine. `engines` holds the living, by engine id."""

    def __init__(self, settings: SimSettings, seed: int) -> None:
        self.settings = settings
        self.rng = random.Random(seed)
        self.engines: dict[str, SimEngine] = {}
        self.gateways: list[SimGateway] = []
        self.num_prefills = 0
        self.is_plane_dead = False
        self._num_lives = 0
        self._connections: dict[Connection, tuple[object, object]] = {}

    async def __aenter__(self) -> SimCluster:
        self.gateways = [SimGateway(self, self.settings) for _ in range(self.settings.num_gateways)]
        for role, num in (("prefill", self.settings.num_prefill), ("decode", self.settings.num_decode)):
            for i in range(num):
                self.start_engine(f"{role}-{i}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine_id in list(self.engines):
            await self.crash(engine_id)

    # ---- engines and connections

    def start_engine(self, engine_id: str) -> None:
        """A new life; its role is the first word of its id."""
        self._num_lives += 1
        role = engine_id.partition("-")[0]
        self.engines[engine_id] = SimEngine(self, self.settings, engine_id, role, f"{engine_id}.{self._num_lives}")
        for gateway in self.gateways:
            gateway.meet(self.engines[engine_id])

    async def crash(self, engine_id: str) -> None:
        """The engine is gone at once. Others notice when their connection tells them, or never ask again."""
        engine = self.engines.pop(engine_id)
        for connection, ends in list(self._connections.items()):
            if engine in ends:
                self.cut(connection)
        await engine.die()

    def connect(self, near: object, far: object) -> Connection:
        connection = Connection(self.rng, self.settings)
        self._connections[connection] = (near, far)
        return connection

    def cut(self, connection: Connection) -> None:
        del self._connections[connection]
        connection.cut()

    @property
    def connections(self) -> list[Connection]:
        return list(self._connections)

    def counted(self, engine_ids: str) -> list[EngineRequest]:
        """All requests that reached the living engines whose id begins like this."""
        living = [engine for engine_id, engine in self.engines.items() if engine_id.startswith(engine_ids)]
        return [request for engine in living for request in engine.submissions]

    # ---- times

    def delay_s(self) -> float:
        return self.rng.uniform(*self.settings.delay_s)

    def step_time_s(self) -> float:
        return self.rng.uniform(*self.settings.step_s)

    def copy_time_s(self) -> float:
        return float("inf") if self.is_plane_dead else self.rng.uniform(*self.settings.block_copy_s)

    # ---- laws

    async def settle(self) -> None:
        """Waits until the last lease and the last pull must have ended, then checks that nothing is left."""
        settings = self.settings
        await asyncio.sleep(max(settings.lease_s, settings.pull_timeout_s) * 2 + settings.notice_s[1] + 1)
        for engine in self.engines.values():
            engine.check_idle()
        for gateway in self.gateways:
            for client in gateway.clients.values():
                assert (client.num_live, client.pending_tokens) == (0, 0), (
                    f"{client.engine_id}: a client keeps requests"
                )


def attempts(requests: Sequence[EngineRequest], **wanted: Any) -> int:
    """How many of the submissions have these attributes."""
    return sum(all(getattr(r, name) == value for name, value in wanted.items()) for r in requests)
