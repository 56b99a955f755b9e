"""Our Llama against transformers', through saved directories: same logits, same greedy tokens, however it is run."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import make_tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from pd_service.errors import ConfigError
from pd_service.models.config import MODEL_REGISTRY, fingerprint, load_model_config
from pd_service.models.loader import load_model
from pd_service.ops.metadata import ForwardMetadata

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
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
VARIANTS = {
    "tied": {},
    "untied": {"tie": False},
    "mha": {"kv_heads": 4},
    "mqa": {"kv_heads": 1},
    "llama3": {"rope": LLAMA3},
    "linear": {"rope": LINEAR},
    "sharded": {"shards": 3, "tie": False},
    "bias": {"bias": True},
    "bfloat16 checkpoint": {"dtype": "bfloat16"},
    "float16 checkpoint": {"dtype": "float16"},
}


@dataclass
class Runner:
    """A model with a cache, and the blocks of each request, dealt by hand."""

    model: torch.nn.Module
    block_size: int
    is_scattered: bool = False
    num_blocks: int = 400
    blocks: dict[int, list[int]] = field(default_factory=dict)
    num_cached: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(1, self.num_blocks))
        if self.is_scattered:
            random.Random(0).shuffle(self.free)
        for layer in self.model.get_cache_info().layer_infos:
            for entry in layer.caches:
                shape = (self.num_blocks, self.block_size, entry.num_head, entry.dim)
                entry.tensor_setter(torch.full(shape, torch.nan, dtype=entry.dtype))

    @torch.inference_mode()
    def step(self, chunks: dict[int, list[int]], room: int = 0) -> dict[int, torch.Tensor]:
        """Append `chunks` of tokens to their requests; the logits of every new token. `room`: tokens to reserve."""
        query_lens, kv_lens, slots, positions = [], [], [], []
        for request, tokens in chunks.items():
            past = self.num_cached.get(request, 0)
            blocks = self.blocks.setdefault(request, [])
            while len(blocks) * self.block_size < max(past + len(tokens), room):
                blocks.append(self.free.pop(0))
            new = range(past, past + len(tokens))
            slots += [blocks[p // self.block_size] * self.block_size + p % self.block_size for p in new]
            positions += new
            query_lens.append(len(tokens))
            kv_lens.append(past + len(tokens))
            self.num_cached[request] = past + len(tokens)
        width = max(len(self.blocks[request]) for request in chunks)
        table = [self.blocks[r] + [0] * (width - len(self.blocks[r])) for r in chunks]
        metadata = ForwardMetadata(
            query_lens=query_lens,
            kv_lens=kv_lens,
            block_size=self.block_size,
            block_table={FULL: torch.tensor(table, dtype=torch.int32)},
            slot_mapping={FULL: torch.tensor(slots, dtype=torch.int32)},
        )
        ids = torch.tensor([token for tokens in chunks.values() for token in tokens])
        logits = self.model.compute_logits(self.model(ids, torch.tensor(positions), metadata))
        return dict(zip(chunks, logits.split(query_lens), strict=True))


def load(directory: Path, *, block_size: int = 4, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return load_model(directory, dtype=dtype, device="cpu", block_size=block_size)[0]


@torch.inference_mode()
def reference_logits(directory: Path, token_lists: list[list[int]]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return [model(torch.tensor([tokens])).logits[0] for tokens in token_lists]


def some_prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [1, 2, longest, *(rng.randint(1, longest) for _ in range(count - 3))]
    return [[rng.randrange(3, 512) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "model", **VARIANTS[variant])
    prompts = some_prompts(6, 200)
    runner = Runner(load(directory), block_size=4)
    ours = runner.step(dict(enumerate(prompts)))
    for request, expected in enumerate(reference_logits(directory, prompts)):
        torch.testing.assert_close(ours[request], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["tied", "llama3", "bias"])
@pytest.mark.parametrize("chunk", [None, 7], ids=["one chunk", "odd chunks"])
@pytest.mark.parametrize("is_scattered", [False, True], ids=["contiguous", "scattered"])
def test_greedy_tokens_equal_those_of_transformers(
    variant: str, chunk: int | None, is_scattered: bool, tmp_path: Path
) -> None:
    directory = make_tiny_llama(tmp_path / "model", **VARIANTS[variant])
    prompts, num_new = some_prompts(50, 200), 8
    runner = Runner(load(directory, block_size=16), block_size=16, is_scattered=is_scattered, num_blocks=1000)
    sequences = [list(prompt) for prompt in prompts]
    for _ in range(200 // (chunk or 200) + num_new + 1):
        work = {}
        for request, sequence in enumerate(sequences):
            past = runner.num_cached.get(request, 0)
            if len(sequence) < len(prompts[request]) + num_new:
                work[request] = sequence[past : past + (chunk or len(sequence))]
        if not work:
            break
        for request, logits in runner.step(work, room=200 + num_new).items():
            if runner.num_cached[request] == len(sequences[request]):
                sequences[request].append(int(logits[-1].argmax()))
    # The reference's choice after every prefix of our sequence: equal at each step means equal greedy outputs.
    for prompt, sequence, logits in zip(prompts, sequences, reference_logits(directory, sequences), strict=True):
        assert len(sequence) == len(prompt) + num_new
        assert sequence[len(prompt) :] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_greedy_outputs_of_the_tiny_model_are_varied(tiny: Path) -> None:
    runner = Runner(load(tiny), block_size=4)
    outputs = []
    for request, prompt in enumerate(some_prompts(8, 20)):
        output = [int(runner.step({request: prompt})[request][-1].argmax())]
        while len(output) < 20:
            output.append(int(runner.step({request: output[-1:]})[request][-1].argmax()))
        outputs.append(tuple(output))
        assert len(set(output)) > 8
    assert len(set(outputs)) == len(outputs)


def test_a_request_gets_the_same_bits_alone_and_among_others(tiny: Path) -> None:
    prompts = some_prompts(6, 60)
    model = load(tiny)
    together = Runner(model, block_size=4, is_scattered=True)
    prefill = together.step(dict(enumerate(prompts)))
    decode = together.step({request: [5 + request] for request in range(len(prompts))})
    for request, prompt in enumerate(prompts):
        alone = Runner(model, block_size=4)
        assert torch.equal(alone.step({0: prompt})[0], prefill[request])
        assert torch.equal(alone.step({0: [5 + request]})[0], decode[request])


def test_bfloat16_stays_near_float32(tiny: Path) -> None:
    prompts = dict(enumerate(some_prompts(5, 100)))
    exact = Runner(load(tiny), block_size=4).step(prompts)
    rough = Runner(load(tiny, dtype=torch.bfloat16), block_size=4).step(prompts)
    for request in prompts:
        assert rough[request].dtype == torch.float32
        similarity = torch.cosine_similarity(exact[request], rough[request], dim=-1)
        assert similarity.min() > 0.98


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


def edit_weights(directory: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """Set tensors of the checkpoint; None removes one."""
    tensors = load_file(directory / "model.safetensors") | change
    save_file({name: t for name, t in tensors.items() if t is not None}, directory / "model.safetensors")
    return directory


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


def edit_json(path: Path, change: dict[str, object]) -> Path:
    """Set keys of a JSON file; None removes one."""
    value = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: v for key, v in value.items() if v is not None}))
    return path.parent


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
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, r"rope_type.*'yarn'"),
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
