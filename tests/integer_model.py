"""A model that is nothing but hashing: its next token depends on every byte of every cache entry it may see.

Each layer writes, per token, integers that are a hash of what the layer got and of the position; it passes on a hash of
all integers it sees, through the block table, at their positions. What a layer gets is what the layer below passed on:

    token, position ─► x0 ─► layer 0: writes hash(x0, position, head, lane), x1 = hash(x0, all it sees) ─► … ─► token

So a wrong, stale, missing, shifted or foreign byte changes the output but for a chance of 2**-64 per token (and 1 in
the vocabulary that two hashes name the same token). Cache tensors are born full of POISON, which is never written: to
read it is an error. A family of its own: this file and one line in the registry, as for any other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view
from safetensors.torch import save_file
from torch import nn

from kv_cache.cache_info import CacheEntry
from pd_service.models.base import DraftingLM
from pd_service.models.config import MODEL_REGISTRY, Count, HfConfig, ModelConfig
from pd_service.models.layers import Linear, Place
from pd_service.ops.metadata import ForwardMetadata

U64 = npt.NDArray[np.uint64]

ARCHITECTURE = "IntegerForCausalLM"
POISON = -1  # all bits set, as in memory poisoned with 0xFF
WINDOW = 6  # tokens, the current one included
VOCAB = 997
SALTS = (7919, 6271)  # stand for the weights: of the embedding, and of the way from hidden states to tokens
WEIGHTS = (3.0, 2.5, 2.0, 1.0)  # logits of the tokens that can be drawn, the most likely first
UNLIKELY = -20.0  # logit of all others
ACCEPTED = 0.6  # of the draft's predictions are right

Attention = Literal["full", "window", "both", "mla"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """`dim` integers of `dtype` in each of `num_head` heads; `window` None sees all positions."""

    name: str
    num_head: int
    dim: int
    dtype: torch.dtype = torch.int64
    window: int | None = None


def _key_value(window: int | None) -> list[Cache]:
    return [
        Cache(name="k_cache", num_head=2, dim=2, window=window),
        Cache(name="v_cache", num_head=2, dim=3, dtype=torch.int32, window=window),
    ]


_LATENT = [
    Cache(name="nope_cache", num_head=1, dim=5),
    Cache(name="rope_cache", num_head=1, dim=2, dtype=torch.int32),
]
_INDEXED = [
    Cache(name="k_cache", num_head=2, dim=1),
    Cache(name="index_cache", num_head=1, dim=3, dtype=torch.int32, window=WINDOW),
]

# The caches of each layer; the last layer is the draft's. "both" has one type per layer, and a layer with both.
VARIANTS: dict[Attention, list[list[Cache]]] = {
    "full": [_key_value(None)] * 3,
    "window": [_key_value(WINDOW)] * 3,
    "both": [_key_value(None), _key_value(WINDOW), _INDEXED, _key_value(None)],
    "mla": [_LATENT] * 3,
}


class UnwrittenRead(Exception):
    """The model looked at a slot that nobody has ever written."""


def fold(start: U64, *parts: Any) -> U64:
    """A hash of `start` and integers or integer arrays, element by element after broadcasting.

    Multiplicative hashing (Knuth, TAOCP volume 3, section 6.4), word by word; each word is taken in by a bijection.
    """
    h = start
    for part in parts:
        h = (h ^ np.asarray(part).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        h ^= h >> np.uint64(32)
    return h


def tag(name: str) -> int:
    """64 bits that stand for a name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def key(name: str) -> U64:
    return np.array([tag(name)], np.uint64)


