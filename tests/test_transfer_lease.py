"""Laws of `transfer.lease`, one by one, and a state machine of many leases and readers against a simple model.

`test_transfer_lease_worlds.py` goes through all stories of few.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from transfer.lease import (
    ENDED,
    TRANSITIONS,
    IllegalTransition,
    LeaseEvent,
    LeaseState,
    LeaseTable,
    Pull,
    next_state,
)

LEASE_S = 10.0
X, Y = Pull("x", 1), Pull("y", 1)
PULL_EVENTS = ("read_opened", "renew", "confirm", "drop")


def hold(table: LeaseTable, lease_id: str, now: float) -> None:
    """A lease whose tokens are all there."""
    table.open(lease_id)
    assert table.complete(lease_id, now) is LeaseState.HELD


def opened_by(*pulls: Pull) -> LeaseTable:
    """Lease "a", complete at time 0."""
    table = LeaseTable(LEASE_S)
    hold(table, "a", 0.0)
    for pull in pulls:
        assert table.read_opened("a", pull, 0.0)
    return table


def call(table: LeaseTable, name: str, now: float) -> LeaseState | None:
    if name == "release":
        return table.release("a", now)
    state: LeaseState | None = getattr(table, name)("a", X, now)
    return state


def test_the_table_ends_in_ended_states_and_never_leaves_them() -> None:
    for state, event in itertools.product(LeaseState, LeaseEvent):
        if (state, event) in TRANSITIONS:
            assert state not in ENDED
            assert next_state(state, event) is TRANSITIONS[state, event]
        else:
            with pytest.raises(IllegalTransition, match=f"{state.value} does not take {event.value}"):
                next_state(state, event)


def test_every_live_state_can_be_released_and_expires_once_it_is_complete() -> None:
    for state in set(LeaseState) - ENDED:
        assert next_state(state, LeaseEvent.RELEASE) is LeaseState.RELEASED
        if state is not LeaseState.COMPUTING:
            assert next_state(state, LeaseEvent.EXPIRE) is LeaseState.EXPIRED


# ---- while its tokens are computed


def computed_for(*pulls: Pull) -> LeaseTable:
    """Lease "a", not complete."""
    table = LeaseTable(LEASE_S)
    table.open("a")
    for pull in pulls:
        assert table.read_opened("a", pull, 0.0) is LeaseState.COMPUTING
    return table


def test_what_is_computed_has_no_time_limit_until_it_is_complete() -> None:
    table = computed_for(X)
    assert table.next_deadline() is None
    assert table.renew("a", X, 5.0) is LeaseState.COMPUTING
    assert table.sweep(1e9) == []
    assert table.next_deadline() is None
    assert table.complete("a", 2e9) is LeaseState.READING
    assert table.next_deadline() == 2e9 + LEASE_S


def test_nothing_is_confirmed_before_it_is_complete() -> None:
    table = computed_for(X, Y)
    assert table.confirm("a", X, 1.0) is None
    assert table.complete("a", 2.0) is LeaseState.READING
    assert table.confirm("a", X, 3.0) is LeaseState.SHARED
    assert table.confirm("a", Y, 3.0) is LeaseState.CONFIRMED


@pytest.mark.parametrize("leave", [lambda table: table.drop("a", X, 1.0), lambda table: table.lose("x", 1.0)])
def test_a_computation_outlives_its_readers(leave: Callable[[LeaseTable], object]) -> None:
    """A decode engine that was full or died costs no second prefill."""
    table = computed_for(X)
    assert leave(table) in (LeaseState.COMPUTING, {})
    assert table.read_opened("a", X, 2.0) is None
    assert table.complete("a", 3.0) is LeaseState.HELD
    assert table.read_opened("a", Y, 4.0) is LeaseState.READING


def test_a_lease_is_completed_once_and_only_while_it_lives() -> None:
    table = computed_for()
    assert table.complete("b", 1.0) is None
    assert table.complete("a", 1.0) is LeaseState.HELD
    assert table.complete("a", 2.0) is None
    assert table.next_deadline() == 1.0 + LEASE_S
    table = computed_for(X)
    assert table.release("a", 1.0) is LeaseState.RELEASED
    assert table.complete("a", 1.0) is None


# ---- time


@pytest.mark.parametrize("name", [*PULL_EVENTS, "release"])
def test_a_lease_over_its_time_has_ended_before_any_sweep(name: str) -> None:
    table = opened_by(X)
    assert call(table, name, LEASE_S) is None
    assert not table.is_live("a", LEASE_S)
    assert table.lose("x", LEASE_S) == {}
    assert table.sweep(LEASE_S) == ["a"]
    assert table.sweep(LEASE_S) == []


@pytest.mark.parametrize("name", PULL_EVENTS)
def test_a_clock_that_goes_back_revives_nothing(name: str) -> None:
    table = opened_by(X)
    assert not table.is_live("a", LEASE_S)
    assert call(table, name, 1.0) is None
    assert table.sweep(1.0) == ["a"]


@pytest.mark.parametrize("name", ["read_opened", "renew"])
def test_a_reader_that_waits_keeps_the_lease_for_as_long_as_it_says_so(name: str) -> None:
    table = opened_by(X)
    for i in range(1, 50):
        assert call(table, name, i * 0.9 * LEASE_S)
        assert table.next_deadline() == i * 0.9 * LEASE_S + LEASE_S
    assert table.confirm("a", X, 49.5 * 0.9 * LEASE_S) is LeaseState.CONFIRMED


def test_only_a_pull_that_reads_can_extend_a_lease() -> None:
    table = opened_by(X, Y)
    assert table.drop("a", Y, 1.0)
    assert table.renew("a", Y, 2.0) is None
    assert table.renew("a", Pull("z", 1), 2.0) is None
    assert table.next_deadline() == LEASE_S


def test_a_sweep_ends_every_lease_whose_time_has_passed_and_no_other() -> None:
    table = LeaseTable(LEASE_S)
    for i in range(5):
        hold(table, f"l{i}", float(i))
    assert table.read_opened("l0", X, 4.0)
    assert table.sweep(12.0) == ["l1", "l2"]
    assert table.next_deadline() == 13.0


# ---- several readers


def test_the_lease_outlives_every_confirm_but_the_last() -> None:
    pulls = [X, Y, Pull("x", 2)]
    for order in itertools.permutations(pulls):
        table = opened_by(*pulls)
        states = [table.confirm("a", pull, 1.0) for pull in order]
        assert states == [LeaseState.SHARED, LeaseState.SHARED, LeaseState.CONFIRMED]
        assert len(table) == 0


@pytest.mark.parametrize("leave", [LeaseTable.drop, LeaseTable.confirm])
def test_a_ticket_one_reader_has_used_ends_with_its_last_reader(leave: object) -> None:
    table = opened_by(X, Y)
    assert table.confirm("a", X, 1.0) is LeaseState.SHARED
    assert leave(table, "a", Y, 1.0) is LeaseState.CONFIRMED  # type: ignore[operator]


def test_a_ticket_all_readers_have_dropped_is_good_for_another() -> None:
    table = opened_by(X, Y)
    assert table.drop("a", X, 1.0) is LeaseState.READING
    assert table.drop("a", Y, 1.0) is LeaseState.HELD
    assert table.read_opened("a", Pull("y", 2), 2.0) is LeaseState.READING
    assert table.confirm("a", Pull("y", 2), 3.0) is LeaseState.CONFIRMED


def test_a_lost_reader_ends_what_it_alone_reads_and_nothing_of_others() -> None:
    table = LeaseTable(LEASE_S)
    readers = {"alone": [X, Pull("x", 2)], "both": [X, Y], "other": [Y], "nobody": [], "used": [X, Pull("y", 2)]}
    for lease_id, pulls in readers.items():
        hold(table, lease_id, 0.0)
        for pull in pulls:
            table.read_opened(lease_id, pull, 0.0)
    assert table.confirm("used", Pull("y", 2), 1.0) is LeaseState.SHARED
    assert table.lose("x", 2.0) == {"alone": LeaseState.RELEASED, "used": LeaseState.CONFIRMED}
    assert table.lose("x", 2.0) == {}
    assert table.confirm("both", X, 3.0) is None
    assert table.confirm("both", Y, 3.0) is LeaseState.CONFIRMED
    assert "other" in table
    assert "nobody" in table


@pytest.mark.parametrize("leave", ["drop", "confirm"])
@pytest.mark.parametrize("name", PULL_EVENTS)
def test_a_pull_that_is_over_stays_over(leave: str, name: str) -> None:
    table = opened_by(X, Y)
    assert call(table, leave, 1.0)
    assert call(table, name, 2.0) is None
    assert table.next_deadline() == LEASE_S
    assert table.confirm("a", Y, 3.0) is LeaseState.CONFIRMED


def test_a_confirm_without_an_opening_ends_nothing() -> None:
    table = opened_by(X)
    assert table.confirm("a", Y, 1.0) is None
    assert table.confirm("a", Pull("x", 2), 1.0) is None
    assert table.confirm("a", X, 1.0) is LeaseState.CONFIRMED


# ---- ids


@pytest.mark.parametrize("now", [1.0, 10.0, 50.0])
def test_a_collision_is_refused_and_leaves_the_first_untouched(now: float) -> None:
    table = opened_by()
    assert table.is_live("a", now) is (now < LEASE_S)
    with pytest.raises(ValueError, match="lease 'a' exists already"):
        table.open("a")
    assert (len(table), table.next_deadline()) == (1, LEASE_S)


def test_empty_ids_and_lease_times_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        LeaseTable(LEASE_S).open("")
    for lease_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="lease_s must be above 0"):
            LeaseTable(lease_s)


def test_ids_are_compared_exactly() -> None:
    table = LeaseTable(LEASE_S)
    table.open("req-10")
    assert not table.release("req-1", 0.0)
    assert "req-10" in table
    assert "req-1" not in table


# ---- many leases, many readers, many incarnations


@dataclass
class Known:
    """A lease as the model remembers it, and the block that is its alone until it ends."""

    block: int
    deadline: float = inf
    reading: set[Pull] = field(default_factory=set)
    over: set[Pull] = field(default_factory=set)
    is_used: bool = False


class Leases(RuleBasedStateMachine):
    """A holder with few blocks, in one life after the other. Every id ever used can come again, late."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_opened = 0
        self.num_lives = 0
        self.start_life()

    @rule()
    def start_life(self) -> None:
        self.num_lives += 1
        self.table = LeaseTable(LEASE_S)
        self.live: dict[str, Known] = {}
        self.free = set(range(6))

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 9.99, 10.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def open(self) -> None:
        if self.free:
            self.num_opened += 1
            self.table.open(f"l{self.num_opened}")
            self.live[f"l{self.num_opened}"] = Known(self.free.pop())

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from([f"l{i}" for i in range(self.num_opened + 1)]))
        known = self.live.get(lease_id)
        state = self.table.complete(lease_id, self.now)
        if known is None or known.deadline < inf:
            assert state is None
        else:
            known.deadline = self.now + LEASE_S
            assert state is self.state_of(known)

    @rule(data=st.data(), name=st.sampled_from(PULL_EVENTS), reader=st.sampled_from("xyz"), number=st.integers(1, 3))
    def say(self, data: st.DataObject, name: str, reader: str, number: int) -> None:
        lease_id = data.draw(st.sampled_from([f"l{i}" for i in range(self.num_opened + 1)]))
        pull, before = Pull(reader, number), self.live.get(lease_id)
        state = getattr(self.table, name)(lease_id, pull, self.now)
        known = before if before is not None and self.now < before.deadline else None
        expected = known is not None and (pull not in known.over if name == "read_opened" else pull in known.reading)
        if known is not None and known.deadline == inf and name == "confirm":
            expected = False
        assert (state is not None) is expected
        if known is not None and expected:
            self.said(lease_id, known, name, pull)
            assert state is self.state_of(known)

    def said(self, lease_id: str, known: Known, name: str, pull: Pull) -> None:
        if name in ("read_opened", "renew"):
            known.reading.add(pull)
            if known.deadline < inf:
                known.deadline = self.now + LEASE_S
            return
        known.reading.discard(pull)
        known.over.add(pull)
        known.is_used |= name == "confirm"
        if known.is_used and not known.reading:
            self.end(lease_id)

    def state_of(self, known: Known) -> LeaseState:
        if known.deadline == inf:
            return LeaseState.COMPUTING
        if known.reading:
            return LeaseState.SHARED if known.is_used else LeaseState.READING
        return LeaseState.CONFIRMED if known.is_used else LeaseState.HELD

    def end(self, lease_id: str) -> None:
        block = self.live.pop(lease_id).block
        assert block not in self.free
        self.free.add(block)

    @rule(reader=st.sampled_from("xyz"))
    def lose(self, reader: str) -> None:
        expected = {}
        for lease_id, known in list(self.live.items()):
            lost = {pull for pull in known.reading if pull.reader == reader}
            if lost and self.now < known.deadline:
                known.reading -= lost
                known.over |= lost
                if not known.reading and known.deadline < inf:
                    expected[lease_id] = LeaseState.CONFIRMED if known.is_used else LeaseState.RELEASED
                    self.end(lease_id)
        assert self.table.lose(reader, self.now) == expected

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from([f"l{i}" for i in range(self.num_opened + 1)]))
        is_live = lease_id in self.live and self.now < self.live[lease_id].deadline
        assert self.table.is_live(lease_id, self.now) is is_live
        assert self.table.release(lease_id, self.now) is (LeaseState.RELEASED if is_live else None)
        if is_live:
            self.end(lease_id)

    @rule()
    def sweep(self) -> None:
        over = self.table.sweep(self.now)
        assert sorted(over) == sorted(i for i, known in self.live.items() if known.deadline <= self.now)
        for lease_id in over:
            self.end(lease_id)

    @invariant()
    def only_live_leases_are_kept(self) -> None:
        assert len(self.table) == len(self.live)
        assert all(lease_id in self.table for lease_id in self.live)
        deadline = min((known.deadline for known in self.live.values()), default=inf)
        assert self.table.next_deadline() == (None if deadline == inf else deadline)

    def teardown(self) -> None:
        """Nothing happens but that computations end and time passes."""
        for lease_id, known in self.live.items():
            if known.deadline == inf:
                assert self.table.complete(lease_id, self.now)
                known.deadline = self.now + LEASE_S
        self.now = max([self.now, *(known.deadline for known in self.live.values())])
        self.sweep()
        assert len(self.table) == 0
        assert len(self.free) == 6


TestLeases = Leases.TestCase
