"""Laws of `transfer.lease`: small cases exhaustively, large ones by a state machine against a simple model."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from transfer.lease import (
    ENDED,
    TRANSITIONS,
    IllegalTransition,
    LeaseEvent,
    LeaseState,
    LeaseTable,
    next_state,
)

LEASE_S = 10.0
CALLS = ("renew", "read_opened", "confirm", "release", "sweep")


def call(table: LeaseTable, name: str, now: float) -> bool:
    """Whether the call on lease "a" did something."""
    if name == "sweep":
        return table.sweep(now) == ["a"]
    return bool(getattr(table, name)("a", now))


def test_the_table_ends_in_ended_states_and_never_leaves_them() -> None:
    for state, event in itertools.product(LeaseState, LeaseEvent):
        if (state, event) in TRANSITIONS:
            assert state not in ENDED
            assert next_state(state, event) is TRANSITIONS[state, event]
        else:
            with pytest.raises(IllegalTransition, match=f"{state.value} does not take {event.value}"):
                next_state(state, event)


@pytest.mark.parametrize("waits", list(itertools.product((0.0, 6.0, 10.0), repeat=4)))
def test_every_short_story_of_one_lease(waits: tuple[float, ...]) -> None:
    """All sequences of four calls with all pauses, against the rules written out."""
    for names in itertools.product(CALLS, repeat=4):
        table = LeaseTable(LEASE_S)
        table.open("a", 0.0)
        now, deadline, is_read, is_live = 0.0, LEASE_S, False, True
        for name, wait in zip(names, waits, strict=True):
            now += wait
            in_time = is_live and now < deadline
            expected = {
                "renew": in_time,
                "read_opened": in_time,
                "confirm": in_time and is_read,
                "release": in_time,
                "sweep": is_live and now >= deadline,
            }[name]
            assert call(table, name, now) is expected, (names, waits, name)
            if expected and name in ("renew", "read_opened"):
                deadline, is_read = now + LEASE_S, is_read or name == "read_opened"
            elif expected:
                is_live = False
            assert len(table) == is_live
            assert table.next_deadline() == (deadline if is_live else None)


@pytest.mark.parametrize("name", ["renew", "read_opened", "confirm", "release"])
def test_a_lease_over_its_time_has_ended_before_any_sweep(name: str) -> None:
    table = LeaseTable(LEASE_S)
    table.open("a", 0.0)
    assert table.read_opened("a", 0.0)
    assert not call(table, name, LEASE_S)
    assert table.sweep(LEASE_S) == ["a"]
    assert table.sweep(LEASE_S) == []


def test_a_clock_that_goes_back_revives_nothing() -> None:
    table = LeaseTable(LEASE_S)
    table.open("a", 0.0)
    assert not table.renew("a", LEASE_S)
    assert not table.renew("a", 1.0)
    assert table.sweep(1.0) == ["a"]


@pytest.mark.parametrize("now", [1.0, 10.0, 50.0])
def test_a_collision_is_refused_and_leaves_the_first_untouched(now: float) -> None:
    table = LeaseTable(LEASE_S)
    table.open("a", 0.0)
    with pytest.raises(ValueError, match="lease 'a' exists already"):
        table.open("a", now)
    assert (len(table), table.next_deadline()) == (1, LEASE_S)


def test_empty_ids_and_lease_times_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        LeaseTable(LEASE_S).open("", 0.0)
    for lease_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="lease_s must be above 0"):
            LeaseTable(lease_s)


def test_ids_are_compared_exactly() -> None:
    table = LeaseTable(LEASE_S)
    table.open("req-10", 0.0)
    assert not table.release("req-1", 0.0)
    assert "req-10" in table
    assert "req-1" not in table


def test_a_sweep_ends_every_lease_whose_time_has_passed_and_no_other() -> None:
    table = LeaseTable(LEASE_S)
    for i in range(5):
        table.open(f"l{i}", float(i))
    assert table.renew("l0", 4.0)
    assert table.sweep(12.0) == ["l1", "l2"]
    assert table.next_deadline() == 13.0


class Leases(RuleBasedStateMachine):
    """Many leases; the model remembers of each when it ends and whether it has."""

    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(LEASE_S)
        self.now = 0.0
        self.deadline: dict[str, float] = {}
        self.was_read: set[str] = set()
        self.ended: list[str] = []

    @initialize(target=ids)
    def unknown(self) -> str:
        return "never opened"

    def is_valid(self, lease_id: str) -> bool:
        return lease_id in self.deadline and self.now < self.deadline[lease_id]

    def end(self, lease_id: str) -> None:
        del self.deadline[lease_id]
        self.ended.append(lease_id)

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 9.99, 10.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(target=ids)
    def open(self) -> str:
        lease_id = f"l{len(self.deadline) + len(self.ended)}"
        self.table.open(lease_id, self.now)
        self.deadline[lease_id] = self.now + LEASE_S
        return lease_id

    @rule(lease_id=ids, is_read=st.booleans())
    def extend(self, lease_id: str, is_read: bool) -> None:
        extend = self.table.read_opened if is_read else self.table.renew
        assert extend(lease_id, self.now) is self.is_valid(lease_id)
        if self.is_valid(lease_id):
            self.deadline[lease_id] = self.now + LEASE_S
            if is_read:
                self.was_read.add(lease_id)

    @rule(lease_id=ids)
    def confirm(self, lease_id: str) -> None:
        expected = self.is_valid(lease_id) and lease_id in self.was_read
        assert self.table.confirm(lease_id, self.now) is expected
        if expected:
            self.end(lease_id)

    @rule(lease_id=ids)
    def release(self, lease_id: str) -> None:
        expected = self.is_valid(lease_id)
        assert self.table.release(lease_id, self.now) is expected
        if expected:
            self.end(lease_id)

    @rule()
    def sweep(self) -> None:
        over = self.table.sweep(self.now)
        assert sorted(over) == sorted(i for i, deadline in self.deadline.items() if deadline <= self.now)
        for lease_id in over:
            self.end(lease_id)

    @invariant()
    def only_live_leases_are_kept_and_each_ended_once(self) -> None:
        assert len(self.table) == len(self.deadline)
        assert len(set(self.ended)) == len(self.ended)
        assert self.table.next_deadline() == min(self.deadline.values(), default=None)

    def teardown(self) -> None:
        self.now += LEASE_S
        self.sweep()
        assert len(self.table) == 0


TestLeases = Leases.TestCase
