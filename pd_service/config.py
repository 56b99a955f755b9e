"""Configuration of a service: one YAML file, overridden by flags.

Every section is a frozen pydantic model that refuses unknown keys, so a typing error is an error. `EngineConfig` is
what one engine receives: the pool's settings and the model's, nothing about the rest of the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from pd_service.errors import ConfigError

Role = Literal["prefill", "decode", "mixed"]
PoolRole = Literal["prefill", "decode"]
PlaneName = Literal["memory", "shm", "mooncake", "tcp"]

DeviceName = Literal["cpu", "npu"]
Dtype = Literal["float32", "bfloat16"]

PROTOCOL_VERSION = 3
MAX_MESSAGE_BYTES = 64 * 2**20  # on every gRPC client and server of ours; a prompt of 2 million tokens is under 8 MB


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """What a device's operators compute in, and the only size of block they take; None: any."""

    dtypes: tuple[Dtype, ...]
    block_size: int | None


DEVICE_LIMITS: dict[DeviceName, DeviceLimits] = {
    "cpu": DeviceLimits(dtypes=("float32", "bfloat16"), block_size=None),
    "npu": DeviceLimits(dtypes=("bfloat16",), block_size=128),
}


def _require_computable(device: DeviceName, dtype: Dtype, block_size: int) -> None:
    """Raises ValueError for what the device's operators do not take."""
    limits = DEVICE_LIMITS[device]
    if dtype not in limits.dtypes:
        raise ValueError(f"device {device!r} does not compute in dtype {dtype!r}; allowed: {', '.join(limits.dtypes)}")
    if limits.block_size not in (None, block_size):
        raise ValueError(f"device {device!r} needs engine.block_size {limits.block_size} (given: {block_size})")


class SpeculativeSettings(_Section):
    """Speculative decoding: guesses at further tokens, verified in one step; the output stays the same.

    "ngram" proposes what followed the last few tokens earlier in the request, for every model; "mtp" uses the model's
    own layer for multi-token prediction.
    """

    method: Literal["none", "ngram", "mtp"] = "none"
    num_tokens: Annotated[int, Field(ge=1, le=16)] = 3  # guesses per request and step, at most
    ngram_max: Annotated[int, Field(ge=1, le=16)] = 4  # longest and shortest run of tokens looked for
    ngram_min: Annotated[int, Field(ge=1, le=16)] = 2

    @model_validator(mode="after")
    def _range_is_one(self) -> SpeculativeSettings:
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min ({self.ngram_min}) must not be more than ngram_max ({self.ngram_max})")
        return self


class EngineSettings(_Section):
    """What every engine of a service shares, so that KV can move between them."""

    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    max_model_len: Annotated[int, Field(ge=2)] | None = None  # tokens; None: what the model states
    max_num_batched_tokens: Annotated[int, Field(ge=1)] = 256  # token budget of one step
    max_num_seqs: Annotated[int, Field(ge=1)] = 64  # requests that may own blocks at once
    max_waiting: Annotated[int, Field(ge=0)] = 256  # requests that may wait for blocks; one more is refused
    max_preemptions: Annotated[int, Field(ge=0)] = 2  # so often, then a request gets all its blocks or none
    priority_step_s: Annotated[float, Field(gt=0)] = 10.0  # seconds of waiting that one level of priority is worth
    prefix_cache: bool = True  # KV of earlier requests is used again where tokens and salt are the same
    speculative: SpeculativeSettings = SpeculativeSettings()
    lease_s: Annotated[float, Field(gt=0)] = 10.0  # a ticket's life without renewal
    pull_timeout_s: Annotated[float, Field(gt=0)] = 30.0  # from a pull's start to its end
    digest_sample_rate: Annotated[float, Field(ge=0, le=1)] = 0.01  # of what a pull brings, compared with the holder's
    planes: Annotated[tuple[PlaneName, ...], Field(min_length=1)] = ("memory", "shm", "tcp")  # best first

    @property
    def max_step_tokens(self) -> int:
        """Most tokens of one request that a step needs slots for: a draft layer writes some beyond the budget."""
        has_draft_layer = self.speculative.method == "mtp"
        return self.max_num_batched_tokens + (self.speculative.num_tokens - 1 if has_draft_layer else 0)


class PoolSettings(_Section):
    """One pool. Each engine takes `num_cpus` and `resources` of Ray, and runs `threads` torch threads."""

    replicas: Annotated[int, Field(ge=0)] = 1  # at the start; `pd-service scale` changes it
    min_replicas: Annotated[int, Field(ge=0)] = 0  # bounds of `pd-service scale`
    max_replicas: Annotated[int, Field(ge=1)] = 64  # of engines that drain as well
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}  # such as {NPU: 1}, per engine
    placement: Literal["spread", "pack"] = "spread"  # over hosts with the fewest engines of the pool, or with the most
    env: dict[str, str] = {}  # environment variables of the engines' processes
    threads: Annotated[int, Field(ge=1)] = 1
    kv_cache_bytes: ByteSize = ByteSize(2**30)

    @model_validator(mode="after")
    def _is_possible(self) -> PoolSettings:
        if not self.min_replicas <= self.replicas <= self.max_replicas:
            raise ValueError(
                f"replicas ({self.replicas}) must be from min_replicas ({self.min_replicas}) "
                f"to max_replicas ({self.max_replicas})"
            )
        if not self.num_cpus and not self.resources:
            raise ValueError("an engine needs num_cpus or resources above 0, or Ray could not place it")
        return self

    @property
    def demand(self) -> dict[str, float]:
        """What one engine takes of Ray's resources."""
        return self.resources | ({"CPU": self.num_cpus} if self.num_cpus else {})


