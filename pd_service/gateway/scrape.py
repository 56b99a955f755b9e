"""One scrape of a gateway shows the whole service: its own metrics, and those of every engine with a label `engine`.

Each engine is asked when somebody scrapes and has little time to answer; one that does not is left out, is 0 in
`pd_engine_up` and counts in `pd_engine_scrape_failures_total`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

import grpc
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from pd_service.channels import channel_options
from pd_service.gateway.engines import EngineMember
from pd_service.metrics import GatewayMetrics
from pd_service.rpc import engine_pb2, engine_pb2_grpc

TIMEOUT_S = 1.0  # of one engine; a scraper itself waits for ten seconds


class ServiceScrape:
    """`members` are the engines to ask."""

    def __init__(self, metrics: GatewayMetrics, members: Callable[[], Sequence[EngineMember]]) -> None:
        self._metrics = metrics
        self._members = members

    async def __call__(self) -> bytes:
        """Everything in Prometheus' text format."""
        members = self._members()
        answers = await asyncio.gather(*(_ask(member) for member in members))
        self._metrics.count_scrape_failures(sum(answer is None for answer in answers))
        return await asyncio.to_thread(self._render, dict(zip(members, answers, strict=True)))

    def _render(self, answers: Mapping[EngineMember, str | None]) -> bytes:
        up = GaugeMetricFamily("pd_engine_up", "Whether the engine answered this scrape.", labels=["engine", "role"])
        for member, answer in answers.items():
            up.add_metric([member.engine_id, member.role], float(answer is not None))
        found = {member.engine_id: answer for member, answer in answers.items() if answer is not None}
        registry = CollectorRegistry()
        registry.register(_Families([up, *merged(found)]))
        return self._metrics.render() + generate_latest(registry)


class _Families:
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged(texts: Mapping[str, str]) -> list[Metric]:
    """The metrics of all engines, each name once; `texts` is Prometheus' text format by engine."""
    families: dict[str, Metric] = {}
    for engine_id, text in texts.items():
        for family in text_string_to_metric_families(text):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.add_sample(sample.name, {"engine": engine_id} | sample.labels, sample.value)
    return list(families.values())


async def _ask(member: EngineMember) -> str | None:
    try:
        async with grpc.aio.insecure_channel(member.address, options=channel_options()) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            answer = await stub.GetMetrics(engine_pb2.EngineMetricsRequest(), timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return None
    text: str = answer.exposition.decode()
    return text
