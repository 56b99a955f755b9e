"""Configuration, checkpoints and fingerprints of models, on a tiny Llama; families are tested in their own files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from pd_service.errors import ConfigError
from pd_service.models.config import MODEL_REGISTRY, fingerprint, load_model_config
from pd_service.models.loader import load_model
from tests.model_parity import edit_json, edit_weights, some_prompts
from tests.model_runner import Runner, load
from tests.tiny_model import make_tiny_llama

torch.set_num_threads(1)
FULL = "FullAttention"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def test_greedy_outputs_of_the_tiny_model_are_varied(tiny: Path) -> None:
    prompts = some_prompts(8, 20)
    outputs = {tuple(tokens[-20:]) for tokens in Runner(load(tiny), block_size=4).greedy(prompts, 20, None)}
    assert len(outputs) == len(prompts)
    assert min(len(set(output)) for output in outputs) > 8


def test_cache_info_lists_two_entries_per_layer_and_sets_their_tensors(tiny: Path) -> None:
    model = load(tiny, block_size=8)
    info = model.get_cache_info()
    assert (info.num_layers, info.block_size) == (2, 8)
    assert [layer.layer_idx for layer in info.layer_infos] == [0, 1]
    for layer_info, layer in zip(info.layer_infos, model.model.layers, strict=True):
        for entry in layer_info.caches:
            assert (entry.attn_type, entry.num_head, entry.dim, entry.needs_block) == (FULL, 2, 16, True)
            tensor = torch.zeros(1)
            entry.tensor_setter(tensor)
            assert getattr(layer.self_attn, entry.cache_name) is tensor


def test_max_model_len_can_shrink_but_not_grow(tiny: Path) -> None:
    _, config = load_model(tiny, dtype=torch.float32, device="cpu", block_size=4, max_model_len=100)
    assert config.max_model_len == 100
    with pytest.raises(ConfigError, match=r"513.*512"):
        load_model(tiny, dtype=torch.float32, device="cpu", block_size=4, max_model_len=513)


def test_progress_rises_to_one(tiny: Path) -> None:
    seen: list[float] = []
    load_model(tiny, dtype=torch.float32, device="cpu", block_size=4, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_ignorable_tensors_of_older_checkpoints_are_ignored(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "m")
    before = Runner(load(directory), block_size=4).step({0: [5, 6, 7]})[0]
    edit_weights(
        directory,
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), "lm_head.weight": torch.zeros(512, 64)},
    )
    assert torch.equal(Runner(load(directory), block_size=4).step({0: [5, 6, 7]})[0], before)


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({K_PROJ: None}, rf"lacks 1 tensors: {K_PROJ}"),
        ({K_PROJ: torch.zeros(64, 64)}, rf"{K_PROJ}.*\[64, 64\].*\[32, 64\]"),
        ({"model.norm.bias": torch.zeros(64)}, r"model\.norm\.bias.*no place"),
        ({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}, r"model\.norm\.weight.*int8.*float32"),
    ],
    ids=["missing", "shape", "unknown", "dtype"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change, message: str, tmp_path: Path) -> None:
    directory = edit_weights(make_tiny_llama(tmp_path / "m"), change)
    with pytest.raises(ConfigError, match=message):
        load(directory)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "m", shards=2)
    first, second = sorted(directory.glob("model-*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)
    with pytest.raises(ConfigError, match=f"{name}.*{first.name}.*{second.name}"):
        load(directory)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    "keep", [None, 0, 5, 2000, -100], ids=["gone", "empty", "short", "cut in header", "cut in data"]
)
def test_a_missing_or_cut_weight_file_is_named(shards: int, keep: int | None, tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "m", shards=shards, tie=False)
    victim = sorted(directory.glob("model*.safetensors"))[-1]
    if keep is None:
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=victim.name):
        load(directory)


def test_old_and_new_spellings_of_rope_mean_the_same(tmp_path: Path) -> None:
    new = make_tiny_llama(tmp_path / "new", rope=LLAMA3)
    old = make_tiny_llama(tmp_path / "old")
    scaling = {"type" if key == "rope_type" else key: v for key, v in LLAMA3.items() if key != "rope_theta"}
    edit_json(old / "config.json", {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": scaling})
    assert load_model_config(old).hf.read_rope() == load_model_config(new).hf.read_rope()
    assert load_model_config(old).hf.read_rope().rope_type == "llama3"


def test_missing_head_dim_and_kv_heads_follow_from_the_others(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "m", kv_heads=4)
    whole = load_model_config(directory).hf
    edit_json(directory / "config.json", {"head_dim": None, "num_key_value_heads": None})
    derived = load_model_config(directory).hf
    assert (derived.dim_per_head, derived.num_kv_heads) == (whole.head_dim, whole.num_key_value_heads)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [(2, 2, (2,)), ([7, 2], 2, (7, 2)), (2, [2, 9], (2, 9)), (None, 4, (4,)), (None, None, ())],
)
def test_end_tokens_come_from_both_files(in_config, in_generation, expected, tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "m")
    edit_json(directory / "config.json", {"eos_token_id": in_config})
    edit_json(directory / "generation_config.json", {"eos_token_id": in_generation})
    assert load_model_config(directory).eos_token_ids == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"MambaForCausalLM.*LlamaForCausalLM"),
        ({"architectures": None}, r"None.*LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, r"hidden_act.*'silu'.*'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config \('awq'\)"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, r"rope_type.*'longrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"'linear' needs 'factor'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, r"partial_rotary_factor 0\.5"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\).*num_key_value_heads \(3\)"),
        ({"head_dim": 15}, r"even"),
        ({"head_dim": None, "hidden_size": 66}, r"hidden_size \(66\)"),
        ({"vocab_size": "many"}, r"vocab_size.*'many'"),
        ({"hidden_size": None}, r"hidden_size.*required"),
    ],
)
def test_what_we_would_compute_wrong_is_refused_by_name(change, message: str, tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "m")
    edit_json(directory / "config.json", change)
    with pytest.raises(ConfigError, match=message):
        load_model_config(directory)


def test_what_is_no_model_directory_hears_what_would_be(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for name, message in [("absent", "not a directory"), ("empty", r"no config\.json"), ("broken", "cannot read")]:
        with pytest.raises(ConfigError, match=message) as caught:
            load_model_config(tmp_path / name)
        assert name in str(caught.value)
        assert name == "broken" or all(architecture in str(caught.value) for architecture in MODEL_REGISTRY)


def test_fingerprint_is_that_of_the_files_wherever_they_lie(tmp_path: Path) -> None:
    first = make_tiny_llama(tmp_path / "a", shards=2)
    assert fingerprint(first) == fingerprint(make_tiny_llama(tmp_path / "b", shards=2))
    assert len(fingerprint(first)) == 32
    others = [
        make_tiny_llama(tmp_path / "seed", shards=2, seed=1),
        make_tiny_llama(tmp_path / "dtype", shards=2, dtype="float16"),
        edit_json(make_tiny_llama(tmp_path / "config", shards=2) / "config.json", {"rms_norm_eps": 1e-4}),
    ]
    assert len({fingerprint(directory) for directory in (first, *others)}) == 4


def test_fingerprint_names_a_missing_file(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "m")
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors does not exist"):
        fingerprint(directory)


def test_tiny_tokenizer_brings_every_text_back(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "".join(chr(c) for c in range(256)) + "你好 🙂 <x>\r\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (1, 2, 512)
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
