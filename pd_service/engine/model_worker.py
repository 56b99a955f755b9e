"""The model and its cache on one device: runs batches, knows nothing of requests' lives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kv_cache import (
    HeapStorage,
    ModelCacheInfo,
    SharedStorage,
    allocate_cache_tensors,
    calculate_block_num,
    calculate_cache_bytes,
    prepare_block_tables,
    prepare_slot_mapping,
    validate_cache_info,
)
from pd_service.config import EngineConfig
from pd_service.engine.sampler import SampleRow, sample
from pd_service.engine.step import SampledToken
from pd_service.errors import ConfigError
from pd_service.models.config import ModelConfig
from pd_service.models.loader import load_model
from pd_service.ops import get_ops
from pd_service.ops.metadata import ForwardMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """One step's batch as arrays. Row i brings `query_lens[i]` new tokens; its cache then holds `kv_lens[i]`.

    `sampled_rows` lists the rows whose next token is wanted, `sample_rows` how each is chosen.
    """

    token_ids: np.ndarray[Any, np.dtype[np.int64]]  # [tokens]
    positions: np.ndarray[Any, np.dtype[np.int64]]  # [tokens]
    query_lens: list[int]
    kv_lens: list[int]
    block_ids: list[dict[str, list[int]]]
    sampled_rows: list[int]
    sample_rows: list[SampleRow]


class ModelWorker:
    """Loads the model, sizes and allocates its cache, runs steps. Raises ConfigError when it cannot start."""

    def __init__(self, config: EngineConfig, progress: Callable[[str], None]) -> None:
        self._config = config
        self._device = torch.device(config.device)
        torch.set_num_threads(config.threads)
        progress("loading weights")
        self.model_config: ModelConfig
        self.model: Any  # a module of pd_service.models; nn.Module knows neither its forward nor its cache info
        self.model, self.model_config = load_model(
            config.model_dir,
            dtype=getattr(torch, config.dtype),
            device=config.device,
            block_size=config.settings.block_size,
            max_model_len=config.settings.max_model_len,
            progress=lambda share: progress(f"loading weights {share:.0%}"),
        )
        progress("allocating KV cache")
        self.cache_info: ModelCacheInfo = self.model.get_cache_info()
        self.block_nums = self._plan_blocks()
        self.storage, self.cache_tensors = self._allocate()

    @property
    def attention(self) -> str:
        """The attention implementation, for people to read."""
        return get_ops(self._config.device).PAGED_ATTENTION

    @property
    def max_model_len(self) -> int:
        return self.model_config.max_model_len

    def _plan_blocks(self) -> Mapping[str, int]:
        settings = self._config.settings
        try:
            validate_cache_info(self.cache_info)
            return calculate_block_num(
                self.cache_info,
                max_concurrency=settings.max_num_seqs,
                max_model_len=self.max_model_len,
                max_step_tokens=settings.max_num_batched_tokens,
                available_bytes=int(self._config.kv_cache_bytes),
            )
        except ValueError as error:
            raise ConfigError(f"KV cache: {error}") from error

    def _allocate(self) -> tuple[HeapStorage | SharedStorage, list[torch.Tensor]]:
        """Shared memory when a reader on this host may map it, ordinary memory otherwise."""
        num_bytes = calculate_cache_bytes(self.cache_info, self.block_nums)
        storage: HeapStorage | SharedStorage
        if "shm" in self._config.settings.planes:
            storage = SharedStorage(num_bytes)
        else:
            storage = HeapStorage(num_bytes, self._device)
        return storage, allocate_cache_tensors(self.cache_info, self.block_nums, storage)

    def run(self, batch: ModelInput) -> list[SampledToken]:
        """One step: writes the KV of all new tokens, returns one token per entry of `sampled_rows`."""
        with torch.inference_mode():
            block_table = prepare_block_tables(batch.block_ids)
            block_size = self._config.settings.block_size
            metadata = ForwardMetadata(
                query_lens=batch.query_lens,
                kv_lens=batch.kv_lens,
                block_size=block_size,
                block_table=block_table,
                slot_mapping=prepare_slot_mapping(batch.positions.tolist(), batch.query_lens, block_table, block_size),
            )
            input_ids = torch.from_numpy(batch.token_ids).to(self._device)
            positions = torch.from_numpy(batch.positions).to(self._device)
            hidden = self.model(input_ids, positions, metadata)  # [tokens, hidden]
            if not batch.sampled_rows:
                return []
            last_tokens = np.cumsum(batch.query_lens)[batch.sampled_rows] - 1
            logits = self.model.compute_logits(hidden[torch.from_numpy(last_tokens)])  # [sampled rows, vocab]
            return sample(logits, batch.sample_rows)

    def close(self) -> None:
        """Gives the cache memory back; no step may run afterwards."""
        for layer in self.cache_info.layer_infos:
            for entry in layer.caches:
                entry.tensor_setter(torch.empty(0))
        self.cache_tensors.clear()
        if isinstance(self.storage, SharedStorage):
            self.storage.close()


def concatenate(rows: Sequence[tuple[list[int], int, int]]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Token ids and positions [tokens] of rows (all token ids, first, count)."""
    ids = np.concatenate([np.asarray(tokens[first : first + count], np.int64) for tokens, first, count in rows])
    positions = np.concatenate([np.arange(first, first + count, dtype=np.int64) for _, first, count in rows])
    return ids, positions
