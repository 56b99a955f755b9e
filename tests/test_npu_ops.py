"""The operators of an NPU against those of the CPU: the calls that would be made, with references in place of kernels.

Every call passes torch_npu's schemas and the documented limits on its way. Cache slots that nobody may see hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_service.ops import ExpertWeights, contracts, cpu, npu, npu_calls
from pd_service.ops.metadata import ForwardMetadata
from pd_service.ops.npu_tables import causal_triangle, visible_tables
from tests.npu.host_library import SCHEMAS
from tests.npu.references import REFERENCES

torch.set_num_threads(1)

FULL = "FullAttention"
HALF = torch.bfloat16
BLOCK = 128
LENGTHS = st.lists(st.tuples(st.sampled_from([1, 1, 2, 5]), st.integers(0, 300)), min_size=1, max_size=4)


def rand(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def assert_near(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.dtype == expected.dtype
    torch.testing.assert_close(ours.float(), expected.float(), rtol=0.02, atol=0.02)


@dataclass
class Step:
    metadata: ForwardMetadata
    caches: list[torch.Tensor]


def make_step(lens: list[tuple[int, int]], window: int | None, rows: list[tuple[int, int]]) -> Step:
    """`lens` holds (new tokens, past) per request; `rows` (heads, dim) of each cache. What left the window is null."""
    counts = [-(-(new + past) // BLOCK) for new, past in lens]
    ids = (torch.randperm(sum(counts)) + 1).split(counts)
    caches = [torch.full((sum(counts) + 1, BLOCK, *row), torch.nan, dtype=HALF) for row in rows]
    table = torch.zeros(len(lens), max(counts) + 1, dtype=torch.int32)
    slots = []
    for i, (new, past) in enumerate(lens):
        positions = torch.arange(new + past)
        slot = ids[i][positions // BLOCK] * BLOCK + positions % BLOCK
        lost = 0 if window is None else max(0, past - window + 1)
        for cache in caches:
            cache.view(-1, *cache.shape[2:])[slot[lost:]] = rand(new + past - lost, *cache.shape[2:])
        table[i, : counts[i]] = ids[i]
        table[i, : lost // BLOCK] = 0
        slots.append(slot[past:])
    metadata = ForwardMetadata(
        query_lens=[new for new, _ in lens],
        kv_lens=[new + past for new, past in lens],
        block_size=BLOCK,
        block_table={FULL: table},
        slot_mapping={FULL: torch.cat(slots).int()},
    )
    return Step(metadata, caches)


@settings(max_examples=30, deadline=None)
@given(
    lens=LENGTHS,
    window=st.one_of(st.none(), st.integers(1, 140)),
    heads=st.sampled_from([(2, 1, 128), (4, 2, 128), (2, 2, 64), (4, 2, 64), (2, 1, 256), (2, 1, 16)]),
    has_sinks=st.booleans(),
)
def test_attention_sees_what_it_sees_on_a_cpu(
    lens: list[tuple[int, int]], window: int | None, heads: tuple[int, int, int], has_sinks: bool
) -> None:
    num_heads, kv_heads, dim = heads
    step = make_step(lens, window, [(kv_heads, dim)] * 2)
    query = rand(sum(new for new, _ in lens), num_heads, dim)
    sinks = rand(num_heads) if has_sinks else None
    args = query, *step.caches, step.metadata, FULL, dim**-0.5, window, sinks
    assert_near(npu.paged_attention(*args), cpu.paged_attention(*args))


@settings(max_examples=20, deadline=None)
@given(lens=LENGTHS, sizes=st.sampled_from([(2, 512, 64), (16, 512, 64), (3, 512, 64), (4, 32, 8)]))
def test_latent_attention_sees_what_it_sees_on_a_cpu(lens: list[tuple[int, int]], sizes: tuple[int, int, int]) -> None:
    heads, rank, rope = sizes
    step = make_step(lens, None, [(1, rank), (1, rope)])
    tokens = sum(new for new, _ in lens)
    args = rand(tokens, heads, rank), rand(tokens, heads, rope), *step.caches, step.metadata, FULL, 0.05
    assert_near(npu.latent_attention(*args), cpu.latent_attention(*args))


def share_of(position: int, window: int, new: int, past: int) -> float:
    """What the last new token makes of the key at `position`, all keys and one sink being alike: its share."""
    step = make_step([(new, past), (1, 5)], window, [(1, 128)] * 2)
    keys, values = step.caches
    keys.nan_to_num_().zero_()
    values.nan_to_num_().zero_()
    values[step.metadata.block_table[FULL][0, position // BLOCK].item(), position % BLOCK] = 1.0
    query, sinks = torch.zeros(new + 1, 1, 128, dtype=HALF), torch.zeros(1, dtype=HALF)
    answers = npu.paged_attention(query, keys, values, step.metadata, FULL, 1.0, window, sinks)
    return answers[new - 1, 0, 0].item()


@pytest.mark.parametrize("window", [1, 2, 45, 127, 128, 129, 173, 200])
@pytest.mark.parametrize(("new", "past"), [(1, 299), (3, 297), (300, 0)])
def test_a_window_of_w_tokens_sees_w_keys(window: int, new: int, past: int) -> None:
    """The token that asks is among them."""
    oldest = 300 - window
    assert share_of(oldest, window, new, past) == pytest.approx(1 / (window + 1), rel=0.01)
    assert share_of(299, window, new, past) == pytest.approx(1 / (window + 1), rel=0.01)
    if oldest % BLOCK:  # else the key before is in a block that was given back
        assert share_of(oldest - 1, window, new, past) == 0
    arguments = npu_calls.visibility([1], window, causal_triangle(torch.device("cpu")))
    assert (arguments["sparse_mode"], arguments["pre_tokens"], arguments["next_tokens"]) == (4, window - 1, 0)


@settings(max_examples=50, deadline=None)
@given(lens=LENGTHS, window=st.one_of(st.none(), st.integers(1, 200)))
def test_no_table_that_an_operator_gets_begins_with_a_null_block(
    lens: list[tuple[int, int]], window: int | None
) -> None:
    step = make_step(lens, window, [(1, 8)])
    tables = visible_tables(step.metadata, FULL, window)
    for row, kv_len in zip(tables.block_table.tolist(), tables.kv_lens, strict=True):
        assert all(row[: -(-kv_len // BLOCK)])
    assert visible_tables(step.metadata, FULL, window) is tables  # made once per step


@pytest.mark.parametrize("cache_rows", [((2, 16), (2, 16)), ((1, 512), (1, 64))], ids=["grouped", "latent"])
def test_new_keys_and_values_go_where_a_cpu_puts_them(cache_rows: tuple[tuple[int, int], ...]) -> None:
    step = make_step([(3, 126), (1, 0)], None, list(cache_rows))
    rows = [rand(4, 2 * heads, dim)[:, ::2] for heads, dim in cache_rows]  # as parts of a projection lie: apart
    theirs = [cache.clone() for cache in step.caches]
    slots = step.metadata.slot_mapping[FULL]
    npu.write_kv(*rows, *step.caches, slots)
    cpu.write_kv(*rows, *theirs, slots)
    for ours, expected in zip(step.caches, theirs, strict=True):
        assert torch.equal(ours.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("weight_dtype", [HALF, torch.float32])
def test_norms_are_those_of_a_cpu(weight_dtype: torch.dtype) -> None:
    x, residual, weight = rand(5, 48), rand(5, 48), rand(48, dtype=weight_dtype)
    assert_near(npu.rms_norm(x, weight, 1e-5), cpu.rms_norm(x, weight, 1e-5))
    for ours, expected in zip(
        npu.add_rms_norm(x, residual, weight, 1e-5), cpu.add_rms_norm(x, residual, weight, 1e-5), strict=True
    ):
        assert_near(ours, expected)


def test_the_norm_of_each_head_is_that_of_a_cpu() -> None:
    heads, weight = rand(5, 6, 32)[:, :4], rand(32)
    assert_near(npu.rms_norm(heads, weight, 1e-6), cpu.rms_norm(heads, weight, 1e-6))


def test_rotation_with_its_own_tables_is_that_of_a_cpu() -> None:
    x, angles = rand(7, 3, 32), torch.rand(7, 16) * 6
    turned = []
    for ops in (npu, cpu):
        cos, sin = (t.unsqueeze(1).to(HALF) for t in ops.rotary_tables(angles.cos(), angles.sin()))
        turned.append(ops.rotary(x, cos, sin))
    assert_near(*turned)


def test_gated_units_are_those_of_a_cpu() -> None:
    x = 4 * rand(5, 64)
    assert_near(npu.silu_and_mul(x), cpu.silu_and_mul(x))
    assert_near(npu.gelu_and_mul(x), cpu.gelu_and_mul(x))
    assert_near(npu.clipped_swiglu(x, 1.702, 7.0), cpu.clipped_swiglu(x, 1.702, 7.0))


def test_products_with_packed_weights_are_those_of_a_cpu() -> None:
    x, matrix, bias, per_head = rand(5, 32), rand(64, 32) / 6, rand(64), rand(4, 48, 8) / 3
    assert npu.pack_linear(matrix) is matrix  # the plan of memory counts no copy
    assert_near(npu.linear(x, npu.pack_linear(matrix), bias), cpu.linear(x, cpu.pack_linear(matrix), bias))
    gate_up, down = rand(64, 32) / 6, rand(32, 32) / 6
    packed = [(ops.pack_linear(gate_up), ops.pack_linear(down)) for ops in (npu, cpu)]
    assert_near(npu.gated_mlp(x, *packed[0]), cpu.gated_mlp(x, *packed[1]))
    heads = x.view(5, 4, 8)
    ours = npu.head_linear(heads, npu.pack_head_linear(per_head))
    assert_near(ours, cpu.head_linear(heads, cpu.pack_head_linear(per_head)))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_are_those_of_a_cpu(has_bias: bool, tokens: int) -> None:
    num, hidden, dim, k = 5, 32, 16, 2
    gate_up, down = rand(num, 2 * dim, hidden) / 6, rand(num, hidden, dim) / 4
    biases = {"gate_up_bias": rand(num, 2 * dim), "down_bias": rand(num, hidden)} if has_bias else {}
    chosen = torch.stack([torch.randperm(num - 1)[:k] for _ in range(tokens)])  # the last expert is idle
    x, shares = rand(tokens, hidden), torch.rand(tokens, k)
    results = []
    for ops in (npu, cpu):
        packed = {"gate_up": ops.pack_experts(gate_up), "down": ops.pack_experts(down)}
        weights = ExpertWeights(num_experts=num, **packed, **biases)
        results.append(ops.experts(x, chosen, shares, weights, ops.silu_and_mul))
    assert_near(*results)


def test_every_operator_has_a_schema_a_reference_and_limits() -> None:
    assert set(SCHEMAS) == set(REFERENCES) == set(contracts.POSITIONAL)


def test_a_call_that_breaks_a_limit_is_not_made() -> None:
    cache = torch.zeros(2, 8, 1, 16, dtype=HALF)
    with pytest.raises(contracts.ContractViolation, match="scatter_range"):
        npu.write_kv(rand(1, 1, 16), rand(1, 1, 16), cache, cache.clone(), torch.tensor([16], dtype=torch.int32))
    assert not cache.any()
