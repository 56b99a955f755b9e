"""One engine on the network: its gRPC server, its loop, and the events between them.

    gateway ── Session ──► EngineNode ── inbox ──► EngineLoop (thread)
            ◄─ one message per step ─┤  ◄─ publish ─┘
                                     ├── Holder: tickets of KV that is held here
                                     └── Reader: pulls of KV that is held elsewhere

A gateway's session owns its requests: when the stream ends, they are cancelled and their tickets released. Knows
nothing of Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from kv_cache import SharedStorage
from pd_service import wire
from pd_service.channels import Context, beside, server_options, write_all
from pd_service.config import PROTOCOL_VERSION, EngineConfig, SpeculativeSettings
from pd_service.engine.execution_engine import EngineLoop, ExecutionEngine
from pd_service.engine.messages import Cancel, Hold, ReleaseHeld, StepOutput, Submit, Withdrawn
from pd_service.errors import DeadlineExceeded, InvalidRequest, TransferFailed, TransferFailure
from pd_service.models.config import fingerprint
from pd_service.node.engine_layout import describe_layout
from pd_service.node.engine_metrics import EngineMetrics
from pd_service.node.holder import Holder
from pd_service.node.pulse import Pulse
from pd_service.node.reader import Reader
from pd_service.node.staging import reachable_planes
from pd_service.request import FinishReason, RequestId, Ticket, TokenEvent
from pd_service.rpc import engine_pb2 as pb
from pd_service.rpc import engine_pb2_grpc, kv_transfer_pb2_grpc
from transfer.planes import make_plane
from transfer.planes.base import Buffers, SharedMemory

logger = logging.getLogger(__name__)

STOP_GRACE_S = 0.5


@dataclass(slots=True, eq=False)
class _Session:
    """One gateway's stream. `outbox` ends with None."""

    requests: set[RequestId] = field(default_factory=set)
    outbox: asyncio.Queue[pb.EngineMessage | None] = field(default_factory=asyncio.Queue)


