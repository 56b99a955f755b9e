"""What a local Hugging Face model directory says: which model it is, its files, and whether two hosts hold the same.

Only config.json and generation_config.json are read here, without transformers, so that a gateway can do it in a
moment. A family's own keys are those of its `config_class`, a subclass of `HfConfig` beside its model; what a family
can carry and we do not compute is refused by name there: a model that loads is computed right.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pd_service.config import describe
from pd_service.errors import ConfigError
from pd_service.models.rope import RopeConfig

MODEL_REGISTRY = {  # architecture: the module that defines the class of that name
    "DeepseekV2ForCausalLM": "pd_service.models.deepseek",
    "DeepseekV3ForCausalLM": "pd_service.models.deepseek",
    "Gemma3ForCausalLM": "pd_service.models.gemma3",
    "Gemma3ForConditionalGeneration": "pd_service.models.gemma3",
    "GptOssForCausalLM": "pd_service.models.gpt_oss",
    "LlamaForCausalLM": "pd_service.models.llama",
    "MistralForCausalLM": "pd_service.models.mistral",
    "Qwen2ForCausalLM": "pd_service.models.qwen2",
    "Qwen3ForCausalLM": "pd_service.models.qwen3",
    "Qwen3MoeForCausalLM": "pd_service.models.qwen3_moe",
}

Count = Annotated[int, Field(ge=1)]
_Model = TypeVar("_Model", bound=BaseModel)


class Generation(BaseModel):
    """The two keys we use of generation_config.json, which config.json may hold as well."""

    model_config = ConfigDict(extra="ignore")

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def eos_token_ids(self) -> list[int]:
        return [self.eos_token_id] if isinstance(self.eos_token_id, int) else self.eos_token_id or []


class HfConfig(Generation):
    """What every family's config.json holds, as transformers 4 and 5 write it.

    A family subclasses it with its own keys, whose defaults are those of its class in transformers, and with validators
    that refuse what the family does not compute.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    model_type: str
    vocab_size: Count
    hidden_size: Count
    num_hidden_layers: Count
    max_position_embeddings: Count = 2048
    tie_word_embeddings: bool = False
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None

    @property
    def num_draft_layers(self) -> int:
        """Layers that predict further tokens (multi-token prediction), for speculative decoding."""
        return 0

    @model_validator(mode="after")
    def _refuse_quantized_weights(self) -> HfConfig:
        if self.quantization_config is not None:
            method = self.quantization_config.get("quant_method")
            raise ValueError(f"quantization_config ({method!r}) is not supported; use unquantized weights")
        return self

    def read_rope(self, given: dict[str, Any] | None = None) -> RopeConfig:
        """The rotary embedding of `given`, by default of the whole model. Raises ValueError for one we do not compute.

        It stands in `rope_parameters` (transformers 5), or in `rope_theta` and `rope_scaling` (before), whose type was
        called "type".
        """
        given = {k: v for k, v in (given or self.rope_parameters or self.rope_scaling or {}).items() if v is not None}
        if "rope_type" not in given and "type" in given:
            given["rope_type"] = given["type"]
        if self.rope_theta is not None:
            given.setdefault("rope_theta", self.rope_theta)
        given.setdefault("original_max_position_embeddings", self.max_position_embeddings)
        try:
            return RopeConfig.model_validate(given)
        except ValidationError as error:
            raise ValueError(f"rope: {describe(error)}") from error


class HeadsConfig(HfConfig):
    """A family whose attention has `num_attention_heads` query heads that share `num_key_value_heads` key heads."""

    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def dim_per_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @model_validator(mode="after")
    def _fit_heads_together(self) -> HeadsConfig:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) is not a multiple of num_attention_heads "
                f"({self.num_attention_heads}), and there is no head_dim"
            )
        if self.dim_per_head % 2:
            raise ValueError(f"the head dimension must be even for rotary embeddings, it is {self.dim_per_head}")
        if self.num_attention_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        return self


LayerType = Literal["full_attention", "sliding_attention"]


