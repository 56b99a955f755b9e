"""The C kernels against the operators in torch, which are the specification, and what they alone promise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_service.ops import cpu, native
from pd_service.ops.metadata import ForwardMetadata
from pd_service.ops.native import build

torch.set_num_threads(1)
FULL = "FullAttention"
needs_kernels = pytest.mark.skipif(native.kernels() is None, reason="no C compiler, or no AVX-512")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "kernels", lambda: None)


def close(ours: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert ours is not None
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.float(), expected.float(), rtol=tolerance, atol=tolerance)


# ---- attention


class Cache:
    """Requests with keys and values in scattered blocks; slots that hold nothing are NaN, so that reading shows."""

    def __init__(self, kv_lens: list[int], *, block_size: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        num_blocks = [-(-length // block_size) for length in kv_lens]
        self.block_size, self.kv_lens = block_size, kv_lens
        self.keys, self.values = torch.full((2, sum(num_blocks) + 1, block_size, kv_heads, dim), torch.nan, dtype=dtype)
        self.table = torch.zeros(len(kv_lens), max(num_blocks), dtype=torch.int32)
        ids = iter((torch.randperm(sum(num_blocks)) + 1).tolist())
        for request, length in enumerate(kv_lens):
            for block in range(num_blocks[request]):
                self.table[request, block] = block_id = next(ids)
                used = min(block_size, length - block * block_size)
                for cache in (self.keys, self.values):
                    cache[block_id, :used] = torch.randn(used, kv_heads, dim).to(dtype)

    def forget(self, request: int, num_tokens: int) -> None:
        """Blocks wholly among the first `num_tokens` become null."""
        self.table[request, : num_tokens // self.block_size] = 0

    def metadata(self, query_lens: list[int], kv_lens: list[int] | None = None) -> ForwardMetadata:
        return ForwardMetadata(
            query_lens=query_lens,
            kv_lens=kv_lens or self.kv_lens,
            block_size=self.block_size,
            block_table={FULL: self.table},
            slot_mapping={},
        )


def attend(cache: Cache, query: torch.Tensor, metadata: ForwardMetadata, window: int | None = None) -> torch.Tensor:
    return cpu.paged_attention(query, cache.keys, cache.values, metadata, FULL, 0.2, sliding_window=window)


@needs_kernels
@settings(max_examples=120, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 4, 16, 128]),
    heads=st.sampled_from([(1, 1), (3, 1), (2, 2), (10, 2), (100, 1)]),
    dim=st.sampled_from([16, 64, 80]),
    window=st.sampled_from([None, 1, 5, 64, 100]),
    has_sinks=st.booleans(),
    dtype=dtypes,
    seed=st.integers(0, 2**16),
)
def test_attention_is_that_of_torch(lens, block_size, heads, dim, window, has_sinks, dtype, seed) -> None:
    torch.manual_seed(seed)
    num_heads, kv_heads = heads
    query_lens, kv_lens = [q for q, _ in lens], [q + past for q, past in lens]
    cache = Cache(kv_lens, block_size=block_size, kv_heads=kv_heads, dim=dim, dtype=dtype)
    for request, (_, past) in enumerate(lens):
        cache.forget(request, 0 if window is None else max(0, past - window + 1))
    query = torch.randn(sum(query_lens), num_heads, dim).to(dtype)
    sinks = torch.randn(num_heads) if has_sinks else None
    arguments = (FULL, 0.2)
    ours = native.paged_attention(
        query, cache.keys, cache.values, cache.metadata(query_lens), *arguments, sliding_window=window, sinks=sinks
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "kernels", lambda: None)
        expected = cpu.paged_attention(
            query, cache.keys, cache.values, cache.metadata(query_lens), *arguments, sliding_window=window, sinks=sinks
        )
    close(ours, expected)


@needs_kernels
@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(2, 200),
    cuts=st.sets(st.integers(1, 199)),
    window=st.sampled_from([None, 3, 70]),
    dtype=dtypes,
    threads=st.sampled_from([1, 2]),
)
def test_a_token_attends_alike_in_any_chunk_to_the_last_bit(length, cuts, window, dtype, threads) -> None:
    torch.manual_seed(length)
    cache = Cache([length, 90], block_size=4, kv_heads=2, dim=32, dtype=dtype)
    query = torch.randn(length, 6, 32).to(dtype)
    other = torch.randn(7, 6, 32).to(dtype)
    whole = attend(cache, torch.cat((query, other)), cache.metadata([length, 7]), window)[:length]
    torch.set_num_threads(threads)
    start = 0
    for stop in [*sorted(cut for cut in cuts if cut < length), length]:
        of_first = cache.metadata([stop - start], [stop])
        of_first.block_table[FULL] = cache.table[:1]
        assert torch.equal(attend(cache, query[start:stop], of_first, window), whole[start:stop])
        start = stop
    torch.set_num_threads(1)


def test_a_head_too_wide_for_the_kernels_is_left_to_torch() -> None:
    cache = Cache([5], block_size=4, kv_heads=1, dim=1024, dtype=torch.float32)
    query = torch.randn(1, 1, 1024)
    arguments = (query, cache.keys, cache.values, cache.metadata([1]), FULL, 0.2)
    assert native.paged_attention(*arguments, sliding_window=None, sinks=None) is None
    assert attend(cache, query, cache.metadata([1])).isfinite().all()


# ---- products


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 2), (96, 70), (576, 1536)])
def test_a_product_is_that_of_torch_and_no_row_knows_of_the_others_or_of_threads(shape, dtype) -> None:
    torch.manual_seed(1)
    weight, bias, x = (torch.randn(size).to(dtype) for size in (shape, shape[:1], (190, shape[1])))
    packed = native.pack_linear(weight)
    assert packed is not None
    assert packed.numel() == weight.numel()
    whole = native.linear(x, packed, bias)
    expected = x.double() @ weight.double().T + bias.double()
    scale = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(whole.double(), expected, rtol=scale, atol=scale * shape[1] ** 0.5)
    for rows in (*range(14), 24, 25, 100):
        torch.set_num_threads(1 + rows % 3)
        assert torch.equal(native.linear(x[:rows], packed, bias), whole[:rows])
    torch.set_num_threads(1)
    wide = torch.randn(5, 2 * shape[1]).to(dtype)
    part = wide[:, shape[1] :]  # rows with a gap between them
    assert torch.equal(native.linear(part, packed, None), native.linear(part.contiguous(), packed, None))


@pytest.mark.parametrize("shape", [(100, 36), (33, 8)])
def test_a_width_that_fills_no_panel_is_left_to_torch(shape) -> None:
    weight = torch.randn(shape)
    assert native.pack_linear(weight) is None
    x = torch.randn(3, shape[1])
    torch.testing.assert_close(cpu.linear(x, cpu.pack_linear(weight), None), x @ weight.T)


# ---- what stands between


@needs_kernels
@settings(max_examples=60, deadline=None)
@given(tokens=st.sampled_from([1, 3, 700]), dtype=dtypes, seed=st.integers(0, 2**16))
def test_the_other_operators_are_those_of_torch(tokens, dtype, seed) -> None:
    torch.manual_seed(seed)
    heads = torch.randn(tokens, 5, 64).to(dtype)
    part, weight = heads[:, 1:4], torch.randn(64)
    cos, sin = torch.randn(2, tokens, 1, 64).to(dtype)
    wide = torch.randn(tokens, 96).to(dtype) * 30
    ours = [
        native.rms_norm(part, weight, 1e-5),
        native.rms_norm(heads.flatten(1), weight.repeat(5).to(dtype), 1e-5),
        native.rotary(part, cos, sin),
        native.silu_and_mul(wide),
        *(native.add_rms_norm(heads, -2 * heads, weight, 1e-5) or ()),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "kernels", lambda: None)
        expected = [
            cpu.rms_norm(part, weight, 1e-5),
            cpu.rms_norm(heads.flatten(1), weight.repeat(5).to(dtype), 1e-5),
            cpu.rotary(part, cos, sin),
            cpu.silu_and_mul(wide),
            *cpu.add_rms_norm(heads, -2 * heads, weight, 1e-5),
        ]
    for one, other in zip(ours, expected, strict=True):
        close(one, other)


@needs_kernels
@pytest.mark.parametrize("value", [-1e30, -90.0, 90.0, 1e30])
def test_the_activation_of_extreme_gates_is_that_of_torch(value) -> None:
    x = torch.cat((torch.full((1, 16), value), torch.full((1, 16), 2.0)), dim=1)
    gate, up = x.chunk(2, dim=-1)
    close(native.silu_and_mul(x), torch.nn.functional.silu(gate) * up)


@needs_kernels
def test_not_a_number_stays_one() -> None:
    x = torch.full((2, 32), torch.nan)
    for result in (native.silu_and_mul(x), native.rms_norm(x, torch.ones(32), 1e-5)):
        assert result is not None
        assert result.isnan().all()


# ---- building


def test_without_kernels_every_operator_is_left_to_torch(no_kernels: None) -> None:
    x = torch.randn(2, 32)
    assert native.pack_linear(torch.randn(32, 32)) is None
    assert native.rms_norm(x, torch.ones(32), 1e-5) is None
    assert native.silu_and_mul(x) is None
    assert cpu.linear(x, cpu.pack_linear(torch.randn(64, 32)), None).shape == (2, 64)


@pytest.mark.parametrize("fault", ["no compiler", "failing compiler", "no such processor"])
def test_whatever_prevents_the_build_is_logged_and_means_no_kernels(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if fault == "no such processor":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    else:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        found = None if fault == "no compiler" else "/bin/false"
        monkeypatch.setattr(build.shutil, "which", lambda name: found)
    with caplog.at_level("INFO"):
        assert build.kernels.__wrapped__() is None
    assert "run in torch" in caplog.text
    assert not list(tmp_path.rglob("*.so"))


@needs_kernels
def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.kernels.__wrapped__() is not None
    (made,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.kernels.__wrapped__() is not None
    assert made.suffix == ".so"
