"""Which blocks a request holds for one attention type: how many it needs, when old ones go back, its block table.

A block table is logical: entry i is the block of tokens [i * block_size, (i + 1) * block_size), and operators require
ceil(tokens / block_size) entries. Where no later token looks any more, the entry is the null block:

    sliding window 6, block_size 4, 18 tokens computed, 1 new: the new token, at 18, sees tokens 13 to 18

    tokens       0..3   4..7   8..11  12..15  16..19
    table      [  0   ,  0   ,   0   ,   7   ,   3   ]
               └─── num_skipped = 13 ──┘ └─ still seen

Always true: the null entries of a table come first; a table has one owner, a request or, once that is over, a holder
(a lease, or a pull that still writes). The check before an allocation and the allocation itself use the same count,
`get_num_blocks_to_allocate`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from kv_cache.block_pool import BlockPool, require
from kv_cache.cache_info import CacheEntry, ModelCacheInfo

NEVER = 2**62  # tokens; more than any request computes

Holder = tuple[str, str]  # what owns blocks after the request: ("lease" or "pull", its id)


class SingleTypeKVCacheManager(ABC):
    """The block tables of one attention type. Lengths are in tokens; `max_model_len` bounds every request."""

    short_name: ClassVar[str]  # in usage lines
    has_token_blocks: ClassVar[bool] = True  # entry i of a table holds tokens [i * block_size, (i + 1) * block_size)

    def __init__(self, attn_type: str, block_pool: BlockPool, block_size: int, max_model_len: int) -> None:
        self.attn_type = attn_type
        self.block_pool = block_pool
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.req_to_blocks: dict[str, list[int]] = {}
        self.holder_to_blocks: dict[Holder, list[int]] = {}
        self.num_reclaimed = 0
        self._null_block = block_pool.null_block

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, computed_tokens: int = 0) -> int:
        """Blocks to take from the pool so that the table covers `num_tokens` tokens. Changes nothing.

        `computed_tokens` matters only to a request without a table whose first tokens are computed elsewhere: what
        they no longer show to any later token needs no block.
        """
        num_existing = len(self.req_to_blocks.get(request_id, ()))
        num_skipped = self.get_num_skipped_tokens(computed_tokens) // self.block_size
        return max(0, self.get_table_len(num_tokens) - max(num_existing, num_skipped))

    def allocate_new_blocks(self, request_id: str, block_num_to_allocate: int, num_tokens: int) -> None:
        """Extends the table to `num_tokens` tokens: `block_num_to_allocate` new blocks at its end, null before them.

        Raises ValueError, and changes nothing, when the pool is short.
        """
        new_blocks = self.block_pool.get_new_blocks(block_num_to_allocate)
        table = self.req_to_blocks.setdefault(request_id, [])
        num_missing = self.get_table_len(num_tokens) - len(table)
        table.extend([self._null_block] * (num_missing - block_num_to_allocate))
        table.extend(new_blocks)

    def adopt_blocks(self, request_id: str, shared: Sequence[int], num_entries: int) -> None:
        """A new table of `num_entries`: `shared`, blocks taken over from the prefix cache, at its end, null before."""
        self.req_to_blocks[request_id] = [self._null_block] * (num_entries - len(shared)) + list(shared)

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Gives back the blocks that no token after `total_computed_tokens` confirmed ones can see; null replaces them.

        Walks back from the newest such block to the first null entry: each block is looked at once in its life.
        """
        table = self.req_to_blocks.get(request_id, [])
        end = start = min(len(table), self.get_num_skipped_tokens(total_computed_tokens) // self.block_size)
        while start > 0 and table[start - 1] != self._null_block:
            start -= 1
        if start == end:
            return
        self.block_pool.free_blocks(table[start:end])
        table[start:end] = [self._null_block] * (end - start)
        self.num_reclaimed += end - start

    def free(self, request_id: str) -> None:
        """Gives back all blocks of a request, the last one first. Raises KeyError for one without a table."""
        self.block_pool.free_blocks(self.req_to_blocks[request_id][::-1])
        del self.req_to_blocks[request_id]

    def hand_over(self, request_id: str, holder: Holder) -> None:
        """Moves the request's table to `holder`. Raises KeyError for a request without a table."""
        self.holder_to_blocks[holder] = self.req_to_blocks.pop(request_id)

    def release(self, holder: Holder) -> None:
        """Gives back all blocks of a holder, the last one first. Raises KeyError for one without a table."""
        self.block_pool.free_blocks(self.holder_to_blocks.pop(holder)[::-1])

    def get_table_len(self, num_tokens: int) -> int:
        """Entries of the table of `num_tokens` tokens, at least 1."""
        return num_logical_blocks(num_tokens, self.block_size)

    def get_peak_num_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Most blocks that a request of `num_tokens` tokens holds at once, at most `max_step_tokens` new per step."""
        return self.get_table_len(num_tokens)

    def get_next_reclaim(self, num_computed_tokens: int) -> int:
        """No reclaim has work to do before so many tokens are computed, if one ran at `num_computed_tokens`.

        A type that says more than the next token lets most steps go by without asking it.
        """
        return num_computed_tokens + 1

    def get_valid_hits(self, blocks: Sequence[int | None]) -> set[int]:
        """The lengths, in blocks, that a prefix hit may have: every block that the next token sees is there.

        `blocks[i]` is the cached block of tokens from i * block_size on, None where there is none.
        """
        valid, num_in_a_row = {0}, 0
        for length, block in enumerate(blocks, 1):
            num_in_a_row = num_in_a_row + 1 if block is not None else 0
            num_skipped = self.get_num_skipped_tokens(length * self.block_size) // self.block_size
            if num_in_a_row >= length - num_skipped:
                valid.add(length)
        return valid

    def get_num_lacking_blocks(
        self, request_id: str, num_tokens: int, computed_tokens: int, max_step_tokens: int
    ) -> int:
        """Blocks the request still needs, beside those it keeps, to reach `num_tokens` tokens. Changes nothing.

        What it gives back on the way counts: a table much longer than a window needs only the window's peak.
        """
        num_skipped = self.get_num_skipped_tokens(computed_tokens) // self.block_size
        num_kept = max(0, len(self.req_to_blocks.get(request_id, ())) - num_skipped)
        num_to_peak = max(0, self.get_peak_num_blocks(num_tokens, max_step_tokens) - num_kept)
        return min(num_to_peak, self.get_num_blocks_to_allocate(request_id, num_tokens, computed_tokens))

    @abstractmethod
    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that no token after `num_computed_tokens` computed ones can see."""

    @staticmethod
    @abstractmethod
    def validate_and_build_kwargs(group_entries: Sequence[CacheEntry]) -> dict[str, int]:
        """The constructor's further arguments, from all entries of the type. Raises ValueError if they disagree."""

    def check(self) -> None:
        """Recounts every table and the pool. Raises CacheInvariantError."""
        owned: list[int] = []
        owners: list[str | Holder] = [*self.req_to_blocks, *self.holder_to_blocks]
        tables = [*self.req_to_blocks.values(), *self.holder_to_blocks.values()]
        for owner, table in zip(owners, tables, strict=True):
            self._check_table(owner, table)
            owned += [block for block in table if block != self._null_block]
        self.block_pool.check(owned)

    def _check_table(self, owner: str | Holder, table: list[int]) -> None:
        num_null = table.count(self._null_block)
        max_null = self.get_num_skipped_tokens(len(table) * self.block_size) // self.block_size
        where = f"{self.attn_type} table of {owner!r}: {table}"
        require(0 < len(table) <= self.get_table_len(self.max_model_len), f"{where}: bad length")
        require(table[:num_null] == [self._null_block] * num_null, f"{where}: null among live blocks")
        require(num_null <= max_null, f"{where}: at most {max_null} entries can be null")


class FullAttentionManager(SingleTypeKVCacheManager):
    """Every token sees all before it: a table only grows."""

    short_name = "full"

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0

    def get_next_reclaim(self, num_computed_tokens: int) -> int:
        return NEVER

    @staticmethod
    def validate_and_build_kwargs(group_entries: Sequence[CacheEntry]) -> dict[str, int]:
        for entry in group_entries:
            if entry.sliding_window is not None:
                raise ValueError(f"sliding_window must be None for {entry.attn_type}, given: {entry.sliding_window}")
        return {}


class SlidingWindowManager(SingleTypeKVCacheManager):
    """A token at position p sees p - sliding_window + 1 to p: blocks left of that go back while the request runs."""

    short_name = "sliding"

    def __init__(
        self, attn_type: str, block_pool: BlockPool, block_size: int, max_model_len: int, sliding_window: int
    ) -> None:
        super().__init__(attn_type, block_pool, block_size, max_model_len)
        self.sliding_window = sliding_window

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.sliding_window + 1)

    def get_next_reclaim(self, num_computed_tokens: int) -> int:
        num_gone = self.get_num_skipped_tokens(num_computed_tokens) // self.block_size
        return (num_gone + 1) * self.block_size + self.sliding_window - 1

    def get_peak_num_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        windowed = num_window_blocks(self.sliding_window - 1 + max_step_tokens, self.block_size)
        return min(windowed, super().get_peak_num_blocks(num_tokens, max_step_tokens))

    @staticmethod
    def validate_and_build_kwargs(group_entries: Sequence[CacheEntry]) -> dict[str, int]:
        return {"sliding_window": _shared_amount("sliding_window", [e.sliding_window for e in group_entries])}


