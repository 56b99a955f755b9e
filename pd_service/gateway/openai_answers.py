"""The OpenAI API's answers: what the gateway's events become, streamed and whole.

One `Answer` per request. Streamed and whole answers are made of the same choices, so that they agree.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from pd_service.gateway.generation import GenerationDelta, GenerationFinish
from pd_service.gateway.openai_api import GenerationBody
from pd_service.gateway.tokenizer import Tokenizer
from pd_service.request import TokenLogprobs

Json = dict[str, Any]


class Answer(ABC):
    """`body` is what was asked; `model` the name the answer carries."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, body: GenerationBody, *, request_id: str, model: str, tokenizer: Tokenizer) -> None:
        self._body = body
        self._id = f"{self.id_prefix}-{request_id}"
        self._model = model
        self._created = int(time.time())
        self._tokenizer = tokenizer

    def chunk(self, delta: GenerationDelta) -> Json:
        """A piece of a streamed answer."""
        return self._chunk([self._choice(self._streamed(delta.text), delta.token_ids, delta.logprobs)])

    def last_chunks(self, finish: GenerationFinish) -> list[Json]:
        """The end of a streamed answer: what was held back, with the reason; then the usage if it was asked for."""
        choice = self._choice(self._streamed(finish.text), (), ()) | self._ending(finish)
        chunks = [self._chunk([choice])]
        if self._body.include_usage:
            chunks.append(self._chunk([]) | {"usage": _usage(finish)})
        return chunks

    def whole(self, deltas: Sequence[GenerationDelta], finish: GenerationFinish) -> Json:
        """The answer in one piece."""
        text = "".join(delta.text for delta in deltas) + finish.text
        token_ids = tuple(itertools.chain.from_iterable(delta.token_ids for delta in deltas))
        logprobs = tuple(itertools.chain.from_iterable(delta.logprobs for delta in deltas))
        choice = self._choice(self._complete(text), token_ids, logprobs) | self._ending(finish)
        return self._head(self.whole_object) | {"choices": [choice], "usage": _usage(finish)}

    def _head(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, choices: list[Json]) -> Json:
        usage = {"usage": None} if self._body.include_usage else {}
        return self._head(self.chunk_object) | {"choices": choices} | usage

    def _choice(self, content: Json, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json:
        entries = self._logprobs(token_ids, logprobs) if logprobs else None
        choice = {"index": 0, **content, "logprobs": entries, "finish_reason": None}
        return choice | {"token_ids": list(token_ids)} if self._body.return_token_ids else choice

    def _ending(self, finish: GenerationFinish) -> Json:
        prompt = {"prompt_token_ids": list(finish.prompt_token_ids)} if self._body.return_token_ids else {}
        return {"finish_reason": finish.reason.value, **prompt}

    @abstractmethod
    def _streamed(self, text: str) -> Json:
        """The part of a streamed choice that holds its text."""

    @abstractmethod
    def _complete(self, text: str) -> Json:
        """The part of a whole choice that holds its text."""

    @abstractmethod
    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json: ...


class CompletionAnswer(Answer):
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    _offset = 0  # characters of the tokens so far

    def _streamed(self, text: str) -> Json:
        return {"text": text}

    def _complete(self, text: str) -> Json:
        return {"text": text}

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json:
        tokens = [self._tokenizer.token_text(token_id) for token_id in token_ids]
        ends = list(itertools.accumulate(map(len, tokens), initial=self._offset))
        self._offset = ends[-1]
        text_of = self._tokenizer.token_text
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [{text_of(token_id): value for token_id, value in entry.top} for entry in logprobs],
            "text_offset": ends[:-1],
        }


class ChatAnswer(Answer):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    _has_begun = False  # the first chunk names the role

    def _streamed(self, text: str) -> Json:
        role = {} if self._has_begun else {"role": "assistant"}
        self._has_begun = True
        return {"delta": {**role, "content": text}}

    def _complete(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json:
        entries = []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            top = [self._entry(alternative, value) for alternative, value in entry.top]
            entries.append({**self._entry(token_id, entry.logprob), "top_logprobs": top})
        return {"content": entries, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        text = self._tokenizer.token_text(token_id)
        spelled = self._tokenizer.token_bytes(token_id) or text.encode()
        return {"token": text, "logprob": logprob, "bytes": list(spelled)}


def _usage(finish: GenerationFinish) -> Json:
    prompt, output = len(finish.prompt_token_ids), finish.num_output_tokens
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
