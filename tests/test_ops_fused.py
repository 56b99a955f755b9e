"""Operators of several steps: the same as their steps one by one, to the last bit, by the C kernels and in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_service.ops import LayerWeights, cpu, native
from pd_service.ops.metadata import ForwardMetadata
from pd_service.ops.native import build
from tests.test_ops_native import FULL, Cache, dtypes, needs_kernels

torch.set_num_threads(1)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "dim"), [(32, 96), (70, 32), (576, 1536)])
def test_a_whole_mlp_is_its_parts_to_the_last_bit_for_any_rows_and_threads(hidden, dim, dtype) -> None:
    torch.manual_seed(2)
    x = torch.randn(600, hidden).to(dtype)
    gate_up, down = torch.randn(2 * dim, hidden).to(dtype), torch.randn(64, dim).to(dtype)
    gate_up, down = cpu.pack_linear(gate_up), cpu.pack_linear(down)
    parts = cpu.linear(cpu.silu_and_mul(cpu.linear(x, gate_up, None)), down, None)
    for rows in (0, 1, 2, 13, 100, 254, 600):
        torch.set_num_threads(1 + rows % 3)
        whole = native.gated_mlp(x[:rows], gate_up, down)
        assert whole is not None
        assert torch.equal(whole, parts[:rows])
    torch.set_num_threads(1)


def test_an_mlp_whose_gates_end_amid_a_panel_is_left_to_its_parts() -> None:
    x, gate_up, down = torch.randn(3, 64), torch.randn(2 * 48, 64), torch.randn(64, 48)
    packed = cpu.pack_linear(gate_up), cpu.pack_linear(down)
    assert native.gated_mlp(x, *packed) is None
    expected = cpu.silu_and_mul(x @ gate_up.T) @ down.T
    torch.testing.assert_close(cpu.gated_mlp(x, *packed), expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 100)), min_size=1, max_size=4),
    dim=st.sampled_from([8, 16, 64]),
    window=st.sampled_from([None, 5]),
    has_sinks=st.booleans(),
    has_kernels=st.booleans(),
    dtype=dtypes,
    seed=st.integers(0, 2**16),
)
def test_rotation_writing_and_attention_in_one_call_are_the_three_to_the_last_bit(
    lens, dim, window, has_sinks, has_kernels, dtype, seed
) -> None:
    torch.manual_seed(seed)
    query_lens, kv_lens = [q for q, _ in lens], [q + past for q, past in lens]
    cache = Cache(kv_lens, block_size=4, kv_heads=2, dim=dim, dtype=dtype)
    metadata = cache.metadata(query_lens)
    slots = [
        int(cache.table[request, position // 4]) * 4 + position % 4
        for request, (query_len, past) in enumerate(lens)
        for position in range(past, past + query_len)
    ]
    metadata.slot_mapping[FULL] = torch.tensor(slots, dtype=torch.int32)
    heads = torch.randn(len(slots), 6 + 2 + 2, dim).to(dtype)
    query, key, value = heads.split((6, 2, 2), dim=1)
    cos, sin = torch.randn(2, len(slots), 1, dim).to(dtype)
    sinks = torch.randn(6) if has_sinks else None
    keys, values = cache.keys.clone(), cache.values.clone()
    with pytest.MonkeyPatch.context() as patch:
        if not has_kernels:
            patch.setattr(build, "kernels", lambda: None)
        whole = cpu.rotate_write_attend(
            query, key, value, cos, sin, keys, values, metadata, FULL, 0.2, sliding_window=window, sinks=sinks
        )
        cpu.write_kv(cpu.rotary(key, cos, sin), value, cache.keys, cache.values, metadata.slot_mapping[FULL])
        rotated = cpu.rotary(query, cos, sin)
        parts = cpu.paged_attention(rotated, cache.keys, cache.values, metadata, FULL, 0.2, window, sinks)
    assert torch.equal(whole, parts)
    for ours, expected in ((keys, cache.keys), (values, cache.values)):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


def layer_weights(dtype: torch.dtype, *, has_bias: bool, head_dim: int = 32) -> LayerWeights:
    """Of 4 heads, 2 of them in the cache, between 64 and 96 values wide."""
    shapes = {"qkv": (8 * head_dim, 64), "o": (64, 4 * head_dim), "gate_up": (192, 64), "down": (64, 96)}
    packed = {name: cpu.pack_linear(torch.randn(shape).to(dtype) / 8) for name, shape in shapes.items()}
    return LayerWeights(
        **packed,
        qkv_bias=torch.randn(8 * head_dim).to(dtype) if has_bias else None,
        o_bias=torch.randn(64).to(dtype) if has_bias else None,
        input_norm=torch.rand(64).to(dtype),
        mlp_norm=torch.rand(64).to(dtype),
        eps=1e-5,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        inner_size=96,
        scale=0.2,
        attn_type=FULL,
        sliding_window=None if has_bias else 5,
    )


def parts_of_layer(
    x: torch.Tensor,
    residual: torch.Tensor,
    w: LayerWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: Cache,
    metadata: ForwardMetadata,
) -> tuple[torch.Tensor, torch.Tensor]:
    normed, residual = cpu.add_rms_norm(x, residual, w.input_norm, w.eps)
    heads = cpu.linear(normed, w.qkv, w.qkv_bias).view(len(x), -1, w.head_dim)
    query, key, value = heads.split((4, 2, 2), dim=1)
    caches = (cache.keys, cache.values)
    attended = cpu.rotate_write_attend(
        query, key, value, cos, sin, *caches, metadata, FULL, w.scale, sliding_window=w.sliding_window
    )
    normed, residual = cpu.add_rms_norm(cpu.linear(attended.flatten(1), w.o, w.o_bias), residual, w.mlp_norm, w.eps)
    return cpu.gated_mlp(normed, w.gate_up, w.down), residual


@pytest.mark.parametrize("has_kernels", [pytest.param(True, marks=needs_kernels), False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_layer_is_its_parts_to_the_last_bit(dtype, has_bias, has_kernels, monkeypatch) -> None:
    torch.manual_seed(3)
    if not has_kernels:
        monkeypatch.setattr(build, "kernels", lambda: None)
    w = layer_weights(dtype, has_bias=has_bias)
    cache = Cache([20, 9], block_size=4, kv_heads=2, dim=32, dtype=dtype)
    x, residual = torch.randn(2, 8, 64).to(dtype)
    cos, sin = torch.randn(2, 8, 1, 32).to(dtype)
    metadata = cache.metadata([7, 1])
    positions = [(0, position) for position in range(13, 20)] + [(1, 8)]
    slots = [int(cache.table[request, position // 4]) * 4 + position % 4 for request, position in positions]
    metadata.slot_mapping[FULL] = torch.tensor(slots, dtype=torch.int32)
    expected = parts_of_layer(x, residual, w, cos, sin, cache, metadata)
    written = cache.keys.clone()
    cache.keys.view(-1, 2, 32)[slots] = torch.nan
    assert native.dense_layer(x, residual, w, cos, sin, cache.keys, cache.values, metadata) is has_kernels
    if not has_kernels:
        cpu.dense_layer(x, residual, w, cos, sin, cache.keys, cache.values, metadata)
    assert torch.equal(x, expected[0])
    assert torch.equal(residual, expected[1])
    torch.testing.assert_close(cache.keys, written, rtol=0, atol=0, equal_nan=True)


@needs_kernels
def test_a_layer_whose_heads_are_too_narrow_is_left_to_its_parts() -> None:
    w = layer_weights(torch.float32, has_bias=False, head_dim=16)
    cache = Cache([9], block_size=4, kv_heads=2, dim=16, dtype=torch.float32)
    metadata = cache.metadata([1])
    metadata.slot_mapping[FULL] = cache.table[:, -1].int() * 4
    x, residual = torch.randn(2, 1, 64)
    cos, sin = torch.randn(2, 1, 1, 16)
    assert not native.dense_layer(x, residual, w, cos, sin, cache.keys, cache.values, metadata)
    expected = parts_of_layer(x, residual, w, cos, sin, cache, metadata)
    cpu.dense_layer(x, residual, w, cos, sin, cache.keys, cache.values, metadata)
    assert torch.equal(x, expected[0])
    assert torch.equal(residual, expected[1])
