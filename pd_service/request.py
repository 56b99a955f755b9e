"""What a request is, between client input and engine: values only, no behaviour.

`SamplingParams` is the single place where limits on sampling are written down; every door builds one and turns a
refusal into `InvalidRequest`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, NamedTuple, NewType

from pydantic import BaseModel, ConfigDict, Field

RequestId = NewType("RequestId", str)

MAX_LOGPROBS = 20
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
MAX_PRIORITY = 100
MAX_CACHE_SALT_CHARS = 128
MAX_ANSWERS = 128

_Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY, allow_inf_nan=False)]
_TokenId = Annotated[int, Field(ge=0)]
_Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS, allow_inf_nan=False)]


class SamplingParams(BaseModel):
    """How tokens are chosen and when to stop, as the client asked.

    The limits are those of the OpenAI API, which clients rely on; `top_k`, `min_p`, `stop_token_ids`, `ignore_eos`,
    `repetition_penalty` and `prompt_logprobs` carry the names and meaning they have in vLLM.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop_token_ids: tuple[_TokenId, ...] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=MAX_REPETITION_PENALTY)] = 1.0
    logit_bias: Annotated[dict[_TokenId, _Bias], Field(max_length=MAX_BIASED_TOKENS)] = {}
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=16)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation; roles are those of the model's chat template."""

    role: str
    content: str


class FinishReason(Enum):
    """Why a request ended. PREFILLED is internal: the engine has done its part and a ticket takes over."""

    STOP = "stop"
    LENGTH = "length"
    PREFILLED = "prefilled"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSampling:
    """Sampling as the engine needs it: seed drawn, every ending token id listed.

    `logit_bias` lists (token id, what is added to its logit) by ascending id. `prompt_logprobs` is set only while no
    token of the output is known: the prompt is judged once, whatever happens to the request later.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def needs_history(self) -> bool:
        """Whether the next token depends on which tokens came before, beyond what the model makes of them."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The right to read the KV blocks of `num_tokens` tokens from the engine that computes and then holds them.

    `token_digest` is BLAKE2b-128 over those token ids as little-endian uint32, so that the reader notices a ticket
    for other tokens than its own.
    """

    address: str
    incarnation: str
    lease_id: str
    num_tokens: int
    token_digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One attempt at a request, as submitted to one engine.

    `token_ids` is the client's prompt of `num_prompt_tokens` tokens, then the output so far. A `ticket` is for all of
    them but the last, or for all of them while the next one is not known yet: that comes with the KV, and does not
    count as one of `max_new_tokens`. A request of lower `priority` runs earlier. Requests of different `cache_salt`
    never share KV that was cached.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    max_new_tokens: int
    sampling: EngineSampling
    prefill_only: bool = False
    ticket: Ticket | None = None
    priority: int = 0
    cache_salt: str = ""

    @property
    def gets_token(self) -> bool:
        """Whether one more token than `token_ids` comes with the KV."""
        return self.ticket is not None and self.ticket.num_tokens == len(self.token_ids)

    @property
    def num_known_tokens(self) -> int:
        """When its KV is here."""
        return len(self.token_ids) + self.gets_token

    @property
    def max_cached_tokens(self) -> int:
        """Tokens whose KV it will ever need on this engine: the last token it generates needs none."""
        return self.num_known_tokens + (0 if self.prefill_only else self.max_new_tokens - 1)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of one token and of the `top` most likely ones, best first: (token id, logprob).

    `rank` is the token's place among all, 1 for the most likely; equal ones share the better place.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """Durations on one engine's clock, in milliseconds; the fields are those of the wire message of that name.

    `cached_tokens` counts the prompt's tokens whose KV the engine found in its prefix cache.
    """

    queue_ms: float = 0.0
    compute_ms: float = 0.0
    received_ms: float = 0.0
    wire_ms: float = 0.0
    confirm_ms: float = 0.0
    kv_bytes: int = 0
    plane: str = ""
    cached_tokens: int = 0
    hidden_wire_ms: float = 0.0
    hidden_kv_bytes: int = 0
    plan_ms: float = 0.0
    num_runs: int = 0


class TokenEvent(NamedTuple):
    """What an engine says about one request after one step; with `finish` it is the last word.

    With a ticket alone it says that a prompt is being computed whose KV can be read as it comes. If that ticket ends
    because the request lost its blocks to others, another one follows when they are computed again.

    A named tuple, because one is made for each request of each step.

    `prompt_logprobs` has one entry for each prompt token but the first, when asked for, and comes once: with the first
    token of the engine that computed the prompt. `num_drafted` guesses were verified for these tokens, of which all but
    the last are guesses that proved right.
    """

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_drafted: int = 0
    finish: FinishReason | None = None
    ticket: Ticket | None = None
    times: EngineTimes | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Snapshot of an engine for the router; blocks are those of the attention type that is shortest."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
