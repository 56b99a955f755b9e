"""A whole service as its user starts it: `pd-service serve` in a process of its own, on free ports."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

from pd_service.channels import channel_options
from pd_service.rpc import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

START_S = 120  # bounds, not measures
STOP_S = 30
CLI = [sys.executable, "-m", "pd_service.cli"]


@dataclass
class Served:
    process: subprocess.Popen[str]
    grpc_address: str
    http_address: str
    output: str

    @property
    def base_url(self) -> str:
        return f"http://{self.http_address}"

    def stop(self, signum: int = signal.SIGINT) -> str:
        """Signals the process as a terminal does, and returns the rest of what it printed."""
        self.process.send_signal(signum)
        rest, _ = self.process.communicate(timeout=STOP_S)
        return rest

    def processes(self) -> list[psutil.Process]:
        """Everything it has started, Ray's own processes included."""
        return psutil.Process(self.process.pid).children(recursive=True)

    @contextlib.asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        async with grpc.aio.insecure_channel(self.grpc_address, options=channel_options()) as channel:
            yield channel

    async def status(self) -> admin_pb2.StatusResponse:
        async with self.channel() as channel:
            answer: admin_pb2.StatusResponse = await admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest())
            return answer

    async def is_empty(self) -> bool:
        """Every engine is ready and holds nothing."""
        status = await self.status()
        held = [
            engine.status.leases + engine.status.pulls + sum(usage.used for usage in engine.status.blocks)
            for engine in status.engines
        ]
        return not any(held) and not any(engine.problem for engine in status.engines)

    async def tokens(self, prompt: list[int], max_tokens: int, **sampling: object) -> list[int]:
        """Token ids of an answer over gRPC."""
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=prompt),
            sampling=generation_pb2.Sampling(max_tokens=max_tokens, **({"temperature": 0.0} | sampling)),  # type: ignore[arg-type]
        )
        async with self.channel() as channel:
            answer = generation_pb2_grpc.GenerationStub(channel).Generate(request)
            return [token async for response in answer for token in response.delta.token_ids]


@contextlib.contextmanager
def served(*flags: str, environment: dict[str, str] | None = None) -> Iterator[Served]:
    """Starts a service, waits until it is ready, and leaves nothing of it whatever the test does."""
    command = [*CLI, "serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", *flags]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment,
    )
    children: list[psutil.Process] = []
    try:
        output = _read_until_ready(process)
        grpc_address = re.search(r"--address (\S+)", output)
        http_address = re.search(r"http://([^/]+)/v1", output)
        assert grpc_address, output
        assert http_address, output
        children = psutil.Process(process.pid).children(recursive=True)
        yield Served(process, grpc_address[1], http_address[1], output)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=STOP_S)
        for left in [process, *children]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                left.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _read_until_ready(process: subprocess.Popen[str]) -> str:
    """What it prints until it says how to stop it; a start that hangs is killed, so that reading ends."""
    assert process.stdout is not None
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    try:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                return "".join(lines)
    finally:
        watchdog.cancel()
    raise AssertionError("the service did not start:\n" + "".join(lines))


def cli(
    *arguments: str, timeout_s: float = 60, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """One run of the command line."""
    environment = (environment or dict(os.environ)) | {"COLUMNS": "120"}
    return subprocess.run(
        [*CLI, *arguments], capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )


def shared_memory_files() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


@dataclass
class RayHead:
    """A Ray cluster of somebody else's."""

    process: subprocess.Popen[str]
    address: str
    environment: dict[str, str]  # to reach it with

    def workers(self, actor: str) -> list[psutil.Process]:
        """The processes of all actors of this class."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if child.status() != psutil.STATUS_ZOMBIE and named(child, actor)]

    def left(self) -> dict[str, object]:
        """What Ray knows of actors, placements and resources in use."""
        script = (
            "import json, ray; ray.init(address='auto', log_to_driver=False); "
            "total, free = ray.cluster_resources(), ray.available_resources(); "
            "groups = ray.util.placement_group_table().values(); "
            "print(json.dumps({'actors': ray.util.list_named_actors(all_namespaces=True), "
            "'placements': [group['name'] for group in groups if group['state'] != 'REMOVED'], "
            "'cpus': total['CPU'] - free.get('CPU', 0)}))"
        )
        environment = self.environment | {"RAY_ADDRESS": self.address}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True, timeout=60
        )
        found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return found


def named(process: psutil.Process, actor: str) -> bool:
    try:
        return f"ray::{actor}" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def ray_head(num_cpus: int = 2) -> Iterator[RayHead]:
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--port=0", f"--num-cpus={num_cpus}",
        "--include-dashboard=false", "--disable-usage-stats",
    ]  # fmt: skip
    head = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        assert head.stdout is not None
        lines: list[str] = []
        for line in head.stdout:
            lines.append(line)
            if found := re.search(r"ray start --address='([^']+)'", line):
                break
        assert found, "".join(lines)
        yield RayHead(head, found[1], environment)
    finally:
        for process in [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        head.communicate()
