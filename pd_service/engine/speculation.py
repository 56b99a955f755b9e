"""Guesses at a request's next tokens, and which of them prove right.

A step computes the last known token and the guesses behind it; at each position the sampler chooses as it would have
without them, since its choice depends on (logits, seed, position, history) alone. A guess equal to the choice before it
is right, and what was computed on top of it stands: the output is that of plain decoding.

    known        ... t          positions p, p+1, p+2, p+3 are computed in one step
    guesses          a  b  c
    choices          a  b  x    the third guess was wrong: a, b, x are the next tokens, c's position is computed again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pd_service.config import SpeculativeSettings
from pd_service.engine.ngram import NgramIndex
from pd_service.engine.request_state import RequestState
from pd_service.engine.step import SampledToken


class DraftPlan(NamedTuple):
    """Guesses to verify in this step; how many to predict for the next, and slots that prediction itself needs."""

    draft_ids: tuple[int, ...] = ()
    max_next_drafts: int = 0
    num_lookahead: int = 0


@dataclass(frozen=True, slots=True)
class Speculation:
    """What one engine guesses with."""

    settings: SpeculativeSettings

    @property
    def is_on(self) -> bool:
        return self.settings.method != "none"

    def plan(self, state: RequestState, most: int) -> DraftPlan:
        """For a request whose last known token is computed in this step, with room for `most` guesses."""
        if not self.is_on or state.request.prefill_only:
            return DraftPlan()
        # The last token it may get needs no guess behind it, and no KV.
        most = max(0, min(most, self.settings.num_tokens, state.num_missing - 1))
        if self.settings.method == "ngram":
            return DraftPlan(self._look_up(state, most))
        drafts = state.draft_ids[:most]
        # A draft layer that predicts several tokens writes its own KV for all but the last of them.
        room = state.num_missing - len(drafts) - 3
        return DraftPlan(drafts, self.settings.num_tokens, max(0, min(self.settings.num_tokens - 1, room)))

    def _look_up(self, state: RequestState, most: int) -> tuple[int, ...]:
        if not most:
            return ()
        if state.ngrams is None:
            state.ngrams = NgramIndex(self.settings.ngram_min, self.settings.ngram_max)
        return state.ngrams.propose(state.token_ids, most)


def accept(draft_ids: Sequence[int], choices: Sequence[SampledToken]) -> tuple[SampledToken, ...]:
    """The choices that stand: the first, and each one behind a guess that was right.

    There is one more choice than guesses, or none at all while no token is wanted.
    """
    num_right = 0
    while num_right < len(draft_ids) and draft_ids[num_right] == choices[num_right].token_id:
        num_right += 1
    return tuple(choices[: num_right + 1])
