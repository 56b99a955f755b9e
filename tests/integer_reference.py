"""What the integer model says, by brute force over the tokens: Python integers, no cache, no engine, no arrays.

Written from the rules in `integer_model`'s docstring; of its code only the tables of caches and constants are shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch

from pd_service.engine.sampler import SampleRow, sample
from pd_service.request import EngineSampling
from tests.integer_model import ACCEPTED, SALTS, UNLIKELY, VARIANTS, VOCAB, WEIGHTS, Attention, Cache, tag

MASK = 2**64 - 1
GREEDY = EngineSampling()


def _fold(start: int, *parts: int) -> int:
    for part in parts:
        start = ((start ^ part) * 0x9E3779B97F4A7C15) & MASK
        start ^= start >> 32
    return start


def _mark(cache: Cache, layer: int, x: int, position: int) -> int:
    """What one token of input `x` adds to what later ones see of this cache."""
    name, limit = f"layer {layer} {cache.name}", 2 ** (cache.dtype.itemsize * 8 - 1) - 1
    total = 0
    for head, lane in product(range(cache.num_head), range(cache.dim)):
        value = _fold(tag(f"write {name}"), head, lane, x, position) & limit
        total += _fold(tag(f"read {name}"), head, lane, value, position)
    return total & MASK


class Reference:
    """One text of the model; it grows token by token."""

    def __init__(self, attention: Attention) -> None:
        *self._layers, self._draft_layer = [_LayerSums(caches, i) for i, caches in enumerate(VARIANTS[attention])]
        self._state = 0  # what the last layer passed on at the last token
        self._draft_digest = 0  # what the draft layer passed on at the token before it
        self.num_tokens = 0

    def feed(self, token: int) -> None:
        position = self.num_tokens
        self._state = _fold(tag("embedding"), SALTS[0], token, position)
        for layer in self._layers:
            self._state = layer.feed(self._state, position)
        if position:
            self._draft_digest = self._draft_layer.feed(self._state, position - 1)
        self.num_tokens += 1

    def next_token(self, sampling: EngineSampling = GREEDY) -> int:
        return self._choose(self._state, sampling)

    def guess(self, sampling: EngineSampling = GREEDY) -> int:
        """What the draft layer takes for the next token, from the last one and all before it."""
        is_right = _fold(tag("coin"), self._state, self._draft_digest) < int(ACCEPTED * 2**64)
        return self._choose(self._state if is_right else _fold(tag("wrong"), self._state), sampling)

    def _choose(self, state: int, sampling: EngineSampling) -> int:
        logits = [UNLIKELY] * VOCAB
        for rank in reversed(range(len(WEIGHTS))):
            logits[_fold(tag("token"), SALTS[1], state, rank) % VOCAB] = WEIGHTS[rank]
        row = SampleRow(sampling=sampling, position=self.num_tokens)
        return sample(torch.tensor([logits]), [row])[0].token_id


class _LayerSums:
    """One layer: all marks its caches hold."""

    def __init__(self, caches: Sequence[Cache], layer: int) -> None:
        self._layer = layer
        self._marks: list[tuple[Cache, list[int]]] = [(cache, []) for cache in caches]

    def feed(self, x: int, position: int) -> int:
        """What the layer passes on at `position`, the one after the last."""
        seen = []
        for cache, marks in self._marks:
            marks.append(_mark(cache, self._layer, x, position))
            seen.append(sum(marks[-cache.window :] if cache.window else marks) & MASK)
        return _fold(tag(f"layer {self._layer}"), x, *seen)


def continuation(
    attention: Attention, prompt: Sequence[int], count: int, sampling: EngineSampling = GREEDY
) -> list[int]:
    """The `count` tokens that follow `prompt`."""
    text, output = Reference(attention), []
    for token in prompt:
        text.feed(token)
    for _ in range(count):
        output.append(text.next_token(sampling))
        text.feed(output[-1])
    return output


def right_guesses(attention: Attention, token_ids: Sequence[int], sampling: EngineSampling = GREEDY) -> list[bool]:
    """Of each token, whether the draft layer foresees it from the tokens before it."""
    text, foreseen = Reference(attention), []
    for token in token_ids:
        foreseen.append(text.num_tokens > 1 and text.guess(sampling) == token)
        text.feed(token)
    return foreseen
