"""Where the time of one request went: every millisecond belongs to exactly one phase, so they add up to the total.

        accepted ── queue ──► ── prefill ──► first token ── transfer ──► ── confirm ──► ── first decode ──► second token
                                                           (wire is a part of it)                   ── decode ──► last

What was moved while the prompt was computed is counted beside the phases: nobody waited for it.

A request that goes round again adds the phases of its next round to those of the ones before.
"""

from __future__ import annotations

from dataclasses import dataclass

from pd_service.request import EngineTimes


@dataclass(slots=True, kw_only=True)
class Phases:
    """Durations in milliseconds, up to the last token handed out; fields as in the wire message `PhaseTimes`.

    `mark` is the time (loop clock, seconds) up to which everything is accounted for. `cached_tokens` counts the
    prompt's tokens that the first prefill found in its engine's prefix cache.
    """

    mark: float
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    wire_ms: float = 0.0
    confirm_ms: float = 0.0
    first_decode_ms: float = 0.0
    decode_ms: float = 0.0
    total_ms: float = 0.0
    kv_bytes: int = 0
    hidden_wire_ms: float = 0.0
    hidden_kv_bytes: int = 0
    plan_ms: float = 0.0
    num_runs: int = 0
    plane: str = ""
    cached_tokens: int = 0
    retries: int = 0

    def prefilled(self, now: float, times: EngineTimes) -> None:
        """A first token came. What the engine did not compute was queueing, the ways to it and back included."""
        elapsed_ms = self._lap(now)
        compute_ms = min(times.compute_ms, elapsed_ms)  # two clocks never agree to the last digit
        self.prefill_ms += compute_ms
        self.queue_ms += elapsed_ms - compute_ms

    def handed_over(self, now: float, times: EngineTimes) -> None:
        """The first token of a decode engine came. What it neither computed nor waited for the holder was transfer."""
        elapsed_ms = self._lap(now)
        compute_ms = min(times.compute_ms, elapsed_ms)
        confirm_ms = min(times.confirm_ms, elapsed_ms - compute_ms)
        self.first_decode_ms += compute_ms
        self.confirm_ms += confirm_ms
        transfer_ms = elapsed_ms - compute_ms - confirm_ms
        self.transfer_ms += transfer_ms
        self.wire_ms += min(times.wire_ms, transfer_ms)
        self.hidden_wire_ms += times.hidden_wire_ms
        self.kv_bytes += times.kv_bytes
        self.hidden_kv_bytes += times.hidden_kv_bytes
        self.plan_ms += times.plan_ms
        self.num_runs += times.num_runs
        self.plane = times.plane

    def decoded(self, now: float) -> None:
        """A further token came."""
        self.decode_ms += self._lap(now)

    def lost(self, now: float) -> None:
        """A round failed: what passed since its last token was waiting."""
        self.queue_ms += self._lap(now)
        self.retries += 1

    def _lap(self, now: float) -> float:
        elapsed_ms, self.mark = (now - self.mark) * 1e3, now
        self.total_ms += elapsed_ms
        return elapsed_ms
