"""One engine node in a process of its own, without Ray: what a benchmark starts, freezes and kills.

    python -m benchmarks.node_process CONFIG

CONFIG is an `EngineConfig` as JSON; the process prints its address and incarnation as JSON when it is ready, and ends
when its standard input does, so that none outlives whoever started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import grpc

from pd_service.channels import channel_options
from pd_service.config import EngineConfig
from pd_service.gateway.engines import EngineMember
from pd_service.rpc import engine_pb2, engine_pb2_grpc

START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class NodeProcess:
    member: EngineMember
    process: Process
    channel: grpc.aio.Channel  # of the observer, apart from all others

    def kill(self) -> None:
        self.process.kill()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def status(self) -> engine_pb2.EngineStatus:
        status: engine_pb2.EngineStatus = await engine_pb2_grpc.EngineStub(self.channel).GetStatus(
            engine_pb2.EngineStatusRequest()
        )
        return status

    async def is_free(self) -> bool:
        """Every block is free, and no request, lease or pull is left."""
        status = await self.status()
        live = status.load.running + status.load.waiting + status.leases + status.pulls
        return not live and not any(usage.used for usage in status.blocks)


@asynccontextmanager
async def node_process(name: str, config: EngineConfig) -> AsyncIterator[NodeProcess]:
    """Runs until the end of the block, whatever has become of it. Raises RuntimeError when it does not start."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.node_process", config.model_dump_json(), stdin=PIPE, stdout=PIPE
    )
    try:
        member = await _member(name, config, process)
        async with grpc.aio.insecure_channel(member.address, options=channel_options()) as channel:
            yield NodeProcess(member, process, channel)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def _member(name: str, config: EngineConfig, process: Process) -> EngineMember:
    assert process.stdout is not None
    async with asyncio.timeout(START_TIMEOUT_S):
        line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"the process of {name} ended before it was ready, with exit code {await process.wait()}")
    told = json.loads(line)
    return EngineMember(engine_id=name, role=config.role, address=told["address"], incarnation=told["incarnation"])


async def _serve(config: EngineConfig) -> None:
    from pd_service.node.node import EngineNode  # torch: half a second that whoever starts us need not spend

    node = await asyncio.to_thread(EngineNode, config)
    address = await node.start("127.0.0.1")
    print(json.dumps({"address": address, "incarnation": node.incarnation}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(_serve(EngineConfig.model_validate_json(sys.argv[1])))
