"""A service in a Ray cluster that was there before: it grows, shrinks, loses its controller and engines, and goes away.

All tests share one cluster of four CPUs and one service; each leaves it with one engine in each pool.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from pd_service.rpc import admin_pb2
from tests.local_cluster import eventually
from tests.one_loop import run_async
from tests.served import RayHead, Served, cli, ray_head, served

PROMPT = list(range(3, 40))
CONFIGURATION = """
pools:
  prefill: {max_replicas: 3}
  decode: {max_replicas: 3, env: {PD_TEST_MARK: "seen"}}
supervision: {probe_s: 0.5, stall_s: 3, drain_s: 30}
"""


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with ray_head(num_cpus=4) as running:
        yield running


@pytest.fixture(scope="module")
def service(head: RayHead, long_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("elastic") / "service.yaml"
    path.write_text(CONFIGURATION)
    flags = ("-f", str(path), "--model", str(long_model_dir), "--ray-address", head.address)
    with served(*flags, environment=head.environment) as running:
        yield running


@asynccontextmanager
async def load(service: Served, num_streams: int = 3) -> AsyncIterator[None]:
    """Streams one after another while the body runs; all of them have to be whole and right."""
    expected = await service.tokens(PROMPT, 60, ignore_eos=True)
    is_over = False

    async def stream() -> int:
        num_done = 0
        while not is_over:
            assert await service.tokens(PROMPT, 60, ignore_eos=True) == expected
            num_done += 1
        return num_done

    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(stream()) for _ in range(num_streams)]
        try:
            yield
        finally:
            is_over = True
    assert all(one.result() for one in streams)


async def incarnations(service: Served) -> dict[str, str]:
    return {e.member.engine_id: e.member.incarnation for e in (await service.status()).engines}


async def operate(service: Served, *command: str) -> tuple[int, str]:
    done = await asyncio.to_thread(cli, *command, "--address", service.grpc_address)
    return done.returncode, done.stdout + done.stderr


async def pools(service: Served) -> dict[str, admin_pb2.PoolStatus]:
    return {pool.role: pool for pool in (await service.status()).pools}


def test_a_killed_controller_comes_back_and_no_request_notices(service: Served, head: RayHead) -> None:
    async def is_back(life: int) -> bool:
        try:
            return (await service.status()).controller_life == life
        except grpc.aio.AioRpcError:
            return False

    async def scenario() -> None:
        before = await incarnations(service)
        async with load(service):
            for life in (2, 3):
                (controller,) = head.workers("Controller")
                controller.kill()
                await eventually(lambda life=life: is_back(life), "the next life answers at the same address")  # type: ignore[misc]
        assert await incarnations(service) == before
        assert [pool.replaced for pool in (await pools(service)).values()] == [0, 0]

    run_async(scenario())


def test_pools_grow_and_shrink_under_load(service: Served, head: RayHead) -> None:
    async def scenario() -> None:
        async with load(service):
            code, said = await operate(service, "scale", "decode=2")
            assert (code, said.splitlines()[-1]) == (0, "as asked: decode 2"), said
            assert len(head.workers("EngineActor")) == 3
            code, said = await operate(service, "scale", "prefill=1", "decode=1")
            assert code == 0, said
        assert "draining" in said
        assert len(head.workers("EngineActor")) == 2
        assert [pool.last_failure for pool in (await pools(service)).values()] == ["", ""]

    run_async(scenario())


def test_an_engine_that_lacks_resources_waits_and_says_for_what(service: Served) -> None:
    async def scenario() -> None:
        code, said = await operate(service, "scale", "prefill=2", "decode=3", "--timeout", "4")
        assert code == 1
        assert "needs CPU 1, free in the cluster: CPU 0 of 4" in said
        assert "free in the cluster" in (await operate(service, "status"))[1]
        code, said = await operate(service, "scale", "prefill=1", "decode=1")
        assert code == 0, said

    run_async(scenario())


def test_a_request_for_an_empty_pool_waits_for_its_engine(service: Served, head: RayHead) -> None:
    async def scenario() -> None:
        expected = await service.tokens(PROMPT, 20, ignore_eos=True)
        assert (await operate(service, "scale", "decode=0"))[0] == 0
        assert len(head.workers("EngineActor")) == 1
        early = asyncio.create_task(service.tokens(PROMPT, 20, ignore_eos=True))
        assert (await operate(service, "scale", "decode=1"))[0] == 0
        assert await early == expected

    run_async(scenario())


def test_a_drained_engine_finishes_its_stream_and_is_replaced(service: Served) -> None:
    async def scenario() -> None:
        expected = await service.tokens(PROMPT, 600, ignore_eos=True)
        (victim,) = [name for name in await incarnations(service) if name.startswith("decode")]
        streaming = asyncio.create_task(service.tokens(PROMPT, 600, ignore_eos=True))
        code, said = await operate(service, "drain", victim)
        assert (code, said.splitlines()[-1]) == (0, f"{victim} has left: drained"), said
        assert await streaming == expected
        await eventually(service.is_empty, "the replacement is ready")
        assert victim not in await incarnations(service)
        assert (await pools(service))["decode"].replaced == 0

    run_async(scenario())


def test_at_its_limit_a_drain_says_what_remained_and_the_stream_goes_on(service: Served) -> None:
    async def scenario() -> None:
        expected = await service.tokens(PROMPT, 3000, ignore_eos=True)
        (victim,) = [name for name in await incarnations(service) if name.startswith("decode")]
        streaming = asyncio.create_task(service.tokens(PROMPT, 3000, ignore_eos=True))

        async def decodes() -> bool:
            return any(e.member.engine_id == victim and e.status.load.running for e in (await service.status()).engines)

        await eventually(decodes, "the stream is on the engine that is to leave")
        code, said = await operate(service, "drain", victim, "--timeout", "0")
        assert (code, "drain limit reached with 1 requests" in said) == (0, True), said
        assert await streaming == expected

    run_async(scenario())


def test_a_frozen_engine_is_found_and_replaced(service: Served, head: RayHead) -> None:
    async def scenario() -> None:
        expected = await service.tokens(PROMPT, 60, ignore_eos=True)
        await eventually(service.is_empty, "both engines are ready")
        status = await service.status()
        (victim,) = [e for e in status.engines if e.member.role == "decode"]
        os.kill(victim.status.pid, signal.SIGSTOP)
        assert await service.tokens(PROMPT, 60, ignore_eos=True) == expected
        assert (await pools(service))["decode"].last_failure == "stuck: no answer for 3 s"
        assert victim.status.pid not in [process.pid for process in head.workers("EngineActor")]

    run_async(scenario())


def test_engines_have_the_environment_of_their_pool(service: Served) -> None:
    async def scenario() -> dict[str, int]:
        await eventually(service.is_empty, "both engines are ready")
        return {e.member.role: e.status.pid for e in (await service.status()).engines}

    marks = {
        role: "PD_TEST_MARK=seen" in Path(f"/proc/{pid}/environ").read_text().split("\0")
        for role, pid in run_async(scenario()).items()
    }
    assert marks == {"prefill": False, "decode": True}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["scale", "decode=4"], "decode=4: the pool may have 0 to 3 engines"),
        (["scale", "encode=1"], "there is no pool 'encode'; there are: prefill, decode"),
        (["scale", "decode"], "'decode' given; POOL=NUMBER is allowed"),
        (["drain", "decode/none"], "there is no engine 'decode/none'; there are: decode/"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_is_allowed(service: Served, command: list[str], said: str) -> None:
    done = cli(*command, "--address", service.grpc_address)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_service_of_the_same_name_is_refused(service: Served, head: RayHead, tiny_model_dir: Path) -> None:
    flags = ("--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--ray-address", head.address)
    done = cli("serve", "--model", str(tiny_model_dir), *flags, environment=head.environment)
    assert (done.returncode, "a service named 'pd-service' runs" in done.stderr) == (1, True), done.stderr
    assert run_async(service.tokens(PROMPT, 4, ignore_eos=True))


def test_a_stop_leaves_nothing_even_right_after_the_controller_was_killed(service: Served, head: RayHead) -> None:
    (controller,) = head.workers("Controller")
    controller.kill()
    done = cli("stop", "--ray-address", head.address, environment=head.environment)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "stopped"), done.stderr
    rest, _ = service.process.communicate(timeout=30)
    assert service.process.returncode == 0, rest
    assert head.left() == {"actors": [], "placements": [], "cpus": 0.0}
    assert not head.workers("EngineActor")
    again = cli("stop", "--ray-address", head.address, environment=head.environment)
    assert re.search("no service named 'pd-service' is in this Ray cluster", again.stderr)


ORPHAN = """
import asyncio, sys, time
from pathlib import Path
import ray
from pd_service.cluster.ray_engines import RayEngines
from pd_service.cluster.ray_names import find_actor, placements
from pd_service.config import ServiceConfig

ray.init(address=sys.argv[1], namespace="orphans", log_to_driver=False, logging_level="ERROR")
config = ServiceConfig.model_validate({"supervision": {"orphan_s": 1}})
engines = RayEngines(config, Path(sys.argv[2]), None, "orphans", "a service that is gone")
asyncio.run(engines.start("decode/1", "decode", print))
assert placements("orphans").keys() == {"decode/1"}
while placements("orphans") or find_actor("decode/1") is not None:
    time.sleep(0.05)
print("gone")
"""


def test_an_engine_that_no_controller_looks_at_ends_itself(head: RayHead, tiny_model_dir: Path) -> None:
    command = [sys.executable, "-c", ORPHAN, head.address, str(tiny_model_dir)]
    done = subprocess.run(command, capture_output=True, text=True, env=head.environment, timeout=60, check=False)
    assert done.stdout == "gone\n", done.stderr
