"""The OpenAI API's answers: what the gateway's events become, streamed and whole.

One `Answer` per request, which may have several choices. Streamed and whole answers are made of the same choices, so
that they agree. What is told of the prompt (its echo, its log probabilities) comes with the beginning of each choice.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from pd_service.gateway.generation import GenerationDelta, GenerationEvent, GenerationFinish, GenerationPrompt
from pd_service.gateway.openai_api import GenerationBody
from pd_service.gateway.openai_logprobs import TextOffsets, chat_logprobs, completion_logprobs, prompt_logprobs
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
        self._prompt: GenerationPrompt | None = None
        self._begun: set[int] = set()  # choices of which something was sent
        self._finishes: list[GenerationFinish] = []

    def chunks(self, event: GenerationEvent) -> list[Json]:
        """The next pieces of a streamed answer; behind the last choice the usage if it was asked for."""
        if isinstance(event, GenerationPrompt):
            self._prompt = event
            return []
        chunks = [] if event.index in self._begun else self._opening(event.index)
        if isinstance(event, GenerationDelta):
            logprobs = self._logprobs(event.index, event.token_ids, event.logprobs)
            choice = self._choice(event.index, self._streamed(event.index, event.text), event.token_ids, logprobs)
            return [*chunks, self._chunk(choice)]
        choice = self._choice(event.index, self._streamed(event.index, event.text), (), None) | self._ending(event)
        chunks.append(self._chunk(choice))
        self._finishes.append(event)
        if self._body.include_usage and len(self._finishes) == self._body.num_answers:
            chunks.append(self._chunk() | {"usage": _usage(self._finishes)})
        return chunks

    def whole(self, events: Sequence[GenerationEvent]) -> Json:
        """The answer in one piece, of all its events."""
        self._prompt = next((event for event in events if isinstance(event, GenerationPrompt)), None)
        finishes = sorted((e for e in events if isinstance(e, GenerationFinish)), key=lambda finish: finish.index)
        deltas = [event for event in events if isinstance(event, GenerationDelta)]
        choices = [self._whole_choice([d for d in deltas if d.index == f.index], f) for f in finishes]
        answer = self._head(self.whole_object) | {"choices": choices, "usage": _usage(finishes)}
        self._tell_of_prompt(answer)
        return answer

    def _whole_choice(self, deltas: Sequence[GenerationDelta], finish: GenerationFinish) -> Json:
        text = "".join(delta.text for delta in deltas) + finish.text
        token_ids = tuple(itertools.chain.from_iterable(delta.token_ids for delta in deltas))
        logprobs = tuple(itertools.chain.from_iterable(delta.logprobs for delta in deltas))
        content = self._complete(self._echoed_text() + text)
        judged = self._echoed_logprobs() + logprobs
        entries = self._logprobs(finish.index, self._echoed_ids(judged) + token_ids, judged)
        return self._choice(finish.index, content, token_ids, entries) | self._ending(finish)

    # ---- the prompt

    def _opening(self, index: int) -> list[Json]:
        """The chunk with the prompt that a streamed choice begins with; none if nothing of the prompt was asked for."""
        is_first = not self._begun
        self._begun.add(index)
        if self._prompt is None:
            return []
        judged = self._echoed_logprobs()
        entries = self._logprobs(index, self._echoed_ids(judged), judged)
        chunk = self._chunk(self._choice(index, self._streamed(index, self._echoed_text()), (), entries))
        self._tell_of_prompt(chunk, is_first=is_first)
        return [chunk]

    def _echoed_text(self) -> str:
        return self._prompt.text if self._prompt is not None and self._body.has_echo else ""

    def _echoed_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        """Of the prompt's tokens, None for the first, which nothing judges; empty without echo or logprobs."""
        if self._prompt is None or not self._body.has_echo or self._body.num_logprobs is None:
            return ()
        return (None, *self._prompt.logprobs)

    def _echoed_ids(self, judged: Sequence[TokenLogprobs | None]) -> tuple[int, ...]:
        return self._prompt.token_ids if self._prompt is not None and judged[:1] == (None,) else ()

    def _tell_of_prompt(self, answer: Json, *, is_first: bool = True) -> None:
        """Adds the prompt's log probabilities, if asked for as such, to an answer or to a chunk that opens a choice."""
        if self._prompt is not None and (num_top := self._body.prompt_logprobs) is not None:
            self._place(answer, prompt_logprobs(self._tokenizer, self._prompt, num_top), is_first)

    # ---- parts

    def _head(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, *choices: Json) -> Json:
        usage = {"usage": None} if self._body.include_usage else {}
        return self._head(self.chunk_object) | {"choices": list(choices)} | usage

    def _choice(self, index: int, content: Json, token_ids: Sequence[int], logprobs: Json | None) -> Json:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": None}
        return choice | {"token_ids": list(token_ids)} if self._body.return_token_ids else choice

    def _ending(self, finish: GenerationFinish) -> Json:
        prompt = {"prompt_token_ids": list(finish.prompt_token_ids)} if self._body.return_token_ids else {}
        return {"finish_reason": finish.reason.value, **prompt}

    @abstractmethod
    def _streamed(self, index: int, text: str) -> Json:
        """The part of a streamed choice that holds its text."""

    @abstractmethod
    def _complete(self, text: str) -> Json:
        """The part of a whole choice that holds its text."""

    @abstractmethod
    def _logprobs(self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Json | None:
        """What the model thought of the next tokens of a choice; None if `logprobs` is empty."""

    @abstractmethod
    def _place(self, answer: Json, entries: list[Json | None], is_first: bool) -> None:
        """Puts the prompt's log probabilities where vLLM has them; `is_first`: nothing was sent before."""


class CompletionAnswer(Answer):
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, body: GenerationBody, *, request_id: str, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(body, request_id=request_id, model=model, tokenizer=tokenizer)
        self._offsets: dict[int, TextOffsets] = {}

    def _streamed(self, index: int, text: str) -> Json:
        return {"text": text}

    def _complete(self, text: str) -> Json:
        return {"text": text}

    def _logprobs(self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Json | None:
        if not logprobs:
            return None
        if index not in self._offsets:
            self._offsets[index] = TextOffsets(self._tokenizer, self._unshown())
        num_top = self._body.num_logprobs or 0
        return completion_logprobs(self._tokenizer, self._offsets[index], token_ids, logprobs, num_top)

    def _unshown(self) -> int:
        """Characters that the prompt's tokens have in front of the prompt as the client wrote it: an added space."""
        if self._prompt is None or not self._body.has_echo:
            return 0
        return max(0, len(self._tokenizer.decode(self._prompt.token_ids)) - len(self._prompt.text))

    def _place(self, answer: Json, entries: list[Json | None], is_first: bool) -> None:
        for choice in answer["choices"]:
            choice["prompt_logprobs"] = entries


class ChatAnswer(Answer):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: GenerationBody, *, request_id: str, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(body, request_id=request_id, model=model, tokenizer=tokenizer)
        self._named: set[int] = set()  # choices whose role was sent

    def _streamed(self, index: int, text: str) -> Json:
        role = {} if index in self._named else {"role": "assistant"}
        self._named.add(index)
        return {"delta": {**role, "content": text}}

    def _complete(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Json | None:
        return chat_logprobs(self._tokenizer, token_ids, logprobs) if logprobs else None

    def _place(self, answer: Json, entries: list[Json | None], is_first: bool) -> None:
        if is_first:
            answer["prompt_logprobs"] = entries


def _usage(finishes: Sequence[GenerationFinish]) -> Json:
    """The prompt counts once, whatever the number of answers; the first one's engine found some of it in its cache."""
    prompt = len(finishes[0].prompt_token_ids)
    output = sum(finish.num_output_tokens for finish in finishes)
    cached = next((finish.phases.cached_tokens for finish in finishes if finish.index == 0), 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
