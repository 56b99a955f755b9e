"""Real engines and a real gateway core in one process, over real gRPC on loopback: no Ray, a tiny model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from pd_service.config import DeviceName, Dtype, EngineConfig, EngineSettings, GatewaySettings, Role
from pd_service.gateway.engines import Directory, EngineMember
from pd_service.gateway.generation import StoryEnd, StoryTokens
from pd_service.gateway.intake import Job
from pd_service.gateway.phases import Phases
from pd_service.gateway.story import RequestStory
from pd_service.metrics import GatewayMetrics
from pd_service.models.config import fingerprint
from pd_service.node.node import EngineNode
from pd_service.request import EngineSampling, RequestId, TokenLogprobs
from pd_service.rpc import engine_pb2 as pb

PATIENCE_S = 20.0  # a bound, not a measure: what is waited for comes in milliseconds


async def eventually(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Returns when the condition holds; fails the test, naming `what`, when it never does."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await condition():  # noqa: ASYNC110  # engines are watched from outside
                await asyncio.sleep(0.005)  # the engines are watched from outside, they set no event
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None


class LocalCluster:
    def __init__(
        self,
        model_dir: Path,
        settings: EngineSettings,
        gateway: GatewaySettings,
        kv_cache_bytes: int,
        device: DeviceName = "cpu",
        dtype: Dtype = "float32",
    ) -> None:
        self._model_dir = model_dir
        self._settings = settings
        self._kv_cache_bytes = kv_cache_bytes
        self._device, self._dtype = device, dtype
        self._names = itertools.count()
        self.nodes: dict[str, EngineNode] = {}
        self.roles: dict[str, Role] = {}
        self.draining: set[str] = set()
        self.directory = Directory(fingerprint(model_dir))
        self.metrics = GatewayMetrics()
        self.story = RequestStory(self.directory, gateway, self.metrics)

    async def add(self, role: Role) -> str:
        """Starts one engine and returns its name."""
        name = f"{role}/{next(self._names)}"
        config = EngineConfig(
            role=role,
            model_dir=self._model_dir,
            device=self._device,
            dtype=self._dtype,
            kv_cache_bytes=self._kv_cache_bytes,
            settings=self._settings,
        )
        node = await asyncio.to_thread(EngineNode, config)
        await node.start("127.0.0.1")
        self.nodes[name], self.roles[name] = node, role
        await self.publish()
        await self.directory.wait_for(role, PATIENCE_S)
        return name

    async def publish(self) -> None:
        """Tells the gateway which engines there are."""
        await self.directory.update(
            [
                EngineMember(
                    engine_id=name,
                    role=self.roles[name],
                    address=node.address,
                    incarnation=node.incarnation,
                    is_draining=name in self.draining,
                )
                for name, node in self.nodes.items()
            ]
        )

    async def remove(self, name: str) -> None:
        """Stops an engine under whatever runs on it."""
        node = self.nodes.pop(name)
        await node.stop()
        await self.publish()

    async def generate(
        self, prompt: Sequence[int], max_new_tokens: int, sampling: EngineSampling | None = None
    ) -> list[int]:
        job = new_job(prompt, max_new_tokens, sampling)
        return (await run(self.story, job))[0]

    async def status(self, name: str) -> pb.EngineStatus:
        return await self.nodes[name].GetStatus(None, None)  # type: ignore[arg-type]

    async def is_empty(self) -> bool:
        """Every block of every engine is free, and no lease and no pull is left."""
        statuses = [await self.status(name) for name in self.nodes]
        return not any(
            status.leases
            or status.pulls
            or status.load.running
            or status.load.waiting
            or any(b.used for b in status.blocks)
            for status in statuses
        )

    async def wait_until_empty(self) -> None:
        await eventually(self.is_empty, "every block, lease and pull of every engine has gone")


def new_job(prompt: Sequence[int], max_new_tokens: int, sampling: EngineSampling | None = None) -> Job:
    return Job(
        request_id=RequestId("test"),
        prompt_token_ids=tuple(prompt),
        sampling=sampling or EngineSampling(),
        max_new_tokens=max_new_tokens,
        deadline=None,
        phases=Phases(mark=asyncio.get_running_loop().time()),
    )


async def run(story: RequestStory, job: Job) -> tuple[list[int], list[TokenLogprobs], StoryEnd]:
    """The whole story: tokens, log probabilities, end."""
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    end: StoryEnd | None = None
    async with aclosing(story.run(job)) as events:
        async for event in events:
            if isinstance(event, StoryTokens):
                tokens += event.token_ids
                logprobs += event.logprobs
            else:
                end = event
    assert end is not None
    return tokens, logprobs, end


@asynccontextmanager
async def local_cluster(
    model_dir: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    mixed: int = 0,
    settings: EngineSettings | None = None,
    gateway: GatewaySettings | None = None,
    kv_cache_bytes: int = 2**22,
    device: DeviceName = "cpu",
    dtype: Dtype = "float32",
) -> AsyncIterator[LocalCluster]:
    settings, gateway = settings or EngineSettings(), gateway or GatewaySettings()
    cluster = LocalCluster(model_dir, settings, gateway, kv_cache_bytes, device, dtype)
    roles: list[Role] = ["prefill"] * prefill + ["decode"] * decode + ["mixed"] * mixed  # type: ignore[assignment,list-item]
    try:
        for role in roles:
            await cluster.add(role)
        yield cluster
        await cluster.wait_until_empty()
    finally:
        await cluster.directory.close()
        for node in cluster.nodes.values():
            await node.stop()
