"""What the tests of splitting rest on: the integer model sees every wrong byte of KV, and its reference is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pd_service.engine.messages import KvArrived, ReleaseHeld, Submit
from pd_service.engine.request_state import PullStats
from pd_service.models.config import load_model_config
from pd_service.models.loader import load_model
from pd_service.request import RequestId
from tests.integer_model import (
    ACCEPTED,
    POISON,
    SALTS,
    VARIANTS,
    Attention,
    UnwrittenRead,
    integer_models,
    save_integer_model,
)
from tests.integer_reference import continuation, right_guesses
from tests.split_engines import Split, plan_pull, read
from tests.stepped_engine import Shape, SteppedEngine, new_request

NAME, OTHER = RequestId("a"), RequestId("b")
PROMPT, OTHER_PROMPT = tuple(range(100, 110)), tuple(range(200, 210))
FLIP = 0x55  # what a byte is changed by


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Attention, Path]]:
    with integer_models(tmp_path_factory.mktemp("integer")) as dirs:
        yield dirs


def computed(model_dir: Path, num_drafts: int = 0) -> SteppedEngine:
    """An engine with two requests, each with a few tokens of its output."""
    engine = SteppedEngine(model_dir, Shape(num_drafts=num_drafts))
    engine.step(
        Submit(new_request(NAME, PROMPT, 20)),
        Submit(new_request(OTHER, OTHER_PROMPT, 20)),
    )
    engine.step_until(lambda: all(len(engine.tokens[name]) >= 3 for name in (NAME, OTHER)))
    return engine


class NextStep:
    """The next step of "a" alone, as often as one likes: it leaves the cache as it found it."""

    def __init__(self, engine: SteppedEngine) -> None:
        batch = [s for s in engine.core.scheduler.schedule(0.0) if s.state.request_id == NAME]
        self._worker, self._rows = engine.core.worker, engine.core.build_model_inputs(batch)
        self.position = self._rows[0].first
        self.tables = self._rows[0].block_ids
        self._hidden = torch.empty(0)
        compute_logits = self._worker.model.compute_logits

        def recorded(hidden: torch.Tensor) -> torch.Tensor:
            self._hidden = hidden
            return compute_logits(hidden)

        self._worker.model.compute_logits = recorded

    def state(self) -> int:
        """What the last layer passes on at `position`: all that the model says follows from it."""
        self._worker.run(self._rows)
        return int(self._hidden[0, 0])


def visible_slots(engine: SteppedEngine, step: NextStep, buffer: int) -> list[tuple[int, int]]:
    """(block, offset) of every token before `step.position` that it sees in this buffer."""
    described = engine.layout.buffers[buffer]
    first = max(0, step.position - described.sliding_window + 1) if described.sliding_window else 0
    table = step.tables[described.attn_type]
    return [(table[p // described.block_size], p % described.block_size) for p in range(first, step.position)]


def model_buffers(engine: SteppedEngine) -> list[int]:
    return [i for i, b in enumerate(engine.layout.buffers) if b.layer < engine.num_model_layers]


def cache_bytes(engine: SteppedEngine, buffer: int) -> npt.NDArray[np.uint8]:
    array: npt.NDArray[np.uint8] = engine.cache(buffer).numpy()
    return array


@pytest.mark.parametrize("attention", VARIANTS)
def test_every_byte_of_every_visible_slot_decides(model_dirs: dict[Attention, Path], attention: Attention) -> None:
    engine = computed(model_dirs[attention])
    step = NextStep(engine)
    right = step.state()
    seen = {right}
    for buffer in model_buffers(engine):
        bytes_of = cache_bytes(engine, buffer)
        for block, offset in visible_slots(engine, step, buffer):
            for i in range(bytes_of.shape[2]):
                bytes_of[block, offset, i] ^= FLIP
                state = step.state()
                assert state not in seen, f"byte {i} of slot {offset} in block {block} of buffer {buffer} is not seen"
                seen.add(state)
                bytes_of[block, offset, i] ^= FLIP
    assert step.state() == right


@pytest.mark.parametrize("attention", VARIANTS)
def test_no_other_byte_decides(model_dirs: dict[Attention, Path], attention: Attention) -> None:
    engine = computed(model_dirs[attention], num_drafts=1)
    step = NextStep(engine)
    right = step.state()
    for buffer in range(len(engine.layout.buffers)):
        is_visible = np.zeros(cache_bytes(engine, buffer).shape[:2], bool)
        if buffer in model_buffers(engine):
            is_visible[tuple(np.transpose(visible_slots(engine, step, buffer)))] = True
        cache_bytes(engine, buffer)[~is_visible] ^= FLIP
    assert step.state() == right


@pytest.mark.parametrize("attention", VARIANTS)
def test_a_look_at_a_slot_nobody_wrote_is_an_error(model_dirs: dict[Attention, Path], attention: Attention) -> None:
    engine = computed(model_dirs[attention], num_drafts=1)
    step = NextStep(engine)
    for buffer in range(len(engine.layout.buffers)):
        cache = engine.kv.cache_tensors[buffer]
        block, offset = visible_slots(engine, step, buffer)[0]
        kept = cache[block, offset, 0, 0].clone()
        cache[block, offset, 0, 0] = POISON
        with pytest.raises(UnwrittenRead, match="never written"):
            step.state()
        cache[block, offset, 0, 0] = kept


@pytest.mark.parametrize("attention", VARIANTS)
def test_exchanged_block_tables_are_seen(model_dirs: dict[Attention, Path], attention: Attention) -> None:
    engine = computed(model_dirs[attention])
    for manager in engine.kv.managers.values():
        tables = manager.req_to_blocks
        tables[NAME], tables[OTHER] = tables[OTHER], tables[NAME]
    engine.step_until(lambda: len(engine.finish) == 2)
    assert engine.tokens[NAME] != continuation(attention, PROMPT, 20)
    assert engine.tokens[OTHER] != continuation(attention, OTHER_PROMPT, 20)


@pytest.mark.parametrize("attention", VARIANTS)
def test_a_wrong_byte_in_a_hand_over_is_seen(model_dirs: dict[Attention, Path], attention: Attention) -> None:
    for buffer in range(len(VARIANTS[attention][0]) * 2):
        split = Split(model_dirs[attention], Shape(), Shape())
        split.hand_over(new_request(NAME, PROMPT, 8))
        described = split.decode.layout.buffers[buffer]
        table = split.decode.kv.get_block_ids(NAME)[described.attn_type]
        last = len(PROMPT) - 1
        split.decode.cache(buffer)[table[last // 4], last % 4, buffer] ^= FLIP
        split.decode.step_until(lambda split=split: NAME in split.decode.finish)  # type: ignore[misc]
        assert split.output(NAME) != continuation(attention, PROMPT, 8)


@pytest.mark.parametrize("attention", VARIANTS)
def test_blocks_that_are_read_too_late_are_seen(model_dirs: dict[Attention, Path], attention: Attention) -> None:
    split = Split(model_dirs[attention], Shape(num_tokens=128, max_requests=1), Shape())
    split.decode.step(Submit(split.compute_prompt(new_request(NAME, PROMPT, 8))))
    hold, order = split.prefill.holds[NAME], split.decode.pulls[NAME]
    split.prefill.step(ReleaseHeld(NAME))
    for i in range(8):  # others write where the prompt was
        split.prefill.run(new_request(f"next-{i}", tuple(range(400 + 40 * i, 440 + 40 * i)), 2))
    read(split.prefill, split.decode, plan_pull(split.prefill, split.decode, hold, order))
    split.decode.step(KvArrived(NAME, PullStats(), 0))
    split.decode.step_until(lambda: NAME in split.decode.finish)
    assert split.output(NAME) != continuation(attention, PROMPT, 8)


@pytest.mark.parametrize("attention", VARIANTS)
def test_kv_that_never_came_is_an_error(model_dirs: dict[Attention, Path], attention: Attention) -> None:
    split = Split(model_dirs[attention], Shape(), Shape())
    split.decode.step(Submit(split.compute_prompt(new_request(NAME, PROMPT, 8))))
    with pytest.raises(UnwrittenRead, match="never written"):
        split.decode.step(KvArrived(NAME, PullStats(), 0))


@pytest.mark.parametrize("attention", VARIANTS)
def test_the_draft_layer_is_right_as_often_as_it_says(attention: Attention) -> None:
    text = [*PROMPT, *continuation(attention, PROMPT, 200)]
    share = sum(right_guesses(attention, text)[len(PROMPT) :]) / 200
    assert abs(share - ACCEPTED) < 0.1


@pytest.mark.parametrize("salts", [(SALTS[0] + 1, SALTS[1]), (SALTS[0], SALTS[1] + 1)])
@pytest.mark.usefixtures("model_dirs")
def test_other_weights_are_another_model(tmp_path: Path, salts: tuple[int, int]) -> None:
    other = SteppedEngine(save_integer_model(tmp_path / "other", "full", salts), Shape())
    assert other.run(new_request(NAME, PROMPT, 8)) != continuation("full", PROMPT, 8)


def test_the_draft_layer_is_built_only_when_asked_for(model_dirs: dict[Attention, Path]) -> None:
    config = load_model_config(model_dirs["both"])
    num_layers = []
    for with_draft in (False, True):
        model, _ = load_model(
            model_dirs["both"], dtype=torch.float32, device="cpu", block_size=4, with_draft=with_draft
        )
        num_layers.append(model.get_cache_info().num_layers)
    assert num_layers == [config.hf.num_hidden_layers, config.hf.num_hidden_layers + config.hf.num_draft_layers]
