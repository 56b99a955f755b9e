"""From a model directory to a model that computes: builds it, fills every parameter exactly once, packs it.

Tensors are copied straight from the mapped file into their place, also within merged matrices, so that loading takes
little more memory than the model. A checkpoint that does not fit the model, tensor for tensor, is refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from pd_service.errors import ConfigError
from pd_service.models.config import MODEL_REGISTRY, ModelConfig, checkpoint_files, load_model_config
from pd_service.models.layers import Linear
from pd_service.ops import get_ops

_CHECKPOINT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_model(
    model_dir: Path,
    *,
    dtype: torch.dtype,
    device: str,
    block_size: int,
    max_model_len: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> tuple[nn.Module, ModelConfig]:
    """The model of `model_dir` in `dtype` on `device`, ready to run, and its configuration.

    `max_model_len` None means what the model states; more than that is refused. `progress` receives the fraction of
    tensors loaded. Raises ConfigError for a directory, configuration or checkpoint that cannot be used.
    """
    config = load_model_config(model_dir)
    if max_model_len is not None:
        if not 1 <= max_model_len <= config.max_model_len:
            raise ConfigError(f"max_model_len {max_model_len} is not within 1..{config.max_model_len}, the model's own")
        config = replace(config, max_model_len=max_model_len)
    files = checkpoint_files(model_dir)
    family = getattr(importlib.import_module(MODEL_REGISTRY[config.architecture]), config.architecture)
    model = family(config, dtype=dtype, device=device, block_size=block_size, ops=get_ops(device))
    _fill(model, _tensors(files), is_tied=config.tie_word_embeddings, progress=progress or (lambda fraction: None))
    for module in model.modules():
        if isinstance(module, Linear):
            module.pack()
    return model.eval(), config


def _fill(
    model: nn.Module,
    tensors: Iterator[tuple[Path, str, torch.Tensor]],
    *,
    is_tied: bool,
    progress: Callable[[float], None],
) -> None:
    ignored = (*model.ignored_weights, *(("lm_head.weight",) if is_tied else ()))
    destinations = _destinations(model)
    seen: dict[str, Path] = {}
    for file, name, tensor in tensors:
        if name.endswith(ignored):
            continue
        if name in seen:
            raise ConfigError(f"tensor {name!r} is in both {seen[name]} and {file}")
        if name not in destinations:
            raise ConfigError(f"{file}: tensor {name!r} has no place in {type(model).__name__}")
        _copy(file, name, tensor, destinations[name])
        seen[name] = file
        progress(len(seen) / len(destinations))
    if missing := destinations.keys() - seen.keys():
        raise ConfigError(f"the checkpoint lacks {len(missing)} tensors: {', '.join(sorted(missing)[:5])}")


def _destinations(model: nn.Module) -> dict[str, torch.Tensor]:
    """Checkpoint name of every tensor the model wants: the parameter, or its slice of a merged one."""
    places: dict[str, torch.Tensor] = {}
    for path, parameter in model.named_parameters():  # a tied weight comes once, under its first name
        module_path, _, kind = path.rpartition(".")
        parent, _, leaf = module_path.rpartition(".")
        parts = model.merged_weights.get(leaf)
        if parts is None:
            places[path] = parameter.data
            continue
        slices = parameter.data.split(model.get_submodule(module_path).out_sizes)
        places |= {f"{parent}.{part}.{kind}": piece for part, piece in zip(parts, slices, strict=True)}
    return places


def _copy(file: Path, name: str, tensor: torch.Tensor, place: torch.Tensor) -> None:
    if tensor.shape != place.shape:
        raise ConfigError(
            f"{file}: tensor {name!r} has the shape {list(tensor.shape)}, but config.json asks for {list(place.shape)}"
        )
    if tensor.dtype not in _CHECKPOINT_DTYPES:
        raise ConfigError(f"{file}: tensor {name!r} has the type {tensor.dtype}; allowed: {_CHECKPOINT_DTYPES}")
    place.copy_(tensor)


def _tensors(files: list[Path]) -> Iterator[tuple[Path, str, torch.Tensor]]:
    """Every tensor of every file, mapped into memory, not read."""
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as checkpoint:
                for name in checkpoint.keys():  # noqa: SIM118  (safe_open is no mapping)
                    yield file, name, checkpoint.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is not a complete safetensors file: {error}") from error
