"""Time limits on the right to read blocks: a pure state machine, no clock, no I/O.

A lease begins when its first tokens are about to be computed, so that readers can follow. It can have several readers,
each with one or more pulls. It ends when every pull that was opened has been confirmed or dropped and one of them was
confirmed; a ticket that all have dropped is good for another reader:

    open ► COMPUTING ──────────────┐ complete_read
            │ complete             │
            ▼    open_read         ▼       confirm
           HELD ──────────► READING ────────────────────► SHARED     a reader is done, others still read
            │ ◄────────────  │  │                          │  │
            │   last_drop    │  └──── last_confirm ──┐     │  │
            │                │                       ▼     │  │
            │                │                   CONFIRMED ◄──┘ last_confirm, last_drop, last_lost
            │ release        │ release, last_lost          │ release
            └────────────────┴────────► RELEASED ◄─────────┘
    expire leads from each of these three to EXPIRED; renew, open_read and drop leave READING and SHARED as they are

COMPUTING has no time limit, since the computation ends in any case; nothing can be confirmed in it, release ends it as
well, and whatever readers do leaves it as it is.

The holder of the blocks owns one `LeaseTable`. What always holds: a lease ends exactly once; a lease whose time has
passed has ended for every call, swept or not; a pull is confirmed or dropped once; nothing said about an ended or
unknown lease, or under a pull that is over, changes anything; only live leases occupy memory. Ids are unique per
attempt, so ended ones need no memorial. The owner learns of each end through a return value.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import NamedTuple


class Pull(NamedTuple):
    """One reader's intention to read the blocks once; `number` is new for each of its pulls."""

    reader: Hashable
    number: int


class LeaseState(Enum):
    COMPUTING = "computing"  # not all of the tokens are there yet; some pulls may read those that are
    HELD = "held"  # nobody reads, and nobody has confirmed
    READING = "reading"  # at least one pull was given the blocks, none is confirmed
    SHARED = "shared"  # at least one pull is confirmed, at least one still reads
    CONFIRMED = "confirmed"
    RELEASED = "released"
    EXPIRED = "expired"


class LeaseEvent(Enum):
    COMPLETE = "complete"  # every token is there, and nobody reads
    COMPLETE_READ = "complete_read"  # every token is there, and somebody reads
    OPEN_READ = "open_read"
    RENEW = "renew"
    CONFIRM = "confirm"
    LAST_CONFIRM = "last_confirm"  # no other pull reads
    DROP = "drop"
    LAST_DROP = "last_drop"  # no other pull reads
    LAST_LOST = "last_lost"  # the reader is gone, and no other reads
    RELEASE = "release"
    EXPIRE = "expire"


TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (LeaseState.COMPUTING, LeaseEvent.COMPLETE): LeaseState.HELD,
    (LeaseState.COMPUTING, LeaseEvent.COMPLETE_READ): LeaseState.READING,
    (LeaseState.COMPUTING, LeaseEvent.OPEN_READ): LeaseState.COMPUTING,
    (LeaseState.COMPUTING, LeaseEvent.RENEW): LeaseState.COMPUTING,
    (LeaseState.COMPUTING, LeaseEvent.DROP): LeaseState.COMPUTING,
    (LeaseState.COMPUTING, LeaseEvent.LAST_DROP): LeaseState.COMPUTING,
    (LeaseState.COMPUTING, LeaseEvent.LAST_LOST): LeaseState.COMPUTING,  # who computes does not need a reader
    (LeaseState.COMPUTING, LeaseEvent.RELEASE): LeaseState.RELEASED,
    (LeaseState.HELD, LeaseEvent.OPEN_READ): LeaseState.READING,
    (LeaseState.HELD, LeaseEvent.RELEASE): LeaseState.RELEASED,
    (LeaseState.HELD, LeaseEvent.EXPIRE): LeaseState.EXPIRED,
    (LeaseState.READING, LeaseEvent.OPEN_READ): LeaseState.READING,
    (LeaseState.READING, LeaseEvent.RENEW): LeaseState.READING,
    (LeaseState.READING, LeaseEvent.CONFIRM): LeaseState.SHARED,
    (LeaseState.READING, LeaseEvent.LAST_CONFIRM): LeaseState.CONFIRMED,
    (LeaseState.READING, LeaseEvent.DROP): LeaseState.READING,
    (LeaseState.READING, LeaseEvent.LAST_DROP): LeaseState.HELD,  # a full decode engine: the next one may have room
    (LeaseState.READING, LeaseEvent.LAST_LOST): LeaseState.RELEASED,
    (LeaseState.READING, LeaseEvent.RELEASE): LeaseState.RELEASED,
    (LeaseState.READING, LeaseEvent.EXPIRE): LeaseState.EXPIRED,
    (LeaseState.SHARED, LeaseEvent.OPEN_READ): LeaseState.SHARED,
    (LeaseState.SHARED, LeaseEvent.RENEW): LeaseState.SHARED,
    (LeaseState.SHARED, LeaseEvent.CONFIRM): LeaseState.SHARED,
    (LeaseState.SHARED, LeaseEvent.LAST_CONFIRM): LeaseState.CONFIRMED,
    (LeaseState.SHARED, LeaseEvent.DROP): LeaseState.SHARED,
    (LeaseState.SHARED, LeaseEvent.LAST_DROP): LeaseState.CONFIRMED,
    (LeaseState.SHARED, LeaseEvent.LAST_LOST): LeaseState.CONFIRMED,
    (LeaseState.SHARED, LeaseEvent.RELEASE): LeaseState.RELEASED,
    (LeaseState.SHARED, LeaseEvent.EXPIRE): LeaseState.EXPIRED,
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
    """`reading` and `over` are disjoint; HELD has nothing in `reading`, READING and SHARED have something."""

    deadline: float = inf  # in COMPUTING, and in no other state
    state: LeaseState = LeaseState.COMPUTING
    reading: set[Pull] = field(default_factory=set)
    over: set[Pull] = field(default_factory=set)  # confirmed, dropped or lost: a late message must not bring them back


