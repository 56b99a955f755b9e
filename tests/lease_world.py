"""A holder, its readers and a network that delivers late, doubled and in any order, around the real `LeaseTable`.

A world is a value: `moves` says what can happen next, `apply` returns the world after it, so that a test can go through
all of them. The holder gives each lease the first free block for a request that computes into it. When that is
complete, the block is the lease's, and is freed when the table says that the lease ended; it is freed at once if the
lease ended before, or the request gives up. Beside it stands a model without states and transitions: of each lease the
pulls that opened it, were confirmed, are over, and the time. Whoever reads, reads what lies in the block then, also
while it is computed; it reads again when it has heard that all is there. Only the answer to its confirm protects it.

Always checked: a block has one live lease at most; what a confirm calls right is what the lease held; the table takes
what the model allows and nothing else, and what it refuses leaves it as it was; each lease ends once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from transfer.lease import ENDED, LeaseState, LeaseTable, Pull, _Lease

LEASE_S = 2
FREE = ""
HALF = "half of "  # the content of a block that is being computed
Snapshot = tuple[tuple[str, LeaseState, float, frozenset[Pull], frozenset[Pull]], ...]


class Move(NamedTuple):
    """`who` is a pull, a reader, or "" for the holder and the clock; `what` a lease, or the kind of a message."""

    kind: str
    who: Pull | str = ""
    what: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A pull at its reader. What it has sent can be delivered at any time from then on, and again."""

    lease_id: str = ""
    sent: frozenset[str] = frozenset()
    block: int | None = None  # known from the answer to its open
    hears: bool = False  # the word that all is there is on its way
    has_heard: bool = False
    content: str | None = None  # what lay there when it read; of several reads the worst
    has_all: bool = False  # it has read since it heard
    is_over: bool = False  # used, refused or given up

    def ended(self) -> Reading:
        return Reading(lease_id=self.lease_id, sent=self.sent, is_over=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What is known of a lease: its life is over when its time is, or for one of the reasons that `is_over` names."""

    deadline: float
    is_complete: bool = False
    opened: frozenset[Pull] = frozenset()
    confirmed: frozenset[Pull] = frozenset()
    gone: frozenset[Pull] = frozenset()  # dropped, or lost with their reader
    was_ended: bool = False  # released, swept, or died with the holder
    was_abandoned: bool = False  # its last reader was lost

    @property
    def reading(self) -> frozenset[Pull]:
        return self.opened - self.confirmed - self.gone

    def is_over(self, now: int) -> bool:
        is_used = bool(self.confirmed) and not self.reading
        return self.was_ended or self.was_abandoned or is_used or now >= self.deadline


COMPUTING = Truth(deadline=inf)
OVER = Truth(deadline=0, was_ended=True)  # how it came to its end makes no difference any more


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseWorld:
    end: int  # the clock stops here
    pulls: tuple[tuple[Pull, Reading], ...]
    unopened: tuple[str, ...]  # ids of leases to come
    owners: tuple[str, ...]  # of each block, the lease that has it
    contents: tuple[str, ...]  # of each block, the lease whose KV was written last
    now: int = 0
    num_restarts: int = 0
    table: Snapshot = ()
    truths: tuple[tuple[str, Truth], ...] = ()
    released: frozenset[str] = frozenset()
    crashed: frozenset[str] = frozenset()  # readers
    forgotten: frozenset[str] = frozenset()  # readers of whose end the holder knows

    def moves(self) -> Iterator[Move]:
        """Everything that can happen, late and repeated messages included."""
        yield Move("sweep")
        if self.now < self.end:
            yield Move("tick")
        if FREE in self.owners:
            yield from (Move("hold", what=lease_id) for lease_id in self.unopened[:1])
        if self.num_restarts:
            yield Move("restart")
        for lease_id, _ in self.truths:
            yield Move("release", what=lease_id)
        for lease_id in self.computing:
            yield Move("complete", what=lease_id)
            yield Move("withdraw", what=lease_id)
        for pull, reading in self.pulls:
            yield from self._moves_of(pull, reading)

    @property
    def computing(self) -> list[str]:
        """The leases whose requests compute, also if they themselves have ended."""
        return [owner for owner, content in zip(self.owners, self.contents, strict=True) if content == HALF + owner]

    def _moves_of(self, pull: Pull, reading: Reading) -> Iterator[Move]:
        reader = str(pull.reader)
        yield from (Move("deliver", pull, kind) for kind in sorted(reading.sent))
        if reader in self.crashed:
            if reader not in self.forgotten:
                yield Move("forget", reader)
            return
        yield Move("crash", reader)
        if not reading.lease_id:
            yield from (Move("claim", pull, lease_id) for lease_id, _ in self.truths)
        elif not reading.is_over:
            yield Move("send", pull, "drop")
            if reading.block is not None:
                yield Move("read", pull)
                yield Move("send", pull, "renew")
            if reading.hears:
                yield Move("hear", pull)
            if reading.has_all:
                yield Move("send", pull, "confirm")

    def apply(self, move: Move) -> LeaseWorld:
        return _Turn(self).play(move)


@dataclass(slots=True)
class _Turn:
    """One move: the parts of a world, to be changed."""

    world: LeaseWorld
    table: LeaseTable = field(init=False)
    truths: dict[str, Truth] = field(init=False)
    pulls: dict[Pull, Reading] = field(init=False)
    owners: list[str] = field(init=False)
    contents: list[str] = field(init=False)

    def __post_init__(self) -> None:
        world = self.world
        self.table = _restored(world.table, world.now)
        self.truths, self.pulls = dict(world.truths), dict(world.pulls)
        self.owners, self.contents = list(world.owners), list(world.contents)

    def play(self, move: Move) -> LeaseWorld:
        changes = getattr(self, f"_{move.kind}")(move) or {}
        return replace(
            self.world,
            pulls=tuple(self.pulls.items()),
            owners=tuple(self.owners),
            contents=tuple(self.contents),
            table=_snapshot(self.table),
            truths=tuple(self.truths.items()),
            **changes,
        )

    # ---- the holder

    def _tick(self, move: Move) -> dict[str, object]:
        return {"now": self.world.now + 1}

    def _hold(self, move: Move) -> dict[str, object]:
        block = self.owners.index(FREE)
        for lease_id, truth in self.truths.items():
            is_its_block = self.contents[block] in (lease_id, HALF + lease_id)
            assert truth.is_over(self.world.now) or not is_its_block, "the block of a live lease was free"
        self.table.open(move.what)
        self.owners[block], self.contents[block] = move.what, HALF + move.what
        self.truths[move.what] = COMPUTING
        return {"unopened": self.world.unopened[1:]}

    def _complete(self, move: Move) -> None:
        """The request has computed the last token; if its ticket was given back meanwhile, its block is free."""
        block, truth, now = self.owners.index(move.what), self.truths[move.what], self.world.now
        self.contents[block] = move.what
        state = self.table.complete(move.what, now)
        self._expect(not truth.is_over(now), state)
        if truth.is_over(now):
            self.owners[block] = FREE
            return
        assert state is (LeaseState.READING if truth.reading else LeaseState.HELD)
        self.truths[move.what] = replace(truth, is_complete=True, deadline=now + LEASE_S)
        for pull in truth.reading:
            if not self.pulls[pull].is_over:
                self.pulls[pull] = replace(self.pulls[pull], hears=True)

    def _withdraw(self, move: Move) -> None:
        """The request was cancelled, failed, or lost its block to others: the ticket is void."""
        is_allowed = not self.truths[move.what].is_over(self.world.now)
        self._expect(is_allowed, self.table.release(move.what, self.world.now))
        self.truths[move.what] = OVER
        self.owners[self.owners.index(move.what)] = FREE

    def _restart(self, move: Move) -> dict[str, object]:
        """Another life at the same address: its memory is empty, and it knows no lease of the former."""
        self.table = LeaseTable(LEASE_S)
        self.owners[:], self.contents[:] = [FREE] * len(self.owners), [FREE] * len(self.owners)
        self.truths = dict.fromkeys(self.truths, OVER)
        return {"num_restarts": self.world.num_restarts - 1}

    def _release(self, move: Move) -> None:
        truth = self.truths[move.what]
        is_allowed = not truth.is_over(self.world.now)
        self._expect(is_allowed, self.table.release(move.what, self.world.now))
        if is_allowed:
            self._free(move.what)

    def _sweep(self, move: Move) -> None:
        over = [key for key, truth in self.truths.items() if truth != OVER and truth.is_over(self.world.now)]
        assert sorted(self.table.sweep(self.world.now)) == sorted(over)
        for lease_id in over:
            self._free(lease_id)

    def _forget(self, move: Move) -> dict[str, object]:
        abandoned = set()
        for lease_id, truth in self.truths.items():
            lost = {pull for pull in truth.reading if pull.reader == move.who}
            if lost and not truth.is_over(self.world.now):
                is_abandoned = truth.is_complete and truth.reading == lost
                self.truths[lease_id] = replace(truth, gone=truth.gone | lost, was_abandoned=is_abandoned)
                abandoned |= {lease_id} if is_abandoned else set()
        ended = self.table.lose(move.who, self.world.now)
        assert ended.keys() == abandoned
        for lease_id, state in ended.items():
            assert state is (LeaseState.CONFIRMED if self.truths[lease_id].confirmed else LeaseState.RELEASED)
            self._free(lease_id)
        return {"forgotten": self.world.forgotten | {move.who}}

    def _deliver(self, move: Move) -> None:
        assert isinstance(move.who, Pull)
        lease_id = self.pulls[move.who].lease_id
        truth, now = self.truths[lease_id], self.world.now
        is_live = not truth.is_over(now)
        if move.what == "open":
            is_allowed = is_live and move.who not in truth.confirmed | truth.gone
            state = self.table.read_opened(lease_id, move.who, now)
        else:
            is_allowed = is_live and move.who in truth.reading and (truth.is_complete or move.what != "confirm")
            state = getattr(self.table, move.what)(lease_id, move.who, now)
        assert self.table.is_live(lease_id, now) == (is_live and state not in ENDED)
        self._expect(is_allowed, state)
        if is_allowed:
            self.truths[lease_id] = truth = _after(truth, move, now)
        if is_allowed and truth.is_over(now):
            assert state is LeaseState.CONFIRMED
            self._free(lease_id)
        self._answer(move.who, move.what, is_allowed)

    def _expect(self, is_allowed: bool, state: LeaseState | None) -> None:
        assert (state is not None) == is_allowed
        assert is_allowed or _snapshot(self.table) == self.world.table, "a refused message changed something"

    def _free(self, lease_id: str) -> None:
        """The lease has ended, and with it goes its block, unless a request still computes into it."""
        assert lease_id not in self.table
        assert self.owners.count(lease_id) == 1, "its block was given back before"
        if self.truths[lease_id].is_complete:
            self.owners[self.owners.index(lease_id)] = FREE
        self.truths[lease_id] = OVER

    # ---- the readers

    def _answer(self, pull: Pull, kind: str, is_allowed: bool) -> None:
        """The reader hears it, unless it has stopped listening."""
        reading = self.pulls[pull]
        if pull.reader in self.world.crashed or reading.is_over:
            return
        if kind == "open" and is_allowed:
            block = self.owners.index(reading.lease_id)
            is_complete = self.truths[reading.lease_id].is_complete
            self.pulls[pull] = replace(reading, block=block, has_heard=reading.has_heard or is_complete)
        elif kind == "open":
            self.pulls[pull] = reading.ended()
        elif kind == "confirm":
            assert not is_allowed or reading.content == reading.lease_id, "wrong KV was confirmed"
            self.pulls[pull] = reading.ended()

    def _claim(self, move: Move) -> None:
        assert isinstance(move.who, Pull)
        self.pulls[move.who] = Reading(lease_id=move.what, sent=frozenset({"open"}))

    def _send(self, move: Move) -> None:
        assert isinstance(move.who, Pull)
        reading = self.pulls[move.who]
        reading = replace(reading, sent=reading.sent | {move.what})
        self.pulls[move.who] = reading.ended() if move.what == "drop" else reading

    def _read(self, move: Move) -> None:
        assert isinstance(move.who, Pull)
        reading = self.pulls[move.who]
        assert reading.block is not None
        has_right_so_far = reading.content in (None, reading.lease_id, HALF + reading.lease_id)
        content = self.contents[reading.block] if has_right_so_far else reading.content
        self.pulls[move.who] = replace(reading, content=content, has_all=reading.has_heard)

    def _hear(self, move: Move) -> None:
        assert isinstance(move.who, Pull)
        self.pulls[move.who] = replace(self.pulls[move.who], hears=False, has_heard=True)

    def _crash(self, move: Move) -> dict[str, object]:
        for pull, reading in self.pulls.items():
            if pull.reader == move.who:
                self.pulls[pull] = reading.ended()
        return {"crashed": self.world.crashed | {move.who}}


def _after(truth: Truth, move: Move, now: int) -> Truth:
    pull = frozenset({move.who})
    match move.what:
        case "open":
            return replace(truth, opened=truth.opened | pull, deadline=now + LEASE_S if truth.is_complete else inf)
        case "renew":
            return replace(truth, deadline=now + LEASE_S if truth.is_complete else inf)
        case "confirm":
            return replace(truth, confirmed=truth.confirmed | pull)
        case _:
            return replace(truth, gone=truth.gone | pull)


def _snapshot(table: LeaseTable) -> Snapshot:
    return tuple(
        (key, lease.state, lease.deadline, frozenset(lease.reading), frozenset(lease.over))
        for key, lease in table._leases.items()
    )


def _restored(snapshot: Snapshot, now: int) -> LeaseTable:
    table = LeaseTable(LEASE_S)
    table._latest = now
    for lease_id, state, deadline, reading, over in snapshot:
        table._leases[lease_id] = _Lease(deadline, state, set(reading), set(over))
    return table
