"""What a scheduler is bound by, what it puts into a step, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass

from pd_service.engine.request_state import RequestState
from pd_service.request import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    max_model_len: int
    vocab_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_waiting: int


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """`num_tokens` tokens of this request, from its computed count on, run in the step."""

    state: RequestState
    num_tokens: int

    @property
    def is_sampled(self) -> bool:
        """Whether the step computes the request's last known token, and so the next one's logits."""
        return self.num_tokens == self.state.num_pending


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class Counters:
    """Totals since the engine's start."""

    steps: int = 0
    computed_tokens: int = 0
    received_tokens: int = 0
    preemptions: int = 0
    ignored_messages: int = 0