class IntegerCache:
    """One cache of one layer."""

    def __init__(self, cache: Cache, layer: int) -> None:
        self.name = f"layer {layer} {cache.name}"
        self.window = cache.window
        self.tensor = torch.empty(0, dtype=cache.dtype)
        self._bits = cache.dtype.itemsize * 8 - 1  # never negative, so never POISON
        self.entry = CacheEntry(
            cache_name=cache.name,
            attn_type="FullAttention" if cache.window is None else "SlidingWindow",
            num_head=cache.num_head,
            dim=cache.dim,
            dtype=cache.dtype,
            sliding_window=cache.window,
            tensor_setter=self._set,
        )
        heads = np.arange(cache.num_head) + self.entry.first_head
        lanes = (heads[:, None], np.arange(cache.dim))
        self._write_key = fold(key(f"write {self.name}"), *lanes)  # [heads, dim]
        self._read_key = fold(key(f"read {self.name}"), *lanes)

    def _set(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.fill_(POISON)

    def values(self, x: U64, positions: U64) -> U64:
        """What tokens of input `x` [tokens] at `positions` [tokens] leave in the cache: [tokens, heads, dim]."""
        return fold(self._write_key, x[:, None, None], positions[:, None, None]) & np.uint64(2**self._bits - 1)

    def marks(self, values: U64, positions: U64) -> U64:
        """What `values` [tokens, heads, dim], seen at `positions` [tokens], add to a sum: [tokens]."""
        return fold(self._read_key, values, positions[:, None, None]).sum(axis=(1, 2))

    def write(self, values: U64, metadata: ForwardMetadata) -> None:
        slots = metadata.slot_mapping[self.entry.group_key].numpy()
        self._slots()[slots] = values.astype(np.int64)

    def read(self, metadata: ForwardMetadata) -> U64:
        """The marks each new token sees, its own last: [tokens, window], or their sum [tokens, 1] without a window."""
        tables = metadata.block_table[self.entry.group_key].numpy()
        rows = zip(tables, metadata.query_lens, metadata.kv_lens, strict=True)
        return np.concatenate([self._read_row(table, *lens, metadata.block_size) for table, *lens in rows])

    def _read_row(self, table: npt.NDArray[np.int32], query_len: int, kv_len: int, block_size: int) -> U64:
        past = kv_len - query_len
        first = 0 if self.window is None else max(0, past - self.window + 1)
        positions = np.arange(first, kv_len)
        values = self._slots()[table[positions // block_size] * block_size + positions % block_size]
        if (values == POISON).any():
            unwritten = positions[(values == POISON).any(axis=(1, 2))]
            raise UnwrittenRead(f"{self.name}: positions {unwritten.tolist()} of {kv_len} were never written")
        marks = self.marks(values.astype(np.uint64), positions.astype(np.uint64))
        if self.window is None:
            return marks.cumsum()[past:, None]
        before = np.zeros(first - past + self.window - 1, np.uint64)  # the window begins before the prompt
        return sliding_window_view(np.concatenate((before, marks)), self.window)

    def append(self, carried: U64, marks: U64) -> U64:
        """What a token sees that leaves `marks` [tokens], after the `carried` ones of the token before."""
        return carried + marks[:, None] if self.window is None else np.column_stack((carried, marks))

    def carry(self, seen: U64) -> U64:
        """What of `seen` the next token still sees."""
        return seen if self.window is None else seen[:, 1:]

    def _slots(self) -> npt.NDArray[Any]:
        """The cache itself, [blocks * block_size, heads, dim]."""
        return self.tensor.view(-1, *self.tensor.shape[2:]).numpy()


class IntegerLayer:
    def __init__(self, caches: Sequence[Cache], layer: int) -> None:
        self.caches = [IntegerCache(cache, layer) for cache in caches]
        self.cache_entries = [cache.entry for cache in self.caches]
        self._key = key(f"layer {layer}")

    def forward(self, x: U64, positions: U64, metadata: ForwardMetadata) -> tuple[U64, list[U64]]:
        """What the layer passes on [tokens], and per cache what each token's successor sees."""
        for cache in self.caches:
            cache.write(cache.values(x, positions), metadata)
        return self._pass_on(x, [cache.read(metadata) for cache in self.caches])

    def advance(self, x: U64, positions: U64, carried: Sequence[U64]) -> tuple[U64, list[U64]]:
        """The same for one token after each of those that carried this, without a cache."""
        marks = [cache.marks(cache.values(x, positions), positions) for cache in self.caches]
        return self._pass_on(x, [c.append(*seen) for c, *seen in zip(self.caches, carried, marks, strict=True)])

    def _pass_on(self, x: U64, seen: Sequence[U64]) -> tuple[U64, list[U64]]:
        passed = fold(self._key, x, *(marks.sum(axis=1) for marks in seen))
        return passed, [cache.carry(marks) for cache, marks in zip(self.caches, seen, strict=True)]


class Salt(Linear):
    """A matrix of one integer."""

    def __init__(self, *, place: Place) -> None:
        super().__init__(1, 1, place=place)
        self.value = 0

    def finish_loading(self) -> None:
        self.value = int(self.weight.item())


class IntegerConfig(HfConfig):
    attention_variant: Attention
    num_nextn_predict_layers: Count = 1

    @property
    def num_draft_layers(self) -> int:
        return self.num_nextn_predict_layers


class IntegerForCausalLM(DraftingLM):
    """Hidden states are int64 [tokens, 2 + carried]: what the last layer passed on, what the draft layer passed on (0
    from the model itself), and all that the next token sees. With it the draft layer knows the next token's hidden
    state without a look into the model's caches, and then decides by a hash of its own cache whether to tell."""

    config_class: ClassVar = IntegerConfig
    family_name: ClassVar = "Integers"
    examples: ClassVar = ("tests",)
    attention: ClassVar = "any"

    def __init__(self, config: ModelConfig, *, place: Place, block_size: int, with_draft: bool = False) -> None:
        nn.Module.__init__(self)
        hf = config.hf
        assert isinstance(hf, IntegerConfig)
        self.block_size = block_size
        self.vocab_size = hf.vocab_size
        self.embed_tokens, self.lm_head = Salt(place=place), Salt(place=place)
        layers = [IntegerLayer(caches, i) for i, caches in enumerate(VARIANTS[hf.attention_variant])]
        self.layers, self.draft_layer = layers[:-1], layers[-1] if with_draft else None

    def attentions(self) -> list[Any]:
        return self.layers + ([self.draft_layer] if self.draft_layer else [])

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: ForwardMetadata) -> torch.Tensor:
        places = _unsigned(positions)
        x, carried = self._embed(input_ids, places), []
        for layer in self.layers:
            x, next_carried = layer.forward(x, places, metadata)
            carried += next_carried
        return _hidden(x, np.zeros_like(x), carried)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits(_unsigned(hidden)[:, 0])

    def draft(
        self, hidden: torch.Tensor, next_ids: torch.Tensor, positions: torch.Tensor, metadata: ForwardMetadata
    ) -> torch.Tensor:
        assert self.draft_layer is not None
        places = _unsigned(positions)
        x, carried = self._advance(_unsigned(hidden), next_ids, places + np.uint64(1))
        digest, _ = self.draft_layer.forward(x, places, metadata)
        return _hidden(x, digest, carried)

    def compute_draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        x, digest = _unsigned(hidden)[:, :2].T
        is_right = fold(key("coin"), x, digest) < np.uint64(int(ACCEPTED * 2**64))
        return self._logits(np.where(is_right, x, fold(key("wrong"), x)))

    def _embed(self, token_ids: torch.Tensor, positions: U64) -> U64:
        return fold(key("embedding"), self.embed_tokens.value, token_ids.numpy(), positions)

    def _advance(self, hidden: U64, next_ids: torch.Tensor, positions: U64) -> tuple[U64, list[U64]]:
        x, carried, column = self._embed(next_ids, positions), [], 2
        for layer in self.layers:
            widths = [1 if cache.window is None else cache.window - 1 for cache in layer.caches]
            parts = np.split(hidden[:, column : column + sum(widths)], np.cumsum(widths)[:-1], axis=1)
            x, next_carried = layer.advance(x, positions, parts)
            carried += next_carried
            column += sum(widths)
        return x, carried

    def _logits(self, x: U64) -> torch.Tensor:
        """float32 [rows, vocab]: a few tokens that can be drawn, hashes of `x` [rows], and all others."""
        ranks = np.arange(len(WEIGHTS))
        drawn = (fold(key("token"), self.lm_head.value, x[:, None], ranks) % np.uint64(self.vocab_size)).astype(
            np.int64
        )
        logits = np.full((len(x), self.vocab_size), UNLIKELY, np.float32)
        for rank in reversed(ranks):  # where two hashes name one token, the better rank counts
            logits[np.arange(len(x)), drawn[:, rank]] = WEIGHTS[rank]
        return torch.from_numpy(logits)


def _unsigned(tensor: torch.Tensor) -> U64:
    return tensor.contiguous().numpy().view(np.uint64)


def _hidden(x: U64, digest: U64, carried: Sequence[U64]) -> torch.Tensor:
    return torch.from_numpy(np.column_stack((x, digest, *carried)).view(np.int64))


def save_integer_model(dir: Path, attention: Attention, salts: tuple[int, int] = SALTS) -> Path:
    """Writes the model as a Hugging Face directory and returns it."""
    dir.mkdir(parents=True)
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "integer",
        "vocab_size": VOCAB,
        "hidden_size": 1,
        "num_hidden_layers": len(VARIANTS[attention]) - 1,
        "max_position_embeddings": 256,
        "attention_variant": attention,
    }
    (dir / "config.json").write_text(json.dumps(config))
    names = ("embed_tokens.weight", "lm_head.weight")
    tensors = {name: torch.full((1, 1), float(salt)) for name, salt in zip(names, salts, strict=True)}
    save_file(tensors, dir / "model.safetensors")
    return dir


@contextmanager
def integer_models(root: Path) -> Iterator[dict[Attention, Path]]:
    """A saved model of every variant; the family is known to the loader meanwhile."""
    MODEL_REGISTRY[ARCHITECTURE] = __name__
    try:
        yield {attention: save_integer_model(root / attention, attention) for attention in VARIANTS}
    finally:
        del MODEL_REGISTRY[ARCHITECTURE]