class ChunkedLocalManager(SingleTypeKVCacheManager):
    """A token at position p sees its own chunk up to itself: p // attention_chunk * attention_chunk to p."""

    short_name = "chunked"

    def __init__(
        self, attn_type: str, block_pool: BlockPool, block_size: int, max_model_len: int, attention_chunk: int
    ) -> None:
        super().__init__(attn_type, block_pool, block_size, max_model_len)
        self.attention_chunk = attention_chunk

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.attention_chunk * self.attention_chunk

    def get_next_reclaim(self, num_computed_tokens: int) -> int:
        return self.get_num_skipped_tokens(num_computed_tokens) + self.attention_chunk

    def get_peak_num_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        in_sight = num_window_blocks(self.attention_chunk - 1 + max_step_tokens, self.block_size)
        return min(in_sight, super().get_peak_num_blocks(num_tokens, max_step_tokens))

    @staticmethod
    def validate_and_build_kwargs(group_entries: Sequence[CacheEntry]) -> dict[str, int]:
        return {"attention_chunk": _shared_amount("attention_chunk", [e.attention_chunk for e in group_entries])}


class FixedStateManager(SingleTypeKVCacheManager):
    """A state that stands for all tokens: one block and `next_n` more per request, from its first token to its end."""

    short_name = "state"
    has_token_blocks = False

    def __init__(self, attn_type: str, block_pool: BlockPool, block_size: int, max_model_len: int, next_n: int) -> None:
        super().__init__(attn_type, block_pool, block_size, max_model_len)
        self.next_n = next_n

    def get_table_len(self, num_tokens: int) -> int:
        return 1 + self.next_n

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0

    def get_next_reclaim(self, num_computed_tokens: int) -> int:
        return NEVER

    @staticmethod
    def validate_and_build_kwargs(group_entries: Sequence[CacheEntry]) -> dict[str, int]:
        return {"next_n": _shared_amount("next_n", [entry.next_n for entry in group_entries], least=0)}


