"""The experts operator against each token alone in float64; a row must not depend on the rows beside it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_service.ops import ExpertWeights, get_ops

torch.set_num_threads(1)
ops = get_ops("cpu")


def make_weights(
    num_experts: int, hidden: int, dim: int, *, bias: bool, dtype: torch.dtype = torch.float32
) -> tuple[ExpertWeights, dict[str, torch.Tensor]]:
    """Random weights as the operator takes them, and plain."""
    plain = {
        "gate_up": torch.randn(num_experts, 2 * dim, hidden, dtype=dtype) * hidden**-0.5,
        "down": torch.randn(num_experts, hidden, dim, dtype=dtype) * dim**-0.5,
        "gate_up_bias": torch.randn(num_experts, 2 * dim, dtype=dtype) * bias,
        "down_bias": torch.randn(num_experts, hidden, dtype=dtype) * bias,
    }
    packed = ExpertWeights(
        num_experts=num_experts,
        gate_up=ops.pack_experts(plain["gate_up"]),
        down=ops.pack_experts(plain["down"]),
        gate_up_bias=plain["gate_up_bias"] if bias else None,
        down_bias=plain["down_bias"] if bias else None,
    )
    return packed, plain


def choose(tokens: int, k: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, k] of random experts, none twice in a row, and their shares."""
    chosen = torch.stack([torch.randperm(num_experts)[:k] for _ in range(tokens)])
    return chosen, torch.rand(tokens, k)


def brute_force(
    x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, plain: dict[str, torch.Tensor]
) -> torch.Tensor:
    exact = {name: weight.double() for name, weight in plain.items()}
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for expert, share in zip(chosen[token].tolist(), shares[token].tolist(), strict=True):
            gate, up = (exact["gate_up"][expert] @ row + exact["gate_up_bias"][expert]).chunk(2)
            out[token] += share * (exact["down"][expert] @ (F.silu(gate) * up) + exact["down_bias"][expert])
    return out


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 20),
    num_experts=st.integers(1, 9),
    k=st.integers(1, 9),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_every_token_gets_the_shares_of_its_experts(tokens, num_experts, k, bias, seed) -> None:
    torch.manual_seed(seed)
    weights, plain = make_weights(num_experts, 12, 10, bias=bias)
    x = torch.randn(tokens, 12)
    chosen, shares = choose(tokens, min(k, num_experts), num_experts)
    given_x = x.clone()
    result = ops.experts(x, chosen, shares, weights, ops.silu_and_mul)
    torch.testing.assert_close(result.double(), brute_force(x, chosen, shares, plain), rtol=1e-4, atol=1e-5)
    assert torch.equal(x, given_x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "dim"), [(64, 48), (1536, 64), (64, 1536)])  # sums of 1536: split for one row
def test_a_row_gets_the_same_bits_alone_and_among_others(dtype: torch.dtype, hidden: int, dim: int) -> None:
    torch.manual_seed(0)
    weights, _ = make_weights(8, hidden, dim, bias=True, dtype=dtype)
    x = torch.randn(40, hidden, dtype=dtype)
    chosen, shares = choose(40, 3, 8)
    together = ops.experts(x, chosen, shares, weights, ops.silu_and_mul)
    assert together.dtype == dtype
    for rows in [slice(i, i + 1) for i in range(40)] + [slice(3, 5), slice(7, 24)]:
        alone = ops.experts(x[rows], chosen[rows], shares[rows], weights, ops.silu_and_mul)
        assert torch.equal(alone, together[rows])


def test_the_order_in_which_a_token_names_its_experts_changes_no_bit() -> None:
    torch.manual_seed(0)
    weights, _ = make_weights(8, 64, 48, bias=False)
    x = torch.randn(10, 64)
    chosen, shares = choose(10, 4, 8)
    turned = ops.experts(x, chosen.flip(1), shares.flip(1), weights, ops.silu_and_mul)
    assert torch.equal(turned, ops.experts(x, chosen, shares, weights, ops.silu_and_mul))


def test_the_activation_is_the_one_that_is_given() -> None:
    torch.manual_seed(0)
    weights, plain = make_weights(2, 8, 6, bias=False)
    x, chosen, shares = torch.randn(3, 8), torch.tensor([[1]] * 3), torch.ones(3, 1)
    result = ops.experts(x, chosen, shares, weights, lambda inner: inner.chunk(2, dim=-1)[1])
    torch.testing.assert_close(result, x @ plain["gate_up"][1, 6:].T @ plain["down"][1].T, rtol=1e-4, atol=1e-5)
