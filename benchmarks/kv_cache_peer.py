"""Block allocation by vLLM's `KVCacheManager`, for `benchmarks.kv_cache`: run by the Python of a vLLM environment.

Imports nothing of this project. Every line on stdin is one repetition in JSON: `block_size`, `sliding_window` (null
without such a group), `num_blocks`, `max_model_len`, `prompt_tokens` and `steps`, each a triple (finished requests,
prefill calls, decode calls) where a call is (request, computed tokens, new tokens). Every line on stdout answers one:
nanoseconds of each kind of call and the most blocks held. The first line on stdout, unasked, names vLLM's version.

What vLLM's scheduler does around a call (making requests, counting computed tokens, appending output tokens, telling
the manager that a step starts) is done here too, outside the measured time, and so is garbage collection.
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
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus

OUTPUT_TOKEN = 7


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
        enable_caching=False,
    )


def make_requests(task: dict[str, Any]) -> dict[int, Request]:
    prompt = list(range(task["prompt_tokens"]))
    indices = {call[0] for _, prefill, _ in task["steps"] for call in prefill}
    return {i: Request(f"request-{i}", prompt, SamplingParams(max_tokens=2**20), None) for i in sorted(indices)}


def allocate(manager: KVCacheManager, requests: dict[int, Request], calls: list[list[int]], *, decode: bool) -> int:
    """Nanoseconds of the calls. Raises RuntimeError when one was refused."""
    batch = []
    for index, num_computed, num_new in calls:
        request = requests[index]
        request.num_computed_tokens = num_computed
        if decode:
            request.append_output_token_ids(OUTPUT_TOKEN)
        batch.append((request, num_new))
    allocate_slots = manager.allocate_slots
    start = time.perf_counter_ns()
    answers = [allocate_slots(request, num_new) for request, num_new in batch]
    spent = time.perf_counter_ns() - start
    if None in answers:
        raise RuntimeError(f"an allocation was refused, {manager.block_pool.get_num_free_blocks()} blocks are free")
    for request, _ in batch:
        request.status = RequestStatus.RUNNING
    return spent


def repetition(task: dict[str, Any]) -> dict[str, int]:
    manager, requests = make_manager(task), make_requests(task)
    num_free = manager.block_pool.get_num_free_blocks()
    prefill_ns = decode_ns = free_ns = max_blocks = 0
    for finished, prefill, decode in task["steps"]:
        done = [requests.pop(index) for index in finished]
        start = time.perf_counter_ns()
        for request in done:
            manager.free(request)
        free_ns += time.perf_counter_ns() - start
        manager.new_step_starts()
        prefill_ns += allocate(manager, requests, prefill, decode=False)
        decode_ns += allocate(manager, requests, decode, decode=True)
        max_blocks = max(max_blocks, num_free - manager.block_pool.get_num_free_blocks())
    if manager.block_pool.get_num_free_blocks() != num_free:
        raise RuntimeError("blocks are left after the last request")
    return {"prefill_ns": prefill_ns, "decode_ns": decode_ns, "free_ns": free_ns, "max_blocks": max_blocks}


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever vLLM prints must not stand among the answers
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        gc.collect()
        gc.disable()
        answer = repetition(task)
        gc.enable()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
