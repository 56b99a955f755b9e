"""The integer model on real nodes: channels, leases, data planes and threads, and still the model's own tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from pd_service.config import EngineSettings, GatewaySettings, PlaneName, RetrySettings, SpeculativeSettings
from pd_service.request import EngineSampling
from tests.integer_model import VARIANTS, Attention, integer_models
from tests.integer_reference import continuation
from tests.local_cluster import LocalCluster, eventually, local_cluster
from tests.one_loop import run_async
from tests.plane_suite import make
from transfer.planes import PLANE_NAMES

Job = tuple[tuple[int, ...], int, EngineSampling]

NO_RETRY = GatewaySettings(retry=RetrySettings(max_failures=0))  # what goes wrong is not to be mended


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Attention, Path]]:
    with integer_models(tmp_path_factory.mktemp("integer")) as dirs:
        yield dirs


def jobs() -> list[Job]:
    """Prompts of many lengths, that begin alike three by three."""
    samplings = [EngineSampling(), EngineSampling(temperature=1.0, seed=3)]
    return [
        (tuple(range(100 * (i % 3), 100 * (i % 3) + length)), 10, samplings[i % 2])
        for i, length in enumerate((1, 2, 3, 4, 5, 6, 15, 16, 17, 30, 41, 64))
    ]


def new_settings(plane: PlaneName, num_drafts: int = 0) -> EngineSettings:
    speculative = SpeculativeSettings(method="mtp", num_tokens=num_drafts) if num_drafts else SpeculativeSettings()
    return EngineSettings(
        block_size=4, max_num_batched_tokens=16, max_num_seqs=4, planes=(plane,), speculative=speculative
    )


async def generate_all(cluster: LocalCluster) -> list[list[int]]:
    return await asyncio.gather(*(cluster.generate(*job) for job in jobs()))


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("plane", PLANE_NAMES)
@pytest.mark.parametrize("attention", VARIANTS)
def test_many_requests_at_once_get_the_models_own_tokens(
    model_dirs: dict[Attention, Path],
    attention: Attention,
    plane: PlaneName,
    num_drafts: int,
) -> None:
    make(plane)  # skips where an optional one is missing

    async def scenario() -> list[list[list[int]]]:
        settings = new_settings(plane, num_drafts)
        async with local_cluster(model_dirs[attention], settings=settings, gateway=NO_RETRY) as cluster:
            return [await generate_all(cluster) for _ in range(2)]  # the second finds much in the caches

    expected = [continuation(attention, *job) for job in jobs()]
    assert run_async(scenario()) == [expected, expected]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("attention", VARIANTS)
def test_tokens_stay_the_models_own_when_an_engine_goes_away(
    model_dirs: dict[Attention, Path], attention: Attention, role: Literal["prefill", "decode"]
) -> None:
    async def scenario() -> list[list[int]]:
        async with local_cluster(model_dirs[attention], prefill=2, decode=2, settings=new_settings("tcp")) as cluster:
            generating = asyncio.create_task(generate_all(cluster))
            doomed = f"{role}/{0 if role == 'prefill' else 2}"

            async def is_at_work() -> bool:
                return (await cluster.status(doomed)).computed_tokens > 0

            await eventually(is_at_work, f"{doomed} computes")
            await cluster.remove(doomed)
            return await generating

    assert run_async(scenario()) == [continuation(attention, *job) for job in jobs()]
