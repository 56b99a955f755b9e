"""Text to token ids and back, for one model.

Encoding runs in threads of its own, so that a long prompt never holds up the event loop. What the tokenizer puts before
a text, as a rule its begin token, stands there exactly once, whichever way the prompt came. Backwards, every token id
stands for some bytes that do not depend on its neighbours; text is the UTF-8 reading of these bytes. That makes a
streamed answer equal to the whole one by construction.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jinja2
from transformers import AutoTokenizer

from pd_service.errors import ConfigError, InvalidRequest
from pd_service.request import ChatMessage

_NUM_THREADS = 2
# A template is a program that runs on the client's messages: these are its ways to fail at them.
_TEMPLATE_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_T = TypeVar("_T")


class Tokenizer:
    """The tokenizer in a local Hugging Face directory. Raises ConfigError when there is none that can be used."""

    def __init__(self, model_dir: Path) -> None:
        try:
            self._renderer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot load a tokenizer from {model_dir}: {error}") from error
        if not getattr(self._renderer, "is_fast", False):
            raise ConfigError(f"the tokenizer in {model_dir} has no tokenizer.json, which is the only supported form")
        self._name = model_dir.name
        self._backend = self._renderer.backend_tokenizer
        self._backend.no_truncation()  # a prompt is refused as too long, never cut
        self._backend.no_padding()
        self._begin = self._added_before_text()
        self._pieces = _TokenPieces(self._backend)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokenizer's own end token: for a tuned model often the end of a turn, which config.json does not name."""
        end: int | None = self._renderer.eos_token_id
        return frozenset() if end is None else frozenset({end})

    async def encode_text(self, text: str) -> list[int]:
        """Raw text as it stands. Raises InvalidRequest naming `prompt`."""
        return await self._in_thread(self._encode_text, text)

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Messages through the model's chat template, ready for the assistant's turn. InvalidRequest: `messages`."""
        return await self._in_thread(self._encode_chat, messages)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text; empty for special tokens and for ids the tokenizer does not know."""
        return self._pieces[token_id]

    def token_text(self, token_id: int) -> str:
        """The token for people to read: special tokens by name, incomplete characters as U+FFFD."""
        return self._pieces.special.get(token_id) or self.token_bytes(token_id).decode(errors="replace")

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of `token_ids` as the continuation of some other text: a leading space is kept."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def close(self) -> None:
        """Ends the threads. May be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, encode: Callable[[_T], list[int]], prompt: _T) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode, prompt)

    def _encode_text(self, text: str) -> list[int]:
        return self._begun_once(self._encode(text, "prompt", add_special_tokens=True))

    def _encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        text = self._render(messages)
        token_ids = self._encode(text, "messages", add_special_tokens=False)
        # Most templates write the begin token themselves, some behind a line break; others leave it to the tokenizer.
        written = "".join(map(self._backend.id_to_token, self._begin))
        return self._begun_once(token_ids if text.lstrip().startswith(written) else self._begin + token_ids)

    def _begun_once(self, token_ids: list[int]) -> list[int]:
        """Without the begin tokens that template or client wrote out and the tokenizer has put there as well."""
        begin, size = self._begin, len(self._begin)
        while size and token_ids[: 2 * size] == begin * 2:
            token_ids = token_ids[size:]
        return token_ids

    def _encode(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{field}: not Unicode text: {error.reason} at {error.start}", field) from error
        # A batch of one: the call for a single text keeps Python's lock while it works, this one lets the loop run.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        token_ids: list[int] = encoding.ids
        return token_ids

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        if not self._renderer.chat_template:
            raise InvalidRequest(
                f"messages: the model {self._name!r} has no chat template; send it a plain prompt instead", "messages"
            )
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text: str = self._renderer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(f"messages: the chat template refuses them: {error}", "messages") from error
        return text

    def _added_before_text(self) -> list[int]:
        """The ids the tokenizer puts before every text: none, the begin token, or a few."""
        plain = self._backend.encode("a", add_special_tokens=False).ids
        whole = self._backend.encode("a").ids
        begins = (n for n in range(len(whole)) if whole[n : n + len(plain)] == plain)
        return list(whole[: next(begins, 0)])


class _TokenPieces(dict[int, bytes]):
    """The bytes of each token id, found when first asked for.

    Byte-level vocabularies spell bytes as printable characters, their added tokens as they are. Others hold text, with
    `<0xE4>` for single bytes where they fall back to them; such a token, added or not, is decoded behind another one,
    because a decoder may drop a leading space.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special: dict[int, str] = {token_id: token.content for token_id, token in added.items() if token.special}
        self._added: dict[int, bytes] = {
            token_id: token.content.encode() for token_id, token in added.items() if not token.special
        }
        kinds = _decoder_kinds(backend)
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._anchor = None if self._is_byte_level else self._find_anchor()

    def __missing__(self, token_id: int) -> bytes:
        piece = self._find(token_id)
        self[token_id] = piece
        return piece

    def _find(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self.special:
            return b""
        if self._is_byte_level:
            return self._added.get(token_id) or _byte_level_bytes(token)
        if self._has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return self._behind_anchor(token_id).encode()

    def _behind_anchor(self, token_id: int) -> str:
        if self._anchor is None:
            return str(self._backend.decode([token_id]))
        anchor = self._backend.decode([self._anchor])
        return str(self._backend.decode([self._anchor, token_id])).removeprefix(anchor)

    def _find_anchor(self) -> int | None:
        """Some token that is a plain word, so that what a decoder does at the start of a text happens to it."""
        for token_id in range(self._backend.get_vocab_size()):
            if token_id not in self.special and str(self._backend.decode([token_id])).isalpha():
                return token_id
        return None


def _decoder_kinds(backend: Any) -> set[str]:
    """The types of all decoders in the tokenizer's description."""
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {part["type"] for part in (state, *state.get("decoders", ()))}


def _byte_level_bytes(token: str) -> bytes:
    if any(character not in _BYTE_OF_CHARACTER for character in token):
        return token.encode()
    return bytes(_BYTE_OF_CHARACTER[character] for character in token)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
