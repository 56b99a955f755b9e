"""What enters and leaves an engine. Outside events reach it only as these messages, through its inbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pd_service.engine.request_state import PullStats
from pd_service.request import EngineRequest, Load, RequestId, Ticket, TokenEvent


@dataclass(frozen=True, slots=True)
class Submit:
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop this request and free its blocks; unknown ids are ignored. A HELD request is not touched: its lease is."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class KvArrived:
    """The pull has ended and the holder has confirmed it."""

    request_id: RequestId
    stats: PullStats


@dataclass(frozen=True, slots=True)
class KvFailed:
    """The pull has ended without usable KV; nothing writes into the request's blocks any more."""

    request_id: RequestId
    error: Exception


@dataclass(frozen=True, slots=True)
class ReleaseHeld:
    """The lease of this prefilled request has ended."""

    request_id: RequestId


Message = Submit | Cancel | KvArrived | KvFailed | ReleaseHeld


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder:
    """Fill these blocks with the KV of the ticket's tokens, then answer KvArrived or KvFailed.

    The KV of the tokens before `first_token` is here already.
    """

    request_id: RequestId
    ticket: Ticket
    first_token: int
    tables: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """The KV of `num_tokens` tokens lies in these blocks and stays there until ReleaseHeld."""

    request_id: RequestId
    tables: Mapping[str, Sequence[int]]
    num_tokens: int
    token_digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Everything that happened since the last output. An event with finish PREFILLED has its Hold in `holds`."""

    events: Sequence[TokenEvent]
    pulls: Sequence[PullOrder]
    holds: Mapping[RequestId, Hold]
    load: Load
