"""A model with caches whose blocks are dealt by hand, one pool for each group of caches, without engine or manager.

Whatever no query may see holds NaN, so that reading it shows: the null block, blocks not yet written, and all that has
left a sliding window, whose blocks go back to their pool as the manager reclaims them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kv_cache.cache_info import CacheEntry
from pd_service.models.loader import load_model
from pd_service.ops.metadata import ForwardMetadata


def load(
    directory: Path, *, block_size: int = 4, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> torch.nn.Module:
    return load_model(directory, dtype=dtype, device=device, block_size=block_size)[0]


@dataclass
class Group:
    """The caches that share block tables, and the table of each request. `window` in tokens, None sees all."""

    window: int | None
    block_size: int
    free: list[int]
    device: str = "cpu"
    caches: list[torch.Tensor] = field(default_factory=list)
    tables: dict[int, list[int]] = field(default_factory=dict)
    skipped: dict[int, int] = field(default_factory=dict)  # tokens of each request that have left the window

    def add(self, entry: CacheEntry, num_blocks: int) -> None:
        assert entry.sliding_window == self.window
        shape = (num_blocks, self.block_size, entry.num_head, entry.dim)
        self.caches.append(torch.full(shape, torch.nan, dtype=entry.dtype, device=self.device))
        entry.tensor_setter(self.caches[-1])

    def reserve(self, request: int, past: int, num_tokens: int) -> None:
        """Blocks for `num_tokens` tokens, of which `past` are computed; what no token to come may see goes."""
        table = self.tables.setdefault(request, [])
        while len(table) * self.block_size < num_tokens:
            table.append(self.free.pop(0))
        skipped = 0 if self.window is None else max(0, past - self.window + 1)
        for position in range(self.skipped.get(request, 0), skipped):
            index, offset = divmod(position, self.block_size)
            for cache in self.caches:
                cache[table[index], offset] = torch.nan
            if offset == self.block_size - 1:
                self.free.append(table[index])
                table[index] = 0
        self.skipped[request] = skipped

    def slots(self, request: int, positions: range) -> list[int]:
        table = self.tables[request]
        return [table[p // self.block_size] * self.block_size + p % self.block_size for p in positions]

    def block_table(self, requests: list[int]) -> torch.Tensor:
        """int32 [requests, blocks], padded with the null block."""
        width = max(len(self.tables[request]) for request in requests)
        rows = [self.tables[request] + [0] * (width - len(self.tables[request])) for request in requests]
        return torch.tensor(rows, dtype=torch.int32)


class Runner:
    """Steps of `model`. Scattered or not, each group deals other blocks, so that a table of another group shows."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        block_size: int,
        is_scattered: bool = False,
        num_blocks: int = 1000,
        device: str = "cpu",
    ) -> None:
        self.model = model
        self.device = device
        self.block_size = block_size
        self.num_cached: dict[int, int] = {}
        self.groups: dict[str, Group] = {}
        for layer in model.get_cache_info().layer_infos:
            for entry in layer.caches:
                if entry.group_key not in self.groups:
                    free = list(range(1 + 3 * len(self.groups), num_blocks))
                    if is_scattered:
                        random.Random(entry.group_key).shuffle(free)
                    self.groups[entry.group_key] = Group(entry.sliding_window, block_size, free, device)
                self.groups[entry.group_key].add(entry, num_blocks)

    def forward(self, chunks: dict[int, list[int]], room: int = 0) -> tuple[torch.Tensor, ForwardMetadata]:
        """Append `chunks` of tokens to their requests: the last hidden states [tokens, hidden], and the metadata.

        `room`: tokens to reserve blocks for from the start, so that a request's blocks stay together.
        """
        requests, slots, positions = list(chunks), {key: [] for key in self.groups}, []
        for request, tokens in chunks.items():
            past = self.num_cached.get(request, 0)
            new = range(past, past + len(tokens))
            for key, group in self.groups.items():
                group.reserve(request, past, max(new.stop, room))
                slots[key] += group.slots(request, new)
            positions += new
            self.num_cached[request] = new.stop
        metadata = ForwardMetadata(
            query_lens=[len(tokens) for tokens in chunks.values()],
            kv_lens=[self.num_cached[request] for request in requests],
            block_size=self.block_size,
            block_table={key: group.block_table(requests).to(self.device) for key, group in self.groups.items()},
            slot_mapping={
                key: torch.tensor(of_group, dtype=torch.int32, device=self.device) for key, of_group in slots.items()
            },
        )
        ids = torch.tensor([token for tokens in chunks.values() for token in tokens], device=self.device)
        with torch.inference_mode():
            return self.model(ids, torch.tensor(positions, device=self.device), metadata), metadata

    def step(self, chunks: dict[int, list[int]], room: int = 0) -> dict[int, torch.Tensor]:
        """As `forward`, to the logits [new tokens, vocab] of every request."""
        hidden, metadata = self.forward(chunks, room)
        with torch.inference_mode():
            logits = self.model.compute_logits(hidden)
        return dict(zip(chunks, logits.split(metadata.query_lens), strict=True))

    def logits(self, prompts: list[list[int]], chunk: int | None) -> list[torch.Tensor]:
        """The logits [prompt, vocab] of new requests 0, 1, …, in chunks of `chunk` tokens or in one."""
        parts: dict[int, list[torch.Tensor]] = {request: [] for request in range(len(prompts))}
        longest = max(len(prompt) for prompt in prompts)
        for start in range(0, longest, chunk or longest):
            work = {r: prompt[start : start + (chunk or longest)] for r, prompt in enumerate(prompts)}
            for request, logits in self.step({r: tokens for r, tokens in work.items() if tokens}).items():
                parts[request].append(logits)
        return [torch.cat(of_request) for of_request in parts.values()]

    def greedy(self, prompts: list[list[int]], num_new: int, chunk: int | None) -> list[list[int]]:
        """Prompts and `num_new` tokens each; those done with their prompt decode while others are at it."""
        done = [list(prompt) for prompt in prompts]
        room = max(len(prompt) for prompt in prompts) + num_new
        while work := self._work(done, prompts, num_new, chunk):
            for request, logits in self.step(work, room).items():
                if self.num_cached[request] == len(done[request]):
                    done[request].append(int(logits[-1].argmax()))
        return done

    def _work(
        self, done: list[list[int]], prompts: list[list[int]], num_new: int, chunk: int | None
    ) -> dict[int, list[int]]:
        work = {}
        for request, tokens in enumerate(done):
            past = self.num_cached.get(request, 0)
            if len(tokens) < len(prompts[request]) + num_new:
                work[request] = tokens[past : past + (chunk or len(tokens))]
        return work
