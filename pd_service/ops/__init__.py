"""The operators whose implementation depends on the device, behind one protocol.

A device is one module here with one function per operator; `get_ops` is the only place that knows which modules there
are. Models receive the module as an argument and never import one. `cpu.py` is the specification: every other device
must compute what it computes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch

from pd_service.errors import ConfigError
from pd_service.ops.metadata import ForwardMetadata

DEVICE_MODULES = {"cpu": "pd_service.ops.cpu", "npu": "pd_service.ops.npu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """A layer's experts: `gate_up` and `down` from `Ops.pack_experts`, biases [experts, out] or None.

    Before packing, `gate_up` is [experts, 2 * dim, hidden] and `down` [experts, hidden, dim].
    """

    num_experts: int
    gate_up: list[torch.Tensor]
    down: list[torch.Tensor]
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """A layer of norm, grouped-query attention, norm and gated MLP; matrices from `Ops.pack_linear`.

    Before packing, `qkv` is [(heads + 2 * kv_heads) * head_dim, hidden], `o` [hidden, heads * head_dim], `gate_up`
    [2 * inner_size, hidden] with all gates first, `down` [hidden, inner_size]; norms are [hidden]. `prepared` is where
    a device keeps what it derives from these once.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    scale: float
    attn_type: str
    sliding_window: int | None
    prepared: dict[str, object] = field(default_factory=dict)


class Ops(Protocol):
    """What a device provides. Shapes and rules stand at the functions of `cpu.py`."""

    PAGED_ATTENTION: str

    def pack_linear(self, weight: torch.Tensor) -> torch.Tensor: ...

    def linear(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...

    def gated_mlp(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor: ...

    def pack_head_linear(self, weight: torch.Tensor) -> list[torch.Tensor]: ...

    def head_linear(self, x: torch.Tensor, packed: list[torch.Tensor]) -> torch.Tensor: ...

    def pack_experts(self, weight: torch.Tensor) -> list[torch.Tensor]: ...

    def experts(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        weights: ExpertWeights,
        activate: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor: ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def rotary_tables(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor: ...

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor: ...

    def gelu_and_mul(self, x: torch.Tensor) -> torch.Tensor: ...

    def clipped_swiglu(self, x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor: ...

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None: ...

    def paged_attention(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: ForwardMetadata,
        attn_type: str,
        scale: float,
        sliding_window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def rotate_write_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: ForwardMetadata,
        attn_type: str,
        scale: float,
        sliding_window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def dense_layer(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weights: LayerWeights,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: ForwardMetadata,
    ) -> None: ...

    def latent_attention(
        self,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        nope_cache: torch.Tensor,
        rope_cache: torch.Tensor,
        metadata: ForwardMetadata,
        attn_type: str,
        scale: float,
    ) -> torch.Tensor: ...


def get_ops(device: str) -> Ops:
    """The operators of `device`, such as "cpu". Raises ConfigError for a device that has none."""
    kind = device.partition(":")[0]
    if kind not in DEVICE_MODULES:
        raise ConfigError(f"no operators for device {device!r}; available: {', '.join(sorted(DEVICE_MODULES))}")
    return cast(Ops, importlib.import_module(DEVICE_MODULES[kind]))
