"""Guesses by the model's own layer for multi-token prediction: it follows every step and keeps its own KV.

Position i of its cache is computed from the hidden state of position i and the token of position i + 1, so a step
computes it once that token is known: the next of the chunk, or the one just chosen. What it says at the last of them is
the first guess; for each further one it is asked again, one position on, with its own hidden state and guess. That KV
is written over when the real token is known.

A guess is drawn as the request's token will be, with the random number of its position: where the two distributions are
alike, so are the draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from pd_service.engine.batch import InputRow, make_batch, take_rows
from pd_service.engine.sampler import SampleRow, sample
from pd_service.engine.step import SampledToken
from pd_service.models.base import DraftingLM
from pd_service.request import EngineSampling


@dataclass(slots=True)
class _Guessing:
    """One request that guesses are wanted for: the last position computed, and the guesses so far."""

    row: InputRow
    sampling: EngineSampling
    position: int
    most: int
    draft_ids: list[int] = field(default_factory=list)

    def sample_row(self) -> SampleRow:
        return SampleRow(sampling=self.sampling, position=self.position + 2)


class DraftLayer:
    def __init__(self, model: DraftingLM, block_size: int) -> None:
        self._model = model
        self._block_size = block_size

    def follow(
        self,
        rows: Sequence[InputRow],
        starts: Sequence[int],
        hidden: torch.Tensor,
        chosen: Sequence[tuple[SampledToken, ...]],
    ) -> list[tuple[int, ...]]:
        """After a step: guesses for each row, none where none are wanted.

        `hidden` [tokens, hidden] is the model's, row i's from `starts[i]` on; `chosen[i]` are the tokens that stand.
        """
        next_ids = [_next_ids(row, tokens) for row, tokens in zip(rows, chosen, strict=True)]
        kept = [i for start, ids in zip(starts, next_ids, strict=True) for i in range(start, start + len(ids))]
        batch = make_batch(rows, next_ids, [row.first for row in rows], self._block_size, hidden.device)
        drafted = self._model.draft(take_rows(hidden, kept), batch.token_ids, batch.positions, batch.metadata)
        guessing: dict[int, _Guessing] = {}
        last: list[int] = []
        for i, (row, tokens) in enumerate(zip(rows, chosen, strict=True)):
            most = min(row.max_next_drafts, row.num_missing - len(tokens) - 1)
            if tokens and most > 0 and row.sampling is not None:
                position = row.first + len(next_ids[i]) - 1
                guessing[i] = _Guessing(row, _plain(row.sampling), position, most)
                last.append(batch.starts[i] + len(next_ids[i]) - 1)
        if guessing:
            self._guess(list(guessing.values()), take_rows(drafted, last))
        return [tuple(guessing[i].draft_ids) if i in guessing else () for i in range(len(rows))]

    def _guess(self, guessing: list[_Guessing], hidden: torch.Tensor) -> None:
        """`hidden` [requests, hidden] is the draft layer's at each request's last position."""
        while True:
            tokens = sample(self._model.compute_draft_logits(hidden), [one.sample_row() for one in guessing])
            for one, token in zip(guessing, tokens, strict=True):
                one.draft_ids.append(token.token_id)
            going_on = [i for i, one in enumerate(guessing) if len(one.draft_ids) < one.most]
            if not going_on:
                return
            guessing = [guessing[i] for i in going_on]
            for one in guessing:
                one.position += 1
            batch = make_batch(
                [one.row for one in guessing],
                [one.draft_ids[-1:] for one in guessing],
                [one.position for one in guessing],
                self._block_size,
                hidden.device,
            )
            hidden = self._model.draft(take_rows(hidden, going_on), batch.token_ids, batch.positions, batch.metadata)


def _next_ids(row: InputRow, chosen: Sequence[SampledToken]) -> list[int]:
    """The token after each position of the row that stands."""
    if row.num_drafts:
        return [token.token_id for token in chosen]
    last = chosen[0].token_id if chosen else row.next_token_id
    return [*row.token_ids[1:], last]


def _plain(sampling: EngineSampling) -> EngineSampling:
    """Without what a guess does not need, or would have to know the output for."""
    return replace(sampling, logprobs=None, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
