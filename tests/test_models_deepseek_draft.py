"""DeepSeek V3's layer for multi-token prediction against transformers' own, through the same directory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from pd_service.config import EngineSettings, SpeculativeSettings
from pd_service.errors import ConfigError
from pd_service.models.base import DraftingLM
from pd_service.models.loader import load_model
from tests.local_cluster import local_cluster
from tests.model_parity import assert_greedy, edit_json, edit_weights, save_random, some_prompts
from tests.model_runner import Runner
from tests.one_loop import run_async
from tests.test_models_deepseek import YARN, v3

torch.set_num_threads(1)
NUM_LAYERS = 3
PATH = f"model.layers.{NUM_LAYERS}."


@dataclass
class Reference:
    """transformers' model and draft layer; tokens alone and without a cache."""

    model: torch.nn.Module
    layer: MtpLayer

    @torch.inference_mode()
    def hidden(self, tokens: list[int]) -> torch.Tensor:  # [tokens, hidden]
        return self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]

    @torch.inference_mode()
    def draft(self, hidden: torch.Tensor, next_ids: list[int]) -> torch.Tensor:  # [tokens, hidden], both
        embedded = self.model.model.embed_tokens(torch.tensor([next_ids]))
        rotation = self.model.model.rotary_emb(embedded, torch.arange(len(next_ids)).unsqueeze(0))
        return self.layer(embedded, hidden.unsqueeze(0), rotation, None, None, None)[0]


def make_layer() -> MtpLayer:
    config = v3(rope_parameters=YARN)
    config._attn_implementation = "sdpa"
    layer = MtpLayer(config, DeepseekV3DecoderLayer, DeepseekV3RMSNorm, NUM_LAYERS)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        for tensor in layer.state_dict().values():
            torch.nn.init.normal_(tensor, std=0.2)
    return layer.eval()


def released_names(layer: MtpLayer) -> dict[str, torch.Tensor]:
    """The layer's tensors as a released checkpoint names them, each expert's by itself."""
    tensors = {}
    for name, tensor in layer.state_dict().items():
        path = PATH + name.replace("mtp_block.", "").replace("post_norm.", "shared_head.norm.")
        if name.endswith("experts.gate_up_proj"):
            for i, (gate, up) in enumerate(expert.chunk(2) for expert in tensor):
                prefix = path.replace("gate_up_proj", f"{i}.")
                tensors |= {f"{prefix}gate_proj.weight": gate.clone(), f"{prefix}up_proj.weight": up.clone()}
        elif name.endswith("experts.down_proj"):
            tensors |= {path.replace("down_proj", f"{i}.down_proj.weight"): e.clone() for i, e in enumerate(tensor)}
        else:
            tensors[path] = tensor
    return tensors


def load(directory: Path, *, with_draft: bool) -> DraftingLM:
    options = {"dtype": torch.float32, "device": "cpu", "block_size": 4}
    model, _ = load_model(directory, with_draft=with_draft, **options)
    assert isinstance(model, DraftingLM)
    return model


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without the layer, although its config.json speaks of one, as transformers writes it."""
    return save_random(v3(rope_parameters=YARN), tmp_path_factory.mktemp("bare"))


def add_layer(directory: Path, change: dict[str, torch.Tensor | None] | None = None) -> Path:
    """The layer into the checkpoint, with its copies of embedding and head, then `change`."""
    tensors = load_file(directory / "model.safetensors")
    copies = {
        f"{PATH}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{PATH}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    return edit_weights(directory, released_names(make_layer()) | copies | (change or {}))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_layer(save_random(v3(rope_parameters=YARN), tmp_path_factory.mktemp("drafting")))


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    return save_random(v3(rope_parameters=YARN), tmp_path / "model")


@pytest.fixture(scope="module")
def reference(bare: Path) -> Reference:
    return Reference(AutoModelForCausalLM.from_pretrained(bare, dtype=torch.float32), make_layer())


class DraftRunner(Runner):
    """Steps of the model, and after each one of its draft layer over the same positions."""

    def follow(self, work: dict[int, tuple[list[int], list[int]]]) -> dict[int, torch.Tensor]:
        """Append tokens, with the one that follows each, to their requests; the draft's hidden states of each."""
        hidden, metadata = self.forward({request: tokens for request, (tokens, _) in work.items()})
        spans = zip(metadata.query_lens, metadata.kv_lens, strict=True)
        positions = torch.cat([torch.arange(end - length, end) for length, end in spans])
        next_ids = torch.tensor([token for _, following in work.values() for token in following])
        with torch.inference_mode():
            drafted = self.model.draft(hidden, next_ids, positions, metadata)
        return dict(zip(work, drafted.split(metadata.query_lens), strict=True))


