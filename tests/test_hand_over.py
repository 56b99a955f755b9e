"""What a ticket stands for: the KV of exactly the tokens it names, or nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pd_service.engine.request_state import token_digest
from pd_service.errors import TransferFailed
from pd_service.request import EngineRequest, EngineSampling, FinishReason, RequestId, Ticket
from tests.local_cluster import LocalCluster, local_cluster
from tests.one_loop import run_async

HELD = tuple(range(3, 36))  # two blocks and one token
OTHERS = {"others": tuple(range(40, 73)), "fewer": HELD[:-1], "more": (*HELD, 7), "one at the end": (*HELD[:-1], 7)}


def request(name: str, token_ids: tuple[int, ...], ticket: Ticket | None = None) -> EngineRequest:
    """For a prefill engine, or with a ticket for a decode engine."""
    return EngineRequest(
        request_id=RequestId(name),
        token_ids=token_ids,
        num_prompt_tokens=len(HELD),
        max_new_tokens=4,
        sampling=EngineSampling(),
        prefill_only=ticket is None,
        ticket=ticket,
    )


async def prefill(cluster: LocalCluster) -> tuple[int, Ticket]:
    """The first token behind HELD, and the ticket for HELD."""
    (engine,) = cluster.directory.ready("prefill")
    early, event = [event async for event in engine.run(request("p", HELD), None)]
    assert event.finish is FinishReason.PREFILLED
    assert early.ticket == event.ticket
    assert event.ticket is not None
    return event.token_ids[0], event.ticket


def test_a_ticket_names_exactly_the_prompt(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            _, ticket = await prefill(cluster)
            assert (ticket.num_tokens, ticket.token_digest) == (len(HELD), token_digest(HELD))
            cluster.directory.ready("prefill")[0].release(ticket.lease_id)
            await cluster.wait_until_empty()

    run_async(scenario())


@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("is_relabelled", [False, True], ids=["named", "relabelled"])
def test_a_lease_on_other_tokens_is_never_read_into_an_answer(
    tiny_model_dir: Path, others: tuple[int, ...], is_relabelled: bool
) -> None:
    """The ticket names the tokens that are held, or those of the request while its lease is on those that are held."""

    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            first, ticket = await prefill(cluster)
            wrong = ticket
            if is_relabelled:
                wrong = replace(ticket, num_tokens=len(others), token_digest=token_digest(others))
            (engine,) = cluster.directory.ready("decode")
            with pytest.raises(TransferFailed, match=r"other tokens|tokens, the request needs"):
                _ = [event async for event in engine.run(request("d", (*others, first), wrong), None)]
            assert (await cluster.status("decode/1")).received_tokens == 0
            assert len([event async for event in engine.run(request("d", (*HELD, first), ticket), None)]) == 4
            await cluster.wait_until_empty()

    run_async(scenario())


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33])
def test_every_position_is_computed_once_and_the_first_step_of_decode_computes_one(
    tiny_model_dir: Path, length: int
) -> None:
    """Around the edges of blocks of 16 tokens."""
    prompt = tuple(range(3, 3 + length))
    max_new_tokens = 2

    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            assert len(await cluster.generate(prompt, max_new_tokens)) == max_new_tokens
            prefill, decode = [await cluster.status(name) for name in cluster.nodes]
            assert (prefill.computed_tokens, prefill.received_tokens) == (length, 0)
            assert (decode.steps, decode.computed_tokens, decode.received_tokens) == (1, 1, length)

    run_async(scenario())
