"""What holds of every model family: it computes what transformers computes, from the same directory, however it is run.

A family's test file subclasses `FamilyLaws` once for each architecture. `save_random` makes the directories: weights
wide enough that every token depends on all before it, and no vector (bias, norm, sink) at a value that hides it.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from pd_service.config import EngineSettings
from pd_service.errors import ConfigError
from pd_service.models.config import MODEL_REGISTRY, load_model_config, model_class
from pd_service.models.loader import build_model
from tests.local_cluster import local_cluster
from tests.model_runner import Runner, load
from tests.one_loop import run_async

VOCAB_SIZE = 512
TINY = {  # keys that most families share
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
NUM_NEW = 8  # greedy tokens per prompt
PROMPT_TOKENS = 200  # the longest prompt; a family's windows are shorter


def save_random(
    config: PreTrainedConfig, directory: Path, *, seed: int = 0, shards: int = 1, dtype: str = "float32"
) -> Path:
    """Write a model of `config`, with an `initializer_range` of some 0.3, to `directory` and return that."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, tensor in model.state_dict().items():
            if tensor.ndim == 1 or name.endswith("bias"):  # transformers starts them at zero or one
                tensor.add_(0.3 * torch.randn_like(tensor))
    model = model.to(getattr(torch, dtype))
    total_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(directory, max_shard_size="1GB" if shards == 1 else -(-total_bytes // shards))
    return directory


def count_parameters(config: dict[str, object], directory: Path) -> int:
    """Those of the model that this config.json describes, which takes no memory here."""
    (directory / "config.json").write_text(json.dumps(config))
    model = build_model(load_model_config(directory), dtype=torch.bfloat16, device="meta", block_size=16)
    return sum(parameter.numel() for parameter in model.parameters())


def some_prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [1, 2, longest, *(rng.randint(1, longest) for _ in range(count - 3))]
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


@lru_cache(maxsize=2)
def _reference(directory: Path, dtype: torch.dtype) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


@torch.inference_mode()
def reference_logits(
    directory: Path, token_lists: list[list[int]], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """transformers' logits, float32 [tokens, vocab], of each list, alone and without a cache, computed in `dtype`."""
    model = _reference(directory, dtype)
    return [model(torch.tensor([tokens]), use_cache=False).logits[0].float() for tokens in token_lists]


def cosine_distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[tokens, vocab] each to [tokens]."""
    return 1 - torch.cosine_similarity(a, b, dim=-1)


def assert_greedy(directory: Path, prompts: list[list[int]], answered: list[list[int]], num_new: int) -> None:
    """`answered`, each a prompt and its output, is what transformers answers.

    Its choice after every prefix of our own answer, equal at each token, means equal greedy outputs.
    """
    for prompt, tokens, logits in zip(prompts, answered, reference_logits(directory, answered), strict=True):
        assert len(tokens) == len(prompt) + num_new
        assert tokens[len(prompt) :] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def edit_weights(directory: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """Set tensors of the checkpoint; None removes one."""
    tensors = load_file(directory / "model.safetensors") | change
    save_file({name: t for name, t in tensors.items() if t is not None}, directory / "model.safetensors")
    return directory


def edit_json(path: Path, change: dict[str, object]) -> Path:
    """Set keys of a JSON file, returns its directory; None removes one."""
    value = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: v for key, v in value.items() if v is not None or key not in change}))
    return path.parent


class FamilyLaws:
    """`variants` are configurations by name. The first one has all attention types: some laws run it alone.

    Each is a configuration of transformers with 512 tokens of vocabulary and room for 256 tokens; `shards` and
    `checkpoint_dtype` go to `save_random`, by name of the variant.
    """

    architecture: ClassVar[str]
    variants: ClassVar[dict[str, PreTrainedConfig]]
    shards: ClassVar[dict[str, int]] = {}
    checkpoint_dtype: ClassVar[dict[str, str]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "variant" in metafunc.fixturenames:
            metafunc.parametrize("variant", self.variants)

    @pytest.fixture(scope="class")
    @classmethod
    def made(cls) -> dict[str, Path]:
        return {}

    @pytest.fixture
    def directory(
        self, request: pytest.FixtureRequest, made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
    ) -> Path:
        """The variant the test is run for, or the first one; not to be changed."""
        params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
        name = params.get("variant", next(iter(self.variants)))
        if name not in made:
            made[name] = self._save(name, tmp_path_factory.mktemp("model"))
        return made[name]

    def _save(self, name: str, directory: Path) -> Path:
        shards, dtype = self.shards.get(name, 1), self.checkpoint_dtype.get(name, "float32")
        return save_random(self.variants[name], directory, shards=shards, dtype=dtype)

    def test_the_family_says_what_it_is(self, directory: Path) -> None:
        cls = model_class(self.architecture)
        assert json.loads((directory / "config.json").read_text())["architectures"] == [self.architecture]
        assert self.architecture in MODEL_REGISTRY
        assert cls.family_name
        assert cls.examples
        assert cls.attention

    @pytest.mark.parametrize("chunk", [None, 7], ids=["one chunk", "odd chunks"])
    @pytest.mark.parametrize("is_scattered", [False, True], ids=["contiguous", "scattered"])
    def test_logits_equal_those_of_transformers(
        self, variant: str, directory: Path, chunk: int | None, is_scattered: bool
    ) -> None:
        prompts = some_prompts(6, PROMPT_TOKENS)
        runner = Runner(load(directory), block_size=4, is_scattered=is_scattered)
        for ours, expected in zip(runner.logits(prompts, chunk), reference_logits(directory, prompts), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("chunk", [None, 7], ids=["one chunk", "odd chunks"])
    @pytest.mark.parametrize("is_scattered", [False, True], ids=["contiguous", "scattered"])
    def test_greedy_tokens_equal_those_of_transformers(
        self, variant: str, directory: Path, chunk: int | None, is_scattered: bool
    ) -> None:
        prompts = some_prompts(50, PROMPT_TOKENS)
        runner = Runner(load(directory, block_size=16), block_size=16, is_scattered=is_scattered)
        assert_greedy(directory, prompts, runner.greedy(prompts, NUM_NEW, chunk), NUM_NEW)

    def test_greedy_outputs_are_varied(self, directory: Path) -> None:
        prompts = some_prompts(8, 20)
        answered = Runner(load(directory), block_size=4).greedy(prompts, 20, None)
        outputs = {tuple(tokens[-20:]) for tokens in answered}
        assert len(outputs) == len(prompts)
        assert min(len(set(output)) for output in outputs) > 8

    def test_a_request_gets_the_same_bits_alone_and_among_others(self, variant: str, directory: Path) -> None:
        prompts = some_prompts(6, 60)
        model = load(directory)
        together = Runner(model, block_size=4, is_scattered=True)
        prefill = together.step(dict(enumerate(prompts)))
        decode = together.step({request: [5 + request] for request in range(len(prompts))})
        for request, prompt in enumerate(prompts):
            alone = Runner(model, block_size=4)
            assert torch.equal(alone.step({0: prompt})[0], prefill[request])
            assert torch.equal(alone.step({0: [5 + request]})[0], decode[request])

    def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(self, directory: Path) -> None:
        prompts = some_prompts(5, 100)
        exact = torch.cat(reference_logits(directory, prompts))
        theirs = torch.cat(reference_logits(directory, prompts, torch.bfloat16))
        ours = torch.cat(Runner(load(directory, dtype=torch.bfloat16), block_size=4).logits(prompts, None))
        assert ours.dtype == torch.float32
        our_distances, their_distances = cosine_distances(exact, ours), cosine_distances(exact, theirs)
        assert our_distances.median() < 0.01
        assert our_distances.median() <= 1.5 * their_distances.median()
        assert our_distances.mean() <= 2 * their_distances.mean()

    def test_a_missing_tensor_is_refused_whichever_it_is(self, directory: Path, tmp_path: Path) -> None:
        kinds = {re.sub(r"\d+", "0", name): name for name in load_file(directory / "model.safetensors")}
        for i, name in enumerate(kinds.values()):
            lacking = edit_weights(self._save(next(iter(self.variants)), tmp_path / str(i)), {name: None})
            with pytest.raises(ConfigError, match=f"lacks 1 tensors: {re.escape(name)}"):
                load(lacking)

    @pytest.mark.parametrize(
        "name", ["model.norm.bias", "model.layers.0.mlp.more.weight", "model.layers.9.mlp.gate_proj.weight"]
    )
    def test_a_tensor_too_many_is_refused(self, name: str, tmp_path: Path) -> None:
        directory = self._save(next(iter(self.variants)), tmp_path)
        with pytest.raises(ConfigError, match=rf"{re.escape(name)}.*no place in {self.architecture}"):
            load(edit_weights(directory, {name: torch.zeros(64)}))

    def test_a_prefill_and_a_decode_engine_answer_as_one_model(self, directory: Path) -> None:
        prompts = some_prompts(5, PROMPT_TOKENS)
        settings = EngineSettings(block_size=8, max_num_batched_tokens=64, max_num_seqs=4)

        async def answer() -> list[list[int]]:
            async with local_cluster(directory, settings=settings) as cluster:
                outputs = await asyncio.gather(*(cluster.generate(prompt, NUM_NEW) for prompt in prompts))
                assert [(await cluster.status(name)).received_tokens for name in cluster.nodes] == [
                    0,
                    sum(len(prompt) for prompt in prompts),
                ]
            return [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]

        answered = run_async(answer())
        assert_greedy(directory, prompts, answered, NUM_NEW)
