"""The emulated NPU behaves like a card where a mistake would show on a card."""

from __future__ import annotations

import pytest
import torch
import torch_npu

from tests.npu.emulator import EmulatedNpu, NotEmulated, host_view
from tests.npu.references import REFERENCES
from tests.npu.schemas import SCHEMAS

DEVICE = "npu:0"


def test_arithmetic_is_that_of_the_host(emulated: EmulatedNpu) -> None:
    x, y = torch.randn(4, 6), torch.randn(6, 3)
    ours = (x.to(DEVICE) @ y.to(DEVICE)).softmax(-1).topk(2).values
    assert ours.device == torch.device(DEVICE)
    assert torch.equal(ours.cpu(), (x @ y).softmax(-1).topk(2).values)


def test_a_view_shares_memory_with_what_it_was_taken_of(emulated: EmulatedNpu) -> None:
    x = torch.zeros(4, 6, device=DEVICE)
    x.view(2, 12)[1, 3:5].fill_(7)
    x[0].add_(1)
    assert x.sum().item() == 14 + 6
    assert host_view(x)[2, 3] == 7


def test_a_reshape_that_cannot_be_a_view_is_a_copy(emulated: EmulatedNpu) -> None:
    with torch.inference_mode():
        x = torch.arange(6, device=DEVICE).view(2, 3).t()
        assert x.reshape(-1).tolist() == [0, 3, 1, 4, 2, 5]
        assert x.contiguous().flatten(0).tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("other", ["cpu", "npu:1"])
def test_tensors_of_two_devices_in_one_operator_are_refused(emulated: EmulatedNpu, other: str) -> None:
    x, y = torch.ones(3, device=DEVICE), torch.ones(3, device=other)
    with pytest.raises(NotEmulated, match=f"different devices: .*{other}|{other}.*different devices"):
        x + y
    with pytest.raises(NotEmulated, match="different devices"):
        x[torch.tensor([0, 1], device=other)]
    assert (x + 1).sum().item() == 6
    assert y.to(DEVICE).add(x).tolist() == [2, 2, 2]
    assert y.copy_(x + 1) is y
    assert y.tolist() == [2, 2, 2]


def test_an_operator_without_a_reference_is_refused(emulated: EmulatedNpu) -> None:
    with pytest.raises(NotEmulated, match="npu::npu_fast_gelu has no reference"):
        torch_npu.npu_fast_gelu(torch.ones(2, 4, device=DEVICE))


@pytest.mark.parametrize("result", [torch.ones(2, 3), torch.ones(2, 2, dtype=torch.float64)], ids=["shape", "type"])
def test_a_reference_that_differs_from_what_the_library_infers_is_refused(
    emulated: EmulatedNpu, result: torch.Tensor
) -> None:
    emulated.references["npu_swiglu"] = lambda input, dim=-1: result
    with pytest.raises(NotEmulated, match=r"npu_swiglu: the library infers .*\[2, 2\]"):
        torch_npu.npu_swiglu(torch.ones(2, 4, device=DEVICE), -1)


@pytest.mark.parametrize("call", [{"input": 3}, {"dim": "last"}, {"axis": 1}])
def test_a_call_that_is_not_of_the_schema_is_refused_by_the_library(
    emulated: EmulatedNpu, call: dict[str, object]
) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        torch_npu.npu_swiglu(**({"input": torch.ones(2, 4, device=DEVICE)} | call))


def test_more_than_a_device_has_is_out_of_memory_on_that_device_alone(emulated: EmulatedNpu) -> None:
    free, total = torch.npu.mem_get_info(0)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device=DEVICE)
    held = torch.empty(free // 2, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(free // 2 + 2**20, dtype=torch.uint8, device=DEVICE)
    assert torch.npu.mem_get_info(0)[0] <= free - held.nbytes
    assert torch.empty(free // 2 + 2**20, dtype=torch.uint8, device="npu:1").device.index == 1


def test_outside_of_the_emulation_nothing_is_computed() -> None:
    x = torch.ones(3).to(DEVICE)
    with pytest.raises(RuntimeError, match="500002"):
        x.mul_(2)


def test_what_makes_the_host_wait_is_refused_where_it_must_not(emulated: EmulatedNpu) -> None:
    x = torch.arange(4, device=DEVICE)
    with emulated.no_host_reads():
        y = x + torch.tensor([1, 2, 3, 4]).to(DEVICE)
        reads = (y.cpu, y.tolist, y.sum().item, lambda: y[y > 2], lambda: bool(y.any()), y.nonzero)
        for read in (*reads, lambda: torch.empty(4, dtype=torch.int64).copy_(y)):
            with pytest.raises(NotEmulated, match="wait"):
                read()
    assert y.tolist() == [1, 3, 5, 7]


def test_streams_and_events_are_the_librarys(emulated: EmulatedNpu) -> None:
    stream, before, after = torch.npu.Stream(), *(torch.npu.Event(enable_timing=True) for _ in range(2))
    before.record()
    with torch.npu.stream(stream):
        y = torch.ones(3, device=DEVICE) + 1
        after.record()
    torch.npu.current_stream().wait_stream(stream)
    after.synchronize()
    assert before.elapsed_time(after) >= 0
    assert y.tolist() == [2, 2, 2]


def test_the_schemas_we_check_against_are_the_librarys() -> None:
    assert set(SCHEMAS) == set(REFERENCES)
    for name, schema in SCHEMAS.items():
        assert str(getattr(torch.ops.npu, name).default._schema) == schema
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "Meta")
