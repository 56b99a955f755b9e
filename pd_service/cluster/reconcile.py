"""Which engines there should be, which there are, and what follows: plain decisions, with time as an argument.

                      ready             drain              empty, limit             removed
    (start) ─► STARTING ────► READY ──────────► DRAINING ──────────────► STOPPING ──────────► GONE
                  │             │                   │                        ▲                  ▲
                  ├─ stop ──────┼─── stop ──────────┴────────────────────────┘                  │
                  └─ died ──────┴─── died ──────► FAILED ───────────────────── removed ─────────┘

Knows neither Ray nor the network: whoever drives it reports what it sees, carries out what `decide` returns, and never
asks twice. Always holds: a pool has at most `max_replicas` engines that may own resources (all but GONE); an engine
that was ever DRAINING, STOPPING or FAILED never takes new work again; a ready engine is drained before it is stopped,
unless the whole service stops; an engine that starts late is not started twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from pd_service.config import PoolRole, PoolSettings, SupervisionSettings
from pd_service.errors import InvalidRequest
from pd_service.node.pulse import Pulse

SETTLE_S = 0.5  # from the drain of an engine to its end, at least: gateways have heard of it by then


class State(Enum):
    """Values are what operators read."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"  # told to end; what it took is not given back yet
    FAILED = "failed"  # ended by itself or was found stuck; what it took is not given back yet
    GONE = "gone"


class Event(Enum):
    BECAME_READY = auto()
    DRAIN = auto()
    EMPTY = auto()
    LIMIT = auto()
    STOP = auto()
    DIED = auto()
    REMOVED = auto()


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.STARTING, Event.BECAME_READY): State.READY,
    (State.STARTING, Event.STOP): State.STOPPING,
    (State.STARTING, Event.DIED): State.FAILED,
    (State.READY, Event.DRAIN): State.DRAINING,
    (State.READY, Event.STOP): State.STOPPING,
    (State.READY, Event.DIED): State.FAILED,
    (State.DRAINING, Event.EMPTY): State.STOPPING,
    (State.DRAINING, Event.LIMIT): State.STOPPING,
    (State.DRAINING, Event.STOP): State.STOPPING,
    (State.DRAINING, Event.DIED): State.FAILED,
    (State.STOPPING, Event.DIED): State.STOPPING,  # as it was told
    (State.STOPPING, Event.REMOVED): State.GONE,
    (State.FAILED, Event.DIED): State.FAILED,  # a stuck one whose process ends
    (State.FAILED, Event.REMOVED): State.GONE,
}


class IllegalTransition(Exception):
    """A bug of the driver: the table has no such event in this state."""


@dataclass(slots=True, kw_only=True)
class Engine:
    """One engine from the decision to start it until nothing of it is left."""

    engine_id: str
    role: PoolRole
    since: float  # when it came into this state
    state: State = State.STARTING
    reason: str = ""  # why it is in this state; while it starts, what it does or waits for
    is_placed: bool = False  # it has the resources it asked for
    held: int = 0
    turns: int = -1
    still_s: float = 0.0  # length of the looks in a row that found it without progress
    drain_until: float = 0.0
    is_being_removed: bool = False

    @property
    def is_active(self) -> bool:
        """It serves, or will."""
        return self.state in (State.STARTING, State.READY)


@dataclass(slots=True, kw_only=True)
class Pool:
    """What is asked of one role, and how its starts went."""

    settings: PoolSettings
    desired: int
    replaced: int = 0  # engines that ended without being told to
    num_failures: int = 0  # in a row, of engines that were not ready for long
    next_start: float = 0.0
    last_failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    engine_id: str
    role: PoolRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """End the engine's process if there is one, and give back what it took. `is_dead`: it need not be asked first."""

    engine_id: str
    is_dead: bool


Decision = Start | Remove