class Pools(_Section):
    prefill: PoolSettings = PoolSettings()
    decode: PoolSettings = PoolSettings()


class RetrySettings(_Section):
    """How long the story of a request goes round before it gives up."""

    max_failures: Annotated[int, Field(ge=0)] = 8  # failures in a row without a new token
    backoff_s: Annotated[float, Field(ge=0)] = 0.05  # doubled after each failure in a row
    max_backoff_s: Annotated[float, Field(ge=0)] = 1.0
    engine_wait_s: Annotated[float, Field(ge=0)] = 120.0  # for an engine of an empty pool to appear


class GatewaySettings(_Section):
    grpc: str = "127.0.0.1:50051"  # host:port; port 0 takes a free one
    http: str = "127.0.0.1:8000"
    max_requests: Annotated[int, Field(ge=1)] = 1024  # live at once; one more is refused
    recent_requests: Annotated[int, Field(ge=1)] = 256  # that ended and can still be explained
    local_prefill_max_tokens: Annotated[int, Field(ge=0)] = 0  # prompts up to this go to a decode engine alone; 0: none
    retry: RetrySettings = RetrySettings()


class RaySettings(_Section):
    address: str | None = None  # of a running Ray cluster; None: start a local one
    namespace: str = "pd-service"  # the service's name in a cluster that is joined: one service per name


class SupervisionSettings(_Section):
    """How engines are watched, replaced and let go."""

    probe_s: Annotated[float, Field(gt=0)] = 2.0  # between looks at an engine's step loop
    stall_s: Annotated[float, Field(gt=0)] = 30.0  # without an answer, or with work and no step's end: it is replaced
    start_s: Annotated[float, Field(gt=0)] = 900.0  # from its resources to ready; then it counts as failed
    backoff_s: Annotated[float, Field(gt=0)] = 0.1  # pause after a failure; doubled with each further one in a row
    max_backoff_s: Annotated[float, Field(gt=0)] = 30.0  # an engine that was ready for so long ends the row
    drain_s: Annotated[float, Field(gt=0)] = 60.0  # for running work to end when its engine is to leave
    orphan_s: Annotated[float, Field(gt=0)] = 300.0  # without a controller: an engine ends itself


class ServiceConfig(_Section):
    """The whole service."""

    model: str = "demo"  # a local Hugging Face directory, or "demo"
    served_model_name: str | None = None  # None: the directory's name
    dtype: Dtype = "float32"
    device: DeviceName = "cpu"
    engine: EngineSettings = EngineSettings()
    pools: Pools = Pools()
    gateway: GatewaySettings = GatewaySettings()
    ray: RaySettings = RaySettings()
    supervision: SupervisionSettings = SupervisionSettings()

    @model_validator(mode="after")
    def _device_takes_it(self) -> ServiceConfig:
        _require_computable(self.device, self.dtype, self.engine.block_size)
        return self

    @model_validator(mode="after")
    def _budget_feeds_every_request(self) -> ServiceConfig:
        engine = self.engine
        if engine.max_num_batched_tokens < engine.max_num_seqs:
            raise ValueError(
                f"engine.max_num_batched_tokens ({engine.max_num_batched_tokens}) must be at least "
                f"engine.max_num_seqs ({engine.max_num_seqs}), or some running request would never get its token"
            )
        return self

    def pool(self, role: Role) -> PoolSettings:
        """The pool an engine of this role belongs to."""
        return self.pools.prefill if role == "prefill" else self.pools.decode

    def engine_config(self, role: Role, model_dir: Path) -> EngineConfig:
        pool = self.pool(role)
        return EngineConfig(
            role=role,
            model_dir=model_dir,
            dtype=self.dtype,
            device=self.device,
            threads=pool.threads,
            kv_cache_bytes=pool.kv_cache_bytes,
            settings=self.engine,
        )


class EngineConfig(_Section):
    """One engine."""

    role: Role
    model_dir: Path
    dtype: Dtype = "float32"
    device: DeviceName = "cpu"
    threads: int = 1
    kv_cache_bytes: ByteSize = ByteSize(2**30)
    settings: EngineSettings = EngineSettings()

    @model_validator(mode="after")
    def _device_takes_it(self) -> EngineConfig:
        _require_computable(self.device, self.dtype, self.settings.block_size)
        return self


def load_config(path: Path | None, overrides: dict[str, Any]) -> ServiceConfig:
    """The configuration in `path` (or the defaults) with `overrides`, whose keys are dotted ("pools.decode.replicas").

    Raises ConfigError with every offending key.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read the configuration {path}: {error}") from error
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"{path}: expected a mapping at the top, found {type(loaded).__name__}")
        tree = loaded or {}
    for dotted, value in overrides.items():
        *parents, leaf = dotted.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{path}: {parent!r} must be a mapping to override {dotted!r}")
        node[leaf] = value
    try:
        return ServiceConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(describe(error)) from error


def describe(error: ValidationError) -> str:
    """One line per offending field: its dotted name, what is wrong, what was given unless the message says it."""
    lines = []
    for e in error.errors():
        name = ".".join(str(part) for part in e["loc"]) or "configuration"
        given = "" if e["type"] in ("extra_forbidden", "missing", "value_error") else f" (given: {e['input']!r})"
        what = "unknown field" if e["type"] == "extra_forbidden" else e["msg"].removeprefix("Value error, ")
        lines.append(f"{name}: {what}{given}")
    return "; ".join(lines)
