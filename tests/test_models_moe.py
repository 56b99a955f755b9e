"""The experts' layer: every matrix of every expert has a name in the checkpoint and its place in the result."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pd_service.models.layers import Place
from pd_service.models.moe import Experts
from pd_service.ops import get_ops

torch.set_num_threads(1)
PARTS = ("gate_proj", "up_proj", "down_proj")


def make_layer(*, bias: bool) -> tuple[Experts, dict[str, torch.Tensor]]:
    """A layer of 3 experts, not yet finished, and its random tensors by name."""
    layer = Experts(3, 8, 6, bias=bias, place=Place(torch.float32, "cpu", get_ops("cpu")))
    for tensor in layer.checkpoint_tensors().values():
        tensor.copy_(torch.randn(tensor.shape))
    return layer, {name: tensor.clone() for name, tensor in layer.checkpoint_tensors().items()}


@pytest.mark.parametrize("bias", [False, True])
def test_names_cover_every_tensor_once(bias: bool) -> None:
    layer, named = make_layer(bias=bias)
    kinds = ("weight", "bias") if bias else ("weight",)
    assert set(named) == {f"{expert}.{part}.{kind}" for expert in range(3) for part in PARTS for kind in kinds}
    assert sum(tensor.numel() for tensor in named.values()) == sum(p.numel() for p in layer.parameters())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("expert", [0, 1, 2])
def test_an_expert_computes_with_the_tensors_of_its_number(bias: bool, expert: int) -> None:
    torch.manual_seed(expert)
    layer, named = make_layer(bias=bias)
    layer.finish_loading()
    x = torch.randn(5, 8)
    gate, up, down = (
        lambda inner, part=part: F.linear(inner, named[f"{expert}.{part}.weight"], named.get(f"{expert}.{part}.bias"))
        for part in PARTS
    )
    expected = down(F.silu(gate(x)) * up(x))
    result = layer(x, torch.full((5, 1), expert), torch.full((5, 1), 0.5))
    torch.testing.assert_close(result, 0.5 * expected, rtol=1e-4, atol=1e-5)
