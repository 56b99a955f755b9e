"""Every story of few leases and few readers, each world visited once: laws of `transfer.lease` and of who relies on it.

`PD_SOAK` in the environment adds the large worlds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from tests.lease_world import FREE, HALF, LEASE_S, LeaseWorld, Move, Reading
from transfer.lease import LeaseState, Pull

X, Y, X_AGAIN = Pull("x", 1), Pull("y", 1), Pull("x", 2)


def world_of(pulls: tuple[Pull, ...], *, num_leases: int, end: int, num_restarts: int = 0) -> LeaseWorld:
    """All leases want the one block there is."""
    return LeaseWorld(
        end=end,
        pulls=tuple((pull, Reading()) for pull in pulls),
        unopened=tuple("abc"[:num_leases]),
        owners=(FREE,),
        contents=(FREE,),
        num_restarts=num_restarts,
    )


WORLDS = {
    "two readers": world_of((X, Y), num_leases=1, end=2),
    "two pulls of one reader": world_of((X, X_AGAIN), num_leases=1, end=2),
    "a ticket after the other": world_of((X,), num_leases=2, end=4, num_restarts=1),
}
LARGE_WORLDS = {
    "two readers, longer": world_of((X, Y), num_leases=1, end=4),
    "two readers, a ticket after the other": world_of((X, Y), num_leases=2, end=2),
}
NAMES = [*WORLDS, *(LARGE_WORLDS if "PD_SOAK" in os.environ else ())]


@cache
def explore(name: str) -> frozenset[LeaseWorld]:
    """All worlds that can follow; `apply` has checked each step between them."""
    start = (WORLDS | LARGE_WORLDS)[name]
    seen, todo = {start}, [start]
    while todo:
        world = todo.pop()
        for move in world.moves():
            after = world.apply(move)
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return frozenset(seen)


@pytest.mark.parametrize("name", NAMES)
def test_in_every_world_time_alone_ends_every_lease_and_brings_every_block_back(name: str) -> None:
    """Time, and the end of each computation. And on the way there no block was given to two, no late message did
    anything, and no wrong KV was confirmed."""
    for world in explore(name):
        for lease_id in world.computing:
            world = world.apply(Move("complete", what=lease_id))
        silent = replace(world, now=world.now + 2 * LEASE_S).apply(Move("sweep"))
        assert silent.table == ()
        assert set(silent.owners) == {FREE}


SIGHTS: dict[str, Callable[[LeaseWorld], bool]] = {
    "a reader is done while another reads": lambda w: any(state is LeaseState.SHARED for _, state, *_ in w.table),
    "a read of a block that has another lease's KV by now": lambda w: any(
        reading.block is not None and w.contents[reading.block] not in (reading.lease_id, HALF + reading.lease_id)
        for _, reading in w.pulls
    ),
    "wrong KV at a reader": lambda w: any(r.content not in (None, r.lease_id, HALF + r.lease_id) for _, r in w.pulls),
    "a lease over its time and not swept": lambda w: any(deadline <= w.now for _, _, deadline, *_ in w.table),
    "a dropped ticket that is held on": lambda w: any(s is LeaseState.HELD and over for _, s, _, _, over in w.table),
    "a read of what is half computed": lambda w: any(
        reading.content == HALF + reading.lease_id for _, reading in w.pulls if reading.lease_id
    ),
    "a ticket given back while its request computes": lambda w: any(
        lease_id not in [key for key, *_ in w.table] for lease_id in w.computing
    ),
    "a reader waits for the rest": lambda w: any(s is LeaseState.COMPUTING and r for _, s, _, r, _ in w.table),
    "a lost reader": lambda w: bool(w.forgotten and w.table),
}


@pytest.mark.parametrize("sight", SIGHTS)
def test_the_worlds_contain_what_they_are_there_for(sight: str) -> None:
    assert any(SIGHTS[sight](world) for name in WORLDS for world in explore(name))
