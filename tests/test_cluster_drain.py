"""What a draining engine does for gateways: it finishes what it has and gets nothing new."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.local_cluster import LocalCluster, eventually, local_cluster, new_job, run
from tests.one_loop import run_async

PROMPT = list(range(3, 30))


async def busy_engines(cluster: LocalCluster) -> list[str]:
    return [name for name in cluster.nodes if (await cluster.status(name)).load.running]


def test_a_draining_engine_finishes_its_streams_and_gets_no_new_ones(long_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(long_model_dir, decode=2, kv_cache_bytes=2**25) as cluster:
            job = new_job(PROMPT, 400)
            streaming = asyncio.create_task(run(cluster.story, job))

            async def decodes() -> bool:
                return any(name.startswith("decode") for name in await busy_engines(cluster))

            await eventually(decodes, "the stream is on a decode engine")
            (leaving,) = [name for name in await busy_engines(cluster) if name.startswith("decode")]
            (staying,) = [name for name in cluster.nodes if name.startswith("decode") and name != leaving]
            cluster.draining.add(leaving)
            await cluster.publish()
            for _ in range(3):
                await cluster.generate(PROMPT, 4)
            assert (await cluster.status(leaving)).received_tokens == len(PROMPT)  # the stream's own
            assert (await cluster.status(staying)).received_tokens
            tokens, _, _ = await streaming
            assert (len(tokens), job.phases.retries) == (400, 0)

            async def holds_nothing() -> bool:
                return (await cluster.nodes[leaving].pulse()).held == 0

            await eventually(holds_nothing, "the draining engine can be stopped")

    run_async(scenario())


def test_a_pool_whose_only_engine_drains_is_empty_for_new_requests(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            (name,) = [name for name in cluster.nodes if name.startswith("decode")]
            cluster.draining.add(name)
            await cluster.publish()
            assert cluster.directory.ready("decode") == []
            late = asyncio.create_task(cluster.generate(PROMPT, 4))
            await cluster.add("decode")
            assert len(await late) == 4

    run_async(scenario())


def test_a_step_in_flight_is_work_and_its_end_is_progress(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            node = cluster.nodes[next(iter(cluster.nodes))]
            before = (await node.pulse()).turns
            await cluster.generate(PROMPT, 4)
            await cluster.wait_until_empty()
            after = await node.pulse()
            assert (after.turns > before, after.is_busy, after.held) == (True, False, 0)

    run_async(scenario())
