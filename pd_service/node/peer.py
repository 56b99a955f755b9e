"""The channel to one life of one holder: handshake, choice of a data plane, questions and answers per pull.

Each opening of a ticket gets a number of its own, so that pulls that share one do not take each other's answers. The
channel's end fails everything that waits for an answer or for more to read, with the reason.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from time import monotonic
from types import MappingProxyType
from typing import Any, NoReturn

import grpc
import msgpack

from pd_service.channels import EOF, beside, channel_options, end, write_all
from pd_service.config import PROTOCOL_VERSION
from pd_service.errors import TransferFailed, TransferFailure
from pd_service.node.digest_wire import digests_to_wire
from pd_service.node.handshake import reasons_against_holder
from pd_service.node.layout_wire import layout_from_wire, layout_to_wire
from pd_service.node.opened_ticket import OpenedTicket
from pd_service.rpc import kv_transfer_pb2 as pb
from pd_service.rpc import kv_transfer_pb2_grpc
from transfer.digest import Digests, Sampler
from transfer.layout import EngineLayout
from transfer.lease import LeaseState
from transfer.plan import OneRankPlanner
from transfer.planes.base import Buffers, Plane, PlaneError, PlaneReader, PlaneUnavailable, ReadRefused, Runs

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0


_Question = tuple[str, int, str]  # lease id, pull id, kind of the answer


class Peer:
    """The channel to one life of one holder."""

    def __init__(self, address: str, incarnation: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s  # for any one answer
        self.address = address
        self.incarnation = incarnation
        self.planner: OneRankPlanner | None = None
        self.sampler: Sampler | None = None
        self._hello: pb.HolderHello | None = None
        self.plane: PlaneReader | None = None
        self.plane_name = ""
        self.plane_reason = ""
        self.broken: str | None = None  # why the channel ended
        self.refusal: str | None = None  # why the two cannot work together, if that is so; trying again is no help
        self._outbox: asyncio.Queue[pb.ReaderMessage | None] = asyncio.Queue()
        self._answers: dict[_Question, asyncio.Future[Any]] = {}
        self._opened: dict[tuple[str, int], OpenedTicket] = {}  # by lease and pull, until the pull is over
        self._pull_ids = itertools.count(1)
        self.reading: asyncio.Task[None] | None = None  # ends when the channel does
        self._open = AsyncExitStack()  # the connection and what belongs to it

    async def connect(self, incarnation: str, layout: EngineLayout, planes: Sequence[Plane], buffers: Buffers) -> None:
        """Handshake, then the best plane both sides share. Raises TransferFailed with the reason."""
        channel = grpc.aio.insecure_channel(self.address, options=channel_options())
        await self._open.enter_async_context(channel)
        self._stream = kv_transfer_pb2_grpc.KvTransferStub(channel).Channel()
        await self._open.enter_async_context(beside(write_all(self._outbox, self._stream)))
        hello = pb.ReaderHello(
            version=PROTOCOL_VERSION,
            incarnation=incarnation,
            holder_incarnation=self.incarnation,
            layout=layout_to_wire(layout),
            planes=[plane.name for plane in planes],
        )
        self._send(pb.ReaderMessage(hello=hello))
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                first = await self._stream.read()
        except (TimeoutError, grpc.aio.AioRpcError) as error:
            message = f"no handshake with {self.address}: {error!r}"
            raise TransferFailed(message, TransferFailure.PEER_LOST) from error
        self._plan_from(first, layout)
        self._hello = first.hello
        await self._choose_plane(first.hello, planes, buffers)
        self.reading = asyncio.create_task(self._read())

    def _plan_from(self, first: pb.HolderMessage | None, layout: EngineLayout) -> None:
        if first is EOF:
            message = f"{self.address} ended the handshake without a word"
            raise TransferFailed(message, TransferFailure.PEER_LOST)
        if first is None:  # what grpc makes of bytes that are no message
            self._refuse("does not fit this reader", ["what it says first is no message"])
        if not first.HasField("hello"):
            self._refuse("refuses this reader", list(first.refused.reasons) or ["it gives no reason"])
        reasons = reasons_against_holder(first.hello, self.incarnation, layout)
        if reasons:
            self._refuse("does not fit this reader", reasons)
        try:
            theirs = layout_from_wire(first.hello.layout)
            self.planner, self.sampler = OneRankPlanner(theirs, layout), Sampler(theirs, layout)
        except ValueError as error:
            self._refuse("cannot be read by this reader", [str(error)])

    def _refuse(self, what: str, reasons: Sequence[str]) -> NoReturn:
        self.refusal = f"{self.address} {what}: {'; '.join(reasons)}"
        raise TransferFailed(self.refusal, TransferFailure.LAYOUT_REFUSED)

    async def _choose_plane(self, hello: pb.HolderHello, planes: Sequence[Plane], buffers: Buffers) -> None:
        offers = {offer.name: offer.endpoint for offer in hello.planes}
        reasons = []
        for plane in planes:
            if plane.name not in offers:
                reasons.append(f"{plane.name}: not offered")
                continue
            try:
                await asyncio.to_thread(self._join, plane, offers[plane.name], hello.access_token, buffers)
            except (PlaneUnavailable, ValueError) as reason:
                reasons.append(f"{plane.name}: {reason}")
                continue
            self.plane_name = plane.name
            self.plane_reason = "; ".join(reasons) or "first choice"
            logger.info("data plane to %s: %s (%s)", self.address, self.plane_name, self.plane_reason)
            return
        if self._stream.done():  # nobody is left to be reached, which says nothing of the planes
            raise TransferFailed(f"{self.address} was lost during the handshake", TransferFailure.PEER_LOST)
        self._refuse("is reached by no data plane", reasons)

    def _join(self, plane: Plane, endpoint: bytes, token: bytes, buffers: Buffers) -> None:
        """In a thread, which a cancelled handshake does not wait for: either side closes what the other may miss."""
        self.plane = plane.connect(msgpack.unpackb(endpoint), token, buffers)
        if self.broken is not None:
            self.plane.close()

    def read(self, lease_id: str, runs: Runs) -> None:
        """In a thread: moves the bytes. Raises TransferFailed."""
        assert self.plane is not None
        deadline = monotonic() + self._timeout_s
        try:
            self.plane.read(lease_id, runs, self._timeout_s)
        except PlaneError as error:
            raise TransferFailed(str(error), self._kind(error, is_late=monotonic() >= deadline)) from error

    def _kind(self, error: PlaneError, *, is_late: bool) -> TransferFailure:
        if self.broken is not None:
            return TransferFailure.PEER_LOST
        if isinstance(error, ReadRefused):
            return TransferFailure.PLANE_REFUSED
        return TransferFailure.TIMEOUT if is_late else TransferFailure.PLANE_FAILED

    def _send(self, message: pb.ReaderMessage) -> None:
        self._outbox.put_nowait(message)

    async def open(self, lease_id: str) -> OpenedTicket:
        """Begins a pull, which the answer stands for. Without an answer the holder is told that it is over."""
        pull_id = next(self._pull_ids)
        message = pb.ReaderMessage(open=pb.OpenTicket(lease_id=lease_id, pull_id=pull_id))
        try:
            opened: OpenedTicket = await self._ask((lease_id, pull_id, "opened"), message)
            return opened
        except TransferFailed:
            self._drop(lease_id, pull_id)
            raise

    async def confirm(self, opened: OpenedTicket, digests: Digests = MappingProxyType({})) -> None:
        """Ends the pull. Raises TransferFailed when what was read may not be used, also if that is known already."""
        opened.check()
        asked = pb.ConfirmTicket(
            lease_id=opened.lease_id, pull_id=opened.pull_id, digests=digests_to_wire(digests)
        )  # fmt: skip
        question = opened.lease_id, opened.pull_id, "confirmed"
        try:
            confirmed: pb.TicketConfirmed = await self._ask(question, pb.ReaderMessage(confirm=asked))
        finally:
            self._opened.pop((opened.lease_id, opened.pull_id), None)
        if confirmed.differing:
            text = f"what arrived from {self.address} is not what it has: {confirmed.differing}"
            raise TransferFailed(text, TransferFailure.DIGEST)
        if not confirmed.valid:
            text = "the holder says that the lease ended before the pull did"
            raise TransferFailed(text, TransferFailure.LEASE_EXPIRED)

    async def probe(self) -> str:
        """One question and its answer: under what lease the holder's null blocks can be read."""
        number = next(self._pull_ids)
        message = pb.ReaderMessage(probe=pb.ProbeHolder(number=number))
        lease_id: str = await self._ask(("", number, "probed"), message)
        return lease_id

    def join_again(self, planes: Sequence[Plane], buffers: Buffers) -> PlaneReader:
        """A second connection over the chosen plane, into other memory. Raises PlaneError; may block."""
        assert self._hello is not None
        (plane,) = [plane for plane in planes if plane.name == self.plane_name]
        (offer,) = [offer for offer in self._hello.planes if offer.name == self.plane_name]
        return plane.connect(msgpack.unpackb(offer.endpoint), self._hello.access_token, buffers)

    def renew(self, opened: OpenedTicket) -> None:
        self._send(pb.ReaderMessage(renew=pb.RenewTicket(lease_id=opened.lease_id, pull_id=opened.pull_id)))

    def drop(self, opened: OpenedTicket) -> None:
        self._drop(opened.lease_id, opened.pull_id)

    def _drop(self, lease_id: str, pull_id: int) -> None:
        self._opened.pop((lease_id, pull_id), None)
        self._send(pb.ReaderMessage(drop=pb.DropTicket(lease_id=lease_id, pull_id=pull_id)))

    async def _ask(self, question: _Question, message: pb.ReaderMessage) -> Any:
        if self.broken is not None:
            raise TransferFailed(self.broken, TransferFailure.PEER_LOST)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[question] = answer
        self._send(message)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError as error:
            text = f"{self.address} did not answer within {self._timeout_s:g} s"
            raise TransferFailed(text, TransferFailure.TIMEOUT) from error
        finally:
            self._answers.pop(question, None)

    async def _read(self) -> None:
        reason = "the holder closed the channel"
        try:
            while (message := await self._stream.read()) is not EOF:
                self._dispatch(message)
        except grpc.aio.AioRpcError as error:
            reason = f"the channel to {self.address} broke: {error.code().name}"
        finally:
            self._break(reason)

    def _dispatch(self, message: pb.HolderMessage | None) -> None:
        """None, which is what grpc makes of bytes that are no message, is ignored like messages of an unknown kind."""
        message = message or pb.HolderMessage()
        match message.WhichOneof("message"):
            case "opened":
                opened = OpenedTicket(message.opened)
                if self._answer((opened.lease_id, opened.pull_id, "opened"), opened):
                    self._opened[opened.lease_id, opened.pull_id] = opened
            case "progress":
                for opened in self._opened_of(message.progress.lease_id):
                    opened.advance(message.progress.ready)
            case "confirmed":
                confirmed = message.confirmed
                self._answer((confirmed.lease_id, confirmed.pull_id, "confirmed"), confirmed)
            case "ended":
                self._fail(message.ended.lease_id, _ended(message.ended.reason))
            case "probed":
                self._answer(("", message.probed.number, "probed"), message.probed.lease_id)
            case kind:
                logger.warning("ignored a message of kind %s from %s", kind, self.address)

    def _answer(self, question: _Question, result: OpenedTicket | pb.TicketConfirmed | str) -> bool:
        """False when nobody waits for it any more."""
        answer = self._answers.get(question)
        if answer is None or answer.done():
            return False
        answer.set_result(result)
        return True

    def _opened_of(self, lease_id: str | None) -> list[OpenedTicket]:
        return [opened for (key, _), opened in self._opened.items() if lease_id in (None, key)]

    def _fail(self, lease_id: str | None, error: TransferFailed) -> None:
        """Everything that waits under this lease; None: under any."""
        for opened in self._opened_of(lease_id):
            opened.fail(error)
        for (asked, _, _), answer in self._answers.items():
            if lease_id in (None, asked) and not answer.done():
                answer.set_exception(error)

    def _break(self, reason: str) -> None:
        self.broken = self.broken or reason  # the first is the cause
        self._fail(None, TransferFailed(self.broken, TransferFailure.PEER_LOST))

    async def close(self) -> None:
        """Ends the channel, and with PlaneError every read over it."""
        self._break("the reader is closing")
        if self.plane is not None:
            await asyncio.to_thread(self.plane.close)  # it waits for running reads to let go
        if self.reading is not None:
            await end(self.reading)
        await self._open.aclose()


def _ended(reason: str) -> TransferFailed:
    was_given_back = reason == LeaseState.RELEASED.value
    kind = TransferFailure.WITHDRAWN if was_given_back else TransferFailure.LEASE_EXPIRED
    return TransferFailed(f"the lease has ended: {reason}", kind)
