"""The OpenAI API's request bodies: what we take, and what it becomes.

A field is either supported, and then it has its effect; or it is an option of the OpenAI API that we do not have, and
then only the value that asks for nothing is taken; or it is unknown and refused. All three by name. Limits on sampling
are not repeated here: they are those of `SamplingParams`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from pd_service.errors import InvalidRequest
from pd_service.gateway.intake import (
    ChatPrompt,
    ClientRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
    refusal,
    sampling_params,
)
from pd_service.request import ChatMessage


def _only(*allowed: object) -> AfterValidator:
    """The option is not supported; these values ask for nothing and are taken."""

    def check(value: object) -> object:
        if not any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in allowed):
            raise ValueError(f"not supported; allowed: {', '.join(map(repr, allowed))}")
        return value

    return AfterValidator(check)


_Unsupported = Annotated[object, _only(None)]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StreamOptions(_Body):
    include_usage: bool = False


class GenerationBody(_Body):
    """What completions and chat completions share."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False  # adds `token_ids` to each choice, and `prompt_token_ids` where the choice ends
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None  # by token id
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None

    user: _Unsupported = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Alternatives per token; None: no log probabilities."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives per token of the prompt; None: no log probabilities of it."""
        return self.prompt_logprobs

    @property
    def num_answers(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def has_echo(self) -> bool:
        """Whether the text of the prompt comes before that of each answer."""
        return False

    @property
    def num_max_tokens(self) -> int | None:
        return self.max_tokens

    def check_pairs(self) -> None:
        """Raises InvalidRequest for a field that makes no sense without, or beside, another."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: allowed only with stream=true", "stream_options")

    @abstractmethod
    def typed_prompt(self) -> Prompt:
        """Raises InvalidRequest for prompts we do not take."""

    def client_request(self, request_id: str) -> ClientRequest:
        """Raises InvalidRequest naming the field."""
        self.check_pairs()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        sampling = sampling_params(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.num_max_tokens,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
        )
        return ClientRequest(
            prompt=self.typed_prompt(),
            sampling=sampling,
            model=self.model,
            request_id=request_id,
            n=self.num_answers,
            echo=self.has_echo,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
        )


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: object
    logprobs: int | None = None

    echo: bool | None = None
    best_of: int | None = None

    suffix: _Unsupported = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        asked = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((num for num in asked if num is not None), default=None)

    @property
    def has_echo(self) -> bool:
        return bool(self.echo)

    def check_pairs(self) -> None:
        super().check_pairs()
        if self.best_of not in (None, 1, self.num_answers):
            raise InvalidRequest(
                f"best_of: answers are not ranked; allowed: 1 and n, which is {self.num_answers} "
                f"(given: {self.best_of})",
                "best_of",
            )

    def typed_prompt(self) -> Prompt:
        prompt = self.prompt[0] if isinstance(self.prompt, list) and _is_batch_of_one(self.prompt) else self.prompt
        if isinstance(prompt, str):
            return TextPrompt(prompt)
        if isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt):
            return TokenPrompt(tuple(prompt))
        given = "several prompts" if isinstance(prompt, list) else type(prompt).__name__
        raise InvalidRequest(f"prompt: one string or one list of token ids is allowed (given: {given})", "prompt")


def _is_batch_of_one(prompt: list[object]) -> bool:
    return len(prompt) == 1 and isinstance(prompt[0], str | list)


class TextPart(_Body):
    type: Literal["text"]
    text: str


class MessageBody(_Body):
    """One message. The last fields come along when a client sends an answer of ours back."""

    role: str
    content: str | list[TextPart]

    name: _Unsupported = None
    refusal: _Unsupported = None
    audio: _Unsupported = None
    annotations: Annotated[object, _only(None, [])] = None
    tool_calls: Annotated[object, _only(None, [])] = None
    function_call: _Unsupported = None
    tool_call_id: _Unsupported = None

    def message(self) -> ChatMessage:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return ChatMessage(role=self.role, content=text)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[MessageBody], Field(fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    response_format: Annotated[object, _only(None, {"type": "text"})] = None
    modalities: Annotated[object, _only(None, ["text"])] = None
    tools: Annotated[object, _only(None, [])] = None
    tool_choice: Annotated[object, _only(None, "none")] = None
    parallel_tool_calls: _Unsupported = None
    functions: Annotated[object, _only(None, [])] = None
    function_call: Annotated[object, _only(None, "none")] = None
    metadata: Annotated[object, _only(None, {})] = None
    store: Annotated[object, _only(None, False)] = None
    audio: _Unsupported = None
    prediction: _Unsupported = None
    reasoning_effort: _Unsupported = None
    verbosity: _Unsupported = None
    service_tier: Annotated[object, _only(None, "auto", "default")] = None
    web_search_options: _Unsupported = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check_pairs(self) -> None:
        super().check_pairs()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: allowed only with logprobs=true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise InvalidRequest("max_tokens: not allowed beside max_completion_tokens, its successor", "max_tokens")

    def typed_prompt(self) -> Prompt:
        return ChatPrompt(tuple(body.message() for body in self.messages))


_BodyT = TypeVar("_BodyT", bound=GenerationBody)


def parse_body(kind: type[_BodyT], content: bytes) -> _BodyT:
    """The JSON text `content` as a body. Raises InvalidRequest that names the first offending fields."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise refusal(error) from error
