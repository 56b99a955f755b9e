"""What the machine allows: measured read bandwidth and matrix products, and what a step needs of both.

A decode step reads every weight once and the keys and values of every request; its limit is that many bytes over the
bandwidth of a sum over memory far larger than the caches. A prefill computes; its limit is its operations over the
rate of the faster of torch.mm and oneDNN on a packed weight, in the model's type.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pd_service.engine.execution_engine import ExecutionEngine

READ_BYTES = 2**29
PRODUCT_SHAPE = (1024, 1536, 1536)
REPETITIONS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of one model: bytes of weights a decode step reads, bytes of KV per token, multiply-adds of a prefill."""

    weight_bytes: int
    kv_bytes_per_token: int
    layer_weights: int  # elements of the matrices every token passes
    head_weights: int  # of the one that only the last token passes
    attention_width: int  # query heads times their dim, summed over layers

    def decode_bytes(self, num_requests: int, context: int) -> int:
        return self.weight_bytes + num_requests * context * self.kv_bytes_per_token

    def prefill_operations(self, num_tokens: int) -> int:
        """Two per multiply-add: matrices, and scores and sums of values over the keys each token sees."""
        seen = num_tokens * (num_tokens + 1) // 2
        return 2 * (num_tokens * self.layer_weights + self.head_weights + 2 * self.attention_width * seen)


def work_of(engine: ExecutionEngine) -> Work:
    """Of a model whose layers are all attention beside dense matrices, with an embedding that is read by row."""
    worker = engine.worker
    hf = worker.model_config.hf
    matrices = {name: p.numel() for name, p in worker.model.named_parameters() if p.dim() > 1 and "embed" not in name}
    head = matrices.pop("lm_head.weight")
    itemsize = getattr(torch, engine.config.dtype).itemsize
    entries = [entry for layer in worker.cache_info.layer_infos for entry in layer.caches]
    return Work(
        weight_bytes=(sum(matrices.values()) + head) * itemsize,
        kv_bytes_per_token=sum(entry.bytes_per_token for entry in entries),
        layer_weights=sum(matrices.values()),
        head_weights=head,
        attention_width=hf.num_hidden_layers * hf.num_attention_heads * hf.dim_per_head,
    )


class Machine:
    """Both rates with torch's present number of threads; each question measures again, since shared machines drift."""

    def __init__(self, dtype: str) -> None:
        rows, depth, width = PRODUCT_SHAPE
        kind = getattr(torch, dtype)
        self._memory = torch.ones(READ_BYTES // 4)
        self._x, self._weight = torch.ones(rows, depth, dtype=kind), torch.ones(width, depth, dtype=kind)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight)

    def bytes_per_s(self) -> float:
        return READ_BYTES / _median_s(self._memory.sum)

    def operations_per_s(self) -> float:
        rows, depth, width = PRODUCT_SHAPE
        x, weight, packed = self._x, self._weight.t(), self._packed
        ways: list[Callable[[], object]] = [
            lambda: torch.mm(x, weight),
            lambda: torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], ""),
        ]
        with torch.inference_mode():
            return 2 * rows * depth * width / min(_median_s(way) for way in ways)


def _median_s(way: Callable[[], object]) -> float:
    way()
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        way()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
