"""An hour of requests for the benchmark of contiguity: from a public trace, or drawn from a stated mix.

A trace is one of the two kinds that are published: `.csv` with TIMESTAMP, ContextTokens, GeneratedTokens (Azure), or
`.jsonl` with timestamp in ms, input_length, output_length and hash_ids, one per 512 tokens of content (Mooncake).

The mix: arrivals of a Poisson process; prompts and outputs log-normal with medians of 900 and 150 tokens and a spread
(sigma) of 1.1 and 0.9; two of three prompts begin with what they can of one of the last 64.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

CONTENT_TOKENS = 512  # tokens that one content id stands for
HOUR_S = 3600.0
MAX_PROMPT, MAX_OUTPUT = 16_384, 2_048  # tokens; longer ones of a trace are left out
MIX_PER_S, MIX_RECENT = 3.0, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request; `contents` names its prompt's content by `CONTENT_TOKENS`, and nothing where it is like no other."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    contents: tuple[int, ...] = ()


def load_trace(path: Path) -> list[Arrival]:
    """The requests of the first hour, by time. Raises ValueError for a file of another kind, or without any."""
    readers = {".csv": _read_azure, ".jsonl": _read_mooncake}
    if path.suffix not in readers:
        raise ValueError(f"a trace is one of {sorted(readers)}, given: {path.name!r}")
    arrivals = [
        arrival
        for arrival in sorted(readers[path.suffix](path), key=lambda one: one.at_s)
        if arrival.at_s < HOUR_S and 0 < arrival.prompt_tokens <= MAX_PROMPT and 0 < arrival.output_tokens <= MAX_OUTPUT
    ]
    if not arrivals:
        raise ValueError(f"{path.name!r} has no request of at most {MAX_PROMPT} tokens in its first hour")
    return arrivals


def _read_azure(path: Path) -> list[Arrival]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return [
        Arrival(
            at_s=(time - times[0]).total_seconds(),
            prompt_tokens=int(row["ContextTokens"]),
            output_tokens=int(row["GeneratedTokens"]),
        )
        for time, row in zip(times, rows, strict=True)
    ]


def _read_mooncake(path: Path) -> list[Arrival]:
    return [
        Arrival(
            at_s=row["timestamp"] / 1e3,
            prompt_tokens=row["input_length"],
            output_tokens=row["output_length"],
            contents=tuple(row["hash_ids"]),
        )
        for row in map(json.loads, path.read_text().splitlines())
    ]


def draw_mix(seed: int = 0, duration_s: float = HOUR_S) -> list[Arrival]:
    """The mix that the module's docstring states."""
    random_ = random.Random(seed)
    recent: list[tuple[int, ...]] = []
    arrivals = []
    num_contents, now = 0, random_.expovariate(MIX_PER_S)
    while now < duration_s:
        prompt = _log_normal(random_, 900, 1.1, MAX_PROMPT)
        begun = random_.choice(recent[-MIX_RECENT:]) if recent and random_.random() < 2 / 3 else ()
        num = math.ceil(prompt / CONTENT_TOKENS)
        new = range(num_contents, num_contents + max(0, num - len(begun)))
        num_contents += len(new)
        contents = (*begun, *new)[:num]
        recent.append(contents)
        output = _log_normal(random_, 150, 0.9, MAX_OUTPUT)
        arrivals.append(Arrival(at_s=now, prompt_tokens=prompt, output_tokens=output, contents=contents))
        now += random_.expovariate(MIX_PER_S)
    return arrivals


def _log_normal(random_: random.Random, median: float, sigma: float, most: int) -> int:
    return min(most, max(1, round(random_.lognormvariate(math.log(median), sigma))))


def thin(arrivals: Sequence[Arrival], share: float) -> list[Arrival]:
    """This share of them, evenly: what one of several engines gets."""
    return [one for i, one in enumerate(arrivals) if math.floor((i + 1) * share) > math.floor(i * share)]