class LeaseTable:
    """The live leases of one holder.

    `now` is in seconds on one clock; a reading older than one seen before counts as that one, so that a lease once
    over its time stays over it. A complete lease lives in [completed or extended, + lease_s). Each event returns the
    state the lease is in after it, one of `ENDED` if it ended with it, or None: refused, nothing has changed.
    """

    def __init__(self, lease_s: float) -> None:
        if not lease_s > 0:
            raise ValueError(f"lease_s must be above 0, given {lease_s}")
        self._lease_s = lease_s
        self._leases: dict[str, _Lease] = {}
        self._latest = float("-inf")

    def __len__(self) -> int:
        """Leases that have not ended, or only by their time and without a sweep since."""
        return len(self._leases)

    def __contains__(self, lease_id: object) -> bool:
        return lease_id in self._leases

    def is_live(self, lease_id: str, now: float) -> bool:
        return self._find_live(lease_id, now) is not None

    def open(self, lease_id: str) -> None:
        """Starts a lease on what is about to be computed, without a time limit until that is complete.

        Raises ValueError, with the first lease untouched, when the id is empty or in use.
        """
        if not lease_id:
            raise ValueError("a lease id must not be empty")
        if lease_id in self._leases:
            raise ValueError(f"lease {lease_id!r} exists already")
        self._leases[lease_id] = _Lease()

    def complete(self, lease_id: str, now: float) -> LeaseState | None:
        """Every token is there: from now on pulls can be confirmed, and the lease has a time limit."""
        lease = self._find_live(lease_id, now)
        if lease is None or lease.state is not LeaseState.COMPUTING:
            return None
        lease.deadline = self._latest + self._lease_s
        return self._take(lease_id, lease, LeaseEvent.COMPLETE_READ if lease.reading else LeaseEvent.COMPLETE)

    def read_opened(self, lease_id: str, pull: Pull, now: float) -> LeaseState | None:
        """A reader is about to learn the blocks: extends the lease and lets this pull be confirmed.

        Again for a pull that reads: extends. None for one that is over.
        """
        lease = self._find_live(lease_id, now)
        if lease is None or pull in lease.over:
            return None
        lease.reading.add(pull)
        return self._extend(lease_id, lease, LeaseEvent.OPEN_READ)

    def renew(self, lease_id: str, pull: Pull, now: float) -> LeaseState | None:
        """The pull still waits or reads: extends the lease to `now + lease_s`."""
        lease = self._find_reading(lease_id, pull, now)
        return None if lease is None else self._extend(lease_id, lease, LeaseEvent.RENEW)

    def confirm(self, lease_id: str, pull: Pull, now: float) -> LeaseState | None:
        """A state exactly if the lease was valid from the opening of this pull until now: what was read is right.

        The lease goes on for the other pulls that read, and ends with the last. A pull that never opened the ticket,
        is over, or has not waited for the last token, gets None and ends nothing.
        """
        lease = self._leases.get(lease_id)
        if lease is not None and lease.state is LeaseState.COMPUTING:
            return None
        return self._leave(lease_id, pull, now, LeaseEvent.CONFIRM, LeaseEvent.LAST_CONFIRM)

    def drop(self, lease_id: str, pull: Pull, now: float) -> LeaseState | None:
        """The pull will not be confirmed any more."""
        return self._leave(lease_id, pull, now, LeaseEvent.DROP, LeaseEvent.LAST_DROP)

    def lose(self, reader: Hashable, now: float) -> dict[str, LeaseState]:
        """The reader is gone, and its pulls are over. Returns the leases that ended, those that nobody else reads."""
        pulls = [(key, pull) for key, lease in self._leases.items() for pull in lease.reading if pull.reader == reader]
        ended = {}
        for lease_id, pull in pulls:
            state = self._leave(lease_id, pull, now, LeaseEvent.DROP, LeaseEvent.LAST_LOST)
            if state is not None and state in ENDED:
                ended[lease_id] = state
        return ended

    def release(self, lease_id: str, now: float) -> LeaseState | None:
        """Ends a live lease that nobody wants any more."""
        lease = self._find_live(lease_id, now)
        return None if lease is None else self._take(lease_id, lease, LeaseEvent.RELEASE)

    def sweep(self, now: float) -> list[str]:
        """Ends every lease whose time has passed and returns their ids, each id once in all calls together."""
        now = self._time(now)
        over = [(lease_id, lease) for lease_id, lease in self._leases.items() if lease.deadline <= now]
        for lease_id, lease in over:
            self._take(lease_id, lease, LeaseEvent.EXPIRE)
        return [lease_id for lease_id, _ in over]

    def next_deadline(self) -> float | None:
        """When `sweep` will next have something to do; None without leases that have a time limit."""
        deadline = min((lease.deadline for lease in self._leases.values()), default=inf)
        return None if deadline == inf else deadline

    def _extend(self, lease_id: str, lease: _Lease, event: LeaseEvent) -> LeaseState:
        """No limit stays none."""
        lease.deadline = max(lease.deadline, self._latest + self._lease_s)
        return self._take(lease_id, lease, event)

    def _leave(
        self, lease_id: str, pull: Pull, now: float, event: LeaseEvent, last_event: LeaseEvent
    ) -> LeaseState | None:
        lease = self._find_reading(lease_id, pull, now)
        if lease is None:
            return None
        lease.reading.remove(pull)
        lease.over.add(pull)
        return self._take(lease_id, lease, event if lease.reading else last_event)

    def _take(self, lease_id: str, lease: _Lease, event: LeaseEvent) -> LeaseState:
        lease.state = next_state(lease.state, event)
        if lease.state in ENDED:
            del self._leases[lease_id]
        return lease.state

    def _find_live(self, lease_id: str, now: float) -> _Lease | None:
        now = self._time(now)
        lease = self._leases.get(lease_id)
        return lease if lease is not None and now < lease.deadline else None

    def _find_reading(self, lease_id: str, pull: Pull, now: float) -> _Lease | None:
        lease = self._find_live(lease_id, now)
        return lease if lease is not None and pull in lease.reading else None

    def _time(self, now: float) -> float:
        self._latest = max(self._latest, now)
        return self._latest
