"""What a local Hugging Face model directory says: shape of the model, its files, and whether two hosts hold the same.

Only config.json and generation_config.json are read here, without transformers, so that a gateway can do it in a
moment. What the Llama family can carry and we do not compute is refused by name: a model that loads is computed right.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pd_service.config import describe
from pd_service.errors import ConfigError

MODEL_REGISTRY = {"LlamaForCausalLM": "pd_service.models.llama"}  # architecture: the module that defines the class

_Count = Annotated[int, Field(ge=1)]
_Model = TypeVar("_Model", bound=BaseModel)


class RopeConfig(BaseModel):
    """Rotary embedding. `factor` stretches positions; the last three are those of Llama 3's published formula."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rope_type: Literal["default", "linear", "llama3"] = "default"
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    factor: Annotated[float, Field(gt=0)] = 1.0
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    original_max_position_embeddings: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a model; `max_model_len` in tokens, prompt and output together."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    rope: RopeConfig
    max_model_len: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


class _Generation(BaseModel):
    """The two keys we use of generation_config.json, which config.json may hold as well."""

    model_config = ConfigDict(extra="ignore")

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def eos_token_ids(self) -> list[int]:
        return [self.eos_token_id] if isinstance(self.eos_token_id, int) else self.eos_token_id or []


class _HfConfig(_Generation):
    """config.json as transformers 4 and 5 write it. A missing key has the default of transformers' LlamaConfig."""

    model_config = ConfigDict(extra="ignore")

    architectures: Annotated[list[str], Field(min_length=1)]
    model_type: str = "llama"
    vocab_size: _Count
    hidden_size: _Count
    intermediate_size: _Count
    num_hidden_layers: _Count
    num_attention_heads: _Count
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    hidden_act: str = "silu"
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    max_position_embeddings: _Count = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None


def load_model_config(model_dir: Path) -> ModelConfig:
    """The model in `model_dir`. Raises ConfigError for what is no model directory, or no model we compute right."""
    path = _config_file(model_dir)
    raw = _read_json(path)
    _require_known_architecture(path, raw)
    hf = _validate(_HfConfig, path, raw)
    _refuse_what_is_not_computed(path, hf)
    generation = _Generation()
    if (generation_path := model_dir / "generation_config.json").is_file():
        generation = _validate(_Generation, generation_path, _read_json(generation_path))
    bos_ids = [b for b in (hf.bos_token_id, generation.bos_token_id) if b is not None]
    return ModelConfig(
        architecture=hf.architectures[0],
        model_type=hf.model_type,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
        head_dim=hf.head_dim or hf.hidden_size // hf.num_attention_heads,
        hidden_act=hf.hidden_act,
        rms_norm_eps=hf.rms_norm_eps,
        rope=_rope(path, hf),
        max_model_len=hf.max_position_embeddings,
        tie_word_embeddings=hf.tie_word_embeddings,
        attention_bias=hf.attention_bias,
        mlp_bias=hf.mlp_bias,
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=tuple(dict.fromkeys(hf.eos_token_ids() + generation.eos_token_ids())),
    )


def checkpoint_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a model, sorted by name. Raises ConfigError naming the file that is missing."""
    index = model_dir / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index}: expected a mapping 'weight_map' from tensor names to files")
        names = sorted({str(name) for name in weight_map.values()})
    files = [model_dir / name for name in names]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file} does not exist; weights must be safetensors files in the model's directory")
    return files


_SAMPLES = 16
_SAMPLE_BYTES = 4096


def fingerprint(model_dir: Path) -> str:
    """32 hex digits, equal on every host whose directory holds the same model.

    Covers config.json and, per safetensors file, its name, size, header (names, types and shapes of the tensors) and
    a sample of its bytes; reading it all would take seconds. Raises ConfigError for missing or unreadable files.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        parts = [_config_file(model_dir).read_bytes()]
        for file in checkpoint_files(model_dir):
            parts += [file.name.encode(), *_sample(file)]
    except OSError as error:
        raise ConfigError(f"cannot read the model in {model_dir}: {error}") from error
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _sample(file: Path) -> list[bytes]:
    """Size, header (safetensors: 8 bytes of length, then JSON) and bytes from evenly spaced places of `file`."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header = stream.read(min(int.from_bytes(stream.read(8), "little"), size))
        parts = [size.to_bytes(8, "little"), header]
        for i in range(_SAMPLES):
            stream.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            parts.append(stream.read(_SAMPLE_BYTES))
    return parts


def _config_file(model_dir: Path) -> Path:
    if not model_dir.is_dir():
        raise ConfigError(f"{model_dir} is not a directory; {_expected()}")
    path = model_dir / "config.json"
    if not path.is_file():
        raise ConfigError(f"{model_dir} has no config.json; {_expected()}")
    return path


def _require_known_architecture(path: Path, raw: dict[str, Any]) -> None:
    """Asked first: a foreign model should hear that it is foreign, not which of our keys it lacks."""
    given = raw.get("architectures")
    if not isinstance(given, list) or not given or given[0] not in MODEL_REGISTRY:
        raise ConfigError(f"{path}: architectures {given!r} is not supported; {_expected()}")


def _expected() -> str:
    supported = ", ".join(sorted(MODEL_REGISTRY))
    return f"expected a local Hugging Face model directory with one of the architectures: {supported}"


def _refuse_what_is_not_computed(path: Path, hf: _HfConfig) -> None:
    if hf.quantization_config is not None:
        method = hf.quantization_config.get("quant_method")
        raise ConfigError(f"{path}: quantization_config ({method!r}) is not supported; use unquantized weights")
    if hf.hidden_act != "silu":
        raise ConfigError(f"{path}: hidden_act {hf.hidden_act!r} is not supported; only 'silu' is")
    if hf.head_dim is None and hf.hidden_size % hf.num_attention_heads:
        raise ConfigError(
            f"{path}: hidden_size ({hf.hidden_size}) is not a multiple of num_attention_heads "
            f"({hf.num_attention_heads}), and there is no head_dim"
        )
    if (hf.head_dim or hf.hidden_size // hf.num_attention_heads) % 2:
        raise ConfigError(f"{path}: the head dimension must be even for rotary embeddings")
    if hf.num_key_value_heads and hf.num_attention_heads % hf.num_key_value_heads:
        raise ConfigError(
            f"{path}: num_attention_heads ({hf.num_attention_heads}) is not a multiple of num_key_value_heads "
            f"({hf.num_key_value_heads})"
        )


def _rope(path: Path, hf: _HfConfig) -> RopeConfig:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before), whose type was "type"."""
    given = {k: v for k, v in (hf.rope_parameters or hf.rope_scaling or {}).items() if v is not None}
    if "rope_type" not in given and "type" in given:
        given["rope_type"] = given["type"]
    if hf.rope_theta is not None:
        given.setdefault("rope_theta", hf.rope_theta)
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"{path}: partial_rotary_factor {given['partial_rotary_factor']!r} is not supported; only 1.0"
        )
    given.setdefault("original_max_position_embeddings", hf.max_position_embeddings)
    needed = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    for key in needed.get(str(given.get("rope_type", "default")), ()):
        if key not in given:
            raise ConfigError(f"{path}: rope_type {given['rope_type']!r} needs {key!r}")
    return _validate(RopeConfig, path, given)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _validate(kind: type[_Model], path: Path, raw: dict[str, Any]) -> _Model:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe(error)}") from error