def chunks(prompts: list[list[int]], start: int, chunk: int) -> dict[int, tuple[list[int], list[int]]]:
    """For every prompt that reaches so far: tokens from `start` on, and the token after each."""
    work = {r: (p[start : start + chunk], p[start + 1 : start + chunk + 1]) for r, p in enumerate(prompts)}
    return {r: (tokens[: len(following)], following) for r, (tokens, following) in work.items() if following}


@pytest.mark.parametrize("chunk", [200, 7], ids=["one chunk", "odd chunks"])
@pytest.mark.parametrize("is_scattered", [False, True], ids=["contiguous", "scattered"])
def test_draft_hidden_states_and_logits_equal_those_of_transformers(
    chunk: int, is_scattered: bool, directory: Path, reference: Reference
) -> None:
    prompts = [[3, *prompt] for prompt in some_prompts(6, 150)]
    runner = DraftRunner(load(directory, with_draft=True), block_size=4, is_scattered=is_scattered)
    parts: dict[int, list[torch.Tensor]] = {request: [] for request in range(len(prompts))}
    for start in range(0, 200, chunk):
        if work := chunks(prompts, start, chunk):
            for request, drafted in runner.follow(work).items():
                parts[request].append(drafted)
    for request, prompt in enumerate(prompts):
        ours, expected = torch.cat(parts[request]), reference.draft(reference.hidden(prompt[:-1]), prompt[1:])
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        with torch.inference_mode():
            logits = runner.model.compute_draft_logits(ours)
            torch.testing.assert_close(logits, reference.model.lm_head(expected), rtol=1e-4, atol=1e-4)


def test_a_further_guess_goes_on_from_the_draft_layers_own_hidden_state(directory: Path, reference: Reference) -> None:
    prompt, guess = some_prompts(3, 40)[2], 77
    runner = DraftRunner(load(directory, with_draft=True), block_size=4)
    drafted = runner.follow({0: (prompt[:-1], prompt[1:])})[0]
    _, metadata = runner.forward({0: prompt[-1:]})  # a slot for the next position
    with torch.inference_mode():
        position = torch.tensor([len(prompt) - 1])
        ours = runner.model.draft(drafted[-1:], torch.tensor([guess]), position, metadata)
    hidden = reference.hidden(prompt[:-1])
    chained = torch.cat((hidden, reference.draft(hidden, prompt[1:])[-1:]))
    torch.testing.assert_close(ours, reference.draft(chained, [*prompt[1:], guess])[-1:], rtol=1e-4, atol=1e-4)


def caches(model: DraftingLM) -> list[tuple[int, str, int, int]]:
    infos = model.get_cache_info().layer_infos
    return [(info.layer_idx, c.cache_name, c.num_head, c.dim) for info in infos for c in info.caches]


def test_a_draft_layer_has_its_caches_behind_the_models_own(directory: Path) -> None:
    own = [(i, name, 1, dim) for i in range(NUM_LAYERS) for name, dim in (("nope_cache", 40), ("rope_cache", 8))]
    assert caches(load(directory, with_draft=False)) == own
    drafts = [(NUM_LAYERS, "nope_cache", 1, 40), (NUM_LAYERS, "rope_cache", 1, 8)]
    assert caches(load(directory, with_draft=True)) == own + drafts


