"""What is said on a channel while both ends live: what comes too late, never, or makes no sense."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from pd_service.engine.messages import KvArrived
from pd_service.errors import TransferFailed
from pd_service.node.node import EngineNode
from pd_service.request import RequestId
from pd_service.rpc import kv_transfer_pb2 as pb
from tests.channel_ends import NETWORK_PLANES, HalfwayPlane, HolderEnd, holder_end, reader_end, until
from tests.local_cluster import local_cluster
from tests.one_loop import run_async
from transfer.planes.base import PlaneError

LOST = (TransferFailed, PlaneError)


def num_reading(end: HolderEnd) -> int:
    return sum(len(held.reading) for held in end.holder._held.values())


@pytest.mark.parametrize("is_opened", [False, True])
def test_a_claim_that_is_given_up_before_its_pull_is_told_to_the_holder_at_once(is_opened: bool) -> None:
    """The ticket is good for another reader then, and its lease is not renewed for the first."""

    async def scenario() -> None:
        async with holder_end() as holder, reader_end("shm") as one, reader_end("tcp") as two:
            ticket = holder.hold(0)
            opening = one.claim(ticket).opening
            if is_opened:
                await until(lambda: num_reading(holder) == 1, "the ticket is opened")
            one.reader.drop(RequestId("r"))
            await opening
            await until(lambda: num_reading(holder) == 0, "the holder knows")
            assert holder.holder.num_leases == 1
            await two.pull(ticket)
            assert two.has_right_bytes(0)
            assert holder.released == ["r0"]
            assert not one.lost

    run_async(scenario())


def test_a_ticket_that_ends_while_its_request_queues_is_lost_once() -> None:
    """Also one that has never been, whose opening is refused. A second pull's ticket is not disturbed."""

    async def scenario() -> None:
        async with holder_end() as holder, reader_end("shm") as end:
            released, withdrawn, other = holder.hold(0), holder.hold(1, is_complete=False), holder.hold(2)
            end.claim(replace(other, lease_id="never"), "refused")
            for name, ticket in (("released", released), ("withdrawn", withdrawn), ("other", other)):
                await end.claim(ticket, name).opening
            holder.holder.release(released.lease_id)
            holder.holder.withdraw(RequestId("r1"))
            await until(lambda: len(end.lost) == 3, "the three are lost")
            assert [failed.request_id for failed in end.lost] == ["refused", "released", "withdrawn"]
            assert isinstance(await end.order(other, "other", index=2), KvArrived)
            assert sum(end.reader.counts.failures.values()) == len(end.lost) == 3

    run_async(scenario())


def test_a_ticket_that_ends_before_its_reader_has_looked_at_the_answer_is_lost_too() -> None:
    """Opened and ended in one go of the channel's loop: the claim has not yet asked to be told."""

    async def scenario() -> None:
        async with holder_end() as holder, reader_end("shm") as end:
            await end.pull(holder.hold(0))
            opening = end.claim(holder.hold(1)).opening
            peer = await end.reader._peer(holder.holder.address, holder.holder.incarnation)
            dispatch = peer._dispatch

            def dispatch_and_end(message: pb.HolderMessage | None) -> None:
                dispatch(message)
                peer._fail(None, TransferFailed("ended"))

            peer._dispatch = dispatch_and_end  # type: ignore[method-assign]
            await opening
            await until(lambda: len(end.lost) == 1, "the ticket is lost")
            assert not end.reader._claims

    run_async(scenario())


def test_a_ticket_that_fails_during_its_pull_is_told_of_by_the_pull_alone() -> None:
    async def scenario() -> None:
        slow = HalfwayPlane("shm")
        async with holder_end() as holder, reader_end(slow) as end:
            ticket = holder.hold(0)
            pull = asyncio.create_task(end.pull(ticket))
            await until(lambda: slow.halfway == 1, "the pull is halfway")
            holder.holder.release(ticket.lease_id)
            slow.may_go_on.set()
            with pytest.raises(LOST):
                await pull
            assert not end.lost
            assert sum(end.reader.counts.failures.values()) == 1

    run_async(scenario())


@pytest.mark.parametrize("plane", NETWORK_PLANES)
def test_a_pull_whose_lease_ends_in_the_middle_is_never_used(plane: str) -> None:
    async def scenario() -> None:
        slow = HalfwayPlane(plane)
        async with holder_end() as holder, reader_end(slow) as end:
            ticket, other = holder.hold(0), holder.hold(1)
            pull = asyncio.create_task(end.pull(ticket))
            await until(lambda: slow.halfway == 1, "the pull is halfway")
            holder.holder.release(ticket.lease_id)
            assert holder.released == ["r0"]
            slow.may_go_on.set()
            with pytest.raises(LOST):
                await pull
            await end.pull(other, index=1)
            assert end.has_right_bytes(1)

    run_async(scenario())


