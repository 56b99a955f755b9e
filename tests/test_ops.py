"""The CPU operators against brute force. Every cache slot that no query may see holds NaN, so that reading it shows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_service.errors import ConfigError
from pd_service.ops import get_ops
from pd_service.ops.metadata import ForwardMetadata

torch.set_num_threads(1)
ops = get_ops("cpu")
FULL = "FullAttention"
DIM = 8


@dataclass
class Batch:
    """A step's caches and metadata, plus each request's keys and values in order, for the brute force."""

    metadata: ForwardMetadata
    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_batch(
    lens: list[tuple[int, int]], *, block_size: int, kv_heads: int, group: int, window: int | None, scattered: bool
) -> Batch:
    """`lens` holds (query_len, past) per request. Blocks wholly before the first query's window are null."""
    num_blocks = [-(-(q + past) // block_size) for q, past in lens]
    ids = torch.randperm(sum(num_blocks)) if scattered else torch.arange(sum(num_blocks))
    k_cache = torch.full((sum(num_blocks) + 1, block_size, kv_heads, DIM), torch.nan)
    v_cache = k_cache.clone()
    table = torch.zeros(len(lens), max(num_blocks) + 1, dtype=torch.int32)
    slots, keys, values = [], [], []
    for i, (query_len, past) in enumerate(lens):
        kv_len = query_len + past
        own = ids[sum(num_blocks[:i]) :][: num_blocks[i]] + 1
        skipped = 0 if window is None else max(0, past - window + 1)
        key, value = torch.randn(2, kv_len, kv_heads, DIM)
        positions = torch.arange(kv_len)
        slot = own[positions // block_size] * block_size + positions % block_size
        seen = slot[skipped:]
        k_cache.view(-1, kv_heads, DIM)[seen], v_cache.view(-1, kv_heads, DIM)[seen] = key[skipped:], value[skipped:]
        own[: skipped // block_size] = 0
        table[i, : num_blocks[i]] = own
        slots.append(slot[past:])
        keys.append(key)
        values.append(value)
    metadata = ForwardMetadata(
        query_lens=[q for q, _ in lens],
        kv_lens=[q + past for q, past in lens],
        block_size=block_size,
        block_table={FULL: table},
        slot_mapping={FULL: torch.cat(slots).int()},
    )
    query = torch.randn(sum(q for q, _ in lens), kv_heads * group, DIM)
    return Batch(metadata, query, k_cache, v_cache, keys, values)


def brute_force(batch: Batch, window: int | None) -> torch.Tensor:
    """Attention token by token and head by head, in float64."""
    rows, start = [], 0
    for query_len, kv_len, key, value in zip(
        batch.metadata.query_lens, batch.metadata.kv_lens, batch.keys, batch.values, strict=True
    ):
        group = batch.query.shape[1] // key.shape[1]
        for i in range(query_len):
            position = kv_len - query_len + i
            lo = 0 if window is None else max(0, position - window + 1)
            heads = []
            for h, q in enumerate(batch.query[start + i].double()):
                scores = key[lo : position + 1, h // group].double() @ q * DIM**-0.5
                heads.append(scores.softmax(0) @ value[lo : position + 1, h // group].double())
            rows.append(torch.stack(heads))
        start += query_len
    return torch.stack(rows).float()


def attend(batch: Batch, window: int | None) -> torch.Tensor:
    return ops.paged_attention(
        batch.query, batch.k_cache, batch.v_cache, batch.metadata, FULL, DIM**-0.5, sliding_window=window
    )


@settings(max_examples=150, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 4, 16]),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    window=st.sampled_from([None, 1, 2, 5, 16, 100]),
    scattered=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_paged_attention_sees_exactly_its_window(lens, block_size, kv_heads, group, window, scattered, seed) -> None:
    torch.manual_seed(seed)
    batch = make_batch(lens, block_size=block_size, kv_heads=kv_heads, group=group, window=window, scattered=scattered)
    torch.testing.assert_close(attend(batch, window), brute_force(batch, window), rtol=1e-4, atol=1e-5)


def test_attention_does_not_depend_on_where_blocks_lie_or_who_shares_the_batch() -> None:
    torch.manual_seed(1)
    lens = [(1, 30), (7, 20), (1, 3), (12, 0)]
    batch = make_batch(lens, block_size=4, kv_heads=2, group=3, window=None, scattered=True)
    together = attend(batch, None)
    start = 0
    for i, (query_len, past) in enumerate(lens):
        alone = make_batch([(query_len, past)], block_size=4, kv_heads=2, group=3, window=None, scattered=False)
        slots = torch.arange(query_len + past) + 4
        alone.k_cache.view(-1, 2, DIM)[slots] = batch.keys[i]
        alone.v_cache.view(-1, 2, DIM)[slots] = batch.values[i]
        alone.query = batch.query[start : start + query_len]
        assert torch.equal(attend(alone, None), together[start : start + query_len])
        start += query_len


def test_two_windows_of_one_step_do_not_share_their_masks() -> None:
    torch.manual_seed(2)
    batch = make_batch([(6, 10)], block_size=4, kv_heads=1, group=2, window=None, scattered=False)
    for window in (None, 3, 8):
        torch.testing.assert_close(attend(batch, window), brute_force(batch, window), rtol=1e-4, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(12)), st.integers(1, 12), st.sampled_from([1, 3, 4]))
def test_write_kv_writes_its_slots_and_no_other(order, num_tokens, block_size) -> None:
    key, value = torch.randn(2, num_tokens, 2, DIM)
    k_cache, v_cache = torch.zeros(2, 12 // block_size, block_size, 2, DIM)
    slots = torch.tensor(order[:num_tokens], dtype=torch.int32)
    ops.write_kv(key, value, k_cache, v_cache, slots)
    for cache, rows in ((k_cache, key), (v_cache, value)):
        expected = torch.zeros(12, 2, DIM)
        for slot, row in zip(order, rows, strict=False):
            expected[slot] = row
        assert torch.equal(cache.view(12, 2, DIM), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (512, 64), (100, 36)])
def test_packed_linear_equals_plain_and_rows_ignore_the_batch(shape, dtype) -> None:
    torch.manual_seed(3)
    weight, bias, x = torch.randn(shape, dtype=dtype), torch.randn(shape[0], dtype=dtype), torch.randn(40, shape[1])
    x = x.to(dtype)
    packed = ops.pack_linear(weight)
    whole = ops.linear(x, packed, bias)
    expected = F.linear(x.double(), weight.double(), bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(whole.double(), expected, rtol=tolerance, atol=tolerance * shape[1] ** 0.5)
    for rows in (1, 2, 3, 7, 16):
        assert torch.equal(ops.linear(x[:rows], packed, bias), whole[:rows])


def test_a_plain_weight_works_in_linear() -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    torch.testing.assert_close(ops.linear(x, weight, None), x @ weight.T)


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_elementwise_operators_follow_their_formulas(rows) -> None:
    x, weight = torch.randn(rows, 24), torch.randn(24)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), expected)
    torch.testing.assert_close(ops.silu_and_mul(x), x[:, :12] * torch.sigmoid(x[:, :12]) * x[:, 12:])


def test_rotary_turns_each_plane_by_its_angle() -> None:
    x, angle = torch.randn(5, 3, DIM), torch.randn(5, 1, DIM // 2)
    cos, sin = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
    turned = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(ops.rotary(x, cos, sin), torch.cat((turned.real, turned.imag), -1))


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'tpu'.*cpu"):
        get_ops("tpu")
