"""The model and its cache on one device: runs batches, knows nothing of requests' lives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from kv_cache import (
    CacheStorage,
    ModelCacheInfo,
    SharedStorage,
    allocate_cache_tensors,
    calculate_cache_bytes,
)
from pd_service.config import EngineConfig
from pd_service.device import get_device
from pd_service.engine.batch import InputRow, make_batch, take_rows
from pd_service.engine.draft_layer import DraftLayer
from pd_service.engine.memory_plan import GIB, plan_blocks, require_memory
from pd_service.engine.sampler import SampleRow, prompt_logprobs, sample
from pd_service.engine.speculation import accept
from pd_service.engine.step import SampledToken, StepResult
from pd_service.models.config import ModelConfig
from pd_service.models.loader import load_model
from pd_service.ops import get_ops
from pd_service.request import EngineSampling, TokenLogprobs

logger = logging.getLogger(__name__)

_JUDGED_AT_ONCE = 64


class ModelWorker:
    """Loads the model, sizes and allocates its cache, runs steps. Raises ConfigError when it cannot start."""

    def __init__(self, config: EngineConfig, progress: Callable[[str], None]) -> None:
        self._config = config
        self.device = get_device(config.device)
        torch.set_num_threads(config.threads)
        progress("loading weights")
        self.available_bytes = self.device.free_bytes()
        self.memory_plan = require_memory(config, self.available_bytes)
        logger.info("memory: %s; %.2f GiB are free", self.memory_plan.describe(), self.available_bytes / GIB)
        has_draft_layer = config.settings.speculative.method == "mtp"
        self.model_config: ModelConfig
        self.model: Any  # a module of pd_service.models; nn.Module knows neither its forward nor its cache info
        self.model, self.model_config = load_model(
            config.model_dir,
            dtype=getattr(torch, config.dtype),
            device=config.device,
            block_size=config.settings.block_size,
            max_model_len=config.settings.max_model_len,
            with_draft=has_draft_layer,
            progress=lambda share: progress(f"loading weights {share:.0%}" if share < 1 else "packing weights"),
        )
        self._draft_layer = DraftLayer(self.model, config.settings.block_size) if has_draft_layer else None
        progress("allocating KV cache")
        self.cache_info: ModelCacheInfo = self.model.get_cache_info()
        self.block_nums = plan_blocks(self.cache_info, config, self.max_model_len)
        self.storage, self.cache_tensors = self._allocate()

    @property
    def attention(self) -> str:
        """The attention implementation, for people to read."""
        return get_ops(self._config.device).PAGED_ATTENTION

    @property
    def max_model_len(self) -> int:
        return self.model_config.max_model_len

    def _allocate(self) -> tuple[CacheStorage, list[torch.Tensor]]:
        """Shared memory when a reader on this host may map it, ordinary memory otherwise."""
        num_bytes = calculate_cache_bytes(self.cache_info, self.block_nums)
        storage = self.device.allocate_cache(num_bytes, is_mapped="shm" in self._config.settings.planes)
        return storage, allocate_cache_tensors(self.cache_info, self.block_nums, storage)

    def run(self, rows: Sequence[InputRow]) -> list[StepResult]:
        """One step: the result of each row. The KV of all new tokens is in the cache when it returns."""
        self.device.enter_thread()
        with torch.inference_mode():
            tokens, firsts = [row.token_ids for row in rows], [row.first for row in rows]
            batch = make_batch(rows, tokens, firsts, self._config.settings.block_size, self.device.torch_device)
            hidden = self.model(batch.token_ids, batch.positions, batch.metadata)  # [tokens, hidden]
            chosen = self._choose(rows, batch.starts, hidden)
            guesses: Sequence[tuple[int, ...]] = [()] * len(rows)
            if self._draft_layer is not None:
                guesses = self._draft_layer.follow(rows, batch.starts, hidden, chosen)
            judged = [self._judge(row, start, hidden) for row, start in zip(rows, batch.starts, strict=True)]
            self.device.synchronize()
            return [StepResult(*result) for result in zip(chosen, guesses, judged, strict=True)]

    def _choose(
        self, rows: Sequence[InputRow], starts: Sequence[int], hidden: torch.Tensor
    ) -> list[tuple[SampledToken, ...]]:
        """The next tokens of each row; none where none is wanted yet."""
        indexes: list[int] = []
        sample_rows: list[SampleRow] = []
        for row, start in zip(rows, starts, strict=True):
            if row.sampling is not None:
                indexes += range(start + row.num_known - 1, start + len(row.token_ids))
                sample_rows += _sample_rows(row, row.sampling)
        if not indexes:
            return [()] * len(rows)
        choices = iter(sample(self.model.compute_logits(take_rows(hidden, indexes)), sample_rows))
        return [
            ()
            if row.sampling is None
            else accept(row.token_ids[row.num_known :], list(islice(choices, row.num_drafts + 1)))
            for row in rows
        ]

    def _judge(self, row: InputRow, start: int, hidden: torch.Tensor) -> tuple[TokenLogprobs, ...]:
        """Log probabilities of prompt tokens, a part of the rows at a time: logits are large."""
        judged: list[TokenLogprobs] = []
        for begin in range(0, len(row.judged_ids), _JUDGED_AT_ONCE):
            ids = row.judged_ids[begin : begin + _JUDGED_AT_ONCE]
            logits = self.model.compute_logits(hidden[start + begin : start + begin + len(ids)])
            judged += prompt_logprobs(logits, ids, row.num_top_judged)
        return tuple(judged)

    def close(self) -> None:
        """Gives the cache memory back; no step may run afterwards."""
        for layer in self.cache_info.layer_infos:
            for entry in layer.caches:
                entry.tensor_setter(torch.empty(0))
        self.cache_tensors.clear()
        if isinstance(self.storage, SharedStorage):
            self.storage.close()


def _sample_rows(row: InputRow, sampling: EngineSampling) -> Iterator[SampleRow]:
    """One for each position whose next token is wanted: the last known one and each guess."""
    for i in range(row.num_drafts + 1):
        position = row.first + row.num_known + i
        history = row.history[:position] if sampling.needs_history else ()
        yield SampleRow(
            sampling=sampling, position=position, token_ids=history, num_prompt_tokens=row.num_prompt_tokens
        )
