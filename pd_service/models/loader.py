"""From a model directory to a model that computes: builds it, fills every parameter exactly once, packs it.

Tensors are copied straight from the mapped file into their place, also within merged matrices, so that loading takes
little more memory than the model. A checkpoint that does not fit the model, tensor for tensor, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pd_service.errors import ConfigError
from pd_service.models.base import CausalLM
from pd_service.models.config import ModelConfig, checkpoint_files, limit_length, load_model_config, model_class
from pd_service.models.layers import Place
from pd_service.ops import get_ops

_CHECKPOINT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_model(
    model_dir: Path,
    *,
    dtype: torch.dtype,
    device: str,
    block_size: int,
    max_model_len: int | None = None,
    with_draft: bool = False,
    progress: Callable[[float], None] | None = None,
) -> tuple[CausalLM, ModelConfig]:
    """The model of `model_dir` in `dtype` on `device`, ready to run, and its configuration.

    `max_model_len` None means what the model states; more than that is refused. `with_draft` builds its layer for
    multi-token prediction as well. `progress` receives the fraction of tensors loaded. Raises ConfigError for a
    directory, configuration or checkpoint that cannot be used.
    """
    config = limit_length(load_model_config(model_dir), max_model_len)
    files = checkpoint_files(model_dir)
    model = build_model(config, dtype=dtype, device=device, block_size=block_size, with_draft=with_draft)
    _fill(model, config, _tensors(files), progress=progress or (lambda fraction: None))
    for module in list(model.modules()):
        finish: Any = getattr(module, "finish_loading", None)
        if finish is not None:
            finish()
    return model.eval(), config


def build_model(
    config: ModelConfig, *, dtype: torch.dtype, device: str, block_size: int, with_draft: bool = False
) -> CausalLM:
    """The model with empty weights; on the device "meta" it takes no memory and serves to plan some."""
    if with_draft and not config.hf.num_draft_layers:
        raise ConfigError(f"{config.architecture} of this checkpoint has no layers for multi-token prediction")
    place = Place(dtype, device, get_ops("cpu" if device == "meta" else device))
    options = {"with_draft": True} if with_draft else {}
    model: CausalLM = model_class(config.architecture)(config, place=place, block_size=block_size, **options)
    return model


def _fill(
    model: CausalLM,
    config: ModelConfig,
    tensors: Iterator[tuple[Path, str, torch.Tensor]],
    *,
    progress: Callable[[float], None],
) -> None:
    destinations = _destinations(model)
    seen: dict[str, Path] = {}
    copies, to_compare = model.copies(), []
    for file, name, tensor in tensors:
        path = model.name_here(name)
        if path in copies:  # perhaps ahead of its original
            to_compare.append((file, name, tensor, copies[path]))
            continue
        if path not in destinations and model.is_ignored(path, config.hf):
            continue
        if path in seen:
            raise ConfigError(f"tensor {name!r} is in both {seen[path]} and {file}")
        if path not in destinations:
            raise ConfigError(f"{file}: tensor {name!r} has no place in {type(model).__name__}")
        _copy(file, name, tensor, destinations[path])
        seen[path] = file
        progress(len(seen) / len(destinations))
    if missing := destinations.keys() - seen.keys():
        raise ConfigError(model.describe_missing(sorted(missing)))
    for file, name, tensor, original in to_compare:
        if not torch.equal(tensor.to(destinations[original]), destinations[original]):
            raise ConfigError(f"{file}: tensor {name!r} is no copy of {original!r}, as it should be")


def _destinations(model: CausalLM) -> dict[str, torch.Tensor]:
    """Checkpoint name of every tensor the model wants: the parameter, or its slice of a merged one.

    A module with a method `checkpoint_tensors` names its own. A tied weight comes once, under its first name.
    """
    places: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        parameters = {k: p for k, p in module.named_parameters(recurse=False) if id(p) not in seen}
        seen |= {id(p) for p in parameters.values()}
        parent, _, leaf = path.rpartition(".")
        if name_tensors := getattr(module, "checkpoint_tensors", None):
            places |= {f"{prefix}{name}": tensor for name, tensor in name_tensors().items()}
        elif leaf in model.merged_weights:
            parts = [f"{parent}.{part}" for part in model.merged_weights[leaf]]
            for kind, parameter in parameters.items():
                slices = parameter.data.split(module.out_sizes)  # type: ignore[arg-type]
                places |= {f"{part}.{kind}": piece for part, piece in zip(parts, slices, strict=True)}
        else:
            places |= {f"{prefix}{kind}": parameter.data for kind, parameter in parameters.items()}
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
