"""Block allocation by vLLM's `KVCacheManager`, for `benchmarks.kv_cache`: run by the Python of a vLLM environment.

Imports nothing of this project. Every line on stdin is one repetition in JSON: `block_size`, `sliding_window` (null
without such a group), `num_blocks`, `max_model_len`, `prompt_tokens`, `prefix_cache`, `tokens` (the ids of each
request, prompt and output) and `steps`, each a triple (finished requests, prefill calls, decode calls) where a call is
(request, computed tokens, new tokens). Every line on stdout answers one: nanoseconds of each kind of call, the most
blocks held and the tokens found in the prefix cache. The first line on stdout, unasked, names vLLM's version.

What vLLM's scheduler does around a call (making requests, counting computed tokens, appending output tokens, telling
the manager that a step starts) is done here too, outside the measured time, and so is garbage collection. With a prefix
cache, hashing new full blocks by vLLM's request block hasher and looking a prompt up are measured as `find_ns`;
`allocate_slots` commits.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus


def make_manager(task: dict[str, Any]) -> KVCacheManager:
    shape = {"block_size": task["block_size"], "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    specs = [FullAttentionSpec(**shape)]
    if task["sliding_window"] is not None:
        specs.append(SlidingWindowSpec(**shape, sliding_window=task["sliding_window"]))
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheManager(
        KVCacheConfig(num_blocks=task["num_blocks"], kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=task["max_model_len"],
        scheduler_block_size=task["block_size"],
        hash_block_size=task["block_size"],
        enable_caching=task["prefix_cache"],
    )


class Repetition:
    """One workload on a new manager, and what it has cost so far."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._manager = make_manager(task)
        self._tokens: list[list[int]] = task["tokens"]
        self._hasher = get_request_block_hasher(task["block_size"], sha256) if task["prefix_cache"] else None
        self._requests = {
            i: Request(f"request-{i}", tokens[: task["prompt_tokens"]], SamplingParams(max_tokens=2**20), None)
            for i, tokens in enumerate(self._tokens)
        }
        self._find_ns = self._hit_tokens = 0

    def run(self, steps: list[list[Any]]) -> dict[str, int]:
        """Raises RuntimeError when a call was refused or blocks are left."""
        pool = self._manager.block_pool
        num_free = pool.get_num_free_blocks()
        prefill_ns = decode_ns = free_ns = max_blocks = 0
        for finished, prefill, decode in steps:
            free_ns += self._free(finished)
            self._manager.new_step_starts()
            prefill_ns += self._allocate(prefill, decode=False) if self._hasher is None else self._prefill(prefill)
            decode_ns += self._allocate(decode, decode=True)
            max_blocks = max(max_blocks, num_free - pool.get_num_free_blocks())
        if pool.get_num_free_blocks() != num_free:
            raise RuntimeError("blocks are left after the last request")
        figures = {"prefill_ns": prefill_ns, "decode_ns": decode_ns, "free_ns": free_ns, "max_blocks": max_blocks}
        return figures | {"find_ns": self._find_ns, "hit_tokens": self._hit_tokens}

    def _free(self, finished: list[int]) -> int:
        done = [self._requests.pop(index) for index in finished]
        start = time.perf_counter_ns()
        for request in done:
            self._manager.free(request)
        return time.perf_counter_ns() - start

    def _prefill(self, calls: list[list[int]]) -> int:
        """With a prefix cache: one after the other, since an allocation may evict what the next would have found."""
        return sum(self._allocate([call], decode=False) if call[1] else self._start(call[0], call[2]) for call in calls)

    def _start(self, index: int, num_new: int) -> int:
        """The first allocation of a prompt that may be known in part; its nanoseconds."""
        request = self._requests[index]
        self._hash([request])
        start = time.perf_counter_ns()
        blocks, num_hit, boundary = self._manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        found = time.perf_counter_ns()
        answer = self._manager.allocate_slots(request, num_new - num_hit, num_hit, blocks)
        spent = time.perf_counter_ns() - found
        self._check([answer])
        request.status = RequestStatus.RUNNING
        self._find_ns += found - start
        self._hit_tokens += num_hit
        return spent

    def _allocate(self, calls: list[list[int]], *, decode: bool) -> int:
        """Nanoseconds of the calls."""
        batch = []
        for index, num_computed, num_new in calls:
            request = self._requests[index]
            request.num_computed_tokens = num_computed
            if decode:
                request.append_output_token_ids(self._tokens[index][num_computed])
            batch.append((request, num_new))
        if decode and self._hasher is not None:
            self._hash([request for request, _ in batch])
        allocate_slots = self._manager.allocate_slots
        start = time.perf_counter_ns()
        answers = [allocate_slots(request, num_new) for request, num_new in batch]
        spent = time.perf_counter_ns() - start
        self._check(answers)
        for request, _ in batch:
            request.status = RequestStatus.RUNNING
        return spent

    def _hash(self, requests: list[Request]) -> None:
        """As `Request.update_block_hashes` does, without the rest of what makes a request or appends to it."""
        assert self._hasher is not None
        start = time.perf_counter_ns()
        for request in requests:
            request.block_hashes.extend(self._hasher(request))
        self._find_ns += time.perf_counter_ns() - start

    def _check(self, answers: list[Any]) -> None:
        if None in answers:
            num_free = self._manager.block_pool.get_num_free_blocks()
            raise RuntimeError(f"an allocation was refused, {num_free} blocks are free")


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever vLLM prints must not stand among the answers
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    init_none_hash(sha256)
    for line in sys.stdin:
        task = json.loads(line)
        gc.collect()
        gc.disable()
        answer = Repetition(task).run(task["steps"])
        gc.enable()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
