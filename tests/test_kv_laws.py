"""Random lives of requests in every mixture of attention types, against the brute-force model of kv_world.

`PD_SOAK=n` in the environment makes everything here n times as long.
"""

import itertools
import os
import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_cache import PrefixCache
from kv_cache.prefix_cache import blake2b_128
from tests.kv_world import MAX_LEN, MAX_STEP, Group, World

SOAK = max(1, int(os.environ.get("PD_SOAK", "1")))
HASHES: dict[str, Callable[[bytes], bytes]] = {
    "strong": blake2b_128,
    "weak": lambda content: blake2b_128(content)[:1],
    "constant": lambda content: b"",
}
SALTS = ("", "a")
GROUPS = st.lists(
    st.one_of(
        st.sampled_from([Group("FullAttention", "FullAttention"), Group("second", "FullAttention")]),
        st.builds(Group, st.sampled_from(["SlidingWindow", "other"]), st.just("SlidingWindow"), st.integers(1, 12)),
        st.builds(Group, st.just("ChunkedLocal"), st.just("ChunkedLocal"), st.integers(1, 12)),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda group: group.key,
)


def tokens_of(first_kind: int, split: int, second_kind: int) -> tuple[int, ...]:
    """Few enough prompts that many begin alike, and many blocks have equal tokens after different ones."""
    return (first_kind,) * split + (second_kind,) * (MAX_LEN - split)


TOKENS = st.builds(tokens_of, st.integers(0, 1), st.integers(0, MAX_LEN), st.integers(0, 1))


class RequestLives(RuleBasedStateMachine):
    @initialize(
        groups=GROUPS,
        state=st.sampled_from([None, 0, 2]),
        num_blocks=st.lists(st.integers(2, 14), min_size=4, max_size=4),
        block_size=st.sampled_from((1, 2, 3, 4, 8)),
        hash_name=st.sampled_from([None, *HASHES]),
    )
    def build(
        self,
        groups: list[Group],
        state: int | None,
        num_blocks: list[int],
        block_size: int,
        hash_name: str | None,
    ) -> None:
        if state is not None and hash_name is None:
            groups = [*groups[:1], Group("FixedState", "FixedState", state), *groups[1:]]
        cache = PrefixCache("model", HASHES[hash_name]) if hash_name else None
        self.world = World(groups, num_blocks[: len(groups)], block_size, cache)

    @rule(tokens=TOKENS, salt=st.sampled_from(SALTS), num_new=st.integers(1, MAX_STEP))
    def start(self, tokens: tuple[int, ...], salt: str, num_new: int) -> None:
        self.world.start(tokens, salt, num_new)

    @rule(tokens=TOKENS, salt=st.sampled_from(SALTS), num_received=st.integers(1, MAX_LEN - 1))
    def receive(self, tokens: tuple[int, ...], salt: str, num_received: int) -> None:
        self.world.receive(tokens, salt, num_received)

    @rule(data=st.data(), num_new=st.integers(1, MAX_STEP - 4), lookahead=st.integers(0, 4))
    def step(self, data: st.DataObject, num_new: int, lookahead: int) -> None:
        if self.world.lives:
            request = data.draw(st.sampled_from(sorted(self.world.lives)))
            self.world.step(request, num_new, lookahead, data.draw(st.integers(0, lookahead)))

    @rule(data=st.data(), end=st.sampled_from([World.free, World.lease]))
    def end(self, data: st.DataObject, end: Callable[[World, str], None]) -> None:
        if self.world.lives:
            end(self.world, data.draw(st.sampled_from(sorted(self.world.lives))))

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        if pulling := sorted(request for request, life in self.world.lives.items() if life.pull):
            self.world.arrive(data.draw(st.sampled_from(pulling)))

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        if self.world.held:
            self.world.let_go(data.draw(st.sampled_from(sorted(self.world.held))))

    @invariant()
    def everything_is_where_it_should_be(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end_everything()


RequestLives.TestCase.settings = settings(max_examples=100 * SOAK, stateful_step_count=40, deadline=None)
TestRequestLives = RequestLives.TestCase

FULL, WINDOW, CHUNK = (
    Group("FullAttention", "FullAttention"),
    Group("SlidingWindow", "SlidingWindow", 6),
    Group("ChunkedLocal", "ChunkedLocal", 8),
)
STATE = Group("FixedState", "FixedState", 1)
WORLDS = [
    ((FULL,), 4, "strong"),
    ((FULL, WINDOW), 4, "strong"),
    ((WINDOW, FULL), 4, None),
    ((WINDOW, Group("other", "SlidingWindow", 3)), 2, "weak"),
    ((CHUNK, FULL, WINDOW), 2, "constant"),
    ((STATE, WINDOW, FULL), 3, None),
]


@pytest.mark.parametrize(("groups", "block_size", "hash_name"), WORLDS)
def test_a_soak_of_thousands_of_operations_loses_nothing(
    groups: tuple[Group, ...], block_size: int, hash_name: str | None
) -> None:
    rng = random.Random(f"{groups}{block_size}{hash_name}")
    cache = PrefixCache("model", HASHES[hash_name]) if hash_name else None
    world = World(groups, [64 // block_size + 3] * len(groups), block_size, cache)
    for _ in range(2_000 * SOAK):
        act_at_random(world, rng)
        world.check()
    assert world.num_true > 400 * SOAK
    assert cache is None or world.num_hits > 50 * SOAK
    assert cache is None or all(usage.evicted for usage in world.kv.usage().values())
    world.end_everything()


def act_at_random(world: World, rng: random.Random) -> None:
    actions = ["start", "receive", *["step"] * 4, "free", "lease", "arrive", "let_go"]
    action, request = rng.choice(actions), rng.choice([*world.lives, ""])
    tokens = tokens_of(rng.randint(0, 1), rng.randint(0, MAX_LEN), rng.randint(0, 1))
    if action == "start" or not (request or world.held):
        world.start(tokens, rng.choice(SALTS), rng.randint(1, MAX_STEP))
    elif action == "receive":
        world.receive(tokens, rng.choice(SALTS), rng.randint(1, MAX_LEN - 1))
    elif action == "let_go" and world.held:
        world.let_go(rng.choice(list(world.held)))
    elif request and action == "step":
        lookahead = rng.randint(0, 3)
        world.step(request, rng.randint(1, 6), lookahead, rng.randint(0, lookahead))
    elif request and action == "arrive" and world.lives[request].pull:
        world.arrive(request)
    elif request and action in ("free", "lease"):
        (world.free if action == "free" else world.lease)(request)


def test_whatever_can_ever_be_held_runs_to_its_end_alone() -> None:
    """And nothing larger than the pool is promised: full attention refuses exactly when its pool is too small."""
    windows = [Group("SlidingWindow", "SlidingWindow", size) for size in (1, 3, 8)]
    cases = itertools.product([*windows, CHUNK, STATE], (True, False), (2, 4, 7, 12), (2, 4, 7, 12), (1, 4))
    for second, is_first, num_first, num_second, block_size in cases:
        order = (second, FULL) if is_first else (FULL, second)
        for length in (1, 8, 17, MAX_LEN):
            world = World(order, (num_first, num_second), block_size)
            if world.kv.can_ever_hold(length):
                run_alone(world, length)


def run_alone(world: World, length: int) -> None:
    world.start(tokens_of(0, 0, 1), "", min(MAX_STEP, length))
    while (computed := world.lives["r1"].computed) < length:
        world.step("r1", min(MAX_STEP, length - computed), 0, 0)
        assert world.lives["r1"].computed > computed
        world.check()
