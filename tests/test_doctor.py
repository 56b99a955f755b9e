"""What doctor and models say, and what the command line leaves alone until it is needed."""

from __future__ import annotations

import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from pd_service import views
from pd_service.config import PoolSettings, ServiceConfig
from pd_service.doctor import Examination, architectures, examine
from pd_service.host_memory import available_bytes
from pd_service.models.config import MODEL_REGISTRY
from tests.tiny_model import make_tiny_llama


def shown(table: RenderableType) -> str:
    """On a terminal of 80 columns."""
    console = Console(file=StringIO(), width=80)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def memory_findings(found: Examination) -> list[tuple[bool, str]]:
    return [(one.is_ok, one.text) for one in found.findings if one.check == "memory"]


def service_config(directory: Path, **decode: object) -> ServiceConfig:
    config = ServiceConfig(model=str(directory))
    decode_pool = PoolSettings.model_validate(decode)
    return config.model_copy(update={"pools": config.pools.model_copy(update={"decode": decode_pool})})


def test_a_model_that_fits_is_shown_with_what_each_pool_holds(tiny_model_dir: Path) -> None:
    found = examine(service_config(tiny_model_dir, replicas=2, kv_cache_bytes="64MiB"))
    ((is_ok, _),) = memory_findings(found)
    assert is_ok
    text = shown(views.memory_table(found.pools, found.available_bytes))
    decode = found.pools[1].plan
    for word in ("1 x prefill", "2 x decode", "weights", "KV cache", "FullAttention", str(decode.num_tokens)):
        assert word in text
    assert "…" not in text


def test_more_engines_than_fit_are_a_problem_that_names_the_settings(tiny_model_dir: Path) -> None:
    engines = available_bytes() // 2**30 + 2
    found = examine(service_config(tiny_model_dir, replicas=engines, kv_cache_bytes="1GiB"))
    ((is_ok, text),) = memory_findings(found)
    assert not is_ok
    assert f"{engines} x decode" in text
    assert "pools.*.kv_cache_bytes or pools.*.replicas" in text
    assert found.pools  # the table shows how much too much it is


def test_a_cache_without_room_for_a_request_is_a_problem_that_names_the_settings(tiny_model_dir: Path) -> None:
    found = examine(service_config(tiny_model_dir, kv_cache_bytes=1000))
    ((is_ok, text),) = memory_findings(found)
    assert not is_ok
    assert "pools.decode.kv_cache_bytes" in text


def test_a_foreign_architecture_is_refused_with_the_list(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    (problem,) = [one for one in examine(ServiceConfig(model=str(tmp_path))).findings if one.check == "model"]
    assert not problem.is_ok
    assert "GPT2LMHeadModel" in problem.text
    assert all(name in problem.text for name in MODEL_REGISTRY)


def test_every_registered_architecture_is_listed_whole_with_what_it_says_of_itself() -> None:
    listed = architectures()
    assert {one.name for one in listed} == set(MODEL_REGISTRY)
    assert all(one.family and one.attention and one.examples for one in listed)
    text = shown(views.architectures_table(listed))
    for one in listed:
        assert one.name in text
        assert one.family in text
    assert "…" not in text


@pytest.mark.parametrize(("limit", "used", "expected"), [("max", "5", 8192), ("6000", "1000", 5000), ("10", "20", 0)])
def test_the_narrower_of_host_and_container_counts(tmp_path: Path, limit: str, used: str, expected: int) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  99 kB\nMemAvailable:   8 kB\n")
    assert available_bytes(meminfo, tmp_path) == 8192  # without a cgroup
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(used + "\n")
    assert available_bytes(meminfo, tmp_path) == expected


def imported_by(program: str) -> set[str]:
    """Top-level names of all modules that a fresh interpreter has imported once `program` has run."""
    script = f"import sys\n{program}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_help_comes_without_torch_ray_and_transformers() -> None:
    program = "import contextlib\nfrom pd_service.cli import app\nwith contextlib.suppress(SystemExit): app(['--help'])"
    names = imported_by(program)
    assert "pd_service" in names
    assert not names & {"torch", "ray", "transformers", "fastapi"}


def test_an_engine_comes_without_transformers_and_ray(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path)
    program = (
        "from pathlib import Path\nfrom pd_service.config import EngineConfig\n"
        "from pd_service.node.node import EngineNode\n"
        f"EngineNode(EngineConfig(role='mixed', model_dir=Path({str(directory)!r}), kv_cache_bytes=2**22))"
    )
    names = imported_by(program)
    assert "torch" in names
    assert not names & {"transformers", "tokenizers", "ray", "fastapi", "sympy"}  # sympy: torch's compiler is at work


def test_a_service_needs_no_torch_before_its_engines_are_on_their_way() -> None:
    assert not imported_by("import pd_service.cluster.service") & {"torch", "transformers", "fastapi"}
