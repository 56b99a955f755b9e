"""What holds of the project's own files: who imports whom, and that generated code is fresh."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pd_service.config import ServiceConfig

ROOT = Path(__file__).parent.parent
PACKAGES = ("pd_service", "kv_cache", "transfer")

# Part of the project: what else of the project, and which of the libraries that are kept in one place, it may import.
# A part is the longest matching prefix; every part may import itself.
BASE = {"pd_service.config", "pd_service.errors", "pd_service.request"}
WIRE = BASE | {"pd_service.rpc", "pd_service.channels", "pd_service.wire"}
OPS = BASE | {"pd_service.ops"}
MODELS = OPS | {"pd_service.models", "kv_cache"}
DEVICE = BASE | {"pd_service.device", "pd_service.host_memory", "kv_cache"}
ENGINE = MODELS | DEVICE | {"pd_service.engine"}
NODE = ENGINE | WIRE | {"pd_service.node", "transfer", "grpc"}
GATEWAY = WIRE | {"pd_service.gateway", "pd_service.metrics", "pd_service.models.config", "grpc"}
CLUSTER = GATEWAY | NODE | {"pd_service.cluster", "pd_service.progress", "ray"}
ALLOWED: dict[str, set[str]] = {
    "kv_cache": set(),
    "transfer": set(),
    "pd_service.errors": set(),
    "pd_service.request": set(),
    "pd_service.config": {"pd_service.errors"},
    "pd_service.rpc": {"grpc"},
    "pd_service.channels": BASE | {"grpc"},
    "pd_service.wire": WIRE,
    "pd_service.metrics": BASE,
    "pd_service.progress": set(),
    "pd_service.host_memory": set(),
    "pd_service.device": DEVICE,
    "pd_service.ops": OPS,
    "pd_service.models": MODELS,
    "pd_service.engine": ENGINE,
    "pd_service.node": NODE,
    "pd_service.gateway": GATEWAY,
    "pd_service.cluster": CLUSTER,
    "pd_service.demo": BASE,
    "pd_service.doctor": MODELS | {"pd_service.demo", "pd_service.host_memory", "pd_service.engine.memory_plan"},
    "pd_service.explain_view": WIRE,
    "pd_service.views": WIRE | {"pd_service.doctor", "pd_service.engine.memory_plan"},
    "pd_service.operate": WIRE | {"pd_service.progress", "grpc"},
    "pd_service.detach": set(),
    "pd_service.cli": CLUSTER
    | {f"pd_service.{name}" for name in ("demo", "detach", "doctor", "explain_view", "operate", "views")},
}
GUARDED = {*ALLOWED, "grpc", "ray", "pd_service"}


def modules() -> list[tuple[str, Path]]:
    return [
        (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    ]


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part_of(module: str, parts: set[str]) -> str | None:
    matches = [part for part in parts if module == part or module.startswith(part + ".")]
    return max(matches, key=len, default=None)


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_go_one_way(module: str, path: Path) -> None:
    part = part_of(module, set(ALLOWED))
    if module == "pd_service":
        assert imports(path) == {"os"}
        return
    assert part is not None, f"{module} belongs to no part: say in this test what it may import"
    for imported in imports(path):
        guarded = part_of(imported, GUARDED)
        if guarded is None or guarded == part:
            continue
        assert part_of(imported, ALLOWED[part]), f"{module} ({part}) must not import {imported}"


def test_the_import_rule_sees_a_wrong_arrow() -> None:
    assert part_of("pd_service.node.reader", {"pd_service", "pd_service.node"}) == "pd_service.node"
    assert part_of("grpc.aio", ALLOWED["pd_service.engine"]) is None
    assert part_of("ray", ALLOWED["pd_service.node"]) is None
    assert part_of("pd_service.models.llama", ALLOWED["pd_service.gateway"]) is None


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    sources = sorted(path.relative_to(ROOT / "proto").as_posix() for path in (ROOT / "proto").rglob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={ROOT / 'proto'}", *outputs, *sources]
    subprocess.run(command, check=True)
    made = {path.name: path.read_text() for path in (tmp_path / "pd_service/rpc").iterdir()}
    kept = {p.name: p.read_text() for p in (ROOT / "pd_service/rpc").glob("*pb2*") if p.is_file()}
    assert made == kept, "run `make proto`"


def test_proto_is_no_package() -> None:
    assert not list((ROOT / "proto").rglob("__init__.py"))


@pytest.mark.parametrize("path", sorted((ROOT / "deploy").glob("*.yaml")), ids=lambda path: path.name)
def test_example_configurations_are_valid(path: Path) -> None:
    assert ServiceConfig.model_validate(yaml.safe_load(path.read_text()))


def test_every_dependency_has_its_reason() -> None:
    inside = False
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        if line.endswith("= [") and line.split()[0] in ("dependencies", "npu", "mooncake", "demo", "dev"):
            inside = True
        elif line.startswith("]"):
            inside = False
        elif inside and "pd-service[" not in line:
            assert "#" in line, f"say why: {line.strip()}"


@pytest.mark.parametrize("path", sorted((ROOT / "proto").rglob("*.proto")), ids=lambda path: path.name)
def test_every_field_of_the_protocol_says_what_it_holds(path: Path) -> None:
    before = ""
    for line in map(str.strip, path.read_text().splitlines()):
        if re.match(r"(optional |repeated )?[\w.]+ \w+ = \d+", line):
            assert before.startswith("//"), f"{path.name}: {line}"
        before = line
