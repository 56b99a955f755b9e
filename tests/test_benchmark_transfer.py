"""Laws of the transfer benchmark: every system moves the same bytes, and a wrong byte is found. No speed is judged."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import transfer
from benchmarks.transfer_cells import MODELS, TABLES, Cell, cache_tokens, cells, erase, first_wrong, flat, layout
from transfer.plan import plan_read

PROMPT = 128
NUM_TOKENS = 2 * PROMPT
BYTES_PER_TOKEN = {"smollm2": 60 * 3 * 64 * 4, "mla": 27 * (512 + 64) * 2}


def cells_of(model: str, block_size: int) -> list[Cell]:
    return cells(layout(MODELS[model], block_size, NUM_TOKENS), [PROMPT])


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("model", list(MODELS))
def test_every_cell_moves_all_bytes_of_its_prompt(model: str, block_size: int) -> None:
    made = cells_of(model, block_size)
    assert [cell.tables for cell in made] == list(TABLES)
    assert {cell.runs.num_bytes for cell in made} == {PROMPT * BYTES_PER_TOKEN[model]}


@pytest.mark.parametrize("block_size", [1, 16, 100, 128, 1000])
@pytest.mark.parametrize("prompt", [1, 128, 1000])
def test_a_cache_has_room_for_more_than_the_longest_prompt(prompt: int, block_size: int) -> None:
    num_tokens = cache_tokens(prompt, block_size)
    assert num_tokens % block_size == 0
    assert num_tokens - block_size >= 1.5 * prompt
    assert {c.num_tokens for c in cells(layout(MODELS["mla"], block_size, num_tokens), [prompt])} == {prompt}


def test_contiguous_tables_have_a_run_per_buffer_and_scattered_ones_many() -> None:
    contiguous, scattered = cells_of("smollm2", 16)
    assert len(contiguous.runs) == 60
    assert len(scattered.runs) > 60 * 4


def moved() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A source, a destination the runs were copied to, and the flat runs, which have gaps on both sides."""
    shape = layout(MODELS["mla"], 16, NUM_TOKENS)
    runs = plan_read(shape, shape, {"FullAttention": [5, 2, 9]}, {"FullAttention": [1, 7, 3]}, 0, 48)
    starts = np.cumsum([0, *(b.num_bytes + 64 for b in shape.buffers[:-1])])
    flat_runs = flat(runs, starts, starts)
    source = np.random.default_rng(0).integers(1, 256, starts[-1] + shape.buffers[-1].num_bytes, dtype=np.uint8)
    dest = np.full_like(source, 255)
    for src, dst, length in flat_runs.T.tolist():
        dest[dst : dst + length] = source[src : src + length]
    return source, dest, flat_runs


@pytest.mark.parametrize("where", [0, -1])
def test_one_wrong_byte_is_found_in_its_run(where: int) -> None:
    source, dest, runs = moved()
    assert first_wrong(source, dest, runs) is None
    last = runs.shape[1] - 1
    run = last if where else 0
    dest[runs[1, run] + (runs[2, run] - 1 if where else 0)] ^= 1
    assert first_wrong(source, dest, runs) == run


def test_erasing_takes_the_destination_of_the_runs_and_nothing_else() -> None:
    _, dest, runs = moved()
    num_kept = int((dest != 0).sum()) - int(runs[2].sum())
    erase(dest, runs)
    assert int((dest != 0).sum()) == num_kept


def test_a_run_measures_every_cell_of_our_planes_and_their_bounds() -> None:
    choice = transfer.Choice(models=["mla"], prompts=[32], block_sizes=[16], systems=["shm", "tcp"], peer_python=None)
    findings = transfer.Findings()
    transfer.run_model(choice, "mla", 16, findings)
    assert [set(cell["gb_per_s"]) for cell in findings.cells] == [{"memcpy", "shm", "raw", "tcp"}] * 2  # type: ignore[call-overload]
    assert len({bar.name for bar in findings.bars}) == len(findings.bars) == 4
    assert [bar.aim for bar in findings.bars] == [0.85, 0.85, None, None]


def test_shared_memory_is_held_to_an_aim_for_scattered_blocks_of_128_tokens_only() -> None:
    for block_size, aim in ((16, None), (128, 0.6)):
        scattered = cells_of("smollm2", block_size)[1]
        assert transfer.aim_of_bound("shm", scattered) == aim
        assert transfer.aim_of_bound("tcp", scattered) is None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--prompts", "0"], "--prompts must be at least 1, given 0"),
        (["--block-sizes", "16", "-1"], "--block-sizes must be at least 1, given -1"),
        (["--systems", "NIXL"], "NIXL need --peer-python"),
    ],
)
def test_a_choice_that_cannot_be_measured_is_refused(
    arguments: list[str], problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["transfer", *arguments])
    with pytest.raises(SystemExit):
        transfer.chosen()
    assert problem in capsys.readouterr().err
