"""Random lives of requests against a model that writes a marker (request, position) for each token into its slot.

Whatever a token may see must still carry its own request's marker: a block that went back too early, or belongs to two
requests, shows at once. The real managers are recounted after every operation.
"""

import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_model import new_kv

MAX_LEN = 40
MAX_STEP = 9
ORDERS = (("FullAttention", "SlidingWindow"), ("SlidingWindow", "FullAttention"))


class MarkedCache:
    """A real KVCacheManager and the model beside it. `computed` holds the confirmed tokens of each live request."""

    def __init__(self, order: tuple[str, ...], num_blocks: tuple[int, int], block_size: int, window: int) -> None:
        nums = dict(zip(order, num_blocks, strict=True))
        self.kv = new_kv(nums, block_size=block_size, window=window, max_model_len=MAX_LEN, max_step_tokens=MAX_STEP)
        self.block_size = block_size
        self.window = {"FullAttention": MAX_LEN, "SlidingWindow": window}
        self.marks: dict[tuple[str, int], tuple[str, int]] = {}
        self.computed: dict[str, int] = {}
        self.num_started = 0
        self.num_true = 0

    def new_id(self) -> str:
        self.num_started += 1
        return f"r{self.num_started}"

    def compute(self, request: str, num_new: int, lookahead: int, num_accepted: int) -> None:
        """One step; `num_accepted` of the lookahead tokens are confirmed with the new ones."""
        computed = self.computed.get(request, 0)
        num_new = min(num_new, MAX_LEN - computed)
        if num_new < 1:
            self.free(request)
            return
        end = min(MAX_LEN, computed + num_new + lookahead)
        said_yes = self.fits(request, computed, end)
        if self.track(request, said_yes, self.kv.allocate_slots(request, computed, num_new, lookahead)):
            self.write(request, range(computed, end))
            self.read(request, range(computed, end))
            self.computed[request] = min(end, computed + num_new + num_accepted)

    def receive(self, request: str, num_tokens: int) -> None:
        said_yes = self.fits(None, num_tokens, num_tokens + 1)
        if self.track(request, said_yes, self.kv.allocate_received_slots(request, num_tokens, 1)):
            self.write(request, range(num_tokens), pulled=True)
            self.write(request, range(num_tokens, num_tokens + 1))
            self.read(request, range(num_tokens, num_tokens + 1))
            self.computed[request] = num_tokens + 1

    def free(self, request: str) -> None:
        self.kv.free(request)
        del self.computed[request]

    def fits(self, request: str | None, computed: int, num_tokens: int) -> bool:
        free = self.kv.num_free_blocks()
        return all(n <= free[t] for t, n in self.kv.num_blocks_needed(request, computed, num_tokens).items())

    def track(self, request: str, said_yes: bool, done: bool) -> bool:
        """The check never promises too much; it may promise too little only while old blocks can go back."""
        assert done or not said_yes
        if request not in self.computed:
            assert done == said_yes
        assert self.kv.owns_blocks(request) == (done or request in self.computed)
        self.num_true += done
        return done

    def slot(self, attn_type: str, table: list[int], position: int) -> tuple[str, int]:
        block = table[position // self.block_size]
        return attn_type, block * self.block_size + position % self.block_size

    def write(self, request: str, positions: range, *, pulled: bool = False) -> None:
        for attn_type, table in self.kv.get_block_ids(request).items():
            for position in positions:
                key = self.slot(attn_type, table, position)
                is_null = key[1] < self.block_size
                assert pulled or not is_null
                if not is_null:
                    self.marks[key] = (request, position)

    def read(self, request: str, positions: range) -> None:
        for attn_type, table in self.kv.get_block_ids(request).items():
            for seen in range(max(0, positions[0] - self.window[attn_type] + 1), positions[-1] + 1):
                assert self.marks[self.slot(attn_type, table, seen)] == (request, seen)

    def check(self) -> None:
        self.kv.check()
        live = dict.fromkeys(self.kv.managers, 0)
        for request, computed in self.computed.items():
            peak = self.kv.peak_blocks_needed(MAX_LEN)
            for attn_type, table in self.kv.get_block_ids(request).items():
                num_live = sum(block != 0 for block in table)
                assert num_live <= peak[attn_type]
                assert len(table) * self.block_size >= computed
                live[attn_type] += num_live
        usable, free = self.kv.num_usable_blocks(), self.kv.num_free_blocks()
        assert live == {t: usable[t] - free[t] for t in usable}
        assert all(manager.req_to_blocks.keys() == self.computed.keys() for manager in self.kv.managers.values())


class RequestLives(RuleBasedStateMachine):
    @initialize(
        order=st.sampled_from(ORDERS),
        num_blocks=st.tuples(st.integers(2, 14), st.integers(2, 14)),
        block_size=st.sampled_from((1, 2, 3, 4, 8)),
        window=st.integers(1, 12),
    )
    def build(self, order: tuple[str, ...], num_blocks: tuple[int, int], block_size: int, window: int) -> None:
        self.cache = MarkedCache(order, num_blocks, block_size, window)

    @rule(num_tokens=st.integers(1, MAX_STEP))
    def start(self, num_tokens: int) -> None:
        self.cache.compute(self.cache.new_id(), num_tokens, 0, 0)

    @rule(num_tokens=st.integers(1, MAX_LEN - 1))
    def receive(self, num_tokens: int) -> None:
        self.cache.receive(self.cache.new_id(), num_tokens)

    @precondition(lambda self: self.cache.computed)
    @rule(data=st.data(), num_new=st.integers(1, MAX_STEP - 4), lookahead=st.integers(0, 4))
    def step(self, data: st.DataObject, num_new: int, lookahead: int) -> None:
        request = data.draw(st.sampled_from(sorted(self.cache.computed)))
        self.cache.compute(request, num_new, lookahead, data.draw(st.integers(0, lookahead)))

    @precondition(lambda self: self.cache.computed)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.cache.free(data.draw(st.sampled_from(sorted(self.cache.computed))))

    @precondition(lambda self: self.cache.computed)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.cache.computed)))
        self.cache.free(request)
        self.cache.compute(request, 1, 0, 0)

    @invariant()
    def nothing_is_lost_doubled_or_held_too_long(self) -> None:
        self.cache.check()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for request in list(self.cache.computed):
                self.cache.free(request)
            self.cache.check()
            assert self.cache.kv.num_free_blocks() == self.cache.kv.num_usable_blocks()


