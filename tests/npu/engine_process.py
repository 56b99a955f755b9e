"""One engine on an emulated NPU in a process of its own: `python -m tests.npu.engine_process CONFIG`.

CONFIG is an EngineConfig as JSON. Prints address, incarnation and the device's number on the host, then lives until its
input ends. ASCEND_RT_VISIBLE_DEVICES says which device it sees.
"""

from __future__ import annotations

import asyncio
import os
import sys

from pd_service.config import EngineConfig
from pd_service.node.node import EngineNode
from pd_service.ops import npu
from tests.npu import load_emulation as load_emulation  # before anything imports torch_npu
from tests.npu.emulator import EmulatedNpu


async def serve(config: EngineConfig) -> None:
    node = await asyncio.to_thread(EngineNode, config)
    try:
        address = await node.start("127.0.0.1")
        print(address, node.incarnation, os.environ["ASCEND_RT_VISIBLE_DEVICES"], flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await node.stop()


def main() -> None:
    npu._IS_CHECKED = True
    with EmulatedNpu().in_all_threads():
        asyncio.run(serve(EngineConfig.model_validate_json(sys.argv[1])))


if __name__ == "__main__":
    main()