def test_the_model_computes_the_same_with_a_draft_layer_without_and_beside_one(directory: Path, bare: Path) -> None:
    prompts = dict(enumerate(some_prompts(4, 50)))
    models = load(directory, with_draft=True), load(directory, with_draft=False), load(bare, with_draft=False)
    first, *others = (Runner(model, block_size=4).step(prompts) for model in models)
    assert all(torch.equal(first[request], other[request]) for other in others for request in prompts)


def test_embedding_and_head_are_held_once_whether_the_checkpoint_repeats_them_or_not(fresh: Path) -> None:
    repeated = load(add_layer(fresh), with_draft=True)
    absent = {f"{PATH}embed_tokens.weight": None, f"{PATH}shared_head.head.weight": None}
    shared = load(add_layer(fresh, absent), with_draft=True)
    for model in (repeated, shared):
        vocabulary = [name for name, _ in model.named_parameters() if "embed" in name or "head" in name]
        assert vocabulary == ["model.embed_tokens.weight", "lm_head.weight", "draft_layer.shared_head.norm.weight"]


@pytest.mark.parametrize("name", [f"{PATH}embed_tokens.weight", f"{PATH}shared_head.head.weight"])
def test_a_repeated_tensor_that_differs_is_refused(name: str, fresh: Path) -> None:
    other = load_file(fresh / "model.safetensors")["lm_head.weight"] + 0.01
    with pytest.raises(ConfigError, match=rf"{name}.*no copy of"):
        load(add_layer(fresh, {name: other}), with_draft=True)


def test_a_head_tied_to_the_embedding_is_the_draft_layers_too(tmp_path: Path) -> None:
    directory = save_random(v3(rope_parameters=YARN, tie_word_embeddings=True), tmp_path)
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"].clone()
    edit_weights(directory, released_names(make_layer()) | {f"{PATH}shared_head.head.weight": embedding})
    assert load(directory, with_draft=True).get_cache_info().num_layers == NUM_LAYERS + 1


def test_a_draft_layer_is_refused_where_the_checkpoint_has_none_or_a_part(bare: Path, fresh: Path) -> None:
    with pytest.raises(ConfigError, match=rf"no complete layer for multi-token prediction: 42 tensors.*{PATH}"):
        load(bare, with_draft=True)
    with pytest.raises(ConfigError, match=rf"no complete layer for multi-token prediction: 1 tensors.*{PATH}"):
        load(add_layer(fresh, {f"{PATH}eh_proj.weight": None}), with_draft=True)


def test_a_draft_layer_is_refused_where_config_json_speaks_of_none(fresh: Path) -> None:
    edit_json(fresh / "config.json", {"num_mtp_layers": None, "num_nextn_predict_layers": 0})
    with pytest.raises(ConfigError, match="no layers for multi-token prediction"):
        load(fresh, with_draft=True)
    with pytest.raises(ConfigError, match=rf"{PATH}.*no place"):
        load(add_layer(fresh), with_draft=False)


def test_an_unknown_tensor_of_the_draft_layer_is_refused(fresh: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{PATH}more\.weight.*no place"):
        load(add_layer(fresh, {f"{PATH}more.weight": torch.zeros(4)}), with_draft=True)


def test_draft_layers_after_the_first_are_passed_over(fresh: Path) -> None:
    edit_json(fresh / "config.json", {"num_nextn_predict_layers": 2})
    add_layer(fresh, {f"model.layers.{NUM_LAYERS + 1}.enorm.weight": torch.zeros(64)})
    for with_draft in (True, False):
        assert load(fresh, with_draft=with_draft).get_cache_info().num_layers == NUM_LAYERS + with_draft


def test_two_engines_that_guess_with_it_answer_as_one_model(directory: Path, bare: Path) -> None:
    prompts, num_new = some_prompts(5, 60), 12
    settings = EngineSettings(block_size=8, speculative=SpeculativeSettings(method="mtp", num_tokens=2))

    async def answer() -> list[list[int]]:
        async with local_cluster(directory, settings=settings) as cluster:
            outputs = await asyncio.gather(*(cluster.generate(prompt, num_new) for prompt in prompts))
        return [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]

    assert_greedy(bare, prompts, run_async(answer()), num_new)