RequestLives.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestRequestLives = RequestLives.TestCase


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("block_size", "window"), [(4, 8), (2, 5), (1, 3)])
def test_a_soak_of_ten_thousand_operations_loses_nothing(order: tuple[str, ...], block_size: int, window: int) -> None:
    rng = random.Random(f"{order}{block_size}{window}")
    cache = MarkedCache(order, (40, 40), block_size, window)
    for _ in range(10_000):
        live = sorted(cache.computed)
        action = rng.choice(("start", "receive", "step", "step", "step", "step", "end")) if live else "start"
        if action == "start":
            cache.compute(cache.new_id(), rng.randint(1, MAX_STEP), 0, 0)
        elif action == "receive":
            cache.receive(cache.new_id(), rng.randint(1, MAX_LEN - 1))
        elif action == "step":
            lookahead = rng.randint(0, 3)
            cache.compute(rng.choice(live), rng.randint(1, 6), lookahead, rng.randint(0, lookahead))
        else:
            cache.free(rng.choice(live))
        cache.check()
    assert cache.num_true > 3_000
    for request in list(cache.computed):
        cache.free(request)
    assert cache.kv.num_free_blocks() == cache.kv.num_usable_blocks()


def test_whatever_can_ever_be_held_runs_to_its_end_alone() -> None:
    """And nothing larger than the pool is promised: full attention refuses exactly when its pool is too small."""
    cases = itertools.product(ORDERS, (2, 4, 7, 12), (2, 4, 7, 12), (1, 4), (1, 3, 8), (1, 8, 17, 40))
    for order, num_first, num_second, block_size, window, length in cases:
        cache = MarkedCache(order, (num_first, num_second), block_size, window)
        if not cache.kv.can_ever_hold(length):
            continue
        while cache.computed.get("r", 0) < length:
            computed = cache.computed.get("r", 0)
            cache.compute("r", min(MAX_STEP, length - computed), 0, 0)
            assert cache.computed["r"] > computed
            cache.check()
