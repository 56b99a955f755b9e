"""What an engine that serves says of itself to its supervisor. Imports nothing: a supervisor needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """Two pulses with `is_busy` and the same `turns` have no progress between them."""

    turns: int  # of the step loop, since the engine's start
    is_busy: bool  # a step is in flight, or messages wait to be read
    held: int  # requests, leases and pulls
