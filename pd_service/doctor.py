"""What `pd-service doctor` looks at: whether a service with this configuration could start on this host."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from pd_service.config import ServiceConfig
from pd_service.engine.memory_plan import GIB, PoolPlan, lack_of_memory, plan_pools
from pd_service.errors import ConfigError
from pd_service.host_memory import available_bytes
from pd_service.models.base import DraftingLM
from pd_service.models.config import MODEL_REGISTRY, checkpoint_files, load_model_config, model_class


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    is_ok: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """All findings in the order an operator would ask; the memory of each pool where the model is known."""

    findings: tuple[Finding, ...]
    pools: tuple[PoolPlan, ...]
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What a class of models says about itself. `has_drafts`: some of them bring a layer for multi-token prediction."""

    name: str
    family: str
    attention: str
    examples: tuple[str, ...]
    has_drafts: bool


def architectures() -> list[Architecture]:
    """Every architecture that can be served, by family."""
    found = []
    for name in MODEL_REGISTRY:
        model = model_class(name)
        found.append(
            Architecture(
                name=name,
                family=model.family_name,
                attention=model.attention,
                examples=model.examples,
                has_drafts=issubclass(model, DraftingLM),
            )
        )
    return sorted(found, key=lambda one: (one.family, one.name))


def examine(config: ServiceConfig) -> Examination:
    """Never raises for what it finds."""
    available = available_bytes()
    findings, pools = _model(config, available)
    return Examination(
        findings=(_versions(), _processors(config), *_doors(config), *findings),
        pools=tuple(pools),
        available_bytes=available,
    )


def _versions() -> Finding:
    names = ("torch", "ray", "grpcio", "transformers")
    found = ", ".join(f"{name} {version(name)}" for name in names)
    return Finding("software", True, f"Python {platform.python_version()}, {found}")


def _processors(config: ServiceConfig) -> Finding:
    pools = (config.pools.prefill, config.pools.decode)
    threads = sum(pool.replicas * pool.threads for pool in pools)
    cores = len(os.sched_getaffinity(0))
    text = f"{threads} engine threads on {cores} cores"
    if config.ray.address is None and threads > cores:
        return Finding(
            "processors",
            False,
            f"{text}: threads that wait for each other slow everything; lower pools.*.threads or pools.*.replicas",
        )
    return Finding("processors", True, text)


def _doors(config: ServiceConfig) -> Iterator[Finding]:
    for name, address in (("gateway.grpc", config.gateway.grpc), ("gateway.http", config.gateway.http)):
        host, _, port = address.rpartition(":")
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, int(port)))
        except (OSError, ValueError) as error:
            yield Finding(name, False, f"{address} cannot be bound: {error}")
        else:
            yield Finding(name, True, f"{address} is free")


def _model(config: ServiceConfig, available: int) -> tuple[list[Finding], list[PoolPlan]]:
    if config.model == "demo":
        from pd_service.demo import cached_demo_model_dir

        cached = cached_demo_model_dir()
        if cached is None:
            text = "the demo model is not made yet; `pd-service serve` makes it (about a minute)"
            return [Finding("model", True, text)], []
        directory = cached
    else:
        directory = Path(config.model).expanduser()
    try:
        model, files = load_model_config(directory), checkpoint_files(directory)
    except ConfigError as error:
        return [Finding("model", False, str(error))], []
    size = sum(file.stat().st_size for file in files) / GIB
    text = f"{model.architecture} in {directory}, {size:.2f} GiB, {model.max_model_len} tokens at most"
    found = Finding("model", True, text)
    try:
        pools = plan_pools(config, directory, model)
    except ConfigError as error:
        return [found, Finding("memory", False, str(error))], []
    return [found, _memory(config, pools, available)], pools


def _memory(config: ServiceConfig, pools: list[PoolPlan], available: int) -> Finding:
    """Of this host: on a cluster that is joined, engines may stand anywhere, and each looks at its own."""
    lack = lack_of_memory(pools, available)
    if lack is not None and config.ray.address is None:
        return Finding("memory", False, lack)
    needed = sum(pool.replicas * pool.plan.total_bytes for pool in pools)
    return Finding("memory", True, f"the engines need {needed / GIB:.2f} GiB, {available / GIB:.2f} are free here")