def test_a_pull_that_waits_for_more_hears_of_the_end_of_its_lease() -> None:
    async def scenario() -> None:
        async with holder_end() as holder, reader_end("shm") as end:
            ticket = holder.hold(0, is_complete=False)
            pull = asyncio.create_task(end.pull(ticket))
            await until(lambda: num_reading(holder) == 1, "the ticket is opened")
            holder.holder.withdraw(RequestId("r0"))
            with pytest.raises(TransferFailed, match="lease has ended"):
                await pull
            assert not holder.released  # its request owns the blocks
            await until(lambda: not end.reader.num_pulls, "the pull is over")

    run_async(scenario())


class MuteHolderEnd(HolderEnd):
    """Shakes hands and never answers anything else."""

    def __init__(self) -> None:
        super().__init__(NETWORK_PLANES)
        self.holder._answer = lambda *_: None  # type: ignore[method-assign]


def test_a_holder_that_never_answers_costs_a_pull_no_more_than_its_time() -> None:
    async def scenario() -> None:
        end = MuteHolderEnd()
        await end.start()
        async with reader_end("shm", timeout_s=0.05) as reader:
            for _ in range(3):
                with pytest.raises(TransferFailed, match=r"did not answer within 0\.05 s"):
                    await reader.pull(end.hold(0))
            assert not reader.reader.num_pulls
        await end.close()

    run_async(scenario())


UNKNOWN = {
    "opened": pb.HolderMessage(opened=pb.TicketOpened(lease_id="never", pull_id=1)),
    "confirmed": pb.HolderMessage(confirmed=pb.TicketConfirmed(lease_id="never", pull_id=1, valid=True)),
    "progress": pb.HolderMessage(progress=pb.TicketProgress(lease_id="never")),
    "ended": pb.HolderMessage(ended=pb.TicketEnded(lease_id="never", reason="released")),
    "a second hello": pb.HolderMessage(hello=pb.HolderHello(version=1)),
    "refused": pb.HolderMessage(refused=pb.Refused(reasons=["too late"])),
    "of a newer version": pb.HolderMessage.FromString(bytes([0xFA, 0x3E, 0x01, 0x00])),
    "nothing": pb.HolderMessage(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_a_reader_does_not_expect_is_ignored(name: str) -> None:
    async def scenario() -> None:
        async with holder_end() as holder, reader_end("shm") as end:
            tickets = [holder.hold(index) for index in range(2)]
            await end.pull(tickets[0])
            (channel,) = holder.holder._channels
            channel.outbox.put_nowait(UNKNOWN[name])
            await end.pull(tickets[1], index=1)
            assert end.has_right_bytes(1)
            assert holder.holder._channels == {channel}  # the same channel

    run_async(scenario())


SENSELESS = {
    "renew": pb.ReaderMessage(renew=pb.RenewTicket(lease_id="never", pull_id=1)),
    "confirm": pb.ReaderMessage(confirm=pb.ConfirmTicket(lease_id="never", pull_id=1)),
    "drop": pb.ReaderMessage(drop=pb.DropTicket(lease_id="never", pull_id=1)),
    "open": pb.ReaderMessage(open=pb.OpenTicket(lease_id="", pull_id=0)),
    "a second hello": pb.ReaderMessage(hello=pb.ReaderHello(version=1)),
    "of a newer version": pb.ReaderMessage.FromString(bytes([0xFA, 0x3E, 0x01, 0x00])),
    "nothing": pb.ReaderMessage(),
}


@pytest.mark.parametrize("name", SENSELESS)
def test_what_a_holder_does_not_expect_changes_nothing(name: str) -> None:
    async def scenario() -> None:
        async with holder_end() as holder, reader_end("shm") as end:
            tickets = [holder.hold(index) for index in range(2)]
            await end.pull(tickets[0])
            peer = await end.reader._peer(tickets[0].address, tickets[0].incarnation)
            peer._send(SENSELESS[name])
            assert holder.holder.num_leases == 1
            await end.pull(tickets[1], index=1)
            assert end.has_right_bytes(1)
            assert await end.reader._peer(tickets[0].address, tickets[0].incarnation) is peer

    run_async(scenario())


def test_an_engine_that_moves_is_used_at_its_new_address_at_once(tiny_model_dir: Path) -> None:
    """And never again at the old one, though the requests of before have made it everybody's favourite."""

    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            prompt = list(range(3, 40))
            expected = [await cluster.generate(prompt, 5) for _ in range(3)][-1]
            for role in ("prefill", "decode"):
                name = next(name for name in cluster.nodes if name.startswith(role))
                old = cluster.nodes[name]
                cluster.nodes[name] = await asyncio.to_thread(EngineNode, old._config)
                assert await cluster.nodes[name].start("127.0.0.1") != old.address
                await cluster.publish()
                await cluster.directory.wait_for(role, 20)  # type: ignore[arg-type]
                steps = (await old.GetStatus(None, None)).steps  # type: ignore[arg-type]
                assert await cluster.generate(prompt, 5) == expected
                assert (await cluster.status(name)).steps > 0
                assert (await old.GetStatus(None, None)).steps == steps  # type: ignore[arg-type]
                await old.stop()

    run_async(scenario())
