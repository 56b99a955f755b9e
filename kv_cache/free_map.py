"""Which block ids are free, as one byte each, so that what is taken together lies together.

    id      1 2 3 4 5 6 7 8 9        take(1) → 2              the lowest
    free    ░ █ ░ █ █ █ ░ █ █        take(3) → 4, 5, 6        the first run of that length
                                     take(4) → 4, 5, 6, 8     no such run: the first of half the length, whole; on

A transfer needs one read per run and buffer, so long runs make it fast. Outputs grow by single blocks, which fill the
low holes and leave the long runs to prompts. Freed neighbours are a run again without any work, and runs are found by
searching for bytes, which costs microseconds for tens of thousands of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

FREE = b"\x01"


class FreeMap:
    """The ids [1, num_ids), all free at first."""

    def __init__(self, num_ids: int) -> None:
        self._is_free = bytearray(FREE * num_ids)
        self._is_free[0] = 0
        self.num_free = num_ids - 1
        self._lowest = 1  # no id below is free

    def __iter__(self) -> Iterator[int]:
        """The free ids, ascending."""
        return (i for i, is_free in enumerate(self._is_free) if is_free)

    def has_any(self, ids: Sequence[int]) -> bool:
        """Whether one of these ids, all of which exist, is free."""
        return any(map(self._is_free.__getitem__, ids))

    def has_run(self, length: int) -> bool:
        return self._is_free.find(FREE * length, self._lowest) >= 0

    def take(self, n: int) -> list[int]:
        """`n` of the free ids, at most as many as there are, in ascending runs."""
        self.num_free -= n
        if n == 1:
            start = self._lowest = self._is_free.find(FREE, self._lowest)
            self._is_free[start] = 0
            return [start]
        taken: list[int] = []
        length = n
        while n:
            start = self._is_free.find(FREE * length, self._lowest)
            if start < 0:
                length = (length + 1) // 2
                continue
            end = self._is_free.find(0, start + length, start + n)
            end = end if end >= 0 else min(start + n, len(self._is_free))
            self._is_free[start:end] = bytes(end - start)
            taken += range(start, end)
            n -= end - start
            length = min(length, n)
        return taken

    def put_back(self, ids: Sequence[int]) -> None:
        """Adds distinct ids, none of which is free."""
        is_free = self._is_free
        for i in ids:
            is_free[i] = 1
        self.num_free += len(ids)
        self._lowest = min(self._lowest, *ids) if ids else self._lowest

    def is_sound(self) -> bool:
        """Whether the counts agree with the bytes."""
        free = list(self)
        return len(free) == self.num_free and self._lowest <= min(free, default=self._lowest)
