"""Small tokenizers built the way the model families build theirs, written and loaded as Hugging Face directories.

All of them have the pieces of `PIECES`, the special tokens BEGIN, END and TOOL, and the added token THINK, which is
text and must not be split. `▁` stands for a space where bytes are not spelled as characters.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from pd_service.gateway.tokenizer import Tokenizer

BEGIN, END, TOOL, THINK = "<s>", "</s>", "<tool>", "<think>"
PIECES = [" ", "a", "b", " a", " b", "ab", " ab", "\n"]


def _byte_level() -> Backend:
    """GPT-2, Llama 3, Qwen: bytes spelled as characters; one token is two thirds of a character."""
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False)
    ((sun, _),) = spelling.pre_tokenize_str("日")
    merges = [("Ġ", "a"), ("Ġ", "b"), ("a", "b"), ("Ġ", "ab"), (sun[0], sun[1])]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = spelling
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_pieces() -> models.BPE:
    """Pieces of text, and `<0xE4>` for each byte of whatever else there is."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = bytes_ + [piece.replace(" ", "▁") for piece in (*PIECES, "é", "日", " 日本", "  ")]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "ab")]
    return models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, byte_fallback=True)


def _llama2() -> Backend:
    """Llama 2, Mistral: a space is put before each text, and the decoder takes it away again."""
    backend = Backend(_sentence_pieces())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def _gemma() -> Backend:
    """Gemma: no space of its own; runs of spaces and of line breaks are added tokens in the vocabulary's spelling."""
    backend = Backend(_sentence_pieces())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken(content, normalized=False) for content in ("▁▁▁", "\n\n")])
    return backend


def _metaspace() -> Backend:
    """T5 and early Mistral conversions: a unigram model between Metaspace and its decoder, without single bytes."""
    pieces = [("<unk>", 0.0), *((piece.replace(" ", "▁"), -1.0) for piece in (*PIECES, "é", "日"))]
    backend = Backend(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>"])
    return backend


FAMILIES: dict[str, Callable[[], Backend]] = {
    "byte_level": _byte_level,
    "llama2": _llama2,
    "gemma": _gemma,
    "metaspace": _metaspace,
}

# As the families' directories name them; transformers builds some of them anew from vocabulary and merges.
CLASSES = {
    "byte_level": "Qwen2Tokenizer",
    "llama2": "LlamaTokenizer",
    "gemma": "GemmaTokenizer",
    "metaspace": "PreTrainedTokenizerFast",
}


def family_tokenizer(
    family: str, directory: Path, *, begins_with: str = BEGIN, template: str | dict[str, str] | None = None
) -> Tokenizer:
    """The family's tokenizer, saved to `directory` and loaded from there. It puts `begins_with` before each text."""
    backend = FAMILIES[family]()
    backend.add_special_tokens([BEGIN, END, TOOL])
    backend.add_tokens([AddedToken(THINK, normalized=False)])
    begins = [name for name in (BEGIN, TOOL) if name in begins_with]
    backend.post_processor = processors.TemplateProcessing(
        single=" ".join([*begins, "$A"]), special_tokens=[(name, backend.token_to_id(name)) for name in begins]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BEGIN, eos_token=END)
    wrapped.chat_template = template
    wrapped.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": CLASSES[family]}))
    return Tokenizer(directory)


def token_id(tokenizer: Tokenizer, piece: str) -> int:
    """The id of a piece as the families spell it; of one character, its single token."""
    backend = tokenizer._backend
    spelled = (piece, piece.replace(" ", "▁"), piece.replace(" ", "Ġ").replace("\n", "Ċ"))
    found = [backend.token_to_id(one) for one in spelled]
    return next(one for one in found if one is not None)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte, in a family that has such tokens."""
    of_byte = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer._backend.get_vocab_size()))}
    return [of_byte[bytes([byte])] for byte in data]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of `text` without the begin token."""
    return asyncio.run(tokenizer.encode_text(text))[1:]
