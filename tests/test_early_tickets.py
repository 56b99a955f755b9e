"""Decode engines that follow a prefill on real nodes. Its steps wait for a gate, so that nothing depends on time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_service.config import EngineSettings
from pd_service.engine.batch import InputRow
from pd_service.engine.step import StepResult
from pd_service.errors import TransferFailed
from pd_service.node.node import EngineNode
from pd_service.request import EngineRequest, EngineSampling, RequestId
from tests.local_cluster import LocalCluster, eventually, local_cluster, new_job, run
from tests.one_loop import run_async

CHUNK, NUM_TOKENS, NUM_OUTPUT = 16, 72, 6
PROMPT = [3 + i * 7 % 400 for i in range(NUM_TOKENS)]
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # layers, k and v, heads, dim, float32


class Gate:
    """Stands before each step of a prefill engine, and lets `open` of them pass."""

    def __init__(self, node: EngineNode) -> None:
        self._permits = threading.Semaphore(0)
        self._worker = node._engine.worker
        self._run = self._worker.run
        self._worker.run = self._wait_and_run  # type: ignore[method-assign]

    def _wait_and_run(self, rows: Sequence[InputRow]) -> list[StepResult]:
        self._permits.acquire()
        return self._run(rows)

    def open(self, num_steps: int = 1000) -> None:
        for _ in range(num_steps):
            self._permits.release()


class Reads:
    """How far each read of a decode engine went, in tokens."""

    def __init__(self, node: EngineNode) -> None:
        self.ends: list[int] = []
        self._read = node._reader._read
        node._reader._read = self._note_and_read  # type: ignore[method-assign]

    def _note_and_read(self, peer: Any, order: Any, ready: Any, *rest: Any) -> Any:
        result = self._read(peer, order, ready, *rest)
        self.ends.append(ready.num_tokens)
        return result

    async def reach(self, ends: list[int]) -> None:
        async def has_reached() -> bool:
            return self.ends == ends

        await eventually(has_reached, f"reads up to {ends}")


Scenario = Callable[[LocalCluster, Gate], Awaitable[None]]


def with_gate(model_dir: Path, scenario: Scenario, *, decode: int = 1, prefix_cache: bool = False) -> None:
    """Runs it with one prefill engine behind a gate, and expects that it leaves nothing behind."""

    async def main() -> None:
        settings = EngineSettings(max_num_batched_tokens=CHUNK, block_size=16, prefix_cache=prefix_cache)
        async with local_cluster(model_dir, decode=decode, settings=settings) as cluster:
            gate = Gate(cluster.nodes["prefill/0"])
            try:
                await scenario(cluster, gate)
            finally:
                gate.open()
            await cluster.wait_until_empty()

    torch.set_num_threads(1)
    run_async(main())


async def expected(cluster: LocalCluster, gate: Gate) -> list[int]:
    """What the request gives when nothing is in its way."""
    gate.open(-(-NUM_TOKENS // CHUNK))
    return await cluster.generate(PROMPT, NUM_OUTPUT)


async def pulls(cluster: LocalCluster, name: str) -> None:
    """Until that decode engine has a pull under way."""

    async def has_one() -> bool:
        return (await cluster.status(name)).pulls == 1

    await eventually(has_one, f"{name} pulls")


def test_each_chunk_is_read_while_the_next_is_computed_and_no_byte_twice(tiny_model_dir: Path) -> None:
    async def scenario(cluster: LocalCluster, gate: Gate) -> None:
        tokens = await expected(cluster, gate)
        reads, job = Reads(cluster.nodes["decode/1"]), new_job(PROMPT, NUM_OUTPUT)
        asking = asyncio.ensure_future(run(cluster.story, job))
        for num_chunks in range(1, 5):
            gate.open(1)
            await reads.reach([CHUNK * (i + 1) for i in range(num_chunks)])
        gate.open(1)
        assert (await asking)[0] == tokens
        assert reads.ends[-1] == NUM_TOKENS
        phases = job.phases
        assert (phases.kv_bytes, phases.hidden_kv_bytes) == (NUM_TOKENS * TOKEN_BYTES, 64 * TOKEN_BYTES)
        assert phases.num_runs >= len(reads.ends)
        assert phases.hidden_wire_ms > 0

    with_gate(tiny_model_dir, scenario)


def test_what_the_decode_engine_has_cached_is_not_read_again(tiny_model_dir: Path) -> None:
    async def scenario(cluster: LocalCluster, gate: Gate) -> None:
        tokens = await expected(cluster, gate)
        await cluster.remove("prefill/0")
        again = Gate(cluster.nodes[await cluster.add("prefill")])  # that has nothing cached
        job = new_job(PROMPT, NUM_OUTPUT)
        asking = asyncio.ensure_future(run(cluster.story, job))
        again.open(4)
        await pulls(cluster, "decode/1")
        again.open()
        assert (await asking)[0] == tokens
        assert job.phases.kv_bytes == (NUM_TOKENS - 64) * TOKEN_BYTES

    with_gate(tiny_model_dir, scenario, prefix_cache=True)


@pytest.mark.parametrize("num_chunks", [0, 1, 4])
def test_a_cancel_frees_the_decode_engine_before_the_prefill_engine_has_finished_its_step(
    tiny_model_dir: Path, num_chunks: int
) -> None:
    async def scenario(cluster: LocalCluster, gate: Gate) -> None:
        asking = asyncio.ensure_future(cluster.generate(PROMPT, NUM_OUTPUT))
        gate.open(num_chunks)
        await pulls(cluster, "decode/1")
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking

        async def is_free() -> bool:
            status = await cluster.status("decode/1")
            return not (status.pulls or status.load.running or any(blocks.used for blocks in status.blocks))

        await eventually(is_free, "the decode engine is empty")
        assert (await cluster.status("prefill/0")).leases == 0

    with_gate(tiny_model_dir, scenario)


def test_a_decode_engine_lost_while_it_follows_costs_no_second_prefill(tiny_model_dir: Path) -> None:
    async def scenario(cluster: LocalCluster, gate: Gate) -> None:
        tokens = await expected(cluster, gate)
        computed = (await cluster.status("prefill/0")).computed_tokens
        job = new_job(PROMPT, NUM_OUTPUT)
        asking = asyncio.ensure_future(run(cluster.story, job))
        gate.open(2)
        await eventually(lambda: _has_pull(cluster), "a decode engine follows")
        (follower,) = [name for name in cluster.nodes if (await cluster.status(name)).pulls]
        await cluster.remove(follower)
        gate.open()
        assert (await asking)[0] == tokens
        assert job.phases.retries == 0
        assert (await cluster.status("prefill/0")).computed_tokens == computed + NUM_TOKENS

    with_gate(tiny_model_dir, scenario, decode=2)


async def _has_pull(cluster: LocalCluster) -> bool:
    return any([(await cluster.status(name)).pulls for name in cluster.nodes])


def test_a_prefill_engine_lost_while_it_is_followed_costs_another_round(tiny_model_dir: Path) -> None:
    async def scenario(cluster: LocalCluster, gate: Gate) -> None:
        tokens = await expected(cluster, gate)
        job = new_job(PROMPT, NUM_OUTPUT)
        asking = asyncio.ensure_future(run(cluster.story, job))
        gate.open(2)
        await pulls(cluster, "decode/1")
        removing = asyncio.ensure_future(cluster.remove("prefill/0"))
        await eventually(lambda: _is_free(cluster, "decode/1"), "the follower has let go")
        gate.open()  # a stopping engine waits for its step
        await removing
        await cluster.add("prefill")
        assert (await asking)[0] == tokens
        assert job.phases.retries > 0

    with_gate(tiny_model_dir, scenario)


async def _is_free(cluster: LocalCluster, name: str) -> bool:
    status = await cluster.status(name)
    return not (status.pulls or status.load.running)


def test_a_first_token_that_ends_the_request_ends_its_follower(tiny_model_dir: Path) -> None:
    async def scenario(cluster: LocalCluster, gate: Gate) -> None:
        first, *_ = await expected(cluster, gate)
        steps = (await cluster.status("decode/1")).steps
        sampling = EngineSampling(stop_token_ids=frozenset({first}))
        asking = asyncio.ensure_future(cluster.generate(PROMPT, NUM_OUTPUT, sampling))
        await pulls(cluster, "decode/1")
        gate.open()
        assert await asking == []
        await cluster.wait_until_empty()
        assert (await cluster.status("decode/1")).steps == steps

    with_gate(tiny_model_dir, scenario)


def test_one_token_is_followed_by_nobody(tiny_model_dir: Path) -> None:
    async def scenario(cluster: LocalCluster, gate: Gate) -> None:
        gate.open()
        assert len(await cluster.generate(PROMPT, 1)) == 1
        assert (await cluster.status("decode/1")).received_tokens == 0
        assert (await cluster.status("decode/1")).steps == 0

    with_gate(tiny_model_dir, scenario)


def test_a_ticket_given_back_too_early_fails_its_request_and_frees_its_blocks_once(tiny_model_dir: Path) -> None:
    """What no gateway of ours does."""

    async def scenario(cluster: LocalCluster, gate: Gate) -> None:
        (engine,) = cluster.directory.ready("prefill")
        request = EngineRequest(
            request_id=RequestId("r"),
            token_ids=tuple(PROMPT),
            num_prompt_tokens=NUM_TOKENS,
            max_new_tokens=NUM_OUTPUT,
            sampling=EngineSampling(),
            prefill_only=True,
        )
        events = engine.run(request, None)
        early = await anext(events)
        assert early.ticket is not None
        assert (early.token_ids, early.finish) == ((), None)
        assert engine.pending_tokens == NUM_TOKENS  # a ticket alone is no answer
        engine.release(early.ticket.lease_id)
        gate.open()
        with pytest.raises(TransferFailed, match="given back"):
            await anext(events)

    with_gate(tiny_model_dir, scenario)