class Fleet:
    """All engines of a service. `draw` returns a new suffix for a name each time."""

    def __init__(
        self,
        pools: dict[PoolRole, PoolSettings],
        desired: dict[PoolRole, int],
        supervision: SupervisionSettings,
        draw: Callable[[], str],
    ) -> None:
        self.pools = {role: Pool(settings=settings, desired=desired[role]) for role, settings in pools.items()}
        self.engines: dict[str, Engine] = {}
        self.is_stopping = False
        self._supervision = supervision
        self._draw = draw

    # ---- what operators ask

    def scale(self, desired: dict[str, int]) -> None:
        """Raises InvalidRequest, and changes nothing, when any of it is impossible."""
        if self.is_stopping:
            raise InvalidRequest("the service is stopping")
        if not desired:
            raise InvalidRequest(f"no pool was named; there are: {', '.join(self.pools)}", "replicas")
        wanted = {self._pool_named(name, number): number for name, number in desired.items()}
        for role, number in wanted.items():
            self.pools[role].desired = number

    def _pool_named(self, name: str, number: int) -> PoolRole:
        for role, pool in self.pools.items():
            low, high = pool.settings.min_replicas, pool.settings.max_replicas
            if name == role and not low <= number <= high:
                raise InvalidRequest(f"{name}={number}: the pool may have {low} to {high} engines", "replicas")
            if name == role:
                return role
        raise InvalidRequest(f"there is no pool {name!r}; there are: {', '.join(self.pools)}", "replicas")

    def drain(self, engine_id: str, now: float, limit_s: float) -> Engine:
        """No new work for this engine; its pool gets another one if that many are asked for.

        Asking again sets a new limit. One that still starts is stopped. Raises InvalidRequest for an unknown engine
        and for one that ends already.
        """
        engine = self.engines.get(engine_id)
        if engine is None:
            raise InvalidRequest(f"there is no engine {engine_id!r}; there are: {self._names()}", "engine_id")
        if engine.state in (State.STOPPING, State.FAILED):
            raise InvalidRequest(f"{engine_id} is {engine.state.value} already", "engine_id")
        engine.drain_until = now + limit_s
        if engine.state is State.STARTING:
            self._tell(engine, Event.STOP, now, "asked to leave")
        elif engine.state is State.READY:
            self._tell(engine, Event.DRAIN, now, "asked to leave")
        return engine

    def _names(self) -> str:
        return ", ".join(sorted(self.engines)) or "none"

    def stop(self, now: float) -> None:
        """Every engine ends, and none is started any more."""
        self.is_stopping = True
        for engine in self.engines.values():
            if engine.state not in (State.STOPPING, State.FAILED):
                self._tell(engine, Event.STOP, now, "the service stops")

    # ---- what the driver sees

    def adopt(self, engine_id: str, role: PoolRole, now: float) -> None:
        """An engine started in an earlier life of the driver. It is starting until it says otherwise."""
        assert engine_id not in self.engines
        self.engines[engine_id] = Engine(engine_id=engine_id, role=role, since=now, is_placed=True)

    def placed(self, engine_id: str, now: float) -> None:
        """It got its resources: the time its start may take runs from now."""
        engine = self.engines[engine_id]
        engine.is_placed, engine.since, engine.reason = True, now, ""

    def starting(self, engine_id: str, what: str) -> None:
        """What an engine that starts does, or waits for."""
        engine = self.engines[engine_id]
        if engine.state is State.STARTING:
            engine.reason = what

    def became_ready(self, engine_id: str, now: float) -> None:
        """Nothing happens to one that was told to end meanwhile."""
        engine = self.engines[engine_id]
        if engine.state is State.STARTING:
            self._tell(engine, Event.BECAME_READY, now, "")

    def answered(self, engine_id: str, pulse: Pulse, now: float, look_s: float) -> None:
        """What an engine that was ready said. `look_s`: how long the look was to take at least."""
        engine = self.engines[engine_id]
        is_still = pulse.is_busy and pulse.turns == engine.turns
        engine.turns, engine.held = pulse.turns, pulse.held
        self._judge(engine, look_s if is_still else None, "stuck: no step ended", now)
        if engine.state is State.DRAINING and not pulse.held and now >= engine.since + SETTLE_S:
            self._tell(engine, Event.EMPTY, now, "drained")

    def unanswered(self, engine_id: str, now: float, look_s: float) -> None:
        """A look at an engine that was ready, and no answer within `look_s`."""
        self._judge(self.engines[engine_id], look_s, "stuck: no answer", now)

    def _judge(self, engine: Engine, still_s: float | None, what: str, now: float) -> None:
        """Adds up looks and not time that passed: a driver that was held up itself blames nobody for it."""
        engine.still_s = 0.0 if still_s is None else engine.still_s + still_s
        if engine.still_s >= self._supervision.stall_s:
            self.died(engine.engine_id, f"{what} for {self._supervision.stall_s:g} s", now)

    def died(self, engine_id: str, reason: str, now: float) -> None:
        """It ended by itself, or is of no use any more."""
        engine = self.engines[engine_id]
        if engine.state not in (State.STOPPING, State.FAILED):
            self._count_failure(engine, reason, now)
        self._tell(engine, Event.DIED, now, reason)

    def _count_failure(self, engine: Engine, reason: str, now: float) -> None:
        pool, settings = self.pools[engine.role], self._supervision
        was_steady = engine.state is not State.STARTING and now >= engine.since + settings.max_backoff_s
        pool.num_failures = 1 if was_steady else pool.num_failures + 1
        doublings = min(pool.num_failures - 1, 30)
        pool.next_start = now + min(settings.max_backoff_s, settings.backoff_s * 2**doublings)
        pool.last_failure = reason
        pool.replaced += 1

    def removed(self, engine_id: str) -> None:
        """Nothing of it is left."""
        engine = self.engines[engine_id]
        self._tell(engine, Event.REMOVED, engine.since, engine.reason)
        del self.engines[engine_id]

    def _tell(self, engine: Engine, event: Event, now: float, reason: str) -> None:
        after = TRANSITIONS.get((engine.state, event))
        if after is None:
            raise IllegalTransition(f"{engine.engine_id} is {engine.state.value}: {event.name}")
        if after is not engine.state:
            engine.state, engine.since, engine.reason = after, now, reason

    # ---- what follows

    def decide(self, now: float) -> list[Decision]:
        """What to do now. It is noted as under way: the next call does not return it again."""
        for engine in list(self.engines.values()):
            self._check_limits(engine, now)
        for role in self.pools:
            self._shrink(role, now)
        return [*self._removals(), *(start for role in self.pools for start in self._starts(role, now))]

    def _check_limits(self, engine: Engine, now: float) -> None:
        start_s = self._supervision.start_s
        if engine.state is State.DRAINING and now >= engine.drain_until:
            self._tell(engine, Event.LIMIT, now, f"drain limit reached with {engine.held} requests, leases and pulls")
        elif engine.state is State.STARTING and engine.is_placed and now >= engine.since + start_s:
            self.died(engine.engine_id, f"not ready within {start_s:g} s: {engine.reason}", now)

    def _shrink(self, role: PoolRole, now: float) -> None:
        """Who costs least goes first: no resources yet, not ready yet, then by what it holds."""
        active = [engine for engine in self._of(role) if engine.is_active]
        surplus = len(active) - self.pools[role].desired
        if surplus <= 0 or self.is_stopping:
            return
        ranked = sorted(active, key=lambda e: (e.is_placed, e.state is State.READY, e.held, -e.since, e.engine_id))
        for engine in ranked[:surplus]:
            self.drain(engine.engine_id, now, self._supervision.drain_s)
            engine.reason = f"{role} was scaled to {self.pools[role].desired}"

    def _removals(self) -> Iterable[Remove]:
        for engine in self.engines.values():
            if engine.state in (State.STOPPING, State.FAILED) and not engine.is_being_removed:
                engine.is_being_removed = True
                yield Remove(engine_id=engine.engine_id, is_dead=engine.state is State.FAILED)

    def _starts(self, role: PoolRole, now: float) -> Iterable[Start]:
        if now < self.pools[role].next_start:
            return
        for _ in range(self._num_missing(role)):
            engine_id = f"{role}/{self._draw()}"
            self.engines[engine_id] = Engine(engine_id=engine_id, role=role, since=now)
            yield Start(engine_id=engine_id, role=role)

    def _num_missing(self, role: PoolRole) -> int:
        """Engines that could be started now but for the pause after a failure."""
        alive, pool = self._of(role), self.pools[role]
        missing = pool.desired - sum(engine.is_active for engine in alive)
        return 0 if self.is_stopping else max(0, min(missing, pool.settings.max_replicas - len(alive)))

    def _of(self, role: PoolRole) -> list[Engine]:
        return [engine for engine in self.engines.values() if engine.role == role]

    def next_look(self, now: float) -> float | None:
        """When `decide` has something new to say if nobody reports anything; None: never."""
        times = [pool.next_start for role, pool in self.pools.items() if self._num_missing(role)]
        for engine in self.engines.values():
            if engine.state is State.DRAINING:
                times.append(engine.drain_until)
            elif engine.state is State.STARTING and engine.is_placed:
                times.append(engine.since + self._supervision.start_s)
        return max(now, min(times)) if times else None

    def waits_for(self, role: PoolRole, now: float) -> str:
        """Why a pool is not as asked, for people; empty when it is, or is about to be."""
        pool, alive = self.pools[role], self._of(role)
        unplaced = [engine for engine in alive if engine.state is State.STARTING and not engine.is_placed]
        reasons = [f"{engine.engine_id} waits: {engine.reason}" for engine in unplaced if engine.reason]
        missing = pool.desired - sum(engine.is_active for engine in alive)
        if self.is_stopping or missing <= 0:
            return "; ".join(reasons)
        if now < pool.next_start:
            pause_s = pool.next_start - now
            reasons.append(f"{missing} to start in {pause_s:.1f} s, after {pool.num_failures} failures in a row")
        elif not self._num_missing(role):
            reasons.append(f"{missing} to start when one has left: {pool.settings.max_replicas} at most at once")
        return "; ".join(reasons)
