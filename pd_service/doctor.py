"""What `pd-service doctor` looks at: whether a service with this configuration could start on this host."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from pd_service.config import ServiceConfig
from pd_service.errors import ConfigError
from pd_service.models.config import ModelConfig, checkpoint_files, load_model_config
from pd_service.models.loader import build_model

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    is_ok: bool
    text: str


def examine(config: ServiceConfig) -> list[Finding]:
    """All findings, in the order an operator would ask; never raises for what it finds."""
    return [_versions(), _processors(config), *_doors(config), *_model(config)]


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


def _model(config: ServiceConfig) -> Iterator[Finding]:
    if config.model == "demo":
        from pd_service.demo import cached_demo_model_dir

        cached = cached_demo_model_dir()
        if cached is None:
            yield Finding("model", True, "the demo model is not made yet; `pd-service serve` makes it (about a minute)")
            return
        directory = cached
    else:
        directory = Path(config.model).expanduser()
    try:
        model, files = load_model_config(directory), checkpoint_files(directory)
    except ConfigError as error:
        yield Finding("model", False, str(error))
        return
    yield Finding("model", True, f"{model.architecture} in {directory}, {model.max_model_len} tokens at most")
    yield _memory(config, model, sum(file.stat().st_size for file in files))


def _memory(config: ServiceConfig, model: ModelConfig, weight_bytes: int) -> Finding:
    """Weights and caches of all engines against what the host has free."""
    pools = (config.pools.prefill, config.pools.decode)
    engines = sum(pool.replicas for pool in pools)
    caches = sum(pool.replicas * int(pool.kv_cache_bytes) for pool in pools)
    dtype = getattr(torch, config.dtype)
    info = build_model(model, dtype=dtype, device="meta", block_size=config.engine.block_size).get_cache_info()
    per_token = sum(entry.bytes_per_token for layer in info.layer_infos for entry in layer.caches)
    needed = engines * weight_bytes + caches
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = (
        f"{engines} engines need {needed / GIB:.1f} GiB (weights {weight_bytes / GIB:.2f} each, caches "
        f"{caches / GIB:.1f}), {available / GIB:.1f} are free; {per_token} bytes of cache per token, so "
        f"{int(config.pools.decode.kv_cache_bytes) // per_token} tokens fit a decode engine"
    )
    if config.ray.address is None and needed > available:
        return Finding("memory", False, f"{text}: lower pools.*.kv_cache_bytes or pools.*.replicas")
    return Finding("memory", True, text)
