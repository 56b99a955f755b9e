"""Lost peers: killed, frozen, or behind a network that carries nothing any more.

Leases and pulls of these tests last for minutes, so whatever ends, ends because the channel did.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pd_service.engine.messages import KvFailed
from pd_service.errors import TransferFailed, TransferFailure
from tests.channel_ends import (
    LENS,
    NETWORK_PLANES,
    NUM_BLOCKS,
    HalfwayPlane,
    blocks_of,
    holder_child,
    holder_end,
    reader_child,
    reader_end,
    ticket_blocks,
    until,
)
from tests.one_loop import run_async
from transfer.planes.base import PlaneError

LOST = (TransferFailed, PlaneError)


# ---- killed


@pytest.mark.parametrize("plane", NETWORK_PLANES)
def test_a_killed_holder_fails_its_pulls_alone_and_is_forgotten_without_a_successor(plane: str) -> None:
    """Both holders are in the middle of a pull when one is killed."""

    async def scenario() -> None:
        slow = HalfwayPlane(plane)
        async with (
            holder_child([plane]) as one,
            holder_child([plane], num_tickets=2) as two,
            reader_end(slow) as end,
        ):
            lost = asyncio.create_task(end.pull(one.told.tickets[0], index=0))
            kept = asyncio.create_task(end.pull(two.told.tickets[1], index=1))
            await until(lambda: slow.halfway == 2, "both pulls are halfway")
            one.kill()
            await until(lambda: len(end.reader._peers) == 1, "the lost holder is forgotten")
            assert (two.told.address, two.told.incarnation) in end.reader._peers
            slow.may_go_on.set()
            with pytest.raises(LOST):
                await lost
            await kept
            assert end.has_right_bytes(1)
            await end.pull(two.told.tickets[0], index=0)
            assert end.has_right_bytes(0)

    run_async(scenario())


def test_a_killed_holder_fails_tickets_that_only_wait_once_each() -> None:
    """The order to pull one of them was on its way: it reads nothing."""

    async def scenario() -> None:
        async with holder_child(["tcp"], num_tickets=3) as holder, reader_end("tcp") as end:
            tickets = holder.told.tickets
            opened = [await end.claim(ticket, ticket.lease_id).opening for ticket in tickets]
            holder.kill()
            await until(lambda: len(end.lost) == 3, "all three are lost")
            for peer, one in opened:
                with pytest.raises(TransferFailed, match=r"broke|closed"):
                    await peer.confirm(one)
            before = blocks_of(end.region, ticket_blocks(0))
            assert isinstance(await end.order(tickets[0], tickets[0].lease_id), KvFailed)
            assert blocks_of(end.region, ticket_blocks(0)) == before
            assert {failed.request_id for failed in end.lost} == {ticket.lease_id for ticket in tickets}
            assert end.reader.counts.failures == {TransferFailure.PEER_LOST: 3}
            await until(lambda: end.is_forgotten(), "nothing of the holder is left")

    run_async(scenario())


def test_a_killed_holder_fails_pulls_that_wait_for_it_to_compute_more() -> None:
    async def scenario() -> None:
        async with holder_child(["tcp"], num_complete=0) as holder, reader_end("tcp") as end:
            pull = asyncio.create_task(end.pull(holder.told.tickets[0]))
            part_of_block = slice(0, LENS[0] // NUM_BLOCKS)
            await until(lambda: end.has_right_bytes(0, part_of_block), "what is ready has been read")
            assert not pull.done()
            holder.kill()
            with pytest.raises(TransferFailed, match="broke"):
                await pull
            await until(end.is_forgotten, "nothing of the holder is left")

    run_async(scenario())


@pytest.mark.parametrize("plane", NETWORK_PLANES)
def test_a_killed_reader_frees_its_tickets_alone_and_is_forgotten(plane: str) -> None:
    """Another reader is in the middle of a pull."""

    async def scenario() -> None:
        slow = HalfwayPlane(plane)
        async with holder_end() as holder:
            tickets = [holder.hold(index) for index in range(2)]
            async with reader_child([plane], tickets[0]) as lost, reader_end(slow) as kept:
                pull = asyncio.create_task(kept.pull(tickets[1], index=1))
                await until(lambda: slow.halfway == 1, "the pull is halfway")
                lost.kill()
                await until(lambda: len(holder.holder._channels) == 1, "the killed reader is forgotten")
                assert holder.released == ["r0"]
                slow.may_go_on.set()
                await pull
                assert kept.has_right_bytes(1)
                assert holder.released == ["r0", "r1"]
            await until(lambda: holder.is_empty(), "nothing of the readers is left")

    run_async(scenario())


# ---- silent


@pytest.mark.parametrize("plane", NETWORK_PLANES)
def test_a_frozen_holder_is_found_while_others_serve_and_is_met_again_when_it_wakes(plane: str) -> None:
    async def scenario() -> None:
        slow = HalfwayPlane(plane)
        async with (
            holder_child([plane], num_tickets=2) as frozen,
            holder_child([plane], num_tickets=2) as awake,
            reader_end(slow) as end,
        ):
            lost = asyncio.create_task(end.pull(frozen.told.tickets[0], index=0))
            kept = asyncio.create_task(end.pull(awake.told.tickets[1], index=1))
            await until(lambda: slow.halfway == 2, "both pulls are halfway")
            frozen.freeze()
            await until(lambda: len(end.reader._peers) == 1, "the frozen holder is found")
            slow.may_go_on.set()
            with pytest.raises(LOST):
                await lost
            await kept
            assert end.has_right_bytes(1)
            frozen.thaw()
            await end.pull(frozen.told.tickets[1], index=1)
            assert end.has_right_bytes(1)
            await end.pull(awake.told.tickets[0], index=0)

    run_async(scenario())


def test_a_frozen_reader_is_found_and_its_tickets_are_free() -> None:
    async def scenario() -> None:
        async with holder_end() as holder:
            tickets = [holder.hold(index) for index in range(2)]
            async with reader_child(["shm"], tickets[0]) as frozen, reader_end("shm") as awake:
                frozen.freeze()
                await until(lambda: holder.released == ["r0"], "the frozen reader's ticket is free")
                await awake.pull(tickets[1], index=1)
                assert awake.has_right_bytes(1)
                frozen.thaw()
                ticket = holder.hold(0)  # the blocks have a new life, which a reader that wakes does not disturb
                await awake.pull(ticket, index=0)
                assert awake.has_right_bytes(0)
            await until(lambda: holder.is_empty(), "nothing of the readers is left")

    run_async(scenario())


class SilentNetwork:
    """A relay to `port` that can stop to carry anything in either direction, while both connections stay open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._carries = asyncio.Event()
        self._carries.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def fall_silent(self) -> None:
        self._carries.clear()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._port)
        self._tasks |= {
            asyncio.create_task(self._carry(reader, there[1])),
            asyncio.create_task(self._carry(there[0], writer)),
        }

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(2**16):
                await self._carries.wait()
                sink.write(data)
        except ConnectionError:
            pass
        finally:
            sink.transport.abort()

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()


