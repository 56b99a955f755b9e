"""Every error a user or an operator can meet, in one tree.

    PdError
    ├── ConfigError            the service cannot start as asked
    ├── InvalidRequest         the client's input, field by field
    │   ├── PromptTooLong
    │   └── UnknownModel
    ├── DuplicateRequest       a live request has this id
    ├── DeadlineExceeded       the client's deadline passed
    ├── Unavailable            every retry was used up, or no engine came in time
    └── RetryableError         another round of the story can help
        ├── Overloaded         the engine refused: no room
        ├── EngineLost         the engine, or the stream to it, died
        ├── EngineFailed       the engine failed at this request
        └── TransferFailed     the KV did not arrive, or arrived too late to be trusted

Each class knows its gRPC status and HTTP code. Errors of libraries (grpc, ray, sockets) are translated into this tree
once, at the edge where they appear, with `from`.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar


class PdError(Exception):
    """Root of the tree. `grpc_status` is the name of a `grpc.StatusCode`, `http_code` an HTTP status."""

    grpc_status: ClassVar[str] = "INTERNAL"
    http_code: ClassVar[int] = 500


class ConfigError(PdError):
    """The service cannot start as asked."""


class InvalidRequest(PdError):
    """The client's input is refused. `field` names what was wrong, None when no single field was."""

    grpc_status = "INVALID_ARGUMENT"
    http_code = 400

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for a token within the model's length."""


class UnknownModel(InvalidRequest):
    """The named model is not served here."""

    grpc_status = "NOT_FOUND"
    http_code = 404


class DuplicateRequest(PdError):
    """A live request has this id already."""

    grpc_status = "ALREADY_EXISTS"
    http_code = 409


class DeadlineExceeded(PdError):
    """The client's deadline passed before the answer was complete."""

    grpc_status = "DEADLINE_EXCEEDED"
    http_code = 504


class Unavailable(PdError):
    """Every retry was used up, or no engine came in time."""

    grpc_status = "UNAVAILABLE"
    http_code = 503


class RetryableError(PdError):
    """Another round of the story can help."""

    grpc_status = "UNAVAILABLE"
    http_code = 503


class Overloaded(RetryableError):
    """The engine refused the request: it has no room and its queue is full."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_code = 429


class EngineLost(RetryableError):
    """The engine, or the stream to it, ended."""


class EngineFailed(RetryableError):
    """The engine failed while it worked on this request."""


class TransferFailure(Enum):
    """Why the KV of a ticket cannot be used."""

    LEASE_EXPIRED = "lease_expired"  # the holder took its blocks back, in time or by a word that got lost
    WITHDRAWN = "withdrawn"  # the holder's request ended, or its gateway gave the ticket back
    PEER_LOST = "peer_lost"  # the holder, or the channel to it, died or cannot be reached
    LAYOUT_REFUSED = "layout_refused"  # the handshake found that the two cannot talk
    PLANE_REFUSED = "plane_refused"  # the holder's guard did not allow the read
    PLANE_FAILED = "plane_failed"  # the data plane broke for another reason
    TIMEOUT = "timeout"
    DIGEST = "digest"  # bytes arrived that are not the holder's
    WRONG_TOKENS = "wrong_tokens"  # the ticket is for other tokens than the request
    CANCELLED = "cancelled"  # the request ended before its pull, or the engine stops
    OTHER = "other"


class TransferFailed(RetryableError):
    """The KV cache of a ticket did not arrive, or arrived too late to be trusted."""

    def __init__(self, message: str, reason: TransferFailure = TransferFailure.OTHER) -> None:
        super().__init__(message)
        self.reason = reason


def from_code(code: str, message: str, reason: str = "") -> PdError:
    """The error an engine named on the wire; an unknown name (a newer engine) becomes `EngineFailed`.

    `reason` is that of a TransferFailed, and OTHER if it is unknown here.
    """
    if code == TransferFailed.__name__:
        known_reasons = {one.value: one for one in TransferFailure}
        return TransferFailed(message, known_reasons.get(reason, TransferFailure.OTHER))
    known: dict[str, type[PdError]] = {c.__name__: c for c in _tree(PdError)}
    return known.get(code, EngineFailed)(message)


def _tree(root: type[PdError]) -> list[type[PdError]]:
    return [root] + [c for child in root.__subclasses__() for c in _tree(child)]
