"""No answer is made from wrong or missing KV: planes that flip bits or break half-way, on real nodes.

The integer model's next token depends on every bit of KV it can see.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pd_service.config import EngineSettings, GatewaySettings, RetrySettings
from pd_service.errors import TransferFailed, TransferFailure
from pd_service.node import holder as holder_module
from pd_service.node import node as node_module
from pd_service.request import EngineSampling, RequestId
from pd_service.rpc.engine_pb2 import EngineStatus
from tests.channel_ends import holder_end, reader_end
from tests.faulty_planes import Fault, FaultyPlane, break_half_way, flip_a_bit, poison_fresh_blocks
from tests.integer_model import VARIANTS, Attention, integer_models
from tests.integer_reference import continuation
from tests.local_cluster import LocalCluster, local_cluster
from tests.one_loop import run_async
from transfer.digest import Piece
from transfer.planes import make_plane

PROMPTS = [tuple(range(100 * (i % 3), 100 * (i % 3) + length)) for i, length in enumerate((1, 4, 5, 16, 17, 30, 41))]
NUM_TOKENS = 6
PATIENT = GatewaySettings(retry=RetrySettings(max_failures=100, backoff_s=0.0))
SAMPLING = EngineSampling()


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Attention, Path]]:
    with integer_models(tmp_path_factory.mktemp("integer")) as dirs:
        yield dirs


def new_settings(rate: float) -> EngineSettings:
    return EngineSettings(
        block_size=4, max_num_batched_tokens=16, max_num_seqs=4, planes=("memory",), digest_sample_rate=rate
    )


def make_faulty(monkeypatch: pytest.MonkeyPatch, fault: Fault, period: int) -> list[FaultyPlane]:
    """The planes that nodes make from now on; the list grows with them."""
    made: list[FaultyPlane] = []

    def make(name: str, *, host: str) -> FaultyPlane:
        made.append(FaultyPlane(make_plane(name, host=host), fault, period))
        return made[-1]

    monkeypatch.setattr(node_module, "make_plane", make)
    return made


async def generate_all(cluster: LocalCluster) -> list[list[int]]:
    return await asyncio.gather(*(cluster.generate(prompt, NUM_TOKENS, SAMPLING) for prompt in PROMPTS))


def expected(attention: Attention) -> list[list[int]]:
    return [continuation(attention, prompt, NUM_TOKENS, SAMPLING) for prompt in PROMPTS]


def failures(cluster: LocalCluster, reason: TransferFailure) -> float:
    """As the gateway counts them."""
    value = cluster.metrics.registry.get_sample_value("pd_transfer_failures_total", {"reason": reason.value})
    assert value is not None
    return value


@pytest.mark.parametrize("attention", VARIANTS)
def test_a_plane_that_flips_a_bit_now_and_then_changes_no_answer(
    model_dirs: dict[Attention, Path],
    attention: Attention,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    planes = make_faulty(monkeypatch, flip_a_bit, 3)

    async def scenario() -> tuple[list[list[int]], float, EngineStatus, EngineStatus]:
        async with local_cluster(model_dirs[attention], settings=new_settings(1.0), gateway=PATIENT) as cluster:
            answers = await generate_all(cluster)
            statuses = [await cluster.status(name) for name in cluster.nodes]
            return answers, failures(cluster, TransferFailure.DIGEST), statuses[0], statuses[1]

    with caplog.at_level(logging.ERROR, "pd_service.node.holder"):
        answers, num_retried, holder, reader = run_async(scenario())
    assert answers == expected(attention)
    num_failures = reader.pull_failures["digest"]  # several faults can meet in one pull, which reads in parts
    assert 0 < num_failures == num_retried <= holder.digests_different <= sum(plane.num_faults for plane in planes)
    assert sum(holder.leases_ended.values()) >= len(PROMPTS)
    places = [record.getMessage() for record in caplog.records]
    assert len(places) == num_failures
    assert all(": layer " in place and " tokens " in place for place in places)


def test_without_digests_the_same_plane_changes_answers(
    model_dirs: dict[Attention, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = next(iter(VARIANTS))
    make_faulty(monkeypatch, flip_a_bit, 3)

    async def scenario() -> list[list[int]]:
        async with local_cluster(model_dirs[attention], settings=new_settings(0.0), gateway=PATIENT) as cluster:
            answers = await generate_all(cluster)
            assert (await cluster.status("prefill/0")).digests_same == 0
            return answers

    assert run_async(scenario()) != expected(attention)


@pytest.mark.parametrize("attention", VARIANTS)
def test_partial_reads_into_poisoned_blocks_change_no_answer(
    model_dirs: dict[Attention, Path], attention: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The integer model stops its engine when it reads what nobody wrote."""
    planes = make_faulty(monkeypatch, break_half_way, 2)

    async def scenario() -> tuple[list[list[list[int]]], float]:
        async with local_cluster(model_dirs[attention], settings=new_settings(1.0), gateway=PATIENT) as cluster:
            for node in cluster.nodes.values():
                poison_fresh_blocks(node)
            answers = [await generate_all(cluster) for _ in range(3)]  # blocks are used again and again
            return answers, failures(cluster, TransferFailure.PLANE_FAILED)

    answers, num_failures = run_async(scenario())
    assert answers == [expected(attention)] * 3
    assert 0 < num_failures <= sum(plane.num_faults for plane in planes)


