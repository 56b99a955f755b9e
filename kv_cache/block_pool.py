"""Which block ids of one attention type are free; ids only, no tensors and no requests.

    id      0        1   2   3   ...   num_blocks - 1
          null     └───────── usable blocks ─────────┘
                     each is either free or owned by exactly one request

Blocks that are taken together lie together where they can, see `free_map.py`. Block 0, the null block, is no part of
what is free: it is a legal index for operators, and is never handed out, freed or counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kv_cache.free_map import FreeMap


class CacheInvariantError(AssertionError):
    """The bookkeeping of blocks contradicts itself: a bug of this package, never the user's input."""


def require(condition: bool, message: str) -> None:
    """Raises CacheInvariantError with `message` unless `condition` holds."""
    if not condition:
        raise CacheInvariantError(message)


class BlockPool:
    """The blocks of one attention type, `block_size` tokens each.

    `num_blocks` includes the null block. Raises ValueError when no usable block is left beside it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks, the null block and a usable one; given: {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, given: {block_size}")
        if num_blocks * block_size > 2**31:
            raise ValueError(f"{num_blocks} blocks of {block_size} tokens: slots are 32-bit, at most {2**31} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._null_block = 0
        self._free_map = FreeMap(num_blocks)

    @property
    def null_block(self) -> int:
        return self._null_block

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can really be handed out: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return self._free_map.num_free

    def get_num_free_blocks(self) -> int:
        return self.num_free_blocks

    def get_new_blocks(self, n: int) -> list[int]:
        """`n` free blocks, in ascending runs. Raises ValueError, and takes none, when fewer are free."""
        self._check_available(n)
        return self._free_map.take(n)

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Takes `blocks` back; null blocks among them are skipped.

        Raises ValueError, and frees none, for an id this pool does not have, one that is free already, and one that
        stands in the list twice.
        """
        self._free_map.put_back(self._to_free(blocks))

    def _check_available(self, n: int) -> None:
        if not 0 <= n <= self.num_free_blocks:
            raise ValueError(f"cannot hand out {n} blocks, {self.num_free_blocks} are free: ask before taking")

    def _to_free(self, blocks: Sequence[int]) -> list[int]:
        """The real ones of `blocks`, once it is sure that all of them can be freed."""
        real = [block for block in blocks if block != self._null_block]
        unknown = [block for block in real if not 0 < block < self.num_blocks]
        if unknown:
            raise ValueError(f"cannot free blocks {unknown}: ids of this pool are 1 to {self.num_usable_blocks}")
        if len(set(real)) != len(real) or self._free_map.has_any(real):
            raise ValueError(f"double free in {real}: a block is named twice or is free already")
        return real

    def check(self, owned: Iterable[int]) -> None:
        """Recounts: the blocks in `owned`, by all requests, and the free ones are every usable block exactly once.

        Raises CacheInvariantError otherwise.
        """
        free = list(self._free_map)
        require(self._free_map.is_sound(), f"{self._free_map.num_free} blocks are counted as free, found: {free}")
        everything = sorted([*free, *owned])
        require(
            everything == list(range(1, self.num_blocks)),
            f"free and owned blocks must be 1 to {self.num_usable_blocks}, each once; found: {everything}",
        )
