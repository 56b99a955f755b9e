"""One ticket, several pulls: of one reader and of several, over real engines and real channels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pd_service.errors import TransferFailed
from pd_service.node.peer import Peer
from pd_service.request import EngineRequest, EngineSampling, RequestId, Ticket
from tests.local_cluster import LocalCluster, eventually, local_cluster
from tests.one_loop import run_async

PROMPT = tuple(range(3, 36))
NUM_TOKENS = 4


@dataclass(frozen=True)
class Held:
    """A prefilled PROMPT: its first output token and its ticket, with a decode engine's channel to the holder each."""

    cluster: LocalCluster
    first: int
    ticket: Ticket
    peers: list[Peer]

    async def num_leases(self) -> int:
        return (await self.cluster.status("prefill/0")).leases

    async def decode(self, engine: int, request_id: str) -> list[int]:
        """The tokens that a decode engine makes from this ticket."""
        engines = sorted(self.cluster.directory.ready("decode"), key=lambda one: one.engine_id)
        asked = request(request_id, (*PROMPT, self.first), self.ticket)
        return [token async for event in engines[engine].run(asked, None) for token in event.token_ids]


def request(name: str, token_ids: tuple[int, ...], ticket: Ticket | None = None) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        token_ids=token_ids,
        num_prompt_tokens=len(PROMPT),
        max_new_tokens=NUM_TOKENS,
        sampling=EngineSampling(),
        prefill_only=ticket is None,
        ticket=ticket,
    )


def with_held(model_dir: Path, num_decode: int, scenario: Callable[[Held], Awaitable[None]]) -> None:
    """Runs `scenario` and expects that it leaves nothing behind."""

    async def run() -> None:
        async with local_cluster(model_dir, decode=num_decode) as cluster:
            (engine,) = cluster.directory.ready("prefill")
            *_, event = [event async for event in engine.run(request("p", PROMPT), None)]
            assert event.ticket is not None
            readers = [node._reader for name, node in sorted(cluster.nodes.items()) if cluster.roles[name] == "decode"]
            peers = [await reader._peer(event.ticket.address, event.ticket.incarnation) for reader in readers]
            await scenario(Held(cluster, event.token_ids[0], event.ticket, peers))
            await cluster.wait_until_empty()

    torch.set_num_threads(1)
    run_async(run())


@pytest.mark.parametrize("num_decode", [1, 2])
def test_each_pull_of_a_ticket_gets_its_own_answers_and_the_last_confirm_ends_it(
    tiny_model_dir: Path, num_decode: int
) -> None:
    async def scenario(held: Held) -> None:
        peers = held.peers * (4 // num_decode)
        opened = await asyncio.gather(*[peer.open(held.ticket.lease_id) for peer in peers])
        for peer, one in zip(peers, opened, strict=True):
            assert one.num_tokens == held.ticket.num_tokens
            assert await held.num_leases() == 1
            await peer.confirm(one, {})
        assert await held.num_leases() == 0
        with pytest.raises(TransferFailed, match="lease ended"):
            await peers[0].confirm(opened[0], {})
        with pytest.raises(TransferFailed, match="the lease has ended"):
            await peers[0].open(held.ticket.lease_id)

    with_held(tiny_model_dir, num_decode, scenario)


def test_confirms_at_once_of_one_reader_are_all_answered(tiny_model_dir: Path) -> None:
    async def scenario(held: Held) -> None:
        (peer,) = held.peers
        opened = [await peer.open(held.ticket.lease_id) for _ in range(3)]
        await asyncio.gather(*[peer.confirm(one, {}) for one in opened])
        assert await held.num_leases() == 0

    with_held(tiny_model_dir, 1, scenario)


def test_late_messages_of_a_pull_that_is_over_do_not_disturb_another(tiny_model_dir: Path) -> None:
    async def scenario(held: Held) -> None:
        (peer,) = held.peers
        first, second = [await peer.open(held.ticket.lease_id) for _ in range(2)]
        await peer.confirm(first, {})
        for _ in range(2):
            peer.renew(first)
            peer.drop(first)
            with pytest.raises(TransferFailed, match="lease ended"):
                await peer.confirm(first, {})
        assert await held.num_leases() == 1
        await peer.confirm(second, {})

    with_held(tiny_model_dir, 1, scenario)


@pytest.mark.parametrize("num_decode", [1, 2])
def test_all_requests_that_share_a_ticket_get_the_same_right_tokens(tiny_model_dir: Path, num_decode: int) -> None:
    async def scenario(held: Held) -> None:
        opened = await held.peers[0].open(held.ticket.lease_id)  # a reader that takes its time
        answers = await asyncio.gather(*[held.decode(i % num_decode, f"d{i}") for i in range(4)])
        assert await held.num_leases() == 1
        await held.peers[0].confirm(opened, {})
        expected = await held.cluster.generate(PROMPT, NUM_TOKENS + 1)
        assert [[held.first, *tokens] for tokens in answers] == [expected] * 4

    with_held(tiny_model_dir, num_decode, scenario)


def test_a_reader_that_dies_takes_no_ticket_from_another(tiny_model_dir: Path) -> None:
    async def scenario(held: Held) -> None:
        shared = [await peer.open(held.ticket.lease_id) for peer in held.peers]
        await held.cluster.remove("decode/1")
        holder = held.cluster.nodes["prefill/0"]._holder

        async def is_alone() -> bool:
            return len(holder._channels) == 1

        await eventually(is_alone, "the holder has noticed")
        assert await held.num_leases() == 1
        await held.peers[1].confirm(shared[1], {})

    with_held(tiny_model_dir, 2, scenario)


def test_a_ticket_whose_only_reader_dies_is_released_at_once(tiny_model_dir: Path) -> None:
    async def scenario(held: Held) -> None:
        await held.peers[0].open(held.ticket.lease_id)
        await held.cluster.remove("decode/1")
        await held.cluster.wait_until_empty()

    with_held(tiny_model_dir, 1, scenario)
