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
    """The pull has ended and the holder has confirmed it. `next_token` is what the holder's engine says comes next."""

    request_id: RequestId
    stats: PullStats
    next_token: int


@dataclass(frozen=True, slots=True)
class KvFailed:
    """The ticket is lost, or its pull has ended without usable KV; nothing writes into the request's blocks any more.

    A ticket that was lost while its pull was being ordered is told of twice, and the second time means nothing.
    """

    request_id: RequestId
    error: Exception


@dataclass(frozen=True, slots=True)
class ReleaseHeld:
    """The lease of this prefilled request has ended."""

    request_id: RequestId


Message = Submit | Cancel | KvArrived | KvFailed | ReleaseHeld


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder:
    """Fill these blocks with the KV of the ticket's tokens as it comes, then answer KvArrived or KvFailed.

    The KV of the tokens before `first_token` is here already.
    """

    request_id: RequestId
    ticket: Ticket
    first_token: int
    tables: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """The KV of the first `num_ready` of `num_tokens` tokens lies in these blocks.

    `next_token` is the token after all of them, None until it is known. From then on the tables are whole and the
    blocks stay until ReleaseHeld. Before, tables are those of the attention types that give no block back while the
    request runs, and they stay until the request ends or a Withdrawn says that it has lost them.
    """

    request_id: RequestId
    tables: Mapping[str, Sequence[int]]
    num_ready: int
    num_tokens: int
    token_digest: bytes
    next_token: int | None = None


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The request whose Hold was told owns its blocks no longer and will not become complete, or only by another."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Everything that happened since the last output; `holds` in the order in which it did.

    A prefilling request has a Hold when it starts and whenever more is ready; the last one is complete and comes with
    the event whose finish is PREFILLED, unless a Withdrawn comes instead.
    """

    events: Sequence[TokenEvent]
    pulls: Sequence[PullOrder]
    holds: Sequence[Hold | Withdrawn]
    load: Load