class LayerTypesConfig(HeadsConfig):
    """A family in which some layers see all positions, others the last `sliding_window`, the current one included."""

    sliding_window: Count | None = None
    layer_types: list[LayerType] | None = None

    @property
    def full_attention_period(self) -> int:
        """Where there are no `layer_types`, each layer of this number sees all positions, the others a window."""
        return 1

    def type_of_layers(self) -> list[LayerType]:
        """One entry per layer."""
        if self.layer_types is not None:
            return self.layer_types
        numbers = range(1, self.num_hidden_layers + 1)
        return ["sliding_attention" if n % self.full_attention_period else "full_attention" for n in numbers]

    def window_of(self, layer: int) -> int | None:
        """What the layer sees, in tokens; None: all."""
        return self.sliding_window if self.type_of_layers()[layer] == "sliding_attention" else None

    @model_validator(mode="after")
    def _type_every_layer(self) -> LayerTypesConfig:
        types = self.type_of_layers()
        if len(types) != self.num_hidden_layers:
            raise ValueError(f"layer_types names {len(types)} layers, num_hidden_layers is {self.num_hidden_layers}")
        if "sliding_attention" in types and self.sliding_window is None:
            raise ValueError("layer_types holds 'sliding_attention', which needs sliding_window")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model; `max_model_len` in tokens, prompt and output together. `hf` holds the family's own keys."""

    architecture: str
    vocab_size: int
    max_model_len: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    hf: HfConfig


def require_supported(model_dir: Path) -> None:
    """Raises ConfigError for what is no model directory, or a model of no family here; imports no family to say so."""
    path = _config_file(model_dir)
    _known_architecture(path, _read_json(path))


def load_model_config(model_dir: Path) -> ModelConfig:
    """The model in `model_dir`. Raises ConfigError for what is no model directory, or no model we compute right."""
    path = _config_file(model_dir)
    raw = _read_json(path)
    architecture = _known_architecture(path, raw)
    hf = _validate(model_class(architecture).config_class, path, raw)
    generation = Generation()
    if (generation_path := model_dir / "generation_config.json").is_file():
        generation = _validate(Generation, generation_path, _read_json(generation_path))
    bos_ids = [b for b in (hf.bos_token_id, generation.bos_token_id) if b is not None]
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf.vocab_size,
        max_model_len=hf.max_position_embeddings,
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=tuple(dict.fromkeys(hf.eos_token_ids() + generation.eos_token_ids())),
        hf=hf,
    )


def limit_length(model: ModelConfig, max_model_len: int | None) -> ModelConfig:
    """`model` with that length, None for its own. Raises ConfigError for one that the model does not reach."""
    if max_model_len is None:
        return model
    if not 1 <= max_model_len <= model.max_model_len:
        raise ConfigError(f"max_model_len {max_model_len} is not within 1..{model.max_model_len}, the model's own")
    return replace(model, max_model_len=max_model_len)


def model_class(architecture: str) -> Any:
    """The class of a registered architecture, a subclass of `pd_service.models.base.CausalLM`."""
    return getattr(importlib.import_module(MODEL_REGISTRY[architecture]), architecture)


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
_TEXT_FILES = (  # whatever of this a directory has decides which token ids a text becomes, and which ids end an answer
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)


def fingerprint(model_dir: Path) -> str:
    """32 hex digits, equal on every host whose directory holds the same model.

    Covers config.json, the files of the tokenizer and its chat templates, and, per safetensors file, its name, size,
    header (names, types and shapes of the tensors) and a sample of its bytes; reading it all would take seconds.
    Raises ConfigError for missing or unreadable files.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        parts = [_config_file(model_dir).read_bytes()]
        for file in checkpoint_files(model_dir):
            parts += [file.name.encode(), *_sample(file)]
        for file in sorted(file for pattern in _TEXT_FILES for file in model_dir.glob(pattern)):
            parts += [file.relative_to(model_dir).as_posix().encode(), file.read_bytes()]
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


def _known_architecture(path: Path, raw: dict[str, Any]) -> str:
    """Asked first: a foreign model should hear that it is foreign, not which of our keys it lacks."""
    given = raw.get("architectures")
    if not isinstance(given, list) or not given or given[0] not in MODEL_REGISTRY:
        raise ConfigError(f"{path}: architectures {given!r} is not supported; {_expected()}")
    return str(given[0])


def _expected() -> str:
    supported = ", ".join(sorted(MODEL_REGISTRY))
    return f"expected a local Hugging Face model directory with one of the architectures: {supported}"


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
