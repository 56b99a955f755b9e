"""Prompt lookup decoding (Saxena 2023): guesses are what followed the last few tokens earlier in the same request."""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """Where each run of `shortest` to `longest` tokens of one request last ended, but for runs that end it.

    Grows with the request: each token is indexed once.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that followed the latest earlier occurrence of the longest run that ends `token_ids`."""
        self._extend(token_ids)
        for length in self._lengths:
            if length < len(token_ids):
                end = self._ends.get(tuple(token_ids[-length:]))
                if end is not None:
                    return tuple(token_ids[end : end + most])
        return ()

    def _extend(self, token_ids: Sequence[int]) -> None:
        for end in range(self._num_indexed + 1, len(token_ids)):
            for length in self._lengths:
                if length <= end:
                    self._ends[tuple(token_ids[end - length : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)