# ---- the confirm


def test_everything_is_compared_at_rate_one_and_one_piece_at_least_at_any_other() -> None:
    async def compared(rate: float) -> int:
        async with holder_end() as holder, reader_end("shm") as end:
            end.reader._digest_sample_rate = rate
            await end.pull(holder.hold(0))
            return holder.holder.counts.digests_same

    async def scenario() -> None:
        assert await compared(1.0) == 2 * 4  # two buffers, four blocks
        assert await compared(0.001) == 1
        assert await compared(0.0) == 0

    run_async(scenario())


def test_a_difference_after_the_lease_has_ended_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder's blocks have a new life then: that they differ says nothing about the plane."""
    monkeypatch.setattr(holder_module, "FEW_DIGESTS", 0)  # all are compared in the thread

    async def scenario() -> None:
        async with holder_end() as holder, reader_end("shm") as end:
            ticket = holder.hold(0)
            peer, opened = await end.claim(ticket).opening
            compare, may_compare = holder.holder._kv_digests.differing, threading.Event()

            def late(*given: object) -> Sequence[Piece]:
                may_compare.wait()
                return compare(*given)  # type: ignore[arg-type]

            holder.holder._kv_digests.differing = late  # type: ignore[assignment,method-assign]
            confirming = asyncio.create_task(peer.confirm(opened, {Piece(0, "k_cache", 0, 16, 0, 2): 1}))
            await asyncio.sleep(0)
            await peer.probe()  # answered meanwhile, and behind the confirm: it has been received
            holder.holder.release(ticket.lease_id)
            may_compare.set()
            with pytest.raises(TransferFailed) as failed:
                await confirming
            assert failed.value.reason is TransferFailure.WITHDRAWN
            assert holder.holder.counts.digests_different == 0
            end.reader.drop(RequestId("r"))

    run_async(scenario())


@pytest.mark.parametrize(
    "piece", [Piece(9, "k_cache", 0, 16, 0, 2), Piece(0, "k_cache", 8, 16, 0, 2), Piece(0, "k_cache", 0, 16, 1, 2**31)]
)
def test_digests_of_what_the_holder_has_not_are_a_no_and_disturb_nobody(piece: Piece) -> None:
    async def scenario() -> None:
        async with holder_end() as holder, reader_end("shm") as end:
            ticket = holder.hold(0)
            peer, opened = await end.claim(ticket).opening
            with pytest.raises(TransferFailed, match=f"layer {piece.layer} k_cache tokens") as failed:
                await peer.confirm(opened, {piece: 1})
            assert failed.value.reason is TransferFailure.DIGEST
            end.reader.drop(RequestId("r"))
            await end.pull(ticket)  # it is still good for another pull
            assert end.has_right_bytes(0)

    run_async(scenario())


@pytest.mark.parametrize("side", ["holder", "reader"])
def test_memory_that_the_host_cannot_read_is_not_compared(side: str) -> None:
    async def scenario() -> None:
        async with holder_end() as holder, reader_end("shm") as end:
            end.reader._digest_sample_rate = 1.0
            (holder.holder if side == "holder" else end.reader)._kv_digests = None
            await end.pull(holder.hold(0))
            assert end.has_right_bytes(0)
            assert (holder.holder.counts.digests_same, holder.holder.counts.leases_ended["confirmed"]) == (0, 1)

    run_async(scenario())
