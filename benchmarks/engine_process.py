"""One engine in a process of its own, without Ray: prints its address and incarnation, and ends with its input.

python -m benchmarks.engine_process CONFIG_JSON
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pd_service.config import EngineConfig
from pd_service.gateway.engines import EngineMember
from pd_service.node.node import EngineNode

HOST = "127.0.0.1"
START_TIMEOUT_S, STOP_TIMEOUT_S = 120.0, 20.0


@asynccontextmanager
async def engine_process(config: EngineConfig) -> AsyncIterator[EngineMember]:
    """The engine as a gateway knows it. Raises RuntimeError when it does not start."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.engine_process", config.model_dump_json(), stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            words = (await process.stdout.readline()).decode().split()
        if len(words) != 2:
            raise RuntimeError(f"the {config.role} engine did not start")
        yield EngineMember(engine_id=config.role, role=config.role, address=words[0], incarnation=words[1])
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _serve(node: EngineNode) -> None:
    address = await node.start(HOST)
    print(address, node.incarnation, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await node.stop()


if __name__ == "__main__":
    asyncio.run(_serve(EngineNode(EngineConfig.model_validate_json(sys.argv[1]))))
