"""One request inside an engine: two lengths and a status.

A request owns the tokens it knows, `token_ids`, of which the first `num_computed` have their KV in the cache. Chunked
prefill, KV received from elsewhere and decoding are all the same chase of `num_computed` after `len(token_ids)`:

    token_ids:     [ prompt ............ | output ... ]
                   [ computed .... ][ pending ]          0 <= num_computed < len(token_ids) while it runs

           WAITING ──admit──► RUNNING ──last token──► (gone)
              │  ▲               │ └──prefill only──► HELD ──lease ends──► (gone)
     ticket   │  └───preempt─────┘
              ▼
          RECEIVING ──KV arrived──► RUNNING

The KV of a request that is RUNNING for its prompt alone may be read by others from its first step on: `token_digest`
is set then, and when it loses its blocks they are told.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from pd_service.engine.ngram import NgramIndex
from pd_service.request import EngineRequest, EngineTimes, FinishReason, RequestId, TokenLogprobs

if TYPE_CHECKING:
    from pd_service.engine.step import SampledToken


class Status(Enum):
    WAITING = "waiting"  # owns no blocks
    RECEIVING = "receiving"  # owns blocks that a pull writes into
    RUNNING = "running"  # may be scheduled
    HELD = "held"  # done here; a lease protects its blocks


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """Times are on the engine's clock, in seconds. The smaller `order`, which never changes, comes first."""

    request: EngineRequest
    token_ids: list[int]
    arrived_at: float
    order: tuple[float, int] = (0.0, 0)
    request_id: RequestId = field(init=False)  # the request's, as are the next two: asked for in every step
    num_given: int = field(init=False)  # tokens it came with, or that came with its KV
    stop_token_ids: frozenset[int] = field(init=False)
    num_computed: int = 0
    status: Status = Status.WAITING
    is_cancelled: bool = False
    takes_ticket: bool = False  # its KV is still to be pulled
    token_digest: bytes = b""  # of its tokens, while readers may know of the blocks it computes into
    started_at: float | None = None  # first scheduled, or KV arrived
    preemptions: int = 0
    pull: PullStats | None = None
    cached_tokens: int = 0  # computed before it started, found in the prefix cache
    num_borrowed: dict[str, int] = field(default_factory=dict)  # blocks of windows it started with in others' use
    draft_ids: tuple[int, ...] = ()  # guesses at the tokens after the last known one
    ngrams: NgramIndex | None = None  # made when it is first looked up
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt tokens computed so far

    def __post_init__(self) -> None:
        assert 0 <= self.num_computed < len(self.token_ids)
        self.request_id = self.request.request_id
        self.num_given = len(self.request.token_ids)
        self.stop_token_ids = self.request.sampling.stop_token_ids
        self.takes_ticket = self.request.ticket is not None

    @property
    def num_received(self) -> int:
        """Tokens whose KV its ticket brings."""
        ticket = self.request.ticket
        return ticket.num_tokens if ticket is not None else 0

    @property
    def num_known(self) -> int:
        """Its tokens, and the one that comes with its KV."""
        return len(self.token_ids) + (self.takes_ticket and self.request.gets_token)

    def give(self, token_id: int) -> None:
        """Takes the token that came with its KV: it counts as given."""
        self.token_ids.append(token_id)
        self.num_given += 1

    @property
    def num_pending(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_missing(self) -> int:
        """Tokens it may still get."""
        return self.request.max_new_tokens - self.num_generated

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Until its first token, with which they are told."""
        request = self.request
        return request.sampling.prompt_logprobs is not None and request.ticket is None and not self.num_generated

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_given

    def append(self, tokens: Sequence[SampledToken]) -> tuple[list[SampledToken], FinishReason | None]:
        """Takes the step's tokens up to the one that ends the request; a stop token is none of them."""
        taken: list[SampledToken] = []
        num_missing = self.num_missing
        for token in tokens:
            if token.token_id in self.stop_token_ids:
                return taken, FinishReason.STOP
            self.token_ids.append(token.token_id)
            taken.append(token)
            if len(taken) == num_missing:
                return taken, FinishReason.LENGTH
        return taken, FinishReason.PREFILLED if taken and self.request.prefill_only else None

    def times(self, now: float) -> EngineTimes:
        """Where the time to this engine's first token of the request went."""
        started = self.started_at if self.started_at is not None else now
        compute_ms = (now - started) * 1e3
        if self.pull is None:
            queue_ms = (started - self.arrived_at) * 1e3
            return EngineTimes(queue_ms=queue_ms, compute_ms=compute_ms, cached_tokens=self.cached_tokens)
        return EngineTimes(
            queue_ms=self.pull.queue_ms,
            compute_ms=compute_ms,
            received_ms=self.pull.received_ms,
            wire_ms=self.pull.wire_ms,
            confirm_ms=self.pull.confirm_ms,
            kv_bytes=self.pull.kv_bytes,
            plane=self.pull.plane,
            cached_tokens=self.cached_tokens,
            hidden_wire_ms=self.pull.hidden_wire_ms,
            hidden_kv_bytes=self.pull.hidden_kv_bytes,
            plan_ms=self.pull.plan_ms,
            num_runs=self.pull.num_runs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PullStats:
    """What a finished pull cost, in milliseconds and bytes on the reader's clock.

    `kv_bytes` moved as `num_runs` byte runs, for which `plan_ms` were needed. Of these bytes `hidden_kv_bytes` were
    asked for while the prompt was still being computed: `hidden_wire_ms` of moving cost nobody anything, `wire_ms`
    passed when the reader knew that all was ready.
    """

    queue_ms: float = 0.0
    received_ms: float = 0.0
    wire_ms: float = 0.0
    confirm_ms: float = 0.0
    kv_bytes: int = 0
    plane: str = ""
    hidden_wire_ms: float = 0.0
    hidden_kv_bytes: int = 0
    plan_ms: float = 0.0
    num_runs: int = 0


def token_digest(token_ids: Sequence[int]) -> bytes:
    """BLAKE2b-128 over the ids as little-endian uint32: equal on every host."""
    ids = array("I", token_ids)
    assert ids.itemsize == 4
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
