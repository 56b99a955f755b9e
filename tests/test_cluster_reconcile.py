"""Which engines are started, drained and replaced: examples, and laws over random lives with restarting controllers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pd_service.cluster.reconcile import (
    SETTLE_S,
    TRANSITIONS,
    Engine,
    Event,
    Fleet,
    IllegalTransition,
    Remove,
    Start,
    State,
)
from pd_service.config import PoolRole, PoolSettings, SupervisionSettings
from pd_service.errors import InvalidRequest
from pd_service.node.pulse import Pulse

ROLES: tuple[PoolRole, ...] = ("prefill", "decode")
RULES = SupervisionSettings(probe_s=1, stall_s=3, start_s=50, backoff_s=1, max_backoff_s=8, drain_s=20, orphan_s=100)
BOUNDS = PoolSettings(replicas=1, min_replicas=0, max_replicas=4)


def new_fleet(prefill: int = 0, decode: int = 0, names: Iterator[str] | None = None) -> Fleet:
    draw = names or map(str, itertools.count())
    desired: dict[PoolRole, int] = {"prefill": prefill, "decode": decode}
    return Fleet(dict.fromkeys(ROLES, BOUNDS), desired, RULES, lambda: next(draw))


def started(fleet: Fleet, now: float = 0.0) -> list[str]:
    """Carries out what is to be started, up to ready."""
    names = [decision.engine_id for decision in fleet.decide(now) if isinstance(decision, Start)]
    for name in names:
        fleet.placed(name, now)
        fleet.became_ready(name, now)
    return names


def holding(held: int, turns: int = 0) -> Pulse:
    return Pulse(turns=turns, is_busy=False, held=held)


def states(fleet: Fleet) -> dict[str, State]:
    return {name: engine.state for name, engine in fleet.engines.items()}


def test_every_pair_outside_the_table_is_refused_and_changes_nothing() -> None:
    for state, event in itertools.product(State, Event):
        if (state, event) in TRANSITIONS:
            continue
        engine = Engine(engine_id="decode/0", role="decode", since=1.0, state=state, reason="as it was")
        with pytest.raises(IllegalTransition):
            new_fleet()._tell(engine, event, 2.0, "other")
        assert (engine.state, engine.since, engine.reason) == (state, 1.0, "as it was")


def test_what_is_being_started_is_not_started_again() -> None:
    fleet = new_fleet(prefill=2, decode=1)
    assert len(fleet.decide(0.0)) == 3
    assert fleet.decide(0.0) == []


def test_scale_down_drains_the_engine_with_the_least_work() -> None:
    fleet = new_fleet(decode=3)
    first, second, third = started(fleet)
    for name, held in ((first, 5), (second, 1), (third, 3)):
        fleet.answered(name, holding(held), 1.0, 1.0)
    fleet.scale({"decode": 2})
    assert fleet.decide(2.0) == []
    assert states(fleet) == {first: State.READY, second: State.DRAINING, third: State.READY}


def test_scale_down_takes_engines_that_do_not_serve_yet_first() -> None:
    fleet = new_fleet(decode=1)
    (ready,) = started(fleet)
    fleet.scale({"decode": 3})
    loading, waiting = [decision.engine_id for decision in fleet.decide(1.0)]
    fleet.placed(loading, 1.0)
    fleet.scale({"decode": 2})
    assert fleet.decide(2.0) == [Remove(engine_id=waiting, is_dead=False)]
    fleet.scale({"decode": 1})
    assert fleet.decide(2.0) == [Remove(engine_id=loading, is_dead=False)]
    assert states(fleet)[ready] is State.READY


def test_a_drained_engine_is_stopped_only_when_it_holds_nothing_and_gateways_have_heard() -> None:
    fleet = new_fleet(decode=1)
    (name,) = started(fleet)
    fleet.scale({"decode": 0})
    fleet.decide(10.0)
    fleet.answered(name, holding(1), 10.0 + SETTLE_S, 1.0)
    assert fleet.decide(10.0 + SETTLE_S) == []
    fleet.drain(name, 10.0, 100.0)
    fleet.answered(name, holding(0), 10.0 + SETTLE_S / 2, 1.0)
    assert fleet.decide(10.0 + SETTLE_S / 2) == []
    fleet.answered(name, holding(0), 10.0 + SETTLE_S, 1.0)
    assert fleet.decide(10.0 + SETTLE_S) == [Remove(engine_id=name, is_dead=False)]
    fleet.removed(name)
    assert fleet.engines == {}


def test_at_its_limit_a_drain_says_what_remains() -> None:
    fleet = new_fleet(decode=1)
    (name,) = started(fleet)
    fleet.drain(name, 5.0, 10.0)
    fleet.answered(name, holding(3), 6.0, 1.0)
    assert fleet.next_look(6.0) == pytest.approx(6.0)  # the replacement
    (replacement,) = [decision.engine_id for decision in fleet.decide(6.0)]
    fleet.placed(replacement, 6.0)
    assert fleet.next_look(6.0) == 15.0
    assert fleet.decide(15.0) == [Remove(engine_id=name, is_dead=False)]
    assert fleet.engines[name].reason == "drain limit reached with 3 requests, leases and pulls"


def test_a_drained_engine_is_replaced_when_its_pool_is_to_keep_its_size() -> None:
    fleet = new_fleet(decode=2)
    first, _ = started(fleet)
    fleet.drain(first, 1.0, 60.0)
    (start,) = fleet.decide(1.0)
    assert isinstance(start, Start)
    assert start.role == "decode"


def test_a_pool_at_its_maximum_waits_for_the_drained_engine_to_leave() -> None:
    fleet = new_fleet(decode=4)
    first, *_ = started(fleet)
    fleet.drain(first, 1.0, 60.0)
    assert fleet.decide(1.0) == []
    assert fleet.waits_for("decode", 1.0) == "1 to start when one has left: 4 at most at once"


def test_starts_that_fail_back_off_and_say_why() -> None:
    fleet = new_fleet(decode=1)
    now, pauses = 0.0, []
    for _ in range(6):
        (start,) = fleet.decide(now)
        fleet.died(start.engine_id, "the cache does not fit", now)
        assert fleet.decide(now) == [Remove(engine_id=start.engine_id, is_dead=True)]
        fleet.removed(start.engine_id)
        again = fleet.next_look(now)
        assert again is not None
        assert fleet.decide(again - 0.01) == []
        pauses.append(again - now)
        now = again
    assert pauses == [1, 2, 4, 8, 8, 8]
    assert fleet.pools["decode"].last_failure == "the cache does not fit"
    assert fleet.waits_for("decode", now - 2) == "1 to start in 2.0 s, after 6 failures in a row"


def test_an_engine_that_served_for_long_is_replaced_at_once_and_ends_the_row() -> None:
    fleet = new_fleet(decode=1)
    fleet.pools["decode"].num_failures = 5
    (name,) = started(fleet)
    fleet.died(name, "killed", RULES.max_backoff_s)
    assert fleet.next_look(RULES.max_backoff_s) == RULES.max_backoff_s + RULES.backoff_s
    assert fleet.pools["decode"].num_failures == 1


def test_a_stuck_loop_is_found_and_a_slow_one_is_left_alone() -> None:
    fleet = new_fleet(decode=2)
    stuck, slow = started(fleet)
    for second in range(4):
        fleet.answered(stuck, Pulse(turns=7, is_busy=True, held=1), float(second), 1.0)
        fleet.answered(slow, Pulse(turns=second // 2, is_busy=True, held=1), float(second), 1.0)
    assert states(fleet) == {stuck: State.FAILED, slow: State.READY}
    assert fleet.pools["decode"].last_failure == "stuck: no step ended for 3 s"


def test_an_idle_engine_is_never_stuck() -> None:
    fleet = new_fleet(decode=1)
    (name,) = started(fleet)
    for second in range(100):
        fleet.answered(name, holding(2, turns=7), float(second), 1.0)
    assert states(fleet) == {name: State.READY}


def test_silence_counts_in_looks_so_that_a_driver_that_slept_blames_nobody() -> None:
    fleet = new_fleet(decode=1)
    (name,) = started(fleet)
    fleet.answered(name, holding(0), 1.0, 1.0)
    fleet.unanswered(name, 1000.0, 1.0)
    assert states(fleet) == {name: State.READY}
    fleet.unanswered(name, 1001.0, 1.0)
    fleet.unanswered(name, 1002.0, 1.0)
    assert states(fleet) == {name: State.FAILED}


def test_a_start_that_takes_too_long_is_a_failure_but_waiting_for_resources_is_not() -> None:
    fleet = new_fleet(decode=2)
    placed, waiting = [decision.engine_id for decision in fleet.decide(0.0)]
    fleet.starting(waiting, "no host has NPU: 1")
    fleet.placed(placed, 0.0)
    fleet.starting(placed, "loading weights")
    assert fleet.decide(RULES.start_s) == [Remove(engine_id=placed, is_dead=True)]
    assert fleet.pools["decode"].last_failure == "not ready within 50 s: loading weights"
    assert states(fleet)[waiting] is State.STARTING
    assert f"{waiting} waits: no host has NPU: 1" in fleet.waits_for("decode", RULES.start_s)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"decode": 5}, "decode=5: the pool may have 0 to 4 engines"),
        ({"prefill": 1, "decode": -1}, "decode=-1: the pool may have 0 to 4 engines"),
        ({"encode": 1}, "there is no pool 'encode'; there are: prefill, decode"),
        ({}, "no pool was named; there are: prefill, decode"),
    ],
)
def test_a_refused_scale_changes_nothing(asked: dict[str, int], said: str) -> None:
    fleet = new_fleet(prefill=2, decode=3)
    with pytest.raises(InvalidRequest, match=said):
        fleet.scale(asked)
    assert [fleet.pools[role].desired for role in ROLES] == [2, 3]


def test_only_engines_that_there_are_can_be_drained() -> None:
    fleet = new_fleet(decode=1)
    (name,) = started(fleet)
    with pytest.raises(InvalidRequest, match=f"there is no engine 'decode/x'; there are: {name}"):
        fleet.drain("decode/x", 0.0, 1.0)
    fleet.died(name, "killed", 1.0)
    with pytest.raises(InvalidRequest, match=f"{name} is failed already"):
        fleet.drain(name, 1.0, 1.0)


def test_a_stop_ends_everything_whatever_was_asked() -> None:
    fleet = new_fleet(prefill=1, decode=2)
    started(fleet)
    fleet.stop(1.0)
    assert len(fleet.decide(1.0)) == 3
    for name in list(fleet.engines):
        fleet.removed(name)
    assert fleet.decide(1000.0) == []
    assert fleet.next_look(1000.0) is None
    with pytest.raises(InvalidRequest, match="the service is stopping"):
        fleet.scale({"decode": 1})


class Lives(RuleBasedStateMachine):
    """A fleet and the engines it has started, under random events. `living` is what Ray would list."""

    def __init__(self) -> None:
        super().__init__()
        self.names = map(str, itertools.count())
        self.now = 0.0
        self.fleet = new_fleet(1, 1, self.names)
        self.living: dict[str, PoolRole] = {}
        self.ready: set[str] = set()  # as the engines know it
        self.left: set[str] = set()  # once drained, stopped or failed

    def carry_out(self) -> None:
        before = states(self.fleet)
        for decision in self.fleet.decide(self.now):
            if isinstance(decision, Start):
                assert decision.engine_id not in self.living
                self.living[decision.engine_id] = decision.role
            elif before[decision.engine_id] is State.READY:
                raise AssertionError("stopped without a drain")

    def some(self, data: st.DataObject, *wanted: State) -> str | None:
        names = sorted(name for name, state in states(self.fleet).items() if state in wanted)
        return data.draw(st.sampled_from(names)) if names else None

    @rule(role=st.sampled_from(ROLES), number=st.integers(0, 4))
    def scale(self, role: PoolRole, number: int) -> None:
        self.fleet.scale({role: number})
        self.carry_out()

    @rule(seconds=st.sampled_from([0.3, 1.0, 5.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out()

    @rule(data=st.data())
    def one_is_ready(self, data: st.DataObject) -> None:
        name = self.some(data, State.STARTING)
        if name is not None:
            self.fleet.placed(name, self.now)
            self.fleet.became_ready(name, self.now)
            self.ready.add(name)
            self.carry_out()

    @rule(data=st.data(), held=st.integers(0, 3))
    def one_is_looked_at(self, data: st.DataObject, held: int) -> None:
        name = self.some(data, State.READY, State.DRAINING)
        if name is not None:
            self.fleet.answered(name, holding(held), self.now, 1.0)
            self.carry_out()

    @rule(data=st.data())
    def one_dies(self, data: st.DataObject) -> None:
        name = self.some(data, State.STARTING, State.READY, State.DRAINING)
        if name is not None:
            self.fleet.died(name, "killed", self.now)
            self.carry_out()

    @rule(data=st.data())
    def one_is_drained(self, data: st.DataObject) -> None:
        name = self.some(data, State.STARTING, State.READY, State.DRAINING)
        if name is not None:
            self.fleet.drain(name, self.now, 10.0)
            self.carry_out()

    @rule(data=st.data())
    def one_is_gone(self, data: st.DataObject) -> None:
        name = self.some(data, State.STOPPING, State.FAILED)
        if name is not None:
            self.fleet.removed(name)
            del self.living[name]
            self.carry_out()

    @rule()
    def the_controller_restarts(self) -> None:
        desired = {role: pool.desired for role, pool in self.fleet.pools.items()}
        draining = {n: e.drain_until for n, e in self.fleet.engines.items() if e.state is State.DRAINING}
        self.fleet = new_fleet(desired["prefill"], desired["decode"], self.names)
        for name, role in self.living.items():
            self.fleet.adopt(name, role, self.now)
            if name in self.left and name not in draining:
                self.fleet.died(name, "what it was told to is done now", self.now)
            elif name in self.ready:
                self.fleet.became_ready(name, self.now)
        for name, until in draining.items():
            self.fleet.drain(name, self.now, until - self.now)
        self.carry_out()

    @invariant()
    def pools_are_bounded_and_known(self) -> None:
        assert self.fleet.engines.keys() == self.living.keys()
        for role in ROLES:
            assert sum(owner == role for owner in self.living.values()) <= BOUNDS.max_replicas

    @invariant()
    def who_left_never_serves_again(self) -> None:
        now_left = {n for n, e in self.fleet.engines.items() if not e.is_active}
        self.left |= now_left
        assert {name for name in self.left if name in self.fleet.engines} == now_left

    @precondition(lambda self: self.living)
    @rule()
    def left_alone_it_becomes_as_asked(self) -> None:
        for _ in range(200):
            due = self.fleet.next_look(self.now)
            self.now = max(self.now + 1.0, self.now if due is None else due)
            for name, state in states(self.fleet).items():
                if state is State.STARTING:
                    self.fleet.became_ready(name, self.now)
                    self.ready.add(name)
                elif state is State.DRAINING:
                    self.fleet.answered(name, holding(0), self.now, 1.0)
                elif state in (State.STOPPING, State.FAILED):
                    self.fleet.removed(name)
                    del self.living[name]
            self.carry_out()
        for role in ROLES:
            of_role = [engine for engine in self.fleet.engines.values() if engine.role == role]
            assert [engine.state for engine in of_role] == [State.READY] * self.fleet.pools[role].desired
            assert self.fleet.waits_for(role, self.now) == ""


TestLives = Lives.TestCase
TestLives.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
