"""Latent attention and per-head products against brute force, on caches whose unseen slots hold NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_service.ops import cpu_attention, get_ops
from pd_service.ops.metadata import ForwardMetadata
from tests.test_ops import DIM, FULL, Batch, make_batch

torch.set_num_threads(1)
ops = get_ops("cpu")
SCALE = 0.3


def latent_batch(lens: list[tuple[int, int]], *, block_size: int, heads: int, scattered: bool) -> Batch:
    """`k_cache` and `keys` are the latents, `v_cache` and `values` the keys with position."""
    return make_batch(lens, block_size=block_size, kv_heads=1, group=heads, window=None, scattered=scattered)


def attend(
    batch: Batch,
    q_rope: torch.Tensor,
    at_once: int = cpu_attention.SCORES_AT_ONCE,
    few: int = cpu_attention.FEW_QUERIES,
) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attention, "SCORES_AT_ONCE", at_once)
        patch.setattr(cpu_attention, "FEW_QUERIES", few)
        return ops.latent_attention(batch.query, q_rope, batch.k_cache, batch.v_cache, batch.metadata, FULL, SCALE)


def brute_force(batch: Batch, q_rope: torch.Tensor) -> torch.Tensor:
    """Token by token and head by head, in float64."""
    rows: list[torch.Tensor] = []
    lens = zip(batch.metadata.query_lens, batch.metadata.kv_lens, batch.keys, batch.values, strict=True)
    for query_len, kv_len, latents, ropes in lens:
        for seen in range(kv_len - query_len + 1, kv_len + 1):
            latent, rope = latents[:seen, 0].double(), ropes[:seen, 0].double()
            asked = zip(batch.query[len(rows)].double(), q_rope[len(rows)].double(), strict=True)
            rows.append(torch.stack([((latent @ a + rope @ b) * SCALE).softmax(0) @ latent for a, b in asked]))
    return torch.stack(rows).float()


@settings(max_examples=100, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 4, 16]),
    heads=st.sampled_from([1, 4]),
    scattered=st.booleans(),
    at_once=st.sampled_from([1, 50, 300, cpu_attention.SCORES_AT_ONCE]),
    few=st.sampled_from([1, cpu_attention.FEW_QUERIES]),
    seed=st.integers(0, 2**16),
)
def test_latent_attention_sees_exactly_the_past(lens, block_size, heads, scattered, at_once, few, seed) -> None:
    torch.manual_seed(seed)
    batch = latent_batch(lens, block_size=block_size, heads=heads, scattered=scattered)
    q_rope = torch.randn(batch.query.shape)
    torch.testing.assert_close(attend(batch, q_rope, at_once, few), brute_force(batch, q_rope), rtol=1e-4, atol=1e-5)


def test_latent_attention_does_not_depend_on_where_blocks_lie_or_who_shares_the_batch() -> None:
    torch.manual_seed(1)
    lens = [(1, 30), (7, 20), (1, 3), (12, 0)]
    batch = latent_batch(lens, block_size=4, heads=3, scattered=True)
    q_rope = torch.randn(batch.query.shape)
    together = attend(batch, q_rope)
    start = 0
    for i, (query_len, past) in enumerate(lens):
        alone = latent_batch([(query_len, past)], block_size=4, heads=3, scattered=False)
        slots = torch.arange(query_len + past) + 4
        alone.k_cache.view(-1, 1, DIM)[slots] = batch.keys[i]
        alone.v_cache.view(-1, 1, DIM)[slots] = batch.values[i]
        own = slice(start, start + query_len)
        alone.query = batch.query[own]
        assert torch.equal(attend(alone, q_rope[own]), together[own])
        start += query_len


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("query_len", [2, 17, cpu_attention.FEW_QUERIES])
def test_a_few_queries_get_the_bits_they_would_get_one_by_one(query_len: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    past, heads, rank, rope_dim = 75, 4, 48, 16
    num_blocks = 1 + -(-(past + query_len) // 4)
    caches = [torch.randn(num_blocks, 4, 1, dim).to(dtype) for dim in (rank, rope_dim)]
    queries = [torch.randn(query_len, heads, dim).to(dtype) for dim in (rank, rope_dim)]
    table = torch.arange(1, num_blocks, dtype=torch.int32).unsqueeze(0)

    def attend_from(first: int, count: int) -> torch.Tensor:
        metadata = ForwardMetadata(
            query_lens=[count],
            kv_lens=[past + first + count],
            block_size=4,
            block_table={FULL: table},
            slot_mapping={},
        )
        own = [query[first : first + count] for query in queries]
        return ops.latent_attention(*own, *caches, metadata, FULL, SCALE)

    one_by_one = torch.cat([attend_from(i, 1) for i in range(query_len)])
    assert torch.equal(attend_from(0, query_len), one_by_one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(4, 16, 32), (3, 128, 24)], ids=str)
def test_each_head_meets_its_own_matrix_and_rows_ignore_the_batch(sizes, dtype) -> None:
    torch.manual_seed(2)
    heads, size_in, size_out = sizes
    weight, x = torch.randn(heads, size_out, size_in).to(dtype), torch.randn(9, heads, size_in).to(dtype)
    packed = ops.pack_head_linear(weight)
    result = ops.head_linear(x, packed)
    expected = torch.einsum("thi,hoi->tho", x.double(), weight.double())
    torch.testing.assert_close(result.double(), expected, rtol=1e-2, atol=0.1 if dtype == torch.bfloat16 else 1e-4)
    for rows in (slice(0, 1), slice(3, 5), slice(2, 9)):
        assert torch.equal(ops.head_linear(x[rows], packed), result[rows])
