"""A process with a gRPC server can start other processes: Ray, in the process of the gateway, starts five."""

from __future__ import annotations

import subprocess
import sys

NUM_FORKS = 400  # one in fifty died when gRPC took part in them

PROGRAM = f"""
import asyncio, subprocess
from pd_service.channels import server_options
import grpc

def start_many():
    # a function to run in the child makes it a real fork, as in Ray
    children = [subprocess.Popen(["true"], preexec_fn=int) for _ in range({NUM_FORKS})]
    return sum(child.wait() != 0 for child in children)

async def main():
    server = grpc.aio.server(options=server_options())
    server.add_insecure_port("127.0.0.1:0")
    print(await asyncio.to_thread(start_many))
    await server.stop(None)

asyncio.run(main())
"""


def test_no_child_dies_before_it_becomes_its_program() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n", done.stderr
