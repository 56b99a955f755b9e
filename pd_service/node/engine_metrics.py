"""What an engine counts, as Prometheus metrics: its status as it is when somebody asks, and histograms of its pulls.

Every counter and gauge is a field of the engine's status, so that `pd-service status` and a scrape never disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pd_service.engine.request_state import PullStats
from pd_service.rpc.engine_pb2 import EngineStatus

_PULL_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)
_RATE_BUCKETS = tuple(gb * 1e9 for gb in (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0))


class EngineMetrics:
    """`status` is called once for each scrape."""

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_StatusCollector(status))
        self._pull_s = Histogram(
            "pd_pull_seconds",
            "Time of a confirmed pull in each part: plan, wait (for blocks and for the holder), wire, confirm; "
            "exposed_wire is what of wire came after the prompt was computed.",
            ["part"],
            buckets=_PULL_BUCKETS_S,
            registry=self._registry,
        )
        self._rate = Histogram(
            "pd_pull_bytes_per_second",
            "Bytes of a confirmed pull by the time in which they moved.",
            buckets=_RATE_BUCKETS,
            registry=self._registry,
        )

    def observe_pull(self, stats: PullStats) -> None:
        """A pull was confirmed."""
        wire_ms = stats.wire_ms + stats.hidden_wire_ms
        parts_ms = {
            "plan": stats.plan_ms,
            "wait": max(0.0, stats.received_ms - stats.plan_ms - wire_ms),
            "wire": wire_ms,
            "exposed_wire": stats.wire_ms,
            "confirm": stats.confirm_ms,
        }
        for part, ms in parts_ms.items():
            self._pull_s.labels(part).observe(ms / 1e3)
        if wire_ms > 0:
            self._rate.observe(stats.kv_bytes / wire_ms * 1e3)

    def render(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self._registry)


class _StatusCollector:
    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield from _gauges(status)
        yield from _work(status)
        yield from _transfer(status)


def _gauges(status: EngineStatus) -> Iterator[Metric]:
    load = status.load
    yield _gauge("pd_engine_requests", "Requests by what they do.", "state",
                 {"running": load.running, "waiting": load.waiting})  # fmt: skip
    blocks = GaugeMetricFamily("pd_engine_blocks", "KV blocks.", labels=["attn_type", "state"])
    for usage in status.blocks:
        blocks.add_metric([usage.attn_type, "used"], usage.used)
        blocks.add_metric([usage.attn_type, "free"], usage.total - usage.used)
    yield blocks
    yield GaugeMetricFamily("pd_leases", "Leases that protect blocks here.", value=status.leases)
    yield GaugeMetricFamily("pd_pulls", "Pulls into blocks of this engine that have not ended.", value=status.pulls)
    yield GaugeMetricFamily("pd_holders", "Engines this one has a channel to.", value=status.holders)


def _work(status: EngineStatus) -> Iterator[Metric]:
    yield CounterMetricFamily("pd_engine_steps", "Steps.", value=status.steps)
    yield CounterMetricFamily(
        "pd_engine_preemptions", "Requests that gave their blocks back.", value=status.preemptions
    )
    tokens = {
        "computed": status.computed_tokens,
        "received": status.received_tokens,
        "cached": status.cached_tokens,
        "drafted": status.drafted_tokens,
        "accepted": status.accepted_tokens,
    }
    yield _counter("pd_engine_tokens", "Tokens by where their KV came from; guesses, and those right.", "kind", tokens)


def _transfer(status: EngineStatus) -> Iterator[Metric]:
    yield _counter("pd_leases_ended", "Leases by how they ended.", "how", status.leases_ended)
    yield CounterMetricFamily(
        "pd_lease_refusals", "Questions of readers that were answered with no.", value=status.lease_refusals
    )
    pieces = {"same": status.digests_same, "different": status.digests_different}
    yield _counter("pd_digests", "Pieces that readers digested, by whether this holder has the same.", "result", pieces)
    yield CounterMetricFamily("pd_pulls_confirmed", "Pulls whose KV was used.", value=status.pulls_confirmed)
    yield CounterMetricFamily("pd_pull_bytes", "Bytes of KV of confirmed pulls.", value=status.pull_bytes)
    yield CounterMetricFamily("pd_pull_runs", "Byte runs of confirmed pulls.", value=status.pull_runs)
    text = "Pulls whose KV was not used, and tickets lost before their pull, by reason."
    yield _counter("pd_pull_failures", text, "reason", status.pull_failures)


def _gauge(name: str, what: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, what, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _counter(name: str, what: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, what, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