class EngineNode(engine_pb2_grpc.EngineServicer):
    """Construct in a thread that may block (the model is loaded), then `await start()` in the loop it lives in.

    `failed` is called in the engine's thread if the engine's loop dies; the owner then ends this node's process, which
    tells gateways and peers at once.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str], None] = lambda _: None,
        failed: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self.incarnation = uuid.uuid4().hex[:12]
        self._config = config
        self._engine = ExecutionEngine(config, progress)
        self._engine_loop = EngineLoop(self._engine, self._publish, failed)
        worker = self._engine.worker
        self._layout = describe_layout(worker.cache_info, worker.block_nums, fingerprint(config.model_dir))
        self._load = self._engine.scheduler.load()
        self._metrics = EngineMetrics(self._status)
        self._sessions: set[_Session] = set()
        self._owners: dict[RequestId, _Session] = {}
        self._deadlines: dict[RequestId, asyncio.TimerHandle] = {}

    async def start(self, host: str, port: int = 0) -> str:
        """Binds, offers the data planes, starts the engine; returns host:port as others reach it."""
        self._loop = asyncio.get_running_loop()
        worker = self._engine.worker
        named = [make_plane(name, host=host) for name in self._config.settings.planes]
        planes = reachable_planes(named, worker.device, worker.cache_tensors)
        buffers = self._buffers()
        self._holder = Holder(
            incarnation=self.incarnation,
            layout=self._layout,
            lease_s=self._config.settings.lease_s,
            release_blocks=lambda request_id: self._engine_loop.put(ReleaseHeld(request_id)),
        )
        self._holder.serve(planes, buffers)
        self._reader = Reader(
            incarnation=self.incarnation,
            layout=self._layout,
            planes=planes,
            buffers=buffers,
            pull_timeout_s=self._config.settings.pull_timeout_s,
            digest_sample_rate=self._config.settings.digest_sample_rate,
            observe=self._metrics.observe_pull,
        )
        self._server = grpc.aio.server(options=server_options())
        engine_pb2_grpc.add_EngineServicer_to_server(self, self._server)
        kv_transfer_pb2_grpc.add_KvTransferServicer_to_server(self._holder, self._server)
        bound = self._server.add_insecure_port(f"{host}:{port}")
        self.address = self._holder.address = f"{host}:{bound}"
        await self._server.start()
        self._engine_loop.start()
        return self.address

    def _buffers(self) -> Buffers:
        ptrs, lens, _, _ = self._engine.kv_cache_manager.get_contiguous_buf_infos()
        storage = self._engine.worker.storage
        shared = None
        if isinstance(storage, SharedStorage):
            shared = SharedMemory(fd=storage.fd, base_ptr=storage.base_ptr, num_bytes=storage.num_bytes)
        is_addressable = self._engine.worker.device.is_addressable
        return Buffers(ptrs=tuple(ptrs), lens=tuple(lens), shared=shared, is_addressable=is_addressable)

    async def stop(self) -> None:
        """Ends every stream, pull and lease, then the engine. Gateways see a broken stream and go round again."""
        for session in self._sessions:
            session.outbox.put_nowait(None)
        self._holder.close()
        await self._server.stop(STOP_GRACE_S)
        await self._reader.close()
        await asyncio.to_thread(self._engine_loop.stop)

    # ---- from the engine

    def _publish(self, output: StepOutput) -> None:
        """In the engine's thread."""
        self._loop.call_soon_threadsafe(self._deliver, output)

    def _deliver(self, output: StepOutput) -> None:
        self._load = output.load
        for order in output.pulls:
            self._reader.pull(order, self._engine_loop.put)
        messages: dict[_Session, pb.StepEvents] = {session: pb.StepEvents() for session in self._sessions}
        tickets = self._follow(output.holds, messages)
        for event in output.events:
            session = self._owners.get(event.request_id)
            if session is None:
                continue  # cancelled while this event was on its way
            if event.finish is FinishReason.PREFILLED:
                event = _with_ticket(event, tickets.get(event.request_id))
            if event.finish is not None or event.error is not None:
                self._forget(event.request_id)
            messages[session].events.append(wire.event_to_wire(event))
        for session, message in messages.items():
            message.load.CopyFrom(wire.load_to_wire(output.load))
            session.outbox.put_nowait(pb.EngineMessage(events=message))

    def _follow(
        self, holds: Sequence[Hold | Withdrawn], messages: Mapping[_Session, pb.StepEvents]
    ) -> dict[RequestId, Ticket]:
        """Gives out the tickets that begin; returns those that are complete now."""
        complete: dict[RequestId, Ticket] = {}
        for hold in holds:
            if isinstance(hold, Withdrawn):
                self._holder.withdraw(hold.request_id)
                continue
            session = self._owners.get(hold.request_id)
            ticket = self._holder.follow(hold, session)
            if ticket is not None and hold.next_token is not None:
                complete[hold.request_id] = ticket
            elif ticket is not None and session is not None:
                event = TokenEvent(request_id=hold.request_id, ticket=ticket)
                messages[session].events.append(wire.event_to_wire(event))
        return complete

    # ---- from gateways

    async def Session(self, request_iterator: AsyncIterator[pb.GatewayMessage], context: Context) -> None:
        hello = await anext(aiter(request_iterator), None)
        refusal = self._refusal(hello)
        if refusal is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        session = _Session()
        self._sessions.add(session)
        session.outbox.put_nowait(pb.EngineMessage(hello=self._hello()))
        try:
            async with beside(self._read(session, request_iterator)):
                await write_all(session.outbox, context)
        finally:
            self._end_session(session)

    def _hello(self) -> pb.EngineHello:
        return pb.EngineHello(
            version=PROTOCOL_VERSION,
            incarnation=self.incarnation,
            role=self._config.role,
            load=wire.load_to_wire(self._load),
        )

    def _refusal(self, first: pb.GatewayMessage | None) -> str | None:
        if first is None or not first.HasField("hello"):
            return "the first message must be a hello"
        hello, reasons = first.hello, []
        if hello.version != PROTOCOL_VERSION:
            reasons.append(f"protocol version: gateway {hello.version}, engine {PROTOCOL_VERSION}")
        if hello.incarnation != self.incarnation:
            reasons.append(f"incarnation: the gateway expects {hello.incarnation!r}, this is {self.incarnation!r}")
        if hello.model != self._layout.model:
            reasons.append(
                f"model: the gateway's files have the fingerprint {hello.model!r}, this engine's have "
                f"{self._layout.model!r}; they differ in configuration, weights, tokenizer or chat template"
            )
        return "; ".join(reasons) or None

    async def _read(self, session: _Session, messages: AsyncIterator[pb.GatewayMessage]) -> None:
        try:
            async for message in messages:
                self._receive(session, message)
        except grpc.aio.AioRpcError as error:
            logger.info("a gateway's stream broke: %s", error.code())
        finally:
            session.outbox.put_nowait(None)

    def _receive(self, session: _Session, message: pb.GatewayMessage) -> None:
        match message.WhichOneof("message"):
            case "submit":
                self._submit(session, message.submit)
            case "cancel":
                self._cancel(session, RequestId(message.cancel.request_id))
            case "release":
                self._holder.release(message.release.lease_id)
            case "holders":
                for holder in message.holders.holders:
                    self._reader.meet(holder.address, holder.incarnation)
            case kind:
                logger.warning("ignored a message of kind %s from a gateway", kind)

    def _submit(self, session: _Session, message: pb.Submit) -> None:
        request = wire.request_from_wire(message)
        request_id = request.request_id
        if request_id in self._owners:
            error = InvalidRequest(f"request_id {request_id!r} is live on this engine", "request_id")
            self._tell(session, TokenEvent(request_id=request_id, error=error))
            return
        self._owners[request_id] = session
        session.requests.add(request_id)
        if message.deadline_ms:
            timer = self._loop.call_later(message.deadline_ms / 1e3, self._expire, request_id)
            self._deadlines[request_id] = timer
        if request.ticket is not None:
            self._reader.claim(request_id, request.ticket, self._engine_loop.put)
        self._engine_loop.put(Submit(request))

    def _cancel(self, session: _Session, request_id: RequestId) -> None:
        """Cancels a live request of this gateway; if it has already become a ticket, releases that."""
        if self._owners.get(request_id) is session:
            self._stop_request(request_id)
        else:
            self._holder.release_request(request_id)

    def _stop_request(self, request_id: RequestId) -> None:
        self._forget(request_id)
        self._holder.release_request(request_id)  # its readers hear of it before the engine does
        self._engine_loop.put(Cancel(request_id))

    def _expire(self, request_id: RequestId) -> None:
        session = self._owners[request_id]
        self._stop_request(request_id)
        error = DeadlineExceeded("the deadline passed on the engine")
        self._tell(session, TokenEvent(request_id=request_id, error=error))

    def _tell(self, session: _Session, event: TokenEvent) -> None:
        message = pb.StepEvents(events=[wire.event_to_wire(event)], load=wire.load_to_wire(self._load))
        session.outbox.put_nowait(pb.EngineMessage(events=message))

    def _forget(self, request_id: RequestId) -> None:
        """The request's last word has been said: no table keeps it."""
        self._owners.pop(request_id).requests.discard(request_id)
        self._reader.drop(request_id)
        timer = self._deadlines.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def _end_session(self, session: _Session) -> None:
        self._sessions.discard(session)
        for request_id in list(session.requests):
            self._stop_request(request_id)
        self._holder.release_owner(session)

    # ---- for operators

    async def pulse(self) -> Pulse:
        """A coroutine, so that an event loop that is stuck gives none."""
        held = len(self._owners) + self._holder.num_leases + self._reader.num_pulls
        return Pulse(turns=self._engine_loop.turns, is_busy=self._engine_loop.is_busy, held=held)

    async def GetStatus(self, request: pb.EngineStatusRequest, context: Context) -> pb.EngineStatus:
        return self._status()

    async def GetMetrics(self, request: pb.EngineMetricsRequest, context: Context) -> pb.EngineMetrics:
        return pb.EngineMetrics(exposition=self._metrics.render())

    async def CheckPeer(self, request: pb.CheckPeerRequest, context: Context) -> pb.PeerReport:
        return await self._reader.examine(request.address, request.incarnation)

    def _status(self) -> pb.EngineStatus:
        kv = self._engine.kv_cache_manager
        usable, free = kv.num_usable_blocks(), kv.num_free_blocks()
        counters = self._engine.scheduler.counters
        status = pb.EngineStatus(
            incarnation=self.incarnation,
            role=self._config.role,
            pid=os.getpid(),
            choices=self._choices(),
            holders=len(self._reader.choices()),
            load=wire.load_to_wire(self._load),
            blocks=[
                pb.BlockUsage(attn_type=attn_type, used=usable[attn_type] - free[attn_type], total=usable[attn_type])
                for attn_type in usable
            ],
            leases=self._holder.num_leases,
            pulls=self._reader.num_pulls,
            steps=counters.steps,
            computed_tokens=counters.computed_tokens,
            received_tokens=counters.received_tokens,
            preemptions=counters.preemptions,
            cached_tokens=counters.cached_tokens,
            drafted_tokens=counters.drafted_tokens,
            accepted_tokens=counters.accepted_tokens,
        )
        self._holder.counts.write_to(status)
        self._reader.counts.write_to(status)
        return status

    def _choices(self) -> list[pb.Choice]:
        config, worker = self._config, self._engine.worker
        size, free = config.kv_cache_bytes.human_readable(), worker.available_bytes / 2**30
        blocks = ", ".join(
            f"{total} x {config.settings.block_size} tokens"
            for total in self._engine.kv_cache_manager.num_usable_blocks().values()
        )
        choices = [
            pb.Choice(what="device", chosen=config.device, reason="configured"),
            pb.Choice(what="dtype", chosen=config.dtype, reason="configured"),
            pb.Choice(what="attention", chosen=worker.attention, reason=f"the one there is for {config.device}"),
            pb.Choice(what="prefix cache", chosen="on" if config.settings.prefix_cache else "off", reason="configured"),
            pb.Choice(what="speculation", chosen=_guesses(config.settings.speculative), reason="configured"),
            pb.Choice(what="KV blocks", chosen=blocks, reason=f"kv_cache_bytes {size}"),
            pb.Choice(what="memory", chosen=worker.memory_plan.describe(), reason=f"{free:.1f} GiB were free"),
        ]
        if config.role != "decode":
            refused = "; ".join(f"{name} not: {why}" for name, why in self._holder.refused_planes.items())
            offered = ", ".join(self._holder.plane_names)
            choices.append(pb.Choice(what="offers", chosen=offered, reason=refused or "all configured planes"))
        return choices + self._reader.choices()


def _with_ticket(event: TokenEvent, ticket: Ticket | None) -> TokenEvent:
    if ticket is None:
        reason = "the ticket was given back before it was complete"
        return TokenEvent(event.request_id, error=TransferFailed(reason, TransferFailure.WITHDRAWN))
    return event._replace(ticket=ticket)


def _guesses(settings: SpeculativeSettings) -> str:
    return "none" if settings.method == "none" else f"{settings.method}, {settings.num_tokens} tokens"
