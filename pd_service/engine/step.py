"""What a scheduler is bound by, what it puts into a step, and what comes out.

What is made for each request of each step is a named tuple: as immutable as a frozen dataclass, and made in a third of
its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pd_service.engine.request_state import RequestState
from pd_service.request import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """`max_preemptions`: a request that was preempted so often is admitted with all it may ever need.

    `priority_step_s`: seconds of waiting that one level of priority is worth.
    """

    max_model_len: int
    vocab_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_waiting: int
    max_preemptions: int = 2
    priority_step_s: float = 10.0


class ScheduledRequest(NamedTuple):
    """`num_tokens` known tokens of this request run in the step, from its computed count on, then `draft_ids`.

    Drafts are guesses at the tokens that follow: each is verified by the model's own choice at its position. With
    `max_next_drafts` the model's draft layer may predict that many for the next step; their slots are allocated.
    """

    state: RequestState
    num_tokens: int
    draft_ids: tuple[int, ...] = ()
    max_next_drafts: int = 0

    @property
    def is_sampled(self) -> bool:
        """Whether the step computes the request's last known token, and so the next one's logits."""
        return self.num_tokens == self.state.num_pending

    @property
    def num_positions(self) -> int:
        return self.num_tokens + len(self.draft_ids)


class SampledToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None = None


class StepResult(NamedTuple):
    """What a step gave one request.

    `tokens` are its next tokens, one more than drafts that proved right; none before its last known token is computed.
    `draft_ids` are guesses at those after them, `prompt_logprobs` what the step's positions say of prompt tokens.
    """

    tokens: tuple[SampledToken, ...] = ()
    draft_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(slots=True)
class Counters:
    """Totals since the engine's start."""

    steps: int = 0
    computed_tokens: int = 0
    received_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    ignored_messages: int = 0
