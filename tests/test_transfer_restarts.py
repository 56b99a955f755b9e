"""Twenty lives of a peer, under load and killed in the middle of it, leave nothing with the survivor."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from pd_service.config import EngineSettings
from pd_service.errors import TransferFailed
from pd_service.node.node import EngineNode
from pd_service.node.reader import Reader
from tests.channel_ends import NETWORK_PLANES, holder_child, holder_end, reader_child, reader_end, until
from tests.leftovers import held_by_this_process, table_sizes
from tests.local_cluster import LocalCluster, local_cluster
from tests.one_loop import run_async
from transfer.planes.base import PlaneError

LIVES = 20
SETTLED = 3  # lives after which pools of threads and connections have their size
PROMPTS = [list(range(3 + i, 40 + 3 * i)) for i in range(4)]


async def fill_pool(reader: Reader) -> None:
    """Starts every thread that reads may ever use, so that their number says nothing of what has run on them."""
    num = reader._threads._max_workers
    barrier = threading.Barrier(num)
    loop = asyncio.get_running_loop()
    await asyncio.gather(*(loop.run_in_executor(reader._threads, barrier.wait) for _ in range(num)))


# ---- engines, stopped under load


async def restart(cluster: LocalCluster, name: str) -> None:
    """Another life at the same address, without a membership in between."""
    old = cluster.nodes.pop(name)
    await old.stop()
    new = await asyncio.to_thread(EngineNode, old._config)
    assert await new.start("127.0.0.1", int(old.address.rpartition(":")[2])) == old.address
    cluster.nodes[name] = new
    await cluster.publish()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_twenty_lives_of_an_engine_under_load_leave_nothing_and_no_wrong_answer(
    tiny_model_dir: Path, role: str
) -> None:
    """The last engine of its role goes again and again: every request waits for the next life and ends right."""

    async def scenario() -> None:
        settings = EngineSettings(planes=NETWORK_PLANES, max_num_batched_tokens=64, prefix_cache=False)
        async with local_cluster(tiny_model_dir, settings=settings) as cluster:
            expected = [await cluster.generate(prompt, 12) for prompt in PROMPTS]
            num_right = 0
            has_ended = asyncio.Event()

            async def client(index: int) -> None:
                nonlocal num_right
                while not has_ended.is_set():
                    assert await cluster.generate(PROMPTS[index], 12) == expected[index]
                    num_right += 1

            async def live(num_lives: int) -> None:
                has_ended.clear()
                async with asyncio.timeout(120), asyncio.TaskGroup() as clients:
                    for index in range(len(PROMPTS)):
                        clients.create_task(client(index))
                    for _ in range(num_lives):
                        wanted = num_right + 1
                        await until(lambda wanted=wanted: num_right >= wanted, "answers come")
                        await restart(cluster, next(name for name in cluster.nodes if name.startswith(role)))
                    has_ended.set()
                await cluster.generate(PROMPTS[0], 12)  # the last lives too have every thread that a request starts
                await cluster.wait_until_empty()
                reader = next(node for name, node in cluster.nodes.items() if name.startswith("decode"))._reader
                await until(lambda: len(reader.choices()) == len(reader._peers) == 1, "the engines have met")
                await until(lambda: not reader._refusals, "lives that ended in a handshake are forgotten")
                await fill_pool(reader)

            await live(SETTLED)
            held, tables = held_by_this_process(), tables_of(cluster)
            await live(LIVES - SETTLED)
            await until(lambda: held.covers(held_by_this_process()), f"the process holds {held} at most")
            assert tables_of(cluster) == tables
            assert num_right >= LIVES

    run_async(scenario())


def tables_of(cluster: LocalCluster) -> dict[str, int]:
    """Without the messages on their way, and without counts, which have an entry for each reason seen so far."""
    sizes = table_sizes([*cluster.nodes.values(), cluster.directory, cluster.story])
    return {path: size for path, size in sizes.items() if ".outbox" not in path and ".counts." not in path}


# ---- ends of channels, killed


LOST = (TransferFailed, PlaneError)


def test_twenty_killed_holders_leave_nothing_with_their_reader() -> None:
    """All at one address; each is killed with pulls waiting, reading and done."""

    async def scenario() -> None:
        async with reader_end("shm") as mapping, reader_end("tcp") as asking:
            port = 0
            for life in range(LIVES):
                end = (mapping, asking)[life % 2]
                async with holder_child(NETWORK_PLANES, 4, num_complete=3, port=port) as holder:
                    told = holder.told
                    port = int(told.address.rpartition(":")[2])
                    end.reader.meet(told.address, told.incarnation)
                    await end.pull(told.tickets[0])
                    assert end.has_right_bytes(0)
                    others = [asyncio.create_task(end.pull(told.tickets[i], index=i)) for i in (1, 2, 3)]
                    await asyncio.sleep(0)
                    holder.kill()
                    results = await asyncio.gather(*others, return_exceptions=True)
                    assert all(not isinstance(result, BaseException) or isinstance(result, LOST) for result in results)
                    assert isinstance(results[2], LOST)  # it waited for a holder that was computing
                await until(end.is_forgotten, "the reader has forgotten this life")
                if life == SETTLED:
                    await fill_pool(mapping.reader)
                    await fill_pool(asking.reader)
                    before = held_by_this_process()
            await until(lambda: before.covers(held_by_this_process()), f"the process holds {before} at most")

    run_async(scenario())


def test_twenty_killed_readers_leave_nothing_with_their_holder() -> None:
    async def scenario() -> None:
        async with holder_end() as holder:
            for life in range(LIVES):
                plane = NETWORK_PLANES[life % len(NETWORK_PLANES)]
                async with reader_child([plane], holder.hold(life % 8)) as reader:
                    reader.kill()
                    await until(holder.is_empty, "the holder has forgotten this life")
                if life == SETTLED:
                    before = held_by_this_process()
            assert len(holder.released) == LIVES
            await until(lambda: before.covers(held_by_this_process()), f"the process holds {before} at most")

    run_async(scenario())
