"""Log probabilities in the forms clients know: OpenAI's of completions and of chats, and vLLM's of prompts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from pd_service.gateway.generation import GenerationPrompt
from pd_service.gateway.tokenizer import Tokenizer
from pd_service.request import TokenLogprobs

Json = dict[str, Any]


class TextOffsets:
    """Where in the text of one choice each token begins, in characters.

    A token that continues an incomplete character begins where that character does; special tokens take no room.
    `num_unshown` characters of the tokens are not in the text's beginning.
    """

    def __init__(self, tokenizer: Tokenizer, num_unshown: int) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._next = -num_unshown

    def take(self, token_id: int) -> int:
        """The offset of the next token."""
        offset = max(0, self._next)
        self._next += len(self._utf8.decode(self._tokenizer.token_bytes(token_id)))
        return offset


def completion_logprobs(
    tokenizer: Tokenizer,
    offsets: TextOffsets,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    num_top: int,
) -> Json:
    """`logprobs` has one entry per token; None, where nothing judges the token, is null in the answer."""
    text_of = tokenizer.token_text
    return {
        "tokens": [text_of(token_id) for token_id in token_ids],
        "token_logprobs": [None if entry is None else entry.logprob for entry in logprobs],
        "top_logprobs": [
            None if entry is None else {text_of(token_id): value for token_id, value in entry.top[:num_top]}
            for entry in logprobs
        ],
        "text_offset": [offsets.take(token_id) for token_id in token_ids],
    }


def chat_logprobs(tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Json:
    """`logprobs` has one entry per token, None for none of them."""
    entries = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        assert entry is not None, "a chat echoes no prompt"
        top = [_chat_entry(tokenizer, alternative, value) for alternative, value in entry.top]
        entries.append({**_chat_entry(tokenizer, token_id, entry.logprob), "top_logprobs": top})
    return {"content": entries, "refusal": None}


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> Json:
    text = tokenizer.token_text(token_id)
    spelled = tokenizer.token_bytes(token_id) or text.encode()
    return {"token": text, "logprob": logprob, "bytes": list(spelled)}


def prompt_logprobs(tokenizer: Tokenizer, prompt: GenerationPrompt, num_top: int) -> list[Json | None]:
    """vLLM's form: for each token a map from token id to what is known of it, its own and the `num_top` most likely.

    The first entry is null: nothing judges the first token.
    """
    entries = [
        _ranked(tokenizer, token_id, entry, num_top)
        for token_id, entry in zip(prompt.token_ids[1:], prompt.logprobs, strict=True)
    ]
    return [None, *entries]


def _ranked(tokenizer: Tokenizer, token_id: int, entry: TokenLogprobs, num_top: int) -> Json:
    known = {token_id: (entry.logprob, entry.rank)}
    for rank, (alternative, value) in enumerate(entry.top[:num_top], start=1):
        known.setdefault(alternative, (value, rank))
    return {
        str(known_id): {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.token_text(known_id)}
        for known_id, (logprob, rank) in known.items()
    }