def test_a_network_that_falls_silent_is_noticed_on_both_sides() -> None:
    async def scenario() -> None:
        async with holder_end() as holder, reader_end("shm") as end:
            network = SilentNetwork(int(holder.holder.address.rpartition(":")[2]))
            address = await network.start()
            ticket = replace(holder.hold(0), address=address)
            peer, opened = await end.claim(ticket).opening
            network.fall_silent()
            answer = asyncio.create_task(peer.confirm(opened))
            await until(lambda: holder.released == ["r0"], "the holder has noticed")
            with pytest.raises(TransferFailed, match="broke"):
                await answer
            await until(lambda: end.is_forgotten() and holder.is_empty(), "neither knows the other")
            await network.close()

    run_async(scenario())


# ---- back again


def test_a_holder_that_comes_back_under_its_address_is_another_one() -> None:
    """A ticket of the dead life is refused by name; the new life is met by its own incarnation, at once."""

    async def scenario() -> None:
        async with reader_end("shm") as end:
            async with holder_child(["shm"], num_tickets=2) as first:
                old = first.told
                await end.pull(old.tickets[0])
                first.kill()
                await first.process.wait()
            async with holder_child(["shm"], port=int(old.address.rpartition(":")[2])) as second:
                assert second.told.address == old.address
                end.reader.meet(old.address, second.told.incarnation)
                await end.pull(second.told.tickets[0])
                assert end.has_right_bytes(0)
                with pytest.raises(TransferFailed, match=f"{old.incarnation}.*{second.told.incarnation}"):
                    await end.pull(old.tickets[1])

    run_async(scenario())
