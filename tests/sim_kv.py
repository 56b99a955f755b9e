"""A KV cache whose content can be told right from wrong, and a model that looks at all of it.

Each slot holds a marker: a hash of the token there, its position and the marker before it, as real KV depends on
everything before. The next token is a hash of all markers that the request's block tables show, so one wrong, stale or
freed block within sight changes the output. Freed blocks are poisoned. Hashes of integers are equal in every process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kv_cache import BlockPool, KVCacheManager, PrefixCache
from kv_cache.prefix_cache import CachingBlockPool
from tests.kv_model import new_kv

VOCAB = 1000
WINDOW = 6  # tokens, the current one included
POISON = -1


class MarkedCache:
    """The memory of one engine: markers by attention type, `block_size` per block."""

    def __init__(self, block_nums: Mapping[str, int], block_size: int) -> None:
        self.block_size = block_size
        self._slots = {attn_type: [POISON] * (num * block_size) for attn_type, num in block_nums.items()}

    def read_block(self, attn_type: str, block: int) -> list[int]:
        return self._slots[attn_type][block * self.block_size : (block + 1) * self.block_size]

    def write_block(self, attn_type: str, block: int, markers: Sequence[int]) -> None:
        self._slots[attn_type][block * self.block_size : (block + 1) * self.block_size] = markers

    def marker(self, tables: Mapping[str, Sequence[int]], position: int) -> int:
        """What the first of these tables shows at a position."""
        attn_type, table = next(iter(tables.items()))
        return self._slots[attn_type][self._slot(table, position)]

    def write(self, tables: Mapping[str, Sequence[int]], position: int, marker: int) -> None:
        """As a pull does: where a table has a block."""
        for attn_type, table in tables.items():
            if table[position // self.block_size]:
                self._slots[attn_type][self._slot(table, position)] = marker

    def poison(self, attn_type: str, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.write_block(attn_type, block, [POISON] * self.block_size)

    def run(self, tables: Mapping[str, Sequence[int]], token_ids: Sequence[int], start: int) -> int:
        """Writes the markers of the tokens from position `start` on; returns the token that follows the last one."""
        position = start
        for position, token_id in enumerate(token_ids, start):
            before = (
                [self._slots[t][self._slot(table, position - 1)] for t, table in tables.items()] if position else []
            )
            marker = hash((position, token_id, *before))
            for attn_type, table in tables.items():
                self._slots[attn_type][self._slot(table, position)] = marker
        seen = [self._slots[t][self._slot(table, p)] for t, table in tables.items() for p in _in_sight(t, position)]
        return hash((position, *seen)) % VOCAB

    def _slot(self, table: Sequence[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size


def _in_sight(attn_type: str, position: int) -> range:
    first = max(0, position - WINDOW + 1) if attn_type == "SlidingWindow" else 0
    return range(first, position + 1)


class _PoisoningPool(BlockPool):
    """Whoever still looks at a freed block sees poison."""

    def __init__(self, num_blocks: int, block_size: int, cache: MarkedCache, attn_type: str) -> None:
        super().__init__(num_blocks, block_size)
        self._cache = cache
        self._attn_type = attn_type

    def free_blocks(self, blocks: Sequence[int]) -> None:
        super().free_blocks(blocks)
        self._cache.poison(self._attn_type, [block for block in blocks if block != self.null_block])


class _PoisoningCachingPool(CachingBlockPool):
    """Poison comes when a block is taken for other content, until then its content may be used again."""

    def __init__(
        self, num_blocks: int, block_size: int, prefix_cache: PrefixCache, cache: MarkedCache, attn_type: str
    ) -> None:
        super().__init__(num_blocks, block_size, prefix_cache)
        self._cache = cache
        self._attn_type = attn_type

    def get_new_blocks(self, n: int) -> list[int]:
        blocks = super().get_new_blocks(n)
        self._cache.poison(self._attn_type, blocks)
        return blocks


def new_cache(
    attn_types: Sequence[str],
    num_blocks: int,
    *,
    block_size: int,
    max_model_len: int,
    budget: int,
    has_prefix_cache: bool = False,
) -> tuple[KVCacheManager, MarkedCache]:
    """The real manager with `num_blocks` usable blocks per type, and the memory behind it."""
    block_nums = dict.fromkeys(attn_types, num_blocks + 1)
    cache = MarkedCache(block_nums, block_size)
    prefix_cache = PrefixCache("") if has_prefix_cache else None
    kv = new_kv(
        block_nums,
        block_size=block_size,
        window=WINDOW,
        max_model_len=max_model_len,
        max_step_tokens=budget,
        prefix_cache=prefix_cache,
    )
    for attn_type, manager in kv.managers.items():
        if prefix_cache is None:
            manager.block_pool = _PoisoningPool(num_blocks + 1, block_size, cache, attn_type)
        else:
            pool = _PoisoningCachingPool(num_blocks + 1, block_size, prefix_cache, cache, attn_type)
            manager.block_pool = kv._caching_pools[attn_type] = pool
    return kv, cache


def continuation(token_ids: Sequence[int], count: int, attn_types: Sequence[str] = ("FullAttention",)) -> list[int]:
    """What one engine that nothing disturbs generates: one request, its blocks in a row, no manager."""
    length = len(token_ids) + count
    cache = MarkedCache(dict.fromkeys(attn_types, length), 1)
    tables = dict.fromkeys(attn_types, range(length))
    output = [cache.run(tables, token_ids, 0)]
    while len(output) < count:
        output.append(cache.run(tables, output[-1:], len(token_ids) + len(output) - 1))
    return output
