"""The scheduler's only door to the KV cache: one request, all attention types, all or nothing.

A request's life here:

    allocate_slots(id, 0, n)          or   allocate_received_slots(id, n, 1)     first blocks; True, or nothing changed
    allocate_slots(id, computed, 1)   ...                                        once per step, before it runs
    free(id)                                                                     once

Always true: a request has a table in every manager or in none, and all its tables have one length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kv_cache.block_pool import require
from kv_cache.cache_info import ModelCacheInfo
from kv_cache.cache_utils import get_entries_in_export_order
from kv_cache.single_type_kv_cache_manager import SingleTypeKVCacheManager


class KVCacheManager:
    """All block tables of one engine.

    `max_model_len` tokens bound a request, `max_step_tokens` the new tokens (lookahead included) of one allocation;
    None stands for `max_model_len`, a whole prompt in one step. `cache_tensors` are those `allocate_cache_tensors`
    returned; without them everything works but `get_contiguous_buf_infos`.
    """

    def __init__(
        self,
        managers: Mapping[str, SingleTypeKVCacheManager],
        cache_info: ModelCacheInfo,
        max_model_len: int,
        cache_tensors: Sequence[torch.Tensor] = (),
        max_step_tokens: int | None = None,
    ) -> None:
        if not managers:
            raise ValueError("a KV cache needs at least one attention type, given: none")
        self.managers = dict(managers)
        self.cache_info = cache_info
        self.max_model_len = max_model_len
        self.cache_tensors = tuple(cache_tensors)
        self.max_step_tokens = max_model_len if max_step_tokens is None else max_step_tokens

    def allocate_slots(
        self, request_id: str, computed_tokens: int, num_new_tokens: int, lookahead_tokens: int = 0
    ) -> bool:
        """Makes room for the next `num_new_tokens + lookahead_tokens` tokens, after `computed_tokens` confirmed ones.

        Two phases. Check: every manager takes back what the confirmed tokens moved out of sight, then counts the blocks
        it needs. Allocate: only when every pool has enough. On False nothing was allocated anywhere; blocks out of
        sight may have gone back, which is right whether the request goes on or not. Tokens from `max_model_len` on get
        no room.

        Raises ValueError, and changes nothing, for an empty id, no new tokens, more than `max_step_tokens`, or
        computed tokens that the request's blocks do not cover.
        """
        self._check_amounts(request_id, computed_tokens, num_new_tokens, lookahead_tokens)
        num_covered = self._num_blocks_in_table(request_id) * self.cache_info.block_size
        if min(computed_tokens, self.max_model_len) > num_covered:
            raise ValueError(
                f"request {request_id!r} has blocks for {num_covered} tokens, so it cannot have computed "
                f"{computed_tokens}; received tokens are announced with allocate_received_slots"
            )
        return self._allocate(request_id, computed_tokens, num_new_tokens + lookahead_tokens)

    def allocate_received_slots(self, request_id: str, num_received_tokens: int, num_new_tokens: int) -> bool:
        """First blocks of a request whose first `num_received_tokens` tokens are written by a pull, not computed here.

        Received tokens that no new token can see get null entries. On False nothing has changed. Raises ValueError,
        and changes nothing, as `allocate_slots` does, and for a request that owns blocks already.
        """
        self._check_amounts(request_id, num_received_tokens, num_new_tokens, 0)
        if self.owns_blocks(request_id):
            raise ValueError(f"request {request_id!r} owns blocks already: it cannot receive its first tokens now")
        return self._allocate(request_id, num_received_tokens, num_new_tokens)

    def owns_blocks(self, request_id: str) -> bool:
        return self._num_blocks_in_table(request_id) > 0

    def get_block_ids(self, request_id: str) -> dict[str, list[int]]:
        """A copy of the request's block tables by attn_type. Raises KeyError if it owns none."""
        self._check_owns_blocks(request_id)
        return {attn_type: list(manager.req_to_blocks[request_id]) for attn_type, manager in self.managers.items()}

    def free(self, request_id: str) -> None:
        """Gives back every block of the request.

        Raises KeyError if it owns none: silence would hide a mistyped id, and with it a leak.
        """
        self._check_owns_blocks(request_id)
        for manager in self.managers.values():
            manager.free(request_id)

    def num_blocks_needed(self, request_id: str | None, computed_tokens: int, num_tokens: int) -> dict[str, int]:
        """New blocks by attn_type to cover `num_tokens` tokens, `computed_tokens` of them there. Changes nothing.

        None asks for a request that owns no blocks. If each number is at most that type's `num_free_blocks()`, the
        allocation succeeds; for a running request it may succeed even if not, since it first takes back old blocks.
        """
        num_tokens, computed_tokens = min(num_tokens, self.max_model_len), min(computed_tokens, self.max_model_len)
        return {  # no request has the empty id
            attn_type: manager.get_num_blocks_to_allocate(request_id or "", num_tokens, computed_tokens)
            for attn_type, manager in self.managers.items()
        }

    def num_blocks_lacking(self, request_id: str | None, computed_tokens: int, num_tokens: int) -> dict[str, int]:
        """Blocks by attn_type that the request still has to get until it has `num_tokens` tokens. Changes nothing.

        For admission: unlike `num_blocks_needed` it counts what the request gives back between steps of at most
        `max_step_tokens` tokens. None asks for a request that owns no blocks.
        """
        num_tokens, computed_tokens = min(num_tokens, self.max_model_len), min(computed_tokens, self.max_model_len)
        return {
            attn_type: manager.get_num_lacking_blocks(
                request_id or "", num_tokens, computed_tokens, self.max_step_tokens
            )
            for attn_type, manager in self.managers.items()
        }

    def peak_blocks_needed(self, num_tokens: int) -> dict[str, int]:
        """Most blocks by attn_type that a request of `num_tokens` tokens, output included, holds at any moment."""
        return {
            attn_type: manager.get_peak_num_blocks(num_tokens, self.max_step_tokens)
            for attn_type, manager in self.managers.items()
        }

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` tokens, output included, can run to its end in an empty cache."""
        usable = self.num_usable_blocks()
        fits = all(num <= usable[attn_type] for attn_type, num in self.peak_blocks_needed(num_tokens).items())
        return fits and num_tokens <= self.max_model_len

    def num_free_blocks(self) -> dict[str, int]:
        return {attn_type: m.block_pool.num_free_blocks for attn_type, m in self.managers.items()}

    def num_usable_blocks(self) -> dict[str, int]:
        """Blocks by attn_type that requests can really get; the null block is none of them."""
        return {attn_type: m.block_pool.num_usable_blocks for attn_type, m in self.managers.items()}

    def format_usage(self) -> str:
        """Used and usable blocks, such as "full:12/100,sliding:8/100"."""
        free, usable = self.num_free_blocks(), self.num_usable_blocks()
        return ",".join(f"{m.short_name}:{usable[t] - free[t]}/{usable[t]}" for t, m in self.managers.items())

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int], list[str]]:
        """(data_ptrs, data_lens, item_lens, attn_types) of the cache tensors, four lists of one length.

        Address, bytes, bytes per block and attention type, ascending by layer_idx, then in the layer's own order.
        Raises ValueError when the manager was made without cache tensors.
        """
        entries = [entry for _, entry in get_entries_in_export_order(self.cache_info)]
        if len(self.cache_tensors) != len(entries):
            raise ValueError(f"the model has {len(entries)} paged caches, given: {len(self.cache_tensors)} tensors")
        return (
            [tensor.data_ptr() for tensor in self.cache_tensors],
            [tensor.nbytes for tensor in self.cache_tensors],
            [self.cache_info.block_size * entry.bytes_per_token for entry in entries],
            [entry.attn_type for entry in entries],
        )

    def check(self) -> None:
        """Recounts every table and every pool. Raises CacheInvariantError: a bug of this package."""
        for manager in self.managers.values():
            manager.check()
        tables = [{r: len(t) for r, t in manager.req_to_blocks.items()} for manager in self.managers.values()]
        require(all(lens == tables[0] for lens in tables), f"table lengths differ between attention types: {tables}")

    def _allocate(self, request_id: str, computed_tokens: int, num_new_tokens: int) -> bool:
        total_computed_tokens = min(computed_tokens, self.max_model_len)
        num_tokens_need_slot = min(computed_tokens + num_new_tokens, self.max_model_len)
        block_nums: list[int] = []
        for manager in self.managers.values():
            manager.remove_skipped_blocks(request_id, total_computed_tokens)
            num_new = manager.get_num_blocks_to_allocate(request_id, num_tokens_need_slot, total_computed_tokens)
            if num_new > manager.block_pool.get_num_free_blocks():
                return False
            block_nums.append(num_new)
        for manager, num_new in zip(self.managers.values(), block_nums, strict=True):
            manager.allocate_new_blocks(request_id, num_new, num_tokens_need_slot)
        return True

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

    def _num_blocks_in_table(self, request_id: str) -> int:
        return len(next(iter(self.managers.values())).req_to_blocks.get(request_id, ()))
