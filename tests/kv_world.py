"""A real KVCacheManager and, beside it, a memory of markers and a brute-force model of who sees what.

A marker is the salt and all tokens up to its position, as real KV depends on everything before. Whatever a new token
may see must carry the marker of its own request: a block that went back too early, is shared wrongly or belongs to two
requests shows at once. The model knows sets of visible positions, none of the formulas of kv_cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from kv_cache import (
    CacheEntry,
    KVCacheManager,
    LayerCacheInfo,
    ModelCacheInfo,
    PrefixCache,
    PrefixHit,
    create_single_type_managers,
)
from kv_cache.prefix_cache import CachingBlockPool, ContentNode
from tests.kv_model import new_entry

MAX_LEN = 32
MAX_STEP = 9
Marker = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Group:
    key: str
    attn_type: str
    size: int = 0  # window, chunk, or next_n

    def entry(self) -> CacheEntry:
        field_of = {"SlidingWindow": "sliding_window", "ChunkedLocal": "attention_chunk", "FixedState": "next_n"}
        size = {field_of[self.attn_type]: self.size} if self.attn_type in field_of else {}
        return new_entry(self.attn_type, cache_name=self.key, group_key=self.key, **size)

    def first_seen(self, position: int) -> int:
        if self.attn_type == "SlidingWindow":
            return max(0, position - self.size + 1)
        if self.attn_type == "ChunkedLocal":
            return next(p for p in range(position, -1, -1) if p % self.size == 0)
        return 0


@dataclass
class Life:
    """A request: all tokens it will ever have, and what of them is confirmed."""

    tokens: tuple[int, ...]
    salt: str
    computed: int = 0
    committed: int = 0
    end: int = 0  # tokens its tables cover
    reclaimed_at: int = 0  # most computed tokens at any allocation so far
    pull: str | None = None
    received: int = 0
    first_own: int = 0  # tokens before are shared


@dataclass
class World:
    groups: Sequence[Group]
    block_nums: Sequence[int]
    block_size: int
    cache: PrefixCache | None = None
    lives: dict[str, Life] = field(default_factory=dict)
    held: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # leases and pulls that own blocks
    num_ids: int = 0
    num_true: int = 0
    num_hits: int = 0

    def __post_init__(self) -> None:
        layer = LayerCacheInfo(layer_idx=0, caches=[group.entry() for group in self.groups])
        info = ModelCacheInfo(num_layers=1, block_size=self.block_size, layer_infos=[layer])
        nums = {group.key: num for group, num in zip(self.groups, self.block_nums, strict=True)}
        managers = create_single_type_managers(info, nums, MAX_LEN)
        self.kv = KVCacheManager(managers, info, MAX_LEN, max_step_tokens=MAX_STEP, prefix_cache=self.cache)
        self.marks: dict[tuple[str, int], Marker] = {}

    # ---- what can happen

    def new_id(self, kind: str) -> str:
        self.num_ids += 1
        return f"{kind}{self.num_ids}"

    def start(self, tokens: tuple[int, ...], salt: str, num_new: int) -> None:
        hit = self.find(tokens, salt)
        computed = hit.num_tokens if hit else 0
        life = Life(tokens, salt, computed=computed, committed=computed, first_own=computed)
        self._allocate(self.new_id("r"), life, min(num_new, MAX_LEN - computed), 0, hit)

    def step(self, request_id: str, num_new: int, lookahead: int, accepted: int) -> None:
        life = self.lives[request_id]
        num_new = min(num_new, MAX_LEN - life.computed)
        if num_new < 1:
            self.free(request_id)
        elif life.pull:
            with pytest.raises(ValueError, match="pull still writes"):
                self.kv.allocate_slots(request_id, life.computed, num_new)
        else:
            self._allocate(request_id, life, num_new, lookahead, None, accepted)

    def receive(self, tokens: tuple[int, ...], salt: str, num_received: int) -> None:
        hit = self.find(tokens[: num_received + 1], salt)
        request_id, shared = self.new_id("r"), hit.num_tokens if hit else 0
        life = Life(tokens, salt, received=num_received, computed=num_received, committed=shared, first_own=shared)
        promised = self._decide(request_id, life, num_received, num_received + 1, hit)
        assert self.kv.allocate_received_slots(request_id, num_received, 1, prefix=hit) == promised
        if promised:
            life.pull = self.new_id("p")
            self._note(request_id, life, num_received, num_received + 1)
            self.kv.begin_pull(request_id, life.pull)

    def arrive(self, request_id: str) -> None:
        life = self.lives[request_id]
        assert life.pull is not None
        self._write(request_id, life, range(life.first_own, life.received), pulled=True)
        self.kv.end_pull(life.pull)
        life.pull = None
        self._commit(request_id, life)

    def free(self, request_id: str) -> None:
        life = self.lives.pop(request_id)
        if life.pull:
            self.held[life.pull] = self.kv.get_block_ids(request_id)
        self.kv.free(request_id)
        with pytest.raises(KeyError):
            self.kv.free(request_id)

    def lease(self, request_id: str) -> None:
        if self.lives[request_id].pull:
            with pytest.raises(ValueError, match="pull still writes"):
                self.kv.lease(request_id, "l")
            return
        lease_id = self.new_id("l")
        self.held[lease_id] = self.kv.get_block_ids(request_id)
        self.kv.lease(request_id, lease_id)
        del self.lives[request_id]
        with pytest.raises(KeyError):
            self.kv.free(request_id)

    def let_go(self, holder: str) -> None:
        del self.held[holder]
        end = self.kv.release_lease if holder.startswith("l") else self.kv.end_pull
        end(holder)
        with pytest.raises(KeyError):
            end(holder)

    def end_everything(self) -> None:
        for request_id in list(self.lives):
            self.free(request_id)
        for holder in list(self.held):
            self.let_go(holder)
        self.check()
        assert self.kv.num_free_blocks() == self.kv.num_usable_blocks()

    # ---- what must hold

    def find(self, tokens: tuple[int, ...], salt: str) -> PrefixHit | None:
        """The hit, if there is a cache: exactly the longest prefix of which every group has all that is seen."""
        if self.cache is None:
            return None
        hit = self.kv.find_prefix(tokens, salt)
        contents = self.contents()
        lengths = [
            num * self.block_size
            for num in range((len(tokens) - 1) // self.block_size + 1)
            if all(
                (salt, tokens[: (index + 1) * self.block_size]) in contents[group.key]
                for group in self.groups
                for index in {p // self.block_size for p in self._seen(group, num * self.block_size, num_more=1)}
                if index < num
            )
        ]
        known = {marker for by_marker in contents.values() for marker in by_marker}
        reachable = 0  # a chain of contents that some group has, or had in the middle of a longer one
        while any(m[0] == salt and m[1][: reachable + 1] == tokens[: reachable + 1] for m in known) and reachable < len(
            tokens
        ):
            reachable += 1
        assert hit.num_tokens in lengths
        assert hit.num_tokens >= max(length for length in lengths if length <= reachable)
        self.num_hits += hit.num_tokens > 0
        return hit

    def contents(self) -> dict[str, dict[Marker, int]]:
        """Of each group, the blocks that can be found, by the marker of their last token."""
        found: dict[str, dict[Marker, int]] = {}
        assert self.cache is not None
        for group in self.groups:
            pool = self.kv.managers[group.key].block_pool
            assert isinstance(pool, CachingBlockPool)
            found[group.key] = {_marker(node): pool._block_of[node] for node in pool.nodes()}
            assert len(found[group.key]) == len(list(pool.nodes())), "one content is held twice"
        return found

    def check(self) -> None:
        self.kv.check()
        owned = self._owned()
        usage = self.kv.usage()
        for group in self.groups:
            free = self.kv.num_usable_blocks()[group.key] - len(owned[group.key])
            seen = usage[group.key]
            assert self.kv.num_free_blocks()[group.key] == free == seen.free + seen.cached
            assert seen.used + seen.leased == len(owned[group.key])
        for request_id, life in self.lives.items():
            self._check_tables(request_id, life)
        if self.cache is not None:
            self._check_contents()

    def _check_tables(self, request_id: str, life: Life) -> None:
        peak = self.kv.peak_blocks_needed(MAX_LEN)
        for group in self.groups:
            table = self.kv.get_block_ids(request_id)[group.key]
            live = {index for index, block in enumerate(table) if block}
            assert live == self._expected_live(group, life.reclaimed_at, life.end)
            assert len(live) <= peak[group.key]
            assert len({table[index] for index in live}) == len(live)

    def _check_contents(self) -> None:
        contents = self.contents()
        for group in self.groups:
            for (salt, tokens), block in contents[group.key].items():
                for offset in range(self.block_size):
                    length = len(tokens) - self.block_size + offset + 1
                    assert self.marks[group.key, block * self.block_size + offset] == (salt, tokens[:length])

    # ---- how

    def _allocate(
        self, request_id: str, life: Life, num_new: int, lookahead: int, hit: PrefixHit | None, accepted: int = 0
    ) -> None:
        end = min(MAX_LEN, life.computed + num_new + lookahead)
        if request_id in self.lives:
            life.reclaimed_at = max(life.reclaimed_at, life.computed)
        promised = self._decide(request_id, life, life.computed, end, hit)
        assert self.kv.allocate_slots(request_id, life.computed, num_new, lookahead, prefix=hit) == promised
        if not promised:
            return
        self._note(request_id, life, life.computed, end)
        self._write(request_id, life, range(life.computed, end))
        self._read(request_id, life, range(life.computed, end))
        life.computed = min(end, life.computed + num_new + min(accepted, lookahead))
        self._commit(request_id, life)

    def _decide(self, request_id: str, life: Life, computed: int, end: int, hit: PrefixHit | None) -> bool:
        """Whether every group has the blocks: those it can see now, or will, less those it has or shares."""
        owned, promised = self._owned(), self.kv.num_blocks_needed(request_id, computed, end, hit)
        fits = True
        for group in self.groups:
            need = self._expected_live(group, max(computed, life.reclaimed_at), max(end, life.end))
            had = self._expected_live(group, max(computed, life.reclaimed_at), life.end) if life.end else set()
            in_use = 0
            if hit is not None:
                pool = self.kv.managers[group.key].block_pool
                assert isinstance(pool, CachingBlockPool)
                shared = [pool.find(node) for index, node in enumerate(hit.nodes) if index in need]
                assert None not in shared
                in_use = sum(block in owned[group.key] for block in shared)
            num_from_free = len(need - had) - in_use
            assert promised[group.key] == num_from_free
            fits &= num_from_free <= self.kv.num_usable_blocks()[group.key] - len(owned[group.key])
        return fits

    def _note(self, request_id: str, life: Life, computed: int, end: int) -> None:
        life.end, life.reclaimed_at = max(end, life.end), max(computed, life.reclaimed_at)
        self.lives[request_id] = life
        self.num_true += 1

    def _commit(self, request_id: str, life: Life) -> None:
        if self.cache is not None:
            num_known = life.committed // self.block_size
            self.kv.commit(request_id, life.tokens, life.computed)
            life.committed = life.computed
            contents = self.contents()
            for key, table in self.kv.get_block_ids(request_id).items():
                for index in range(num_known, life.computed // self.block_size):
                    marker = life.salt, life.tokens[: (index + 1) * self.block_size]
                    assert not table[index] or marker in contents[key], "computed content cannot be found"

    def _owned(self) -> dict[str, set[int]]:
        """Real blocks with an owner; of a running request those that its last confirmed tokens leave in sight."""
        owned: dict[str, set[int]] = {group.key: set() for group in self.groups}
        for request_id, life in self.lives.items():
            for group in self.groups:
                table = self.kv.get_block_ids(request_id)[group.key]
                live = self._expected_live(group, life.reclaimed_at, life.end)
                owned[group.key] |= {table[index] for index in live}
        for tables in self.held.values():
            for key, table in tables.items():
                owned[key] |= set(table)
        return {key: blocks - {0} for key, blocks in owned.items()}

    def _seen(self, group: Group, computed: int, num_more: int = MAX_LEN) -> set[int]:
        """Positions that some token from `computed` on, `num_more` at most, sees."""
        last = min(MAX_LEN + 1, computed + num_more)
        return {seen for p in range(computed, last) for seen in range(group.first_seen(p), p + 1)}

    def _expected_live(self, group: Group, computed: int, end: int) -> set[int]:
        if group.attn_type == "FixedState":
            return set(range(1 + group.size))
        return {
            p // self.block_size for p in self._seen(group, computed) if p // self.block_size * self.block_size < end
        }

    def _slots(self, request_id: str, position: int) -> Iterable[tuple[str, int]]:
        for group in self.groups:
            if group.attn_type != "FixedState":
                block = self.kv.get_block_ids(request_id)[group.key][position // self.block_size]
                yield group.key, block * self.block_size + position % self.block_size

    def _write(self, request_id: str, life: Life, positions: range, *, pulled: bool = False) -> None:
        for position in positions:
            for key, slot in self._slots(request_id, position):
                assert pulled or slot >= self.block_size, "a new token's slot lies in the null block"
                if slot >= self.block_size:
                    self.marks[key, slot] = life.salt, life.tokens[: position + 1]

    def _read(self, request_id: str, life: Life, positions: range) -> None:
        first = {group.key: min(group.first_seen(p) for p in positions) for group in self.groups}
        for seen in range(positions[-1] + 1):
            for key, slot in self._slots(request_id, seen):
                assert seen < first[key] or self.marks[key, slot] == (life.salt, life.tokens[: seen + 1])


def _marker(node: ContentNode) -> Marker:
    salt = node.salt
    tokens: tuple[int, ...] = ()
    while node.parent is not None:
        tokens = node.token_ids + tokens
        node = node.parent
    return salt, tokens