ATTN_TYPE_MANAGER_MAP: dict[str, type[SingleTypeKVCacheManager]] = {
    "FullAttention": FullAttentionManager,
    "SlidingWindow": SlidingWindowManager,
    "ChunkedLocal": ChunkedLocalManager,
    "FixedState": FixedStateManager,
}


def num_logical_blocks(num_tokens: int, block_size: int) -> int:
    """Length of the block table of `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def num_window_blocks(num_tokens: int, block_size: int) -> int:
    """Most blocks that `num_tokens` tokens in a row touch, wherever in a block the first one stands."""
    return num_logical_blocks(num_tokens, block_size) + 1


def _shared_amount(name: str, values: Sequence[int | None], least: int = 1) -> int:
    """The one value that all caches of a group give for `name`."""
    for value in values:
        if value is None or value < least:
            raise ValueError(f"{name} must be at least {least}, given: {value}")
    found = sorted({value for value in values if value is not None})
    if len(found) != 1:
        raise ValueError(f"all caches of one group share one {name}, given: {found}")
    return found[0]


def group_entries(cache_info: ModelCacheInfo) -> dict[str, list[CacheEntry]]:
    """The paged entries (`needs_block`) by group_key, in the order of their first appearance."""
    groups: dict[str, list[CacheEntry]] = {}
    for layer in cache_info.layer_infos:
        for entry in layer.caches:
            if entry.needs_block:
                groups.setdefault(entry.group_key, []).append(entry)
    return groups


def create_single_type_managers(
    cache_info: ModelCacheInfo, block_nums: Mapping[str, int], max_model_len: int
) -> dict[str, SingleTypeKVCacheManager]:
    """One manager with its own pool of `block_nums[group_key]` blocks (null block included) per group.

    Raises ValueError when `block_nums` has other keys than the model's groups, or a pool is too small to be one.
    """
    groups = group_entries(cache_info)
    if groups.keys() != block_nums.keys():
        raise ValueError(f"block_nums must be given for {sorted(groups)}, found: {sorted(block_nums)}")
    return {
        key: create_manager(entries, BlockPool(block_nums[key], cache_info.block_size), max_model_len)
        for key, entries in groups.items()
    }


def create_manager(
    entries: Sequence[CacheEntry], block_pool: BlockPool, max_model_len: int
) -> SingleTypeKVCacheManager:
    """The manager of one group's entries."""
    attn_type = entries[0].attn_type
    manager_type = ATTN_TYPE_MANAGER_MAP[attn_type]
    kwargs = manager_type.validate_and_build_kwargs(entries)
    return manager_type(attn_type, block_pool, block_pool.block_size, max_model_len, **kwargs)
