"""The gateway's view of the engines: one client per member, each with one persistent stream.

`Directory` follows the membership and owns the clients; `EngineClient` owns the stream and the requests on it. A stream
that ends fails its requests with EngineLost at once and is opened again while its engine is a member.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

import grpc

from pd_service import wire
from pd_service.channels import EOF, beside, channel_options, end, write_all
from pd_service.config import PROTOCOL_VERSION, Role
from pd_service.errors import DeadlineExceeded, EngineLost, Unavailable
from pd_service.request import EngineRequest, Load, RequestId, TokenEvent
from pd_service.rpc import engine_pb2 as pb
from pd_service.rpc import engine_pb2_grpc

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
RECONNECT_S = 0.2  # between attempts at a member whose stream ended


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMember:
    """One engine that serves, as the membership names it. A draining one finishes what it has and gets nothing new."""

    engine_id: str
    role: Role
    address: str
    incarnation: str
    is_draining: bool = False

    def is_same_engine(self, other: EngineMember | None) -> bool:
        return other is not None and (self.address, self.incarnation) == (other.address, other.incarnation)


class EngineClient:
    def __init__(
        self, member: EngineMember, model: str, changed: Callable[[], None], holders: Sequence[EngineMember]
    ) -> None:
        self.member = member
        self.refusal: str | None = None  # why the engine does not take this gateway, if that is so
        self._model = model
        self._holders = holders
        self.load = Load()
        self.is_connected = False
        self._changed = changed  # called whenever this engine becomes usable, or ceases to be
        self._outbox: asyncio.Queue[pb.GatewayMessage | None] = asyncio.Queue()
        self._requests: dict[RequestId, asyncio.Queue[TokenEvent]] = {}
        self._unanswered: dict[RequestId, int] = {}
        self._task = asyncio.create_task(self._keep_connected())

    @property
    def engine_id(self) -> str:
        return self.member.engine_id

    @property
    def num_live(self) -> int:
        return len(self._requests)

    @property
    def pending_tokens(self) -> int:
        return sum(self._unanswered.values())

    async def run(self, request: EngineRequest, deadline: float | None) -> AsyncGenerator[TokenEvent, None]:
        """The request's events, the last one with `finish`. Raises the event's error, and EngineLost.

        Closing it before the last event cancels the request on the engine, tickets it has become included.
        """
        if not self.is_connected:
            raise EngineLost(f"{self.engine_id} is not connected")
        remaining_ms = _remaining_ms(deadline)
        inbox = self._requests[request.request_id] = asyncio.Queue()
        self._unanswered[request.request_id] = len(request.token_ids)
        self._send(pb.GatewayMessage(submit=wire.request_to_wire(request, remaining_ms)))
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
            if not has_ended:
                self._send(pb.GatewayMessage(cancel=pb.Cancel(request_id=request.request_id)))

    def release(self, lease_id: str) -> None:
        """Gives a ticket of this engine back."""
        self._send(pb.GatewayMessage(release=pb.ReleaseTicket(lease_id=lease_id)))

    def meet(self, holders: Sequence[EngineMember]) -> None:
        """Tells a reading engine whose tickets it may be given, now and after each reconnection."""
        self._holders = holders
        if holders and self.member.role != "prefill":
            named = [pb.Holder(address=holder.address, incarnation=holder.incarnation) for holder in holders]
            self._send(pb.GatewayMessage(holders=pb.Holders(holders=named)))

    def _send(self, message: pb.GatewayMessage) -> None:
        if self.is_connected:  # otherwise the engine has already let go of everything that was ours
            self._outbox.put_nowait(message)

    async def _keep_connected(self) -> None:
        while True:
            try:
                reason = await self._session()
                logger.info("the stream to %s ended: %s", self.engine_id, reason)
            except Exception:  # a message that makes no sense ends its stream, never the client
                logger.exception("the stream to %s failed", self.engine_id)
            await asyncio.sleep(RECONNECT_S)

    async def _session(self) -> str:
        """One stream from hello to its end; returns why it ended."""
        self._outbox = asyncio.Queue()
        hello = pb.GatewayHello(version=PROTOCOL_VERSION, incarnation=self.member.incarnation, model=self._model)
        self._outbox.put_nowait(pb.GatewayMessage(hello=hello))
        try:
            async with grpc.aio.insecure_channel(self.member.address, options=channel_options()) as channel:
                stream = engine_pb2_grpc.EngineStub(channel).Session()
                async with beside(write_all(self._outbox, stream)):
                    async with asyncio.timeout(CONNECT_TIMEOUT_S):
                        first = await stream.read()
                    if first is not EOF:
                        self._connected(first.hello)
                        while (message := await stream.read()) is not EOF:
                            self._deliver(message.events)
                return "the engine closed it"
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                self._refused(error.details() or "it gives no reason")
            return f"{error.code().name}: {error.details()}"
        except TimeoutError:
            return f"no hello within {CONNECT_TIMEOUT_S:g} s"
        finally:
            self._disconnected()

    def _connected(self, hello: pb.EngineHello) -> None:
        self.load = wire.load_from_wire(hello.load)
        self.is_connected = True
        self.refusal = None
        self.meet(self._holders)
        self._changed()

    def _refused(self, reason: str) -> None:
        """Attempts go on, but only somebody who changes a side can end it: said once, and kept for whoever asks."""
        if reason != self.refusal:
            logger.warning("%s refuses this gateway: %s", self.engine_id, reason)
        self.refusal = reason

    def _deliver(self, events: pb.StepEvents) -> None:
        self.load = wire.load_from_wire(events.load)
        # Whoever waits for a first token goes first: the others of this step have waited for one step only.
        for message in sorted(events.events, key=_is_later):
            request_id = RequestId(message.request_id)
            if message.token_ids or message.finish or message.HasField("error"):  # a ticket alone is no answer
                self._unanswered.pop(request_id, None)
            inbox = self._requests.get(request_id)
            if inbox is not None:
                inbox.put_nowait(wire.event_from_wire(message))

    def _disconnected(self) -> None:
        self.is_connected = False
        for request_id, inbox in self._requests.items():
            error = EngineLost(f"{self.engine_id} was lost")
            inbox.put_nowait(TokenEvent(request_id=request_id, error=error))
        self._changed()

    async def close(self) -> None:
        await end(self._task)


class Directory:
    """The engines there are, and a way to wait for one.

    `changed` is the event of the next change, whatever it is: take it, look, then wait for it. `model` is the
    fingerprint of this gateway's model directory; engines with another one refuse it.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._clients: dict[str, EngineClient] = {}
        self.changed = asyncio.Event()
        self._is_closing = False

    async def update(self, members: Sequence[EngineMember]) -> None:
        """Takes a new membership over: a member whose incarnation or address changed is a new engine."""
        wanted = {member.engine_id: member for member in members}
        gone = [key for key, client in self._clients.items() if not client.member.is_same_engine(wanted.get(key))]
        closing = [self._clients.pop(key) for key in gone]
        holders = [member for member in members if member.role != "decode"]
        for key, client in self._clients.items():
            client.member = wanted[key]
            client.meet(holders)
        for key in wanted.keys() - self._clients.keys():
            self._clients[key] = EngineClient(wanted[key], self._model, self._notify, holders)
        self._notify()
        await asyncio.gather(*(client.close() for client in closing))

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def ready(self, role: Role) -> list[EngineClient]:
        """Connected engines that take new work of this kind."""
        taking = [c for c in self._clients.values() if c.is_connected and not c.member.is_draining]
        return [client for client in taking if client.member.role in (role, "mixed")]

    def members(self) -> list[EngineMember]:
        """All that serve, connected or not."""
        return [client.member for client in self._clients.values()]

    def refusals(self) -> list[str]:
        """For operators: each member that does not take this gateway, and why."""
        return [f"{c.engine_id} refuses this gateway: {c.refusal}" for c in self._clients.values() if c.refusal]

    async def wait_for(self, role: Role, timeout_s: float) -> list[EngineClient]:
        """Ready engines of this kind, at least one. Raises Unavailable when none came in time, or none will."""
        if self._is_closing:
            raise Unavailable("the gateway is stopping")
        try:
            async with asyncio.timeout(timeout_s):
                while not (ready := self.ready(role)):
                    await self.changed.wait()
        except TimeoutError as error:
            raise Unavailable(f"no {role} engine came within {timeout_s:g} s") from error
        return ready

    async def close(self) -> None:
        """Lets every engine go: requests that still run end with Unavailable."""
        self._is_closing = True
        await self.update([])


def _is_later(event: pb.RequestEvent) -> bool:
    return not (event.HasField("times") or event.HasField("ticket"))


def _remaining_ms(deadline: float | None) -> int:
    """Milliseconds until the deadline (loop time), at least 1; 0 when there is none."""
    if deadline is None:
        return 0
    remaining_s = deadline - asyncio.get_running_loop().time()
    if remaining_s <= 0:
        raise DeadlineExceeded("the deadline passed before the request reached an engine")
    return max(1, int(remaining_s * 1e3))
