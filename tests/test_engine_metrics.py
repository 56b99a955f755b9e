"""One scrape shows the whole service, and says what pulls and leases did; an operator's check of pairs of engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pd_service.channels import server_options
from pd_service.config import EngineSettings
from pd_service.engine.request_state import PullStats
from pd_service.errors import TransferFailure
from pd_service.gateway.admin_door import AdminServicer
from pd_service.gateway.engines import EngineMember
from pd_service.gateway.recent import RecentRequests
from pd_service.gateway.scrape import ServiceScrape, merged
from pd_service.metrics import GatewayMetrics
from pd_service.node.engine_metrics import EngineMetrics
from pd_service.node.peer_probe import null_block_runs
from pd_service.rpc import admin_pb2, admin_pb2_grpc, engine_pb2, engine_pb2_grpc
from pd_service.rpc.engine_pb2 import EngineStatus
from tests.channel_ends import LAYOUT, holder_end, reader_end
from tests.local_cluster import LocalCluster, local_cluster
from tests.one_loop import run_async
from transfer.planes.base import PlaneError, Runs

PROMPT = list(range(3, 40))
PARTS = ("plan", "wait", "wire", "exposed_wire", "confirm")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: bytes) -> Samples:
    """By name and labels; every family has its name once."""
    families = list(text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


async def scrape(cluster: LocalCluster, more: Sequence[EngineMember] = ()) -> Samples:
    return samples(await ServiceScrape(cluster.metrics, lambda: [*cluster.directory.members(), *more])())


@pytest.mark.parametrize("plane", ["shm", "tcp"])
def test_a_scrape_says_what_every_engine_did_as_its_status_does(tiny_model_dir: Path, plane: str) -> None:
    async def scenario() -> None:
        settings = EngineSettings(planes=(plane,), digest_sample_rate=1.0)  # type: ignore[arg-type]
        async with local_cluster(tiny_model_dir, decode=2, settings=settings) as cluster:
            await asyncio.gather(*(cluster.generate([number, *PROMPT], 4) for number in range(3, 9)))
            await cluster.wait_until_empty()
            found = await scrape(cluster)
            assert value(found, "pd_engine_up", engine="prefill/0", role="prefill") == 1
            assert value(found, "pd_leases_ended_total", engine="prefill/0", how="confirmed") == 6
            assert value(found, "pd_digests_total", engine="prefill/0", result="different") == 0
            num_pulls = 0.0
            for name in ("decode/1", "decode/2"):
                status = await cluster.status(name)
                pulls = value(found, "pd_pulls_confirmed_total", engine=name)
                num_pulls += pulls
                assert pulls == status.pulls_confirmed
                assert value(found, "pd_pull_bytes_total", engine=name) == status.pull_bytes
                assert value(found, "pd_pull_runs_total", engine=name) == status.pull_runs
                assert value(found, "pd_engine_tokens_total", engine=name, kind="received") == status.received_tokens
                for part in PARTS if pulls else ():
                    assert value(found, "pd_pull_seconds_count", engine=name, part=part) == pulls
            assert num_pulls == 6
            same = value(found, "pd_digests_total", engine="prefill/0", result="same")
            assert same == (await cluster.status("prefill/0")).digests_same > 0

    run_async(scenario())


def test_every_reason_of_a_failed_hand_over_is_shown_from_the_start(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            found = await scrape(cluster)
        for reason in TransferFailure:
            assert value(found, "pd_transfer_failures_total", reason=reason.value) == 0
            assert value(found, "pd_pull_failures_total", engine="decode/1", reason=reason.value) == 0

    run_async(scenario())


def test_the_parts_of_a_pull_are_the_whole_of_it_and_its_rate_counts_all_time_on_the_wire() -> None:
    metrics = EngineMetrics(EngineStatus)
    metrics.observe_pull(
        PullStats(plan_ms=1.0, received_ms=20.0, wire_ms=2.0, hidden_wire_ms=6.0, confirm_ms=0.5, kv_bytes=16_000_000)
    )
    found = samples(metrics.render())
    sums = {part: value(found, "pd_pull_seconds_sum", part=part) * 1e3 for part in PARTS}
    assert sums == pytest.approx({"plan": 1.0, "wait": 11.0, "wire": 8.0, "exposed_wire": 2.0, "confirm": 0.5})
    assert value(found, "pd_pull_bytes_per_second_sum") == pytest.approx(2e9)


class Silent(engine_pb2_grpc.EngineServicer):
    """Takes questions and never answers."""

    async def GetMetrics(self, request: object, context: object) -> engine_pb2.EngineMetrics:
        await asyncio.Event().wait()
        raise AssertionError


@asynccontextmanager
async def silent_engine() -> AsyncIterator[EngineMember]:
    server = grpc.aio.server(options=server_options())
    engine_pb2_grpc.add_EngineServicer_to_server(Silent(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield EngineMember(engine_id="decode/silent", role="decode", address=f"127.0.0.1:{port}", incarnation="x")
    await server.stop(None)


def test_an_engine_that_does_not_answer_is_left_out_and_counted(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_service.gateway.scrape.TIMEOUT_S", 0.3)  # enough for the engine that answers

    async def scenario() -> None:
        gone = EngineMember(engine_id="decode/gone", role="decode", address="127.0.0.1:1", incarnation="x")
        async with local_cluster(tiny_model_dir) as cluster, silent_engine() as silent:
            found = await scrape(cluster, [silent, gone])
        ups = {dict(labels)["engine"]: up for (name, labels), up in found.items() if name == "pd_engine_up"}
        assert ups == {"prefill/0": 1, "decode/1": 1, "decode/silent": 0, "decode/gone": 0}
        assert value(found, "pd_engine_scrape_failures_total") == 2
        assert not [
            labels for name, labels in found if ("engine", "decode/silent") in labels and name != "pd_engine_up"
        ]

    run_async(scenario())


def test_no_name_is_both_the_gateways_and_an_engines(tiny_model_dir: Path) -> None:
    async def scenario() -> set[str]:
        async with local_cluster(tiny_model_dir) as cluster:
            text = cluster.nodes["decode/1"]._metrics.render().decode()
            return {family.name for family in text_string_to_metric_families(text)}

    own = {family.name for family in text_string_to_metric_families(GatewayMetrics().render().decode())}
    assert not own & run_async(scenario())


def test_merging_keeps_every_sample_of_every_engine() -> None:
    text = '# HELP pd_x_total X.\n# TYPE pd_x_total counter\npd_x_total{kind="a"} 1.0\npd_x_total{kind="b"} 2.0\n'
    (family,) = merged({"one": text, "two": text})
    assert [(s.name, s.labels, s.value) for s in family.samples] == [
        ("pd_x_total", {"engine": engine, "kind": kind}, number)
        for engine in ("one", "two")
        for kind, number in (("a", 1.0), ("b", 2.0))
    ]


# ---- pairs of engines


@asynccontextmanager
async def operators_door(cluster: LocalCluster) -> AsyncIterator[admin_pb2_grpc.AdminStub]:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        servicer = AdminServicer(channel, RecentRequests(1), cluster.directory.members)
        admin_pb2_grpc.add_AdminServicer_to_server(servicer, server)
        await server.start()
        yield admin_pb2_grpc.AdminStub(channel)
        await server.stop(None)


@pytest.mark.parametrize("plane", ["memory", "shm", "tcp"])
def test_every_pair_is_checked_without_touching_a_cache(tiny_model_dir: Path, plane: str) -> None:
    async def scenario() -> None:
        settings = EngineSettings(planes=(plane,))  # type: ignore[arg-type]
        async with local_cluster(tiny_model_dir, prefill=2, settings=settings) as cluster:
            expected = await cluster.generate(PROMPT, 6)
            async with operators_door(cluster) as admin:
                checked = await admin.CheckPeers(admin_pb2.CheckPeersRequest())
                one = await admin.CheckPeers(admin_pb2.CheckPeersRequest(prefill="prefill/1"))
            assert [(p.prefill, p.decode) for p in checked.pairs] == [
                ("prefill/0", "decode/2"),
                ("prefill/1", "decode/2"),
            ]
            assert [p.prefill for p in one.pairs] == ["prefill/1"]
            for pair in checked.pairs:
                report = pair.report
                assert (report.problem, report.plane, report.buffers) == ("", plane, 4)
                assert report.round_trip_ms > 0
                assert report.bytes_per_second > 0
            assert await cluster.generate(PROMPT, 6) == expected  # partly from the caches

    run_async(scenario())


def test_a_pair_that_cannot_talk_says_why(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir, settings=EngineSettings(planes=("shm",))) as cluster:
            reader = cluster.nodes["decode/1"]
            unknown = await reader._reader.examine(cluster.nodes["prefill/0"].address, "another life")
            assert "incarnation: the reader asks for 'another life'" in unknown.problem
            async with operators_door(cluster) as admin:
                with pytest.raises(
                    grpc.aio.AioRpcError, match="no prefill engine 'prefill/9' serves; there are: prefill/0"
                ):
                    await admin.CheckPeers(admin_pb2.CheckPeersRequest(prefill="prefill/9"))

    run_async(scenario())


def first_of(runs: Runs) -> Runs:
    return Runs(**{item.name: getattr(runs, item.name)[:1] for item in fields(Runs)})


def test_a_probe_may_read_null_blocks_and_nothing_else() -> None:
    """Over a plane that asks the guard."""

    async def scenario() -> None:
        async with holder_end() as holder, reader_end("tcp") as end:
            ticket = holder.hold(0)
            await end.pull(holder.hold(1), index=1)
            peer = await end.reader._peer(ticket.address, ticket.incarnation)
            assert peer.plane is not None
            lease_id = await peer.probe()
            assert await peer.probe() == lease_id
            runs = null_block_runs(LAYOUT)
            assert runs.num_bytes > 2**20
            assert not runs.src_offset.any()
            await asyncio.to_thread(peer.plane.read, lease_id, first_of(runs), 5.0)
            beyond = replace(first_of(runs), src_offset=runs.length[:1])
            with pytest.raises(PlaneError, match="not all part of the lease"):
                await asyncio.to_thread(peer.plane.read, lease_id, beyond, 5.0)

    run_async(scenario())
