"""A prefill and a decode engine's block bookkeeping under a stream of requests, in virtual time: no model, no bytes.

    arrive ─► prefill engine: chunks of a step's budget, first come first served ─► hand-over ─► decode engine:
    the prompt's blocks at once, then one block whenever the output fills one ─► end

A request is admitted where all the blocks it will need are there beside what is promised to others, as the scheduler
does. The prefill engine keeps its blocks until the transfer is over. What is counted is the runs of each transfer:
pieces that lie in one row on both sides.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.contiguity_trace import CONTENT_TOKENS, Arrival
from benchmarks.kv_cache_ours import cache_info
from kv_cache import KVCacheManager, PrefixCache, PrefixHit, create_single_type_managers
from kv_cache.free_map import FreeMap

FULL = "FullAttention"
STEP_TOKENS = 2048  # budget of one step of the prefill engine
DECODE_S = 0.05  # per token of output
TRANSFER_S, TRANSFER_TOKEN_S = 0.01, 2e-6  # of one hand-over, and of each of its tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The cache of each of the two engines; `usable_tokens` is a multiple of `block_size`."""

    block_size: int
    usable_tokens: int
    max_model_len: int
    prefix_cache: bool
    is_fifo: bool = False  # hand out the block that was freed first, instead of what the pool does


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The blocks that were missing at the decode engine, and the runs in which they can be read."""

    arrival: Arrival
    num_blocks: int
    num_runs: int


class FreeQueue(FreeMap):
    """Free ids first in, first out; any number of them counts as a run, so that no content is evicted for one."""

    def __init__(self, num_ids: int) -> None:
        super().__init__(num_ids)
        self._queue = deque(self)

    def has_run(self, length: int) -> bool:
        return length <= self.num_free

    def take(self, n: int) -> list[int]:
        taken = [self._queue.popleft() for _ in range(n)]
        self.num_free -= n
        for block in taken:
            self._is_free[block] = 0
        return taken

    def put_back(self, ids: Sequence[int]) -> None:
        super().put_back(ids)
        self._queue.extend(ids)


@dataclass(slots=True, eq=False)
class _Life:
    name: str
    arrival: Arrival
    tokens: list[int]
    computed: int = 0
    hit: PrefixHit | None = None


class Engine:
    """One engine's cache, and what of it is promised to requests that run."""

    def __init__(self, cache: Cache) -> None:
        info, num_blocks = cache_info(cache.block_size, None), cache.usable_tokens // cache.block_size + 1
        managers = create_single_type_managers(info, {FULL: num_blocks}, cache.max_model_len)
        prefix_cache = PrefixCache("benchmark") if cache.prefix_cache else None
        self.kv = KVCacheManager(managers, info, cache.max_model_len, prefix_cache=prefix_cache)
        if cache.is_fifo:
            for manager in self.kv.managers.values():
                manager.block_pool._free_map = FreeQueue(num_blocks)
        self.has_content = cache.prefix_cache
        self._promised: dict[str, int] = {}
        self._num_promised = 0

    def admit(self, name: str, num_tokens: int) -> bool:
        need = self.kv.peak_blocks_needed(num_tokens)[FULL]
        if need + self._num_promised > self.kv.num_usable_blocks()[FULL]:
            return False
        self._promised[name] = need
        self._num_promised += need
        return True

    def find(self, life: _Life, num_tokens: int) -> PrefixHit | None:
        return self.kv.find_prefix(life.tokens[:num_tokens]) if self.has_content else None

    def commit(self, life: _Life, num_computed: int) -> None:
        if self.has_content:
            self.kv.commit(life.name, life.tokens, num_computed)

    def free(self, name: str) -> None:
        self.kv.free(name)
        self._num_promised -= self._promised.pop(name)

    def table(self, name: str) -> list[int]:
        return self.kv.get_block_ids(name)[FULL]

    @property
    def hit_tokens(self) -> int:
        return self.kv.usage()[FULL].hit_tokens


