"""The earliest door: from what a client asked to a `Job` the story can run, or a refusal that names the field.

Shared by the gRPC and the HTTP door. Owns the table of live request ids: an id is in it from the first check until the
request has ended, whatever way it ends, and two live requests never share one. Prompts are turned into ids here, once;
only ids travel further.
"""

from __future__ import annotations

import asyncio
import reprlib
import secrets
import uuid
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from pd_service.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    UnknownModel,
)
from pd_service.gateway.job import Job
from pd_service.gateway.phases import Phases
from pd_service.request import (
    MAX_ANSWERS,
    MAX_CACHE_SALT_CHARS,
    MAX_PRIORITY,
    ChatMessage,
    EngineSampling,
    RequestId,
    SamplingParams,
)

if TYPE_CHECKING:
    from pd_service.gateway.tokenizer import Tokenizer

MAX_REQUEST_ID_CHARS = 128
MAX_STOP_CHARS = 1024  # of one stop string
_MAX_REPORTED = 4  # fields named in one refusal
_TELL_NOTHING_GIVEN = ("extra_forbidden", "missing", "json_invalid")


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Raw text, tokenized as it stands."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, passed to the model as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages, rendered with the model's chat template."""

    messages: tuple[ChatMessage, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """What a client asked, typed but not yet checked against the model. Empty `model`: the served one.

    `n` is the number of answers; with `echo` the prompt comes before them.
    """

    prompt: Prompt
    sampling: SamplingParams
    model: str = ""
    request_id: str = ""
    n: int = 1
    echo: bool = False
    priority: int = 0
    cache_salt: str = ""


def new_request_id() -> str:
    """A fresh id for a request whose client chose none."""
    return f"req-{uuid.uuid4().hex}"


def sampling_params(**given: object) -> SamplingParams:
    """The sampling a client gave; None means not given. Raises InvalidRequest that names every offending field."""
    try:
        return SamplingParams.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise refusal(error) from error


def refusal(error: ValidationError) -> InvalidRequest:
    """What a client is told when its input does not validate: field, what is wrong, what was given, shortened."""
    found = error.errors(include_url=False, include_context=False)
    lines = []
    for e in found[:_MAX_REPORTED]:
        name = ".".join(map(str, e["loc"])) or "body"
        given = "" if e["type"] in _TELL_NOTHING_GIVEN else f" (given: {reprlib.repr(e['input'])})"
        what = "unknown field" if e["type"] == "extra_forbidden" else e["msg"].removeprefix("Value error, ")
        lines.append(f"{name}: {what}{given}")
    return InvalidRequest("; ".join(lines), str(found[0]["loc"][0]) if found[0]["loc"] else None)


class Intake:
    """Checks requests for one served model.

    `max_model_len` counts prompt and output tokens together; `max_requests` may be live at once, each of several
    answers counted as one. `eos_token_ids` are the model's own ending tokens.
    """

    def __init__(
        self,
        *,
        model_name: str,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Collection[int],
        tokenizer: Tokenizer,
        max_requests: int,
    ) -> None:
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_requests = max_requests
        self._live: dict[RequestId, int] = {}  # number of answers

    @property
    def num_live(self) -> int:
        return len(self._live)

    @asynccontextmanager
    async def admit(self, request: ClientRequest, deadline: float | None) -> AsyncIterator[Job]:
        """The request as the job of its first answer; its id is live inside the context.

        Raises InvalidRequest and its kinds, DuplicateRequest, Overloaded, and DeadlineExceeded; a refused request
        leaves nothing behind.
        """
        accepted_at = asyncio.get_running_loop().time()
        with self._live_id(request.request_id, request.n) as request_id:
            try:
                async with asyncio.timeout_at(deadline):
                    token_ids = await self._checked_token_ids(request)
            except TimeoutError as error:
                raise DeadlineExceeded("the deadline passed while the prompt was tokenized") from error
            yield Job(
                request_id=request_id,
                prompt_token_ids=token_ids,
                sampling=self._engine_sampling(request.sampling),
                max_new_tokens=self._max_new_tokens(len(token_ids), request.sampling.max_tokens),
                deadline=deadline,
                phases=Phases(mark=accepted_at),
                priority=request.priority,
                cache_salt=request.cache_salt,
            )

    @contextmanager
    def _live_id(self, given: str, num_answers: int) -> Iterator[RequestId]:
        if len(given) > MAX_REQUEST_ID_CHARS:
            raise InvalidRequest(
                f"request_id: {len(given)} characters, at most {MAX_REQUEST_ID_CHARS} are allowed", "request_id"
            )
        _check_range("n", num_answers, 1, min(MAX_ANSWERS, self._max_requests))
        request_id = RequestId(given or new_request_id())
        if request_id in self._live:
            raise DuplicateRequest(f"request_id: {request_id!r} is in use by a request that has not ended")
        num_live = sum(self._live.values())
        if num_live + num_answers > self._max_requests:
            raise Overloaded(
                f"{num_live} requests are live, and this gateway takes at most {self._max_requests}; try later"
            )
        self._live[request_id] = num_answers
        try:
            yield request_id
        finally:
            del self._live[request_id]

    async def _checked_token_ids(self, request: ClientRequest) -> tuple[int, ...]:
        """The prompt's ids. All that can be refused without tokenizing is refused first."""
        if request.model not in ("", self.model_name):
            raise UnknownModel(f"model: {request.model!r} is not served here; served: {self.model_name!r}", "model")
        self._check_options(request)
        token_ids = await self._token_ids(request.prompt)
        field = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
        self._check_prompt(token_ids, field)
        return token_ids

    async def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        match prompt:
            case TokenPrompt(token_ids):
                return token_ids
            case TextPrompt(text):
                return tuple(await self.tokenizer.encode_text(text)) if text else ()
            case ChatPrompt(messages):
                if not messages:
                    raise InvalidRequest("messages: at least one is needed", "messages")
                return tuple(await self.tokenizer.encode_chat(messages))

    def _check_prompt(self, token_ids: tuple[int, ...], field: str) -> None:
        limit = self.max_model_len - 1
        if not token_ids:
            raise InvalidRequest(f"{field}: it is empty; at least one token is needed", field)
        if len(token_ids) > limit:
            raise PromptTooLong(
                f"{field}: {len(token_ids)} tokens, but at most {limit} are allowed (the model's length is "
                f"{self.max_model_len} tokens, one of which must be left for the answer)",
                field,
            )
        self._check_ids(token_ids, field)

    def _check_options(self, request: ClientRequest) -> None:
        sampling = request.sampling
        _check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
            raise InvalidRequest(
                f"cache_salt: {len(request.cache_salt)} characters, at most {MAX_CACHE_SALT_CHARS} are allowed",
                "cache_salt",
            )
        self._check_ids(sampling.stop_token_ids, "stop_token_ids")
        self._check_ids(tuple(sampling.logit_bias), "logit_bias")
        longest = max(map(len, sampling.stop), default=0)
        if longest > MAX_STOP_CHARS:
            raise InvalidRequest(f"stop: {longest} characters in one string, at most {MAX_STOP_CHARS} fit", "stop")

    def _check_ids(self, token_ids: tuple[int, ...], field: str) -> None:
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < self._vocab_size:
                allowed = f"0 to {self._vocab_size - 1}"
                raise InvalidRequest(f"{field}: no token has the id {token_id}; allowed: {allowed}", field)

    def _max_new_tokens(self, num_prompt_tokens: int, asked: int | None) -> int:
        room = self.max_model_len - num_prompt_tokens
        if asked is None:
            return room
        if asked > room:
            raise InvalidRequest(
                f"max_tokens: {asked} do not fit behind a prompt of {num_prompt_tokens} tokens; at most {room} are "
                f"allowed (the model's length is {self.max_model_len} tokens)",
                "max_tokens",
            )
        return asked

    def _engine_sampling(self, sampling: SamplingParams) -> EngineSampling:
        eos_token_ids = frozenset() if sampling.ignore_eos else self._eos_token_ids
        return EngineSampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            stop_token_ids=eos_token_ids.union(sampling.stop_token_ids),
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=tuple(sorted(sampling.logit_bias.items())),
        )


def _check_range(field: str, given: int, lowest: int, highest: int) -> None:
    if not lowest <= given <= highest:
        raise InvalidRequest(f"{field}: {lowest} to {highest} are allowed (given: {given})", field)
