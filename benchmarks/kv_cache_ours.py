"""Our side of the benchmark of block bookkeeping: one workload on one new `KVCacheManager`, timed call by call.

Always true: a repetition begins with an empty cache and ends with every block free again, or it raises RuntimeError.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from benchmarks.kv_cache_workload import STEP_TOKENS, Call, Step, Workload, tokens_of
from kv_cache import (
    CacheEntry,
    KVCacheManager,
    LayerCacheInfo,
    ModelCacheInfo,
    PrefixCache,
    calculate_block_num,
    create_single_type_managers,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One workload on one cache: full attention, and a sliding window beside it if one is given; in tokens."""

    block_size: int
    sliding_window: int | None = None
    prefix_cache: bool = False
    workload: Workload = field(default_factory=Workload)

    @property
    def name(self) -> str:
        groups = "full" if self.sliding_window is None else "full + sliding"
        return f"{groups}, block size {self.block_size}{', prefix cache' if self.prefix_cache else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One repetition, one side: nanoseconds of each kind of call, and the most blocks held after any step.

    With a prefix cache besides: `find_ns` of hashing for and looking up prefixes, `commit_ns` of making content
    findable where that is a call of its own, and the tokens of prompts that were found.
    """

    prefill_ns: int
    decode_ns: int
    free_ns: int
    max_blocks: int
    find_ns: int = 0
    commit_ns: int = 0
    hit_tokens: int = 0

    @property
    def call_ns(self) -> int:
        """All but frees."""
        return self.find_ns + self.prefill_ns + self.decode_ns + self.commit_ns


def cache_info(block_size: int, sliding_window: int | None) -> ModelCacheInfo:
    entries = [_entry("full", "FullAttention", None)]
    if sliding_window is not None:
        entries.append(_entry("sliding", "SlidingWindow", sliding_window))
    return ModelCacheInfo(
        num_layers=1, block_size=block_size, layer_infos=[LayerCacheInfo(layer_idx=0, caches=entries)]
    )


def block_nums(row: Row) -> dict[str, int]:
    return calculate_block_num(
        cache_info(row.block_size, row.sliding_window),
        max_concurrency=row.workload.concurrency,
        max_model_len=row.workload.max_model_len,
        max_step_tokens=STEP_TOKENS,
    )


def make_manager(row: Row) -> KVCacheManager:
    info, max_model_len = cache_info(row.block_size, row.sliding_window), row.workload.max_model_len
    managers = create_single_type_managers(info, block_nums(row), max_model_len)
    prefix_cache = PrefixCache("benchmark") if row.prefix_cache else None
    return KVCacheManager(managers, info, max_model_len, max_step_tokens=STEP_TOKENS, prefix_cache=prefix_cache)


def measure_ours(row: Row, steps: Sequence[Step]) -> Measured:
    """One repetition on a new manager. Raises RuntimeError when a call was refused or blocks are left."""
    manager = make_manager(row)
    cached = CachedRequests(manager, tokens_of(row.workload)) if row.prefix_cache else None
    num_free = sum(manager.num_free_blocks().values())
    prefill_ns = decode_ns = free_ns = max_blocks = 0
    with no_collection():
        for step in steps:
            free_ns += _free(manager, step.finished)
            prefill_ns += _allocate(manager, step.prefill) if cached is None else cached.start(step.prefill)
            decode_ns += _allocate(manager, step.decode)
            if cached is not None:
                cached.commit([*step.prefill, *step.decode])
            max_blocks = max(max_blocks, num_free - sum(manager.num_free_blocks().values()))
    if sum(manager.num_free_blocks().values()) != num_free:
        raise RuntimeError(f"{row.name}: blocks are left after the last request")
    content = {} if cached is None else cached.figures()
    return Measured(prefill_ns=prefill_ns, decode_ns=decode_ns, free_ns=free_ns, max_blocks=max_blocks, **content)


class CachedRequests:
    """Requests whose content is found and made known; the token ids of each grow as it computes."""

    def __init__(self, manager: KVCacheManager, tokens: Sequence[list[int]]) -> None:
        self._manager = manager
        self._tokens = tokens
        self._known: dict[int, list[int]] = {}
        self._find_ns = self._commit_ns = self._hit_tokens = 0

    def start(self, calls: Sequence[Call]) -> int:
        """Nanoseconds of the allocations. A prompt's first one starts with its hit and makes room for the rest."""
        spent = 0
        for call in calls:
            if call.num_computed:
                spent += _allocate(self._manager, [call])
                continue
            request_id, prompt = request_name(call.request), self._tokens[call.request][: call.num_new]
            start = time.perf_counter_ns()
            hit = self._manager.find_prefix(prompt)
            found = time.perf_counter_ns()
            done = self._manager.allocate_slots(request_id, hit.num_tokens, len(prompt) - hit.num_tokens, prefix=hit)
            spent += time.perf_counter_ns() - found
            if not done:
                raise RuntimeError(f"the start of {request_id} was refused")
            self._known[call.request] = []
            self._find_ns += found - start
            self._hit_tokens += hit.num_tokens
        return spent

    def commit(self, calls: Sequence[Call]) -> None:
        """Every call of the step has computed its tokens."""
        batch = []
        for request, num_computed, num_new in calls:
            known = self._known[request]
            known += self._tokens[request][num_computed : num_computed + num_new]
            batch.append((request_name(request), known, num_computed + num_new))
        commit = self._manager.commit
        start = time.perf_counter_ns()
        for request_id, known, num_computed in batch:
            commit(request_id, known, num_computed)
        self._commit_ns += time.perf_counter_ns() - start

    def figures(self) -> dict[str, int]:
        return {"find_ns": self._find_ns, "commit_ns": self._commit_ns, "hit_tokens": self._hit_tokens}


def _entry(name: str, attn_type: str, sliding_window: int | None) -> CacheEntry:
    return CacheEntry(
        cache_name=name,
        attn_type=attn_type,
        dim=64,
        num_head=1,
        dtype=torch.float32,
        tensor_setter=lambda tensor: None,
        sliding_window=sliding_window,
    )


def _allocate(manager: KVCacheManager, calls: Sequence[Call]) -> int:
    """Nanoseconds of the calls. Raises RuntimeError when one was refused."""
    batch = [(request_name(call.request), call.num_computed, call.num_new) for call in calls]
    allocate_slots = manager.allocate_slots
    start = time.perf_counter_ns()
    answers = [allocate_slots(request_id, num_computed, num_new) for request_id, num_computed, num_new in batch]
    spent = time.perf_counter_ns() - start
    if not all(answers):
        raise RuntimeError(f"an allocation was refused, free blocks: {manager.num_free_blocks()}")
    return spent


def _free(manager: KVCacheManager, requests: Sequence[int]) -> int:
    request_ids = [request_name(request) for request in requests]
    start = time.perf_counter_ns()
    for request_id in request_ids:
        manager.free(request_id)
    return time.perf_counter_ns() - start


def request_name(request: int) -> str:
    return f"request-{request}"


@contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
