"""Time limits on the right to read blocks: a pure state machine, no clock, no I/O.

                 renew                    renew, open_read
                  ↺       open_read        ↺        confirm
    open ──────► HELD ──────────────────► READING ─────────► CONFIRMED
                  │  release, expire        │  release, expire
                  └────────────────────────►┴──────────────► RELEASED, EXPIRED

The holder of the blocks owns one `LeaseTable`. What always holds: a lease ends exactly once; a lease whose time has
passed has ended for every call, swept or not; nothing said about an ended or unknown lease changes anything; only
live leases occupy memory. Ids are unique per attempt, so ended ones need no memorial. The owner learns of each end
through a return value: True from `confirm` or `release`, or the list from `sweep`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class LeaseState(Enum):
    HELD = "held"  # nobody has asked to read yet
    READING = "reading"  # at least one reader was given the blocks
    CONFIRMED = "confirmed"
    RELEASED = "released"
    EXPIRED = "expired"


class LeaseEvent(Enum):
    RENEW = "renew"
    OPEN_READ = "open_read"
    CONFIRM = "confirm"
    RELEASE = "release"
    EXPIRE = "expire"


TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (LeaseState.HELD, LeaseEvent.RENEW): LeaseState.HELD,
    (LeaseState.HELD, LeaseEvent.OPEN_READ): LeaseState.READING,
    (LeaseState.HELD, LeaseEvent.RELEASE): LeaseState.RELEASED,
    (LeaseState.HELD, LeaseEvent.EXPIRE): LeaseState.EXPIRED,
    (LeaseState.READING, LeaseEvent.RENEW): LeaseState.READING,
    (LeaseState.READING, LeaseEvent.OPEN_READ): LeaseState.READING,  # several answers may share one ticket
    (LeaseState.READING, LeaseEvent.CONFIRM): LeaseState.CONFIRMED,
    (LeaseState.READING, LeaseEvent.RELEASE): LeaseState.RELEASED,
    (LeaseState.READING, LeaseEvent.EXPIRE): LeaseState.EXPIRED,
}
ENDED = frozenset({LeaseState.CONFIRMED, LeaseState.RELEASED, LeaseState.EXPIRED})


class IllegalTransition(Exception):
    """The event is not allowed in this state; nothing has changed."""


def next_state(state: LeaseState, event: LeaseEvent) -> LeaseState:
    """Raises IllegalTransition unless the table knows the pair."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a lease that is {state.value} does not take {event.value}") from None


@dataclass(slots=True)
class _Lease:
    state: LeaseState
    deadline: float


class LeaseTable:
    """The live leases of one holder.

    `now` is in seconds on one clock; a reading older than one seen before counts as that one, so that a lease once
    over its time stays over it. A lease lives in [opened or extended, + lease_s).
    """

    def __init__(self, lease_s: float) -> None:
        if not lease_s > 0:
            raise ValueError(f"lease_s must be above 0, given {lease_s}")
        self._lease_s = lease_s
        self._leases: dict[str, _Lease] = {}
        self._latest = float("-inf")

    def __len__(self) -> int:
        """Leases that have not been confirmed, released or swept."""
        return len(self._leases)

    def __contains__(self, lease_id: object) -> bool:
        return lease_id in self._leases

    def open(self, lease_id: str, now: float) -> None:
        """Starts a lease. Raises ValueError, with the first lease untouched, when the id is empty or in use."""
        now = self._time(now)
        if not lease_id:
            raise ValueError("a lease id must not be empty")
        if lease_id in self._leases:
            raise ValueError(f"lease {lease_id!r} exists already")
        self._leases[lease_id] = _Lease(LeaseState.HELD, now + self._lease_s)

    def renew(self, lease_id: str, now: float) -> bool:
        """Extends the lease to `now + lease_s`; False when it is not live."""
        return self._extend(lease_id, LeaseEvent.RENEW, now)

    def read_opened(self, lease_id: str, now: float) -> bool:
        """A reader is about to learn the blocks: extends the lease and lets it be confirmed; False when not live."""
        return self._extend(lease_id, LeaseEvent.OPEN_READ, now)

    def confirm(self, lease_id: str, now: float) -> bool:
        """True, and the lease ends, only if it was valid from its start until now and a reader had opened it.

        What was read under it is right exactly then. A reader that never opened the ticket gets False and ends
        nothing: another one may be reading.
        """
        return self._end(lease_id, LeaseEvent.CONFIRM, now)

    def release(self, lease_id: str, now: float) -> bool:
        """Ends a live lease that nobody wants any more; False when it is not live."""
        return self._end(lease_id, LeaseEvent.RELEASE, now)

    def sweep(self, now: float) -> list[str]:
        """Ends every lease whose time has passed and returns their ids, each id once in all calls together."""
        now = self._time(now)
        over = [lease_id for lease_id, lease in self._leases.items() if lease.deadline <= now]
        for lease_id in over:
            self._take(lease_id, LeaseEvent.EXPIRE)
        return over

    def next_deadline(self) -> float | None:
        """When `sweep` will next have something to do; None without leases."""
        return min((lease.deadline for lease in self._leases.values()), default=None)

    def _extend(self, lease_id: str, event: LeaseEvent, now: float) -> bool:
        now = self._time(now)
        if not self._allows(lease_id, event, now):
            return False
        self._take(lease_id, event)
        self._leases[lease_id].deadline = now + self._lease_s
        return True

    def _end(self, lease_id: str, event: LeaseEvent, now: float) -> bool:
        if not self._allows(lease_id, event, self._time(now)):
            return False
        self._take(lease_id, event)
        return True

    def _allows(self, lease_id: str, event: LeaseEvent, now: float) -> bool:
        lease = self._leases.get(lease_id)
        return lease is not None and now < lease.deadline and (lease.state, event) in TRANSITIONS

    def _take(self, lease_id: str, event: LeaseEvent) -> None:
        lease = self._leases[lease_id]
        lease.state = next_state(lease.state, event)
        if lease.state in ENDED:
            del self._leases[lease_id]

    def _time(self, now: float) -> float:
        self._latest = max(self._latest, now)
        return self._latest