@dataclass(slots=True)
class Lives:
    """Both engines and the clock. `step_s` is how long a full step of the prefill engine takes."""

    cache: Cache
    step_s: float
    transfers: list[Transfer] = field(default_factory=list)
    now: float = 0.0
    prefill: Engine = field(init=False)
    decode: Engine = field(init=False)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _waiting: deque[_Life] = field(default_factory=deque)
    _running: deque[_Life] = field(default_factory=deque)
    _handed: deque[_Life] = field(default_factory=deque)
    _is_stepping: bool = False

    def __post_init__(self) -> None:
        self.prefill, self.decode = Engine(self.cache), Engine(self.cache)

    def run(self, arrivals: Sequence[Arrival]) -> None:
        """All of them, to the end of the last. Raises RuntimeError when a block is left or a request was never run."""
        for i, arrival in enumerate(arrivals):
            life = _Life(f"r{i}", arrival, _tokens_of(arrival, -1 - i))
            self._at(arrival.at_s, lambda life=life: self._arrive(life))
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        for engine in (self.prefill, self.decode):
            engine.kv.check()
            if engine.kv.num_free_blocks() != engine.kv.num_usable_blocks():
                raise RuntimeError(f"blocks are left after the last request: {engine.kv.format_usage()}")
        if len(self.transfers) != len(arrivals):
            raise RuntimeError(f"{len(self.transfers)} of {len(arrivals)} requests were handed over")

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), event))

    # ---- prefill

    def _arrive(self, life: _Life) -> None:
        self._waiting.append(life)
        self._start_step()

    def _start_step(self) -> None:
        """Takes the blocks of the next step's tokens, as many of the oldest requests as its budget has room for."""
        if self._is_stepping:
            return
        while self._waiting and self.prefill.admit(self._waiting[0].name, self._waiting[0].arrival.prompt_tokens):
            self._running.append(self._waiting.popleft())
        budget, chunks = STEP_TOKENS, []
        for life in self._running:
            if num_new := self._allocate(life, budget):
                chunks.append((life, num_new))
                budget -= num_new
        if chunks:
            self._is_stepping = True
            self._at(self.now + self.step_s * (1 - budget / STEP_TOKENS), lambda: self._end_step(chunks))

    def _allocate(self, life: _Life, budget: int) -> int:
        """How many tokens of the request the step computes."""
        prompt = life.arrival.prompt_tokens
        hit = self.prefill.find(life, prompt) if not life.computed and budget else None
        computed = hit.num_tokens if hit else life.computed
        num_new = min(budget, prompt - computed)
        if num_new:
            _must(self.prefill.kv.allocate_slots(life.name, computed, num_new, prefix=hit))
            life.computed = computed
        return num_new

    def _end_step(self, chunks: Sequence[tuple[_Life, int]]) -> None:
        self._is_stepping = False
        for life, num_new in chunks:
            life.computed += num_new
            self.prefill.commit(life, life.computed)
            if life.computed == life.arrival.prompt_tokens:
                self._running.remove(life)
                self._handed.append(life)
        self._admit_to_decode()
        self._start_step()

    # ---- hand-over and decode

    def _admit_to_decode(self) -> None:
        while self._handed:
            life = self._handed[0]
            prompt, output = life.arrival.prompt_tokens, life.arrival.output_tokens
            if not self.decode.admit(life.name, prompt + output):
                return
            self._handed.popleft()
            hit = self.decode.find(life, prompt + 1)
            _must(self.decode.kv.allocate_received_slots(life.name, prompt, 1, prefix=hit))
            self._note_transfer(life, hit.num_tokens if hit else 0)
            self._at(self.now + TRANSFER_S + prompt * TRANSFER_TOKEN_S, lambda life=life: self._arrived(life))

    def _note_transfer(self, life: _Life, num_known: int) -> None:
        first, num = num_known // self.cache.block_size, -(-life.arrival.prompt_tokens // self.cache.block_size)
        source, target = (engine.table(life.name)[first:num] for engine in (self.prefill, self.decode))
        self.transfers.append(
            Transfer(
                arrival=life.arrival,
                num_blocks=len(source),
                num_runs=count_runs(source, target),
            )
        )

    def _arrived(self, life: _Life) -> None:
        self.prefill.free(life.name)
        self.decode.commit(life, life.arrival.prompt_tokens)
        self._start_step()
        self._grow(life, life.arrival.prompt_tokens)

    def _grow(self, life: _Life, computed: int) -> None:
        """Room for tokens up to the end of a block, and back when they are made."""
        end = life.arrival.prompt_tokens + life.arrival.output_tokens
        self.decode.commit(life, computed)
        if computed == end:
            self.decode.free(life.name)
            self._admit_to_decode()
            return
        num_new = min(end - computed, self.cache.block_size - computed % self.cache.block_size)
        _must(self.decode.kv.allocate_slots(life.name, computed, num_new))
        self._at(self.now + num_new * DECODE_S, lambda: self._grow(life, computed + num_new))


def count_runs(source: Sequence[int], target: Sequence[int]) -> int:
    """Pieces of two tables of one length in which both count up by one."""
    pairs = list(zip(source, target, strict=True))
    return sum(i == 0 or (a, b) != (pairs[i - 1][0] + 1, pairs[i - 1][1] + 1) for i, (a, b) in enumerate(pairs))


def _tokens_of(arrival: Arrival, own: int) -> list[int]:
    """Token ids of prompt and output; those of the request alone are `own`, which nobody else has."""
    tokens = [content for content in arrival.contents for _ in range(CONTENT_TOKENS)][: arrival.prompt_tokens]
    return tokens + [own] * (arrival.prompt_tokens + arrival.output_tokens + 1 - len(tokens))


def _must(done: bool) -> None:
    if not done:
        raise RuntimeError("an allocation was refused to a request that had been admitted")
