"""Which engine gets the next piece of work: a pure choice from snapshots, with the reason said.

A snapshot is as old as the engine's last step message, so what this gateway has sent since counts on top of it:
`num_live` requests and `pending_tokens` prompt tokens without an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pd_service.request import Load


class Candidate(Protocol):
    """What the router looks at."""

    @property
    def engine_id(self) -> str: ...
    @property
    def load(self) -> Load: ...
    @property
    def num_live(self) -> int: ...
    @property
    def pending_tokens(self) -> int: ...


C = TypeVar("C", bound=Candidate)


@dataclass(slots=True)
class Affinity:
    """Ids of the engines that most likely have a prompt's KV in their cache; empty: not known."""

    prefill: str = ""
    decode: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """`is_local`: a decode engine computes the prompt itself. `reason` is one of a small fixed set."""

    is_local: bool
    reason: str


def choose_way(num_tokens: int, local_prefill_max_tokens: int) -> Choice:
    """Whether this prompt is worth a hand-over."""
    if not local_prefill_max_tokens:
        return Choice(is_local=False, reason="always_disaggregated")
    if num_tokens <= local_prefill_max_tokens:
        return Choice(is_local=True, reason="short_prompt")
    return Choice(is_local=False, reason="long_prompt")


def rank_prefill(candidates: Sequence[C], preferred: str = "") -> list[C]:
    """Best first: the engine named `preferred`, then fewest tokens to compute before ours, then most free blocks."""
    return sorted(
        candidates,
        key=lambda c: (
            c.engine_id != preferred,
            max(c.load.queued_tokens, c.pending_tokens),
            -c.load.free_blocks,
            c.engine_id,
        ),
    )


def rank_decode(candidates: Sequence[C], preferred: str = "") -> list[C]:
    """Best first: nobody waiting, `preferred`, fewest requests, then most free blocks.

    Sharing a prompt's blocks with requests that run saves a pull; waiting in a queue for it does not.
    """
    return sorted(
        candidates,
        key=lambda c: (
            c.load.waiting,
            c.engine_id != preferred,
            max(c.load.running + c.load.waiting, c.num_live),
            -c.load.free_blocks,
            c.engine_id,
        ),
    )
