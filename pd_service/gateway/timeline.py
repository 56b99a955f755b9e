"""What happened to one answer, hop by hop, as its story and its stream write it down. Nothing here decides anything."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MAX_HOPS = 64  # of one answer, the newest ones: a request that goes round for minutes must not grow for minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """Something that happened at `at` (loop clock, seconds), on `engine_id` if on any engine."""

    at: float
    what: str
    engine_id: str = ""
    detail: str = ""


@dataclass(slots=True, kw_only=True)
class Timeline:
    """The hops of one answer, and when its first token was handed out (loop clock, seconds; None: not yet)."""

    hops: deque[Hop] = field(default_factory=lambda: deque(maxlen=MAX_HOPS))
    first_token_at: float | None = None
    num_tokens: int = 0

    def note(self, now: float, what: str, engine_id: str = "", detail: str = "") -> None:
        self.hops.append(Hop(at=now, what=what, engine_id=engine_id, detail=detail))

    def handed_out(self, now: float, num_tokens: int) -> None:
        """The client got tokens."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.num_tokens += num_tokens
