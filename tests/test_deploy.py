"""The files of `deploy/`: they parse, follow their schemas, and name only what exists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.main import get_command

from pd_service.cli import app
from pd_service.config import ServiceConfig
from pd_service.engine.request_state import PullStats
from pd_service.gateway import scrape
from pd_service.metrics import GatewayMetrics
from pd_service.node.engine_metrics import EngineMetrics
from pd_service.rpc.engine_pb2 import BlockUsage, EngineStatus

DEPLOY = Path(__file__).parent.parent / "deploy"
MANIFESTS = sorted((DEPLOY / "kuberay").glob("*.yaml"))
KUBERAY_SCHEMA = json.loads((DEPLOY / "kuberay" / "schema.json").read_text())


def manifests() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        yield from yaml.safe_load_all(path.read_text())


def one(kind: str) -> dict[str, Any]:
    (found,) = [manifest for manifest in manifests() if manifest["kind"] == kind]
    return found


@pytest.mark.parametrize("manifest", list(manifests()), ids=lambda manifest: manifest["kind"])
def test_manifests_follow_their_schema(manifest: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(KUBERAY_SCHEMA)
    jsonschema.Draft202012Validator(KUBERAY_SCHEMA).validate(manifest)


def test_the_schema_sees_a_typing_error() -> None:
    cluster = one("RayCluster")
    cluster["spec"]["workerGroupSpecs"][0]["maxReplica"] = 3
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(KUBERAY_SCHEMA).validate(cluster)


def test_each_pool_fits_the_workers_that_are_kept_for_it() -> None:
    config = ServiceConfig.model_validate(yaml.safe_load(one("ConfigMap")["data"]["service.yaml"]))
    groups = {group["groupName"]: group for group in one("RayCluster")["spec"]["workerGroupSpecs"]}
    assert groups.keys() == {"prefill", "decode"}
    for name, group in groups.items():
        pool = config.pools.prefill if name == "prefill" else config.pools.decode
        offered = json.loads(json.loads(group["rayStartParams"]["resources"]))
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert pool.resources == offered == {name: 1}
        assert pool.num_cpus <= float(limits["cpu"])
        assert pool.max_replicas == group["maxReplicas"]


def test_the_doors_are_where_the_service_listens() -> None:
    config = ServiceConfig.model_validate(yaml.safe_load(one("ConfigMap")["data"]["service.yaml"]))
    ports = {port["name"]: port["port"] for port in one("Service")["spec"]["ports"]}
    assert ports == {
        "grpc": int(config.gateway.grpc.rpartition(":")[2]),
        "http": int(config.gateway.http.rpartition(":")[2]),
    }
    (head,) = one("RayCluster")["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert ports.items() <= {port["name"]: port["containerPort"] for port in head["ports"]}.items()


def test_the_cluster_launchers_file_follows_rays_schema() -> None:
    schema = json.loads((files("ray.autoscaler") / "ray-schema.json").read_text())
    jsonschema.validate(yaml.safe_load((DEPLOY / "ray" / "cluster.yaml").read_text()), schema)


@pytest.mark.parametrize("path", sorted((DEPLOY / "docker").iterdir()), ids=lambda path: path.name)
def test_images_are_built_from_a_base_that_can_be_chosen_and_from_files_that_there_are(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert "FROM ${BASE_IMAGE}" in lines
    assert lines[lines.index("FROM ${BASE_IMAGE}") - 1].startswith("ARG BASE_IMAGE")
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied
    assert [name for name in copied if not (DEPLOY.parent / name).exists()] == []


@pytest.mark.parametrize(
    "path", [DEPLOY / "bare-hosts.md", DEPLOY / "ray" / "cluster.yaml"], ids=lambda path: path.name
)
def test_commands_and_options_that_are_named_exist(path: Path) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    named = re.findall(r"pd-service (serve|status|scale|drain|stop|\w+) (.*)", path.read_text())
    assert named
    for command, rest in named:
        options = {option for parameter in commands[command].params for option in parameter.opts}
        assert set(re.findall(r"(?<!\S)--?[a-z][\w-]*", rest)) <= options, (command, rest)


def exposed_names() -> set[str]:
    """Every sample a scrape of a gateway can hold."""
    status = EngineStatus(blocks=[BlockUsage(attn_type="FullAttention", used=1, total=2)])
    status.leases_ended["confirmed"] = status.pull_failures["timeout"] = 1
    engine, gateway = EngineMetrics(lambda: status), GatewayMetrics()
    engine.observe_pull(PullStats(kv_bytes=1, plane="tcp", received_ms=1.0, wire_ms=1.0, confirm_ms=1.0))
    text = (engine.render() + gateway.render()).decode()
    added = re.findall(r'GaugeMetricFamily\("(pd_\w+)"', Path(scrape.__file__).read_text())
    return {*added, *re.findall(r"^(?:# TYPE )?(pd_\w+)", text, re.MULTILINE)}


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    panels = json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    asked = {name for panel in panels for target in panel["targets"] for name in re.findall(r"pd_\w+", target["expr"])}
    known = exposed_names()
    families = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in known}
    assert {name for name in asked if re.sub(r"_(bucket|total)$", "", name) not in families} == set()


def test_prometheus_asks_the_default_http_door() -> None:
    (job,) = yaml.safe_load((DEPLOY / "monitoring" / "prometheus.yml").read_text())["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": [ServiceConfig().gateway.http]}]
