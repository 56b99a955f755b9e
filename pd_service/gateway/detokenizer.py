"""The text of one answer, token by token, and the search for its stop strings.

Sent text is certain: a character leaves when its last byte has come, bytes that can form no character leave as U+FFFD
as soon as that is known (at the latest with `flush`), and the beginning of what may become a stop string is held back.
Work per token is constant: neither depends on how long the answer is.

    sent                     held: the longest end that     incomplete
                             begins a stop string           character
    ├────────────────────────┼──────────────────────────────┼─────────►
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_service.gateway.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns the tokens of one answer into text. Without a stop string, all text together is `Tokenizer.decode`'s."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = [_StopSearch(stop) for stop in stop_strings]
        self._held = ""
        self._num_tokens = 0
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """A stop string was found; all text before it has been returned, and nothing more will be."""
        return self._stopped

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to the answer, the one that completed a stop string included."""
        return self._num_tokens

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that became certain with these tokens. Tokens behind the end of a stop string are not looked at."""
        text = ""
        for token_id in token_ids:
            if self._stopped:
                break
            self._num_tokens += 1
            text += self._feed(self._utf8.decode(self._tokenizer.token_bytes(token_id)))
        return text

    def flush(self) -> str:
        """The rest, when no token will follow. Empty when called again."""
        text = "" if self._stopped else self._feed(self._utf8.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text + rest

    def _feed(self, new: str) -> str:
        """Of several stop strings the one that ends first counts, and of those the longest: so the result does not
        depend on how the text was cut into tokens."""
        if not self._stops:
            return new
        text, self._held = self._held + new, ""
        begin = len(text) - len(new)
        for end, character in enumerate(new, start=begin + 1):
            found = max([stop.length for stop in self._stops if stop.advance(character)], default=0)
            if found:
                self._stopped = True
                return text[: end - found]
        certain = len(text) - max(stop.num_matched for stop in self._stops)
        self._held = text[certain:]
        return text[:certain]


class _StopSearch:
    """Knuth, Morris, Pratt (1977): `num_matched` is the longest end of the text that is a beginning of the string."""

    def __init__(self, stop: str) -> None:
        self.length = len(stop)
        self.num_matched = 0
        self._stop = stop
        self._borders = _borders(stop)

    def advance(self, character: str) -> bool:
        """Takes the next character of the text; True when the string is complete. Not to be called after that."""
        while self.num_matched and self._stop[self.num_matched] != character:
            self.num_matched = self._borders[self.num_matched - 1]
        if self._stop[self.num_matched] == character:
            self.num_matched += 1
        return self.num_matched == self.length


def _borders(pattern: str) -> list[int]:
    """For each beginning of `pattern` the length of its longest proper beginning that is also its end."""
    borders = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = borders[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        borders[i] = length
    return borders
