"""The scheduler's only door to the KV cache: one request, all attention types, all or nothing.

A request's life here:

    allocate_slots(id, 0, n)          or   allocate_received_slots(id, n, 1)     first blocks; True, or nothing changed
    allocate_slots(id, computed, 1)   ...                                        once per step, before it runs
    free(id)                          or   lease(id, lease_id), later release_lease(lease_id)                      once

With a prefix cache, `find_prefix` before the first blocks, and `commit` after each step.

Always true: a request has a table in every manager or in none; every table has exactly one owner, a request, a lease or
a pull, and giving it back removes it from its owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kv_cache.block_pool import require
from kv_cache.cache_info import ModelCacheInfo
from kv_cache.cache_usage import BufferInfo, GroupUsage, describe_buffers, measure_usage
from kv_cache.cache_utils import get_entries_in_export_order
from kv_cache.prefix_cache import CachingBlockPool, PrefixCache, PrefixHit
from kv_cache.single_type_kv_cache_manager import Holder, SingleTypeKVCacheManager


@dataclass(slots=True)
class _Room:
    """Of a request: tokens its tables cover; computed ones the next reclaim waits for; those in findable blocks."""

    num_tokens: int
    next_reclaim: int
    num_fixed: int


class _Need(NamedTuple):
    """In one group: blocks to take over from the cache, blocks to take from the pool, and what both cost it."""

    shared: list[int]
    num_new: int
    num_from_free: int


class KVCacheManager:
    """All block tables of one engine.

    `managers` by group_key. `max_model_len` tokens bound a request, `max_step_tokens` the new tokens (lookahead
    included) of one allocation; None stands for `max_model_len`, a whole prompt in one step. `cache_tensors` are those
    `allocate_cache_tensors` returned; without them everything works but the descriptions of buffers. With
    `prefix_cache`, fresh managers get pools that keep content; ValueError if a type's blocks do not hold tokens.
    """

    def __init__(
        self,
        managers: Mapping[str, SingleTypeKVCacheManager],
        cache_info: ModelCacheInfo,
        max_model_len: int,
        cache_tensors: Sequence[torch.Tensor] = (),
        max_step_tokens: int | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        if not managers:
            raise ValueError("a KV cache needs at least one attention type, given: none")
        self.managers = dict(managers)
        self.cache_info = cache_info
        self.max_model_len = max_model_len
        self.cache_tensors = tuple(cache_tensors)
        self.max_step_tokens = max_model_len if max_step_tokens is None else max_step_tokens
        self._rooms: dict[str, _Room] = {}
        self._leases: set[str] = set()
        self._pulls: dict[str, str | None] = {}  # pull id → the request that owns its blocks; None: the pull does
        self._pull_of: dict[str, str] = {}  # request id → pull id
        self._prefix_cache = prefix_cache
        self._caching_pools: dict[str, CachingBlockPool] = {}
        self._hit_tokens = dict.fromkeys(self.managers, 0)
        if prefix_cache is not None:
            self._install(prefix_cache)

    def _install(self, prefix_cache: PrefixCache) -> None:
        if stateful := [m.attn_type for m in self.managers.values() if not m.has_token_blocks]:
            raise ValueError(f"a prefix cache shares blocks of tokens, but {stateful} have none")
        for key, manager in self.managers.items():
            pool = CachingBlockPool(manager.block_pool.num_blocks, manager.block_size, prefix_cache)
            self._caching_pools[key] = manager.block_pool = pool

    def allocate_slots(
        self,
        request_id: str,
        computed_tokens: int,
        num_new_tokens: int,
        lookahead_tokens: int = 0,
        *,
        prefix: PrefixHit | None = None,
    ) -> bool:
        """Makes room for the next `num_new_tokens + lookahead_tokens` tokens, after `computed_tokens` confirmed ones.

        Two phases. Check: every manager takes back what the confirmed tokens moved out of sight, then counts the blocks
        it needs. Allocate: only when every pool has enough. On False nothing was allocated anywhere; blocks out of
        sight may have gone back, which is right whether the request goes on or not. Tokens from `max_model_len` on get
        no room. `prefix` lets a new request start with its `num_tokens` tokens computed, in blocks it shares; a hit
        that has been evicted since is refused with False as well, then look it up again.

        Raises ValueError, and changes nothing, for an empty id, no new tokens, more than `max_step_tokens`, computed
        tokens that the request's blocks do not cover, new tokens among those committed, or a pull that still writes.
        """
        room = self._rooms.get(request_id)
        if (
            room is not None
            and room.num_fixed <= computed_tokens < room.next_reclaim
            and num_new_tokens > 0 <= lookahead_tokens
            and num_new_tokens + lookahead_tokens <= self.max_step_tokens
            and computed_tokens + num_new_tokens + lookahead_tokens <= room.num_tokens
            and prefix is None
        ):
            return True  # most decode steps: nothing to give back, nothing to take
        self._check_amounts(request_id, computed_tokens, num_new_tokens, lookahead_tokens)
        self._check_prefix(request_id, prefix, computed_tokens)
        num_covered = room.num_tokens if room else prefix.num_tokens if prefix else 0
        if min(computed_tokens, self.max_model_len) > num_covered:
            raise ValueError(
                f"request {request_id!r} has blocks for {num_covered} tokens, so it cannot have computed "
                f"{computed_tokens}; received tokens are announced with allocate_received_slots"
            )
        if request_id in self._pull_of:
            raise ValueError(f"a pull still writes into the blocks of request {request_id!r}")
        if room and computed_tokens < room.num_fixed:
            raise ValueError(f"the first {room.num_fixed} tokens of request {request_id!r} are shared or may be")
        return self._allocate(request_id, computed_tokens, num_new_tokens + lookahead_tokens, prefix)

    def allocate_received_slots(
        self, request_id: str, num_received_tokens: int, num_new_tokens: int, *, prefix: PrefixHit | None = None
    ) -> bool:
        """First blocks of a request whose first `num_received_tokens` tokens are not computed here.

        A pull writes them, but for those of `prefix`, which are here already. Received tokens that no new token can see
        get null entries. On False nothing has changed. Raises ValueError, and changes nothing, as `allocate_slots`
        does, and for a request that owns blocks already.
        """
        self._check_amounts(request_id, num_received_tokens, num_new_tokens, 0)
        if self.owns_blocks(request_id):
            raise ValueError(f"request {request_id!r} owns blocks already: it cannot receive its first tokens now")
        self._check_prefix(request_id, prefix, num_received_tokens)
        return self._allocate(request_id, num_received_tokens, num_new_tokens, prefix)

    def find_prefix(self, token_ids: Sequence[int], salt: str = "") -> PrefixHit:
        """The longest cached prefix of a prompt that every group can use; at least one token is left to compute.

        Takes nothing and changes nothing: the hit holds until blocks are next taken, and giving it to the first
        allocation checks it again. Without a prefix cache it is a ValueError.
        """
        block_size = self.cache_info.block_size
        nodes = self._need_prefix_cache().find(token_ids[: self.max_model_len], salt, block_size)
        lengths = set(range(len(nodes) + 1))
        for key, pool in self._caching_pools.items():
            lengths &= self.managers[key].get_valid_hits([pool.find(node) for node in nodes])
        length = max(lengths)
        return PrefixHit(salt=salt, nodes=tuple(nodes[:length]), num_tokens=length * block_size)

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """The KV of the first `num_computed` of `token_ids` is confirmed and written: full blocks become findable.

        For requests that started with a `prefix`, of 0 tokens if need be. Raises ValueError otherwise, for more tokens
        than given or covered, and while a pull still writes.
        """
        room = self._rooms.get(request_id)
        if (
            room is not None
            and room.num_fixed <= num_computed < room.num_fixed + self.cache_info.block_size
            and num_computed <= room.num_tokens
            and num_computed <= len(token_ids)
            and request_id not in self._pull_of
            and self._prefix_cache is not None
            and self._prefix_cache.knows(request_id)
        ):
            return  # most decode steps: no further block is full
        cache = self._need_prefix_cache()
        if not cache.knows(request_id):
            raise ValueError(f"request {request_id!r} did not start with a prefix: its content is not known")
        num_covered = min(len(token_ids), self._rooms[request_id].num_tokens)
        if not 0 <= num_computed <= num_covered or request_id in self._pull_of:
            raise ValueError(
                f"request {request_id!r} has {num_covered} tokens given and covered, and pull "
                f"{self._pull_of.get(request_id)} in progress, so {num_computed} cannot be computed"
            )
        block_size = self.cache_info.block_size
        for index, node in cache.extend(request_id, token_ids, num_computed // block_size, block_size):
            for key, pool in self._caching_pools.items():
                block = self.managers[key].req_to_blocks[request_id][index]
                if block != pool.null_block:
                    pool.register(block, node)
            self._rooms[request_id].num_fixed = (index + 1) * block_size

    def lease(self, request_id: str, lease_id: str) -> None:
        """The request is over, and its blocks, of every type, belong to the lease from now on.

        Raises KeyError if it owns none, ValueError for an existing lease, and while a pull still writes into them.
        """
        self._check_owns_blocks(request_id)
        if lease_id in self._leases:
            raise ValueError(f"lease {lease_id!r} exists already")
        if request_id in self._pull_of:
            raise ValueError(f"a pull still writes into the blocks of request {request_id!r}")
        self._hand_over(request_id, ("lease", lease_id))
        self._leases.add(lease_id)

    def release_lease(self, lease_id: str) -> None:
        """Gives back the lease's blocks. Raises KeyError for a lease that does not exist, or no longer."""
        if lease_id not in self._leases:
            raise KeyError(f"lease {lease_id!r} does not exist")
        self._leases.remove(lease_id)
        self._release(("lease", lease_id))

    def begin_pull(self, request_id: str, pull_id: str) -> None:
        """A pull writes into the request's blocks until `end_pull`; freed before, they wait for it.

        Raises KeyError if the request owns no blocks, ValueError if it has a pull or `pull_id` is in use.
        """
        self._check_owns_blocks(request_id)
        if request_id in self._pull_of or pull_id in self._pulls:
            raise ValueError(f"pull {pull_id!r} is in progress already, or request {request_id!r} has one")
        self._pulls[pull_id] = request_id
        self._pull_of[request_id] = pull_id
        self._rooms[request_id].next_reclaim = 0

    def end_pull(self, pull_id: str) -> None:
        """Nothing writes for this pull any more. Raises KeyError for one that is not in progress."""
        if pull_id not in self._pulls:
            raise KeyError(f"pull {pull_id!r} is not in progress")
        request_id = self._pulls.pop(pull_id)
        if request_id is None:
            self._release(("pull", pull_id))
        else:
            del self._pull_of[request_id]

    def owns_blocks(self, request_id: str) -> bool:
        return request_id in self._rooms

    def get_block_ids(self, request_id: str) -> dict[str, list[int]]:
        """A copy of the request's block tables by group_key. Raises KeyError if it owns none."""
        self._check_owns_blocks(request_id)
        return {key: list(manager.req_to_blocks[request_id]) for key, manager in self.managers.items()}

    def free(self, request_id: str) -> None:
        """Gives back every block of the request; those a pull still writes into belong to the pull until its end.

        Raises KeyError if it owns none: silence would hide a mistyped id, and with it a leak.
        """
        self._check_owns_blocks(request_id)
        if pull_id := self._pull_of.pop(request_id, None):
            self._pulls[pull_id] = None
            self._hand_over(request_id, ("pull", pull_id))
            return
        self._forget(request_id)
        for manager in self.managers.values():
            manager.free(request_id)

    def num_blocks_needed(
        self, request_id: str | None, computed_tokens: int, num_tokens: int, prefix: PrefixHit | None = None
    ) -> dict[str, int]:
        """Free blocks by group_key that covering `num_tokens` tokens costs, `computed_tokens` there. Changes nothing.

        None asks for a request that owns no blocks. If each number is at most that group's `num_free_blocks()`, the
        allocation succeeds; for a running request it may succeed even if not, since it first takes back old blocks.
        Raises ValueError for a hit that has been evicted.
        """
        needs = self._count(request_id or "", computed_tokens, num_tokens, prefix)  # no request has the empty id
        if needs is None:
            raise ValueError("the prefix has been evicted since it was found: look it up again")
        return {key: need.num_from_free for key, need in zip(self.managers, needs, strict=True)}

    def num_blocks_lacking(self, request_id: str | None, computed_tokens: int, num_tokens: int) -> dict[str, int]:
        """Blocks by group_key that the request still has to get until it has `num_tokens` tokens. Changes nothing.

        For admission: unlike `num_blocks_needed` it counts what the request gives back between steps of at most
        `max_step_tokens` tokens. None asks for a request that owns no blocks.
        """
        num_tokens, computed_tokens = min(num_tokens, self.max_model_len), min(computed_tokens, self.max_model_len)
        return {
            key: manager.get_num_lacking_blocks(request_id or "", num_tokens, computed_tokens, self.max_step_tokens)
            for key, manager in self.managers.items()
        }

    def peak_blocks_needed(self, num_tokens: int) -> dict[str, int]:
        """Most blocks by group_key that a request of `num_tokens` tokens, output included, holds at any moment."""
        return {
            key: manager.get_peak_num_blocks(num_tokens, self.max_step_tokens) for key, manager in self.managers.items()
        }

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` tokens, output included, can run to its end in an empty cache."""
        usable = self.num_usable_blocks()
        fits = all(num <= usable[key] for key, num in self.peak_blocks_needed(num_tokens).items())
        return fits and num_tokens <= self.max_model_len

    def num_free_blocks(self) -> dict[str, int]:
        return {key: m.block_pool.num_free_blocks for key, m in self.managers.items()}

    def num_usable_blocks(self) -> dict[str, int]:
        """Blocks by group_key that requests can really get; the null block is none of them."""
        return {key: m.block_pool.num_usable_blocks for key, m in self.managers.items()}

    def format_usage(self) -> str:
        """Used and usable blocks, such as "full:12/100,sliding:8/100"."""
        free, usable = self.num_free_blocks(), self.num_usable_blocks()
        return ",".join(f"{m.short_name}:{usable[t] - free[t]}/{usable[t]}" for t, m in self.managers.items())

    def usage(self) -> dict[str, GroupUsage]:
        """The blocks of each group counted by what they are good for, and what has happened to them so far."""
        return {key: measure_usage(manager, self._hit_tokens[key]) for key, manager in self.managers.items()}

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int], list[str]]:
        """(data_ptrs, data_lens, item_lens, group_keys) of the cache tensors, four lists of one length.

        Address, bytes, bytes per block and group (its attn_type by default), ascending by layer_idx, then in the
        layer's own order. Raises ValueError when the manager was made without cache tensors.
        """
        buffers = self.get_buffer_infos()
        return (
            [buffer.data_ptr for buffer in buffers],
            [buffer.num_bytes for buffer in buffers],
            [buffer.bytes_per_block for buffer in buffers],
            [buffer.group_key for buffer in buffers],
        )

    def get_buffer_infos(self) -> list[BufferInfo]:
        """The same buffers in the same order, each with its name, layer and geometry."""
        entries = get_entries_in_export_order(self.cache_info)
        if len(self.cache_tensors) != len(entries):
            raise ValueError(f"the model has {len(entries)} paged caches, given: {len(self.cache_tensors)} tensors")
        return describe_buffers(self.cache_info, entries, self.cache_tensors)

    def check(self) -> None:
        """Recounts every table, pool and content. Raises CacheInvariantError: a bug of this package."""
        holders = {("lease", lease_id) for lease_id in self._leases}
        holders |= {("pull", pull_id) for pull_id, request_id in self._pulls.items() if request_id is None}
        for key, manager in self.managers.items():
            manager.check()
            lens = {request_id: len(table) for request_id, table in manager.req_to_blocks.items()}
            expected = {
                request_id: manager.get_table_len(min(room.num_tokens, self.max_model_len))
                for request_id, room in self._rooms.items()
            }
            require(lens == expected, f"{key} tables have lengths {lens}, expected: {expected}")
            require(manager.holder_to_blocks.keys() == holders, f"{key}: holders differ from {holders}")
        pulling = {request_id: pull_id for pull_id, request_id in self._pulls.items() if request_id is not None}
        require(pulling == self._pull_of and pulling.keys() <= self._rooms.keys(), f"pulls: {self._pulls}")
        if self._prefix_cache is not None:
            self._prefix_cache.check([node for pool in self._caching_pools.values() for node in pool.nodes()])

    def _count(
        self, request_id: str, computed_tokens: int, num_tokens: int, prefix: PrefixHit | None
    ) -> list[_Need] | None:
        """What each group needs; None when the prefix is no longer there. The one count of check and allocation."""
        num_tokens, computed_tokens = min(num_tokens, self.max_model_len), min(computed_tokens, self.max_model_len)
        needs = []
        for key, manager in self.managers.items():
            num_new = manager.get_num_blocks_to_allocate(request_id, num_tokens, computed_tokens)
            shared: list[int] = []
            num_unused = 0
            if prefix is not None and prefix.nodes:
                first_seen = manager.get_num_skipped_tokens(computed_tokens) // manager.block_size
                found = [self._caching_pools[key].find(node) for node in prefix.nodes[first_seen:]]
                shared = [block for block in found if block is not None]
                if len(shared) != len(found):
                    return None
                num_new -= len(shared)
                num_unused = self._caching_pools[key].count_unused(shared)
            needs.append(_Need(shared, num_new, num_new + num_unused))
        return needs

    def _allocate(self, request_id: str, computed_tokens: int, num_new_tokens: int, prefix: PrefixHit | None) -> bool:
        num_computed = min(computed_tokens, self.max_model_len)
        num_tokens = min(computed_tokens + num_new_tokens, self.max_model_len)
        managers = self.managers.values()
        room = self._rooms.get(request_id)
        if room is not None and num_computed >= room.next_reclaim:
            for manager in managers:
                manager.remove_skipped_blocks(request_id, num_computed)
        needs = self._count(request_id, num_computed, num_tokens, prefix)
        if needs is None:
            return False
        for manager, need in zip(managers, needs, strict=True):
            if need.num_from_free > manager.block_pool.num_free_blocks:
                return False
        if prefix is not None:
            self._start_with(request_id, prefix, needs)
        if room is None or num_tokens > room.num_tokens:
            for manager, need in zip(managers, needs, strict=True):
                manager.allocate_new_blocks(request_id, need.num_new, num_tokens)
        self._note_room(request_id, num_computed, num_tokens)
        if prefix is not None:
            self._rooms[request_id].num_fixed = prefix.num_tokens
        return True

    def _start_with(self, request_id: str, prefix: PrefixHit, needs: Sequence[_Need]) -> None:
        self._need_prefix_cache().begin(request_id, prefix)
        for (key, pool), need in zip(self._caching_pools.items(), needs, strict=True):
            pool.share(need.shared)
            self.managers[key].adopt_blocks(request_id, need.shared, len(prefix.nodes))
            self._hit_tokens[key] += len(need.shared) * pool.block_size

    def _note_room(self, request_id: str, num_computed: int, num_tokens: int) -> None:
        block_size = self.cache_info.block_size
        room = self._rooms.get(request_id)
        if room is None:
            room = self._rooms[request_id] = _Room(0, 0, 0)
        room.num_tokens = max(room.num_tokens, -(-num_tokens // block_size) * block_size)
        if num_computed >= room.next_reclaim:
            room.next_reclaim = min([manager.get_next_reclaim(num_computed) for manager in self.managers.values()])

    def _forget(self, request_id: str) -> None:
        del self._rooms[request_id]
        if self._prefix_cache is not None:
            self._prefix_cache.end(request_id)

    def _hand_over(self, request_id: str, holder: Holder) -> None:
        self._forget(request_id)
        for manager in self.managers.values():
            manager.hand_over(request_id, holder)

    def _release(self, holder: Holder) -> None:
        for manager in self.managers.values():
            manager.release(holder)

    def _need_prefix_cache(self) -> PrefixCache:
        if self._prefix_cache is None:
            raise ValueError("this KV cache was made without a prefix cache")
        return self._prefix_cache

    def _check_prefix(self, request_id: str, prefix: PrefixHit | None, computed_tokens: int) -> None:
        if prefix is None:
            return
        self._need_prefix_cache()
        if self.owns_blocks(request_id):
            raise ValueError(f"request {request_id!r} owns blocks already: it cannot start with a prefix now")
        if prefix.num_tokens > computed_tokens:
            raise ValueError(f"a prefix of {prefix.num_tokens} tokens is more than {computed_tokens} computed ones")

    def _check_amounts(self, request_id: str, computed_tokens: int, num_new_tokens: int, lookahead_tokens: int) -> None:
        if not request_id:
            raise ValueError("a request id must not be empty")
        if computed_tokens < 0 or lookahead_tokens < 0:
            raise ValueError(f"negative token count: computed {computed_tokens}, lookahead {lookahead_tokens}")
        if num_new_tokens < 1:
            raise ValueError(f"an allocation is for at least 1 new token, given: {num_new_tokens}")
        if num_new_tokens + lookahead_tokens > self.max_step_tokens:
            raise ValueError(
                f"{num_new_tokens} new and {lookahead_tokens} lookahead tokens exceed the "
                f"{self.max_step_tokens} tokens of one step"
            )

    def _check_owns_blocks(self, request_id: str) -> None:
        if not self.owns_blocks(request_id):
            raise KeyError(f"request {request_id!r} owns no blocks")
