"""Which allocations the benchmark of block bookkeeping makes, in which order: data, the same for all who are measured.

A request is a prompt in chunks of the step's budget, then decode steps of one token, then its end. As many run at a
time as there are seats:

    step      0     1     2     3     4     5     6     7     8        P  prefill
    seat 0    P     d     d     d     d    f,P    d     d     d  ...   d  decode
    seat 1                P     d     d     d     d    f,P    d  ...   f  freed, before the step's allocations

Always true: a seat's request is freed in the step in which the next one starts, and the calls of a request follow each
other step by step, each with as many computed tokens as all before it made.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

STEP_TOKENS = 512  # budget of one step of one request
SHARED_TOKENS = 256
SHARE_AMONG = 16  # a prefix comes from one of so many requests before: recent enough that nobody has evicted it
VOCABULARY = 128_000


class Call(NamedTuple):
    """One `allocate_slots`: the number of the request, its computed tokens, the new ones."""

    request: int
    num_computed: int
    num_new: int


class Step(NamedTuple):
    """What a scheduler does in one step, in this order: frees `finished`, then allocates."""

    finished: list[int]
    prefill: list[Call]
    decode: list[Call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`concurrency` seats, in each `rounds` requests one after the other; lengths in tokens."""

    concurrency: int = 64
    rounds: int = 2
    prompt_tokens: int = 512
    decode_steps: int = 256

    @property
    def max_model_len(self) -> int:
        return self.prompt_tokens + self.decode_steps


def steps_of(workload: Workload) -> list[Step]:
    """The calls of the whole workload; seat after seat starts, evenly over the decode steps of one request."""
    prompt = chunks_of(workload.prompt_tokens)
    num_steps = len(prompt) + workload.decode_steps
    starts = [
        (round_ * num_steps + seat * workload.decode_steps // workload.concurrency)
        for round_ in range(workload.rounds)
        for seat in range(workload.concurrency)
    ]
    steps = [Step([], [], []) for _ in range(starts[-1] + num_steps + 1)]
    for request, start in enumerate(starts):
        for i, (num_computed, num_new) in enumerate(prompt):
            steps[start + i].prefill.append(Call(request, num_computed, num_new))
        for i in range(workload.decode_steps):
            steps[start + len(prompt) + i].decode.append(Call(request, workload.prompt_tokens + i, 1))
        steps[start + num_steps].finished.append(request)
    return steps


def num_calls(steps: Sequence[Step]) -> tuple[int, int]:
    """(prefill, decode)"""
    return sum(len(step.prefill) for step in steps), sum(len(step.decode) for step in steps)


def chunks_of(num_tokens: int) -> list[tuple[int, int]]:
    """(computed, new) of a prompt's allocations."""
    return [(start, min(STEP_TOKENS, num_tokens - start)) for start in range(0, num_tokens, STEP_TOKENS)]


def tokens_of(workload: Workload) -> list[list[int]]:
    """The token ids of each request, prompt and output: the same in every process.

    Every second request begins like one of the requests shortly before it, the others are new.
    """
    random_ = random.Random(0)
    requests: list[list[int]] = []
    for i in range(workload.concurrency * workload.rounds):
        tokens = [random_.randrange(VOCABULARY) for _ in range(workload.max_model_len)]
        if i % 2:
            num_shared = min(SHARED_TOKENS, workload.prompt_tokens)
            tokens[:num_shared] = requests[random_.randrange(max(0, i - SHARE_AMONG), i)][:num_shared]
        requests.append(tokens)
    return requests
