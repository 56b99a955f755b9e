"""Which waiting request may own blocks: room for all its tokens, some growth, and what was promised before.

A request is promised one block of growth. One that was preempted `max_preemptions` times is promised all it may ever
need and is called secured: whatever others take beyond their own promises, they can be made to give back, so it is
never preempted again and comes to its end. So does everybody, since each is preempted a bounded number of times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from kv_cache import FIXED_BLOCK_ATTN_TYPES, KVCacheManager, PrefixHit
from pd_service.engine.request_state import RequestState, Status


class Admission:
    """Asks the KV manager; changes nothing but by `admit`. With a prefix cache, requests start with what is found."""

    def __init__(
        self, kv_cache_manager: KVCacheManager, block_size: int, *, max_preemptions: int, has_prefix_cache: bool
    ) -> None:
        self._kv = kv_cache_manager
        self._block_size = block_size
        self._max_preemptions = max_preemptions
        self._has_prefix_cache = has_prefix_cache
        managers = kv_cache_manager.managers
        self._windows = {key for key, manager in managers.items() if manager.attn_type in FIXED_BLOCK_ATTN_TYPES}

    def is_secured(self, state: RequestState) -> bool:
        return state.preemptions >= self._max_preemptions

    def admit(self, state: RequestState, admitted: Iterable[RequestState]) -> bool:
        """Gives the waiting request its first blocks, if it fits beside what the `admitted` are promised.

        With a ticket the blocks cover all its tokens; without, the tokens found in the cache and one more.
        """
        hit = self._find_prefix(state)
        num_in_use = self._shared_in_use(state, hit) if hit is not None and hit.num_tokens else {}
        if not self._fits(state, num_in_use, admitted):
            return False
        num_found = hit.num_tokens if hit is not None else 0
        if state.takes_ticket:
            fits = self._kv.allocate_received_slots(state.request_id, state.num_received, 1, prefix=hit)
        else:
            fits = self._kv.allocate_slots(state.request_id, num_found, 1, prefix=hit)
        assert fits, "admission and allocation disagree"
        state.num_computed = state.cached_tokens = num_found
        state.num_borrowed = {key: num for key, num in num_in_use.items() if key in self._windows}
        return True

    def _find_prefix(self, state: RequestState) -> PrefixHit | None:
        if not self._has_prefix_cache:
            return None
        salt = state.request.cache_salt
        if state.wants_prompt_logprobs:  # every position of the prompt has to be computed
            return PrefixHit(salt=salt, nodes=(), num_tokens=0)
        if state.num_known > len(state.token_ids):  # the token that is to come is in no full block, whatever it is
            return self._kv.find_prefix([*state.token_ids, 0], salt)
        return self._kv.find_prefix(state.token_ids, salt)

    def _fits(self, state: RequestState, num_in_use: Mapping[str, int], admitted: Iterable[RequestState]) -> bool:
        room = self._kv.num_free_blocks()
        for key in num_in_use.keys() - self._windows:
            room[key] += num_in_use[key]
        for one in chain((state,), admitted):
            for key, num_blocks in self._need(one).items():
                room[key] -= num_blocks
                if room[key] < 0:
                    return False
        return True

    def _need(self, state: RequestState) -> dict[str, int]:
        """Blocks the request still lacks of what it is promised."""
        tokens = state.request.max_cached_tokens
        if not self.is_secured(state):
            tokens = min(state.num_known + self._block_size, tokens)
        computed = state.num_received if state.takes_ticket else state.num_computed
        owner = state.request_id if state.status is not Status.WAITING else None
        need = self._kv.num_blocks_lacking(owner, computed, max(tokens, computed + 1))
        for key, num_blocks in state.num_borrowed.items():
            if self._kv.managers[key].get_num_skipped_tokens(computed) < state.cached_tokens:
                need[key] += num_blocks
        return need

    def _shared_in_use(self, state: RequestState, hit: PrefixHit) -> dict[str, int]:
        """Blocks of the hit that some other request uses now: sharing them costs no free block.

        Full attention keeps them to the end. A window moves on: it takes blocks of its own, and those it leaves are
        not free while others use them, so they are borrowed, and count as lacking until the last one is left.
        """
        start = state.num_received if state.takes_ticket else hit.num_tokens
        without = self._kv.num_blocks_needed(None, start, start + 1)
        with_hit = self._kv.num_blocks_needed(None, start, start + 1, hit)
        return {key: without[key] - with_hit[key] for key in without}
