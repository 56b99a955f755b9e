"""The operators of some families alone: attention with sinks, further activations, norms with a more exact weight."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_service.ops import get_ops
from tests.test_ops import DIM, FULL, Batch, make_batch

torch.set_num_threads(1)
ops = get_ops("cpu")


def attend(batch: Batch, window: int | None, sinks: torch.Tensor | None) -> torch.Tensor:
    return ops.paged_attention(
        batch.query, batch.k_cache, batch.v_cache, batch.metadata, FULL, DIM**-0.5, window, sinks=sinks
    )


def brute_force(batch: Batch, window: int | None, sinks: torch.Tensor) -> torch.Tensor:
    """Each softmax with the sink as one more score, whose weight is thrown away; in float64."""
    out = torch.empty_like(batch.query, dtype=torch.float64)
    stops = torch.tensor(batch.metadata.query_lens).cumsum(0).tolist()
    for stop, query_len, key, value in zip(stops, batch.metadata.query_lens, batch.keys, batch.values, strict=True):
        group = batch.query.shape[1] // key.shape[1]
        keys, values = (t.double().repeat_interleave(group, dim=1).transpose(0, 1) for t in (key, value))
        query = batch.query[stop - query_len : stop].double().transpose(0, 1)
        back = torch.arange(len(key) - query_len, len(key)).unsqueeze(1) - torch.arange(len(key))  # [queries, keys]
        unseen = (back < 0) | (back >= (window or len(key)))
        scores = (query @ keys.transpose(1, 2) * DIM**-0.5).masked_fill(unseen, -torch.inf)
        sink = sinks.double().view(-1, 1, 1).expand(-1, query_len, 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        out[stop - query_len : stop] = (weights @ values).transpose(0, 1)
    return out.float()


@settings(max_examples=150, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=4),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    window=st.sampled_from([None, 1, 2, 5, 16, 100]),
    scattered=st.booleans(),
    height=st.sampled_from([0.0, 1.0, 5.0, 100.0, -100.0]),
    seed=st.integers(0, 2**16),
)
def test_a_sink_is_a_score_without_a_value(lens, kv_heads, group, window, scattered, height, seed) -> None:
    torch.manual_seed(seed)
    batch = make_batch(lens, block_size=4, kv_heads=kv_heads, group=group, window=window, scattered=scattered)
    sinks = torch.randn(kv_heads * group) + height
    expected = brute_force(batch, window, sinks)
    torch.testing.assert_close(attend(batch, window, sinks), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 100])
def test_sinks_are_exact_where_whole_stretches_of_keys_are_out_of_sight(window: int | None) -> None:
    torch.manual_seed(0)
    batch = make_batch([(700, 3), (1, 900)], block_size=16, kv_heads=1, group=2, window=window, scattered=False)
    sinks = torch.tensor([0.5, 3.0])
    torch.testing.assert_close(attend(batch, window, sinks), brute_force(batch, window, sinks), rtol=1e-4, atol=1e-5)


def test_a_sink_far_below_every_score_changes_nothing() -> None:
    torch.manual_seed(1)
    batch = make_batch([(1, 30), (7, 20), (12, 0)], block_size=4, kv_heads=2, group=3, window=5, scattered=True)
    assert torch.equal(attend(batch, 5, torch.full((6,), -1e4)), attend(batch, 5, None))


def test_with_sinks_a_request_gets_the_same_bits_alone_and_among_others() -> None:
    torch.manual_seed(2)
    lens, sinks = [(1, 30), (7, 20), (1, 3), (12, 0)], torch.randn(6)
    batch = make_batch(lens, block_size=4, kv_heads=2, group=3, window=None, scattered=True)
    together = attend(batch, None, sinks).split(batch.metadata.query_lens)
    queries = batch.query.split(batch.metadata.query_lens)
    for i, (query_len, past) in enumerate(lens):
        alone = make_batch([(query_len, past)], block_size=4, kv_heads=2, group=3, window=None, scattered=False)
        slots = torch.arange(query_len + past) + 4
        alone.k_cache.view(-1, 2, DIM)[slots] = batch.keys[i]
        alone.v_cache.view(-1, 2, DIM)[slots] = batch.values[i]
        alone.query = queries[i]
        assert torch.equal(attend(alone, None, sinks), together[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_follow_their_formulas(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x = (torch.randn(5, 24) * 4).to(dtype)
    kept = x.clone()
    gate, up = x.double().chunk(2, dim=-1)
    cubic = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    expected = 0.5 * gate * (1 + cubic.tanh()) * up
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(ops.gelu_and_mul(x).double(), expected, **tolerance)
    gate, up = x.double()[:, ::2].clamp(max=2.0), x.double()[:, 1::2].clamp(-2.0, 2.0)
    expected = gate / (1 + (-1.7 * gate).exp()) * (up + 1)
    torch.testing.assert_close(ops.clipped_swiglu(x, alpha=1.7, limit=2.0).double(), expected, **tolerance)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("dim", [1, 7, 20, 48])
def test_a_row_of_an_activation_does_not_depend_on_the_others(dim: int) -> None:
    torch.manual_seed(5)
    x = torch.randn(40, 2 * dim) * 3
    for activate in (ops.silu_and_mul, ops.gelu_and_mul, partial(ops.clipped_swiglu, alpha=1.702, limit=7.0)):
        whole = activate(x)
        for start, rows in ((0, 1), (5, 1), (3, 2), (7, 13)):
            assert torch.equal(activate(x[start : start + rows].clone()), whole[start : start + rows])


def test_a_norm_with_a_float32_weight_is_rounded_once() -> None:
    torch.manual_seed(4)
    x, weight = torch.randn(5, 24).bfloat16(), 1 + torch.randn(24) / 100
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert torch.equal(ops.rms_norm(x, weight, 1e-6), exact.to(torch.bfloat16))
