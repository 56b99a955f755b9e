"""Each documented limit of an NPU operator: a legal call passes, one that breaks the limit is refused by its name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pd_service.ops import npu_calls
from pd_service.ops.contracts import POSITIONAL, Call, ContractViolation, check, rules_of
from pd_service.ops.npu_tables import causal_triangle

torch.set_num_threads(1)

HALF = torch.bfloat16
TRIANGLE = causal_triangle(torch.device("cpu"))
ATTENTION = "npu_fused_infer_attention_score_v2"


def zeros(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def attention(
    query_lens: tuple[int, ...] = (3, 1), kv_lens: tuple[int, ...] = (130, 5), *, heads: int = 4, kv_heads: int = 2,
    dim: int = 128, window: int | None = None, sinks: torch.Tensor | None = None,
) -> Call:  # fmt: skip
    cache = zeros(5, 128, kv_heads, dim)
    return npu_calls.attention(
        zeros(sum(query_lens), heads, dim),
        cache,
        cache.clone(),
        query_lens=query_lens,
        kv_lens=kv_lens,
        block_table=torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)[: len(kv_lens)],
        scale=0.1,
        triangle=TRIANGLE,
        window=window,
        sinks=sinks,
    )


def latent(heads: int = 4) -> Call:
    return npu_calls.latent_attention(
        zeros(4, heads, 512),
        zeros(4, heads, 64),
        zeros(5, 128, 1, 512),
        zeros(5, 128, 1, 64),
        query_lens=(3, 1),
        kv_lens=(130, 5),
        block_table=torch.tensor([[1, 2], [3, 0]], dtype=torch.int32),
        scale=0.1,
        triangle=TRIANGLE,
    )


LEGAL: dict[str, Callable[[], Call]] = {
    "attention": attention,
    "attention of decodes": lambda: attention((1, 1), (130, 5)),
    "attention without shared heads": lambda: attention(kv_heads=4, dim=64),
    "attention with a window": lambda: attention(window=20),
    "attention with sinks": lambda: attention(sinks=zeros(4), window=1),
    "latent attention": latent,
    "write": lambda: npu_calls.write_rows(zeros(5, 16, 2, 8), torch.tensor([3, 79], dtype=torch.int32), zeros(2, 2, 8)),
    "norm": lambda: npu_calls.rms_norm(zeros(3, 8), zeros(8), 1e-5),
    "norm of heads": lambda: npu_calls.rms_norm(zeros(3, 2, 8, dtype=torch.float32), zeros(8, dtype=torch.float32), 0),
    "sum and norm": lambda: npu_calls.add_rms_norm(zeros(3, 8), zeros(3, 8), zeros(8), 1e-5),
    "rotation": lambda: npu_calls.rotary(zeros(3, 4, 8), zeros(3, 1, 8), zeros(3, 1, 8)),
    "silu": lambda: npu_calls.swiglu(zeros(3, 8)),
    "gelu": lambda: npu_calls.geglu(zeros(3, 8)),
    "clipped": lambda: npu_calls.clipped_swiglu(zeros(3, 8), 1.7, 7.0),
    "routing": lambda: npu_calls.route_tokens(zeros(3, 8), zeros(3, 2, dtype=torch.int32), 4),
    "experts": lambda: npu_calls.expert_matmul(zeros(6, 8), zeros(4, 8, 10), None, torch.tensor([0, 5, 1, 0])),
    "experts with biases": lambda: npu_calls.expert_matmul(
        zeros(6, 8), zeros(4, 8, 10), zeros(4, 10), torch.tensor([0, 5, 1, 0])
    ),
    "sum of experts": lambda: npu_calls.sum_experts(zeros(6, 8), zeros(3, 2), zeros(6, dtype=torch.int32)),
}

# (the rule, a legal call, what it is given instead by name)
BROKEN: list[tuple[str, str, dict[str, object]]] = [
    ("attention_said", "attention", {"softmax_scale": None}),
    ("attention_said", "attention", {"input_layout": None}),
    ("attention_said", "attention", {"num_key_value_heads": None}),
    ("attention_layout", "attention", {"input_layout": "BSND"}),
    ("attention_layout", "attention", {"num_query_heads": 8}),
    ("attention_types", "attention", {"query": zeros(4, 4, 128, dtype=torch.float32)}),
    ("attention_types", "attention", {"value": zeros(5, 128, 256, dtype=torch.float16)}),
    ("attention_contiguous", "attention", {"query": zeros(4, 4, 256)[..., ::2]}),
    ("attention_heads", "attention", {"num_key_value_heads": 3}),
    ("attention_heads", "attention", {"query": zeros(4, 258, 128), "num_query_heads": 258}),
    ("attention_heads", "attention", {"query": zeros(4, 130, 128), "num_query_heads": 130}),
    ("attention_lengths", "attention", {"actual_seq_kvlen": torch.tensor([130, 5])}),
    ("attention_lengths", "attention", {"actual_seq_qlen": None}),
    ("attention_lengths", "attention", {"actual_seq_qlen": [3, 1]}),
    ("attention_lengths", "attention", {"actual_seq_qlen": [3, 5]}),
    ("attention_lengths", "attention", {"actual_seq_kvlen": [130]}),
    ("attention_lengths", "attention", {"actual_seq_kvlen": [130, 0]}),
    ("attention_lengths", "attention", {"actual_seq_qlen": [4] * 4097, "actual_seq_kvlen": [5] * 4097}),
    ("attention_cache", "attention", {"key": zeros(5, 128, 2, 128)}),
    ("attention_cache", "attention", {"value": zeros(6, 128, 256)}),
    ("attention_block_size", "attention", {"block_size": 100}),
    ("attention_block_size", "attention", {"block_size": 64}),
    ("attention_block_table", "attention", {"block_table": None}),
    ("attention_block_table", "attention", {"block_table": zeros(2, 2, dtype=torch.int64)}),
    ("attention_block_table", "attention", {"block_table": zeros(2, 1, dtype=torch.int32)}),
    ("attention_block_table", "attention", {"block_table": zeros(3, 2, dtype=torch.int32)}),
    ("attention_block_ids", "attention", {"block_table": torch.full((2, 2), 5, dtype=torch.int32)}),
    ("attention_block_ids", "attention", {"block_table": torch.full((2, 2), -1, dtype=torch.int32)}),
    ("attention_mask", "attention", {"sparse_mode": 5, "atten_mask": None}),
    ("attention_mask", "attention", {"atten_mask": None}),
    ("attention_mask", "attention", {"atten_mask": TRIANGLE[:1024, :1024].contiguous()}),
    ("attention_mask", "attention", {"atten_mask": TRIANGLE.float()}),
    ("attention_mask", "attention of decodes", {"atten_mask": TRIANGLE}),
    ("attention_unmasked", "attention", {"sparse_mode": 0, "atten_mask": None}),
    ("attention_window", "attention", {"pre_tokens": 3}),
    ("attention_window", "attention with a window", {"next_tokens": None}),
    ("attention_window", "attention with a window", {"pre_tokens": -1}),
    ("attention_sink", "attention with sinks", {"learnable_sink": zeros(4, dtype=torch.float32)}),
    ("attention_sink", "attention with sinks", {"learnable_sink": zeros(2)}),
    ("attention_sink", "latent attention", {"learnable_sink": zeros(4)}),
    ("attention_rope", "latent attention", {"key_rope": None}),
    ("attention_rope", "latent attention", {"query_rope": zeros(4, 4, 32)}),
    ("attention_rope", "latent attention", {"query_rope": zeros(4, 4, 64, dtype=torch.float16)}),
    ("attention_latent", "latent attention", {"sparse_mode": 2}),
    ("scatter_indices", "write", {"indices": torch.tensor([3, 4])}),
    ("scatter_indices", "write", {"indices": torch.zeros(2, 1)}),
    ("scatter_updates", "write", {"updates": zeros(3, 16)}),
    ("scatter_updates", "write", {"updates": zeros(2, 16, dtype=torch.float16)}),
    ("scatter_range", "write", {"indices": torch.tensor([[3], [80]])}),
    ("scatter_range", "write", {"indices": torch.tensor([[3], [-1]])}),
    ("norm_types", "norm", {"gamma": zeros(8, dtype=torch.float32)}),
    ("norm_types", "norm", {"input": zeros(3, 8).double(), "gamma": zeros(8).double()}),
    ("norm_shapes", "norm", {"gamma": zeros(4)}),
    ("norm_shapes", "sum and norm", {"x2": zeros(1, 8)}),
    ("norm_epsilon_is_given", "norm", {"epsilon": None}),
    ("rotary_mode_is_given", "rotation", {"rotary_mode": None}),
    ("rotary_mode_is_given", "rotation", {"rotary_mode": "quarter"}),
    ("rotary_types", "rotation", {"r1": zeros(3, 1, 8, dtype=torch.float32)}),
    ("rotary_shapes", "rotation", {"r2": zeros(3, 2, 8)}),
    ("rotary_shapes", "rotation", {"input": zeros(3, 4, 896), "r1": zeros(3, 1, 896), "r2": zeros(3, 1, 896)}),
    ("rotary_shapes", "rotation", {"input": zeros(3, 1000, 8)}),
    ("gated_input", "silu", {"input": zeros(3, 7)}),
    ("gated_input", "silu", {"input": zeros(0, 8)}),
    ("gated_input", "gelu", {"input": zeros(3, 16)[:, ::2]}),
    ("gated_input", "clipped", {"x": zeros(8)}),
    ("gated_dim", "silu", {"dim": None}),
    ("geglu_form", "gelu", {"activate_left": None}),
    ("clipped_form", "clipped", {"interleaved": None}),
    ("routing_inputs", "routing", {"expert_idx": zeros(3, 2, dtype=torch.int64)}),
    ("routing_inputs", "routing", {"x": zeros(4, 8)}),
    ("routing_form", "routing", {"quant_mode": None}),
    ("routing_form", "routing", {"row_idx_type": 1}),
    ("routing_experts", "routing", {"active_expert_range": [0, 3]}),
    ("routing_experts", "routing", {"expert_num": 10241, "active_expert_range": [0, 10241]}),
    ("routing_experts", "routing", {"active_num": 3}),
    ("grouped_form", "experts", {"split_item": 0}),
    ("grouped_form", "experts", {"group_list_type": 0}),
    ("grouped_form", "experts", {"weight": [zeros(8, 10), zeros(8, 10)]}),
    ("grouped_shapes", "experts", {"weight": [zeros(4, 10, 8)]}),
    ("grouped_shapes", "experts", {"x": [zeros(6, 65536)], "weight": [zeros(1, 65536, 1)]}),
    ("grouped_types", "experts", {"weight": [zeros(4, 8, 10, dtype=torch.float16)]}),
    ("grouped_types", "experts", {"bias": [zeros(4, 10)]}),
    ("grouped_sizes", "experts", {"group_list": torch.tensor([0, 5, 1])}),
    ("grouped_sizes", "experts", {"group_list": torch.tensor([0, 5, 2, 0])}),
    ("grouped_sizes", "experts", {"group_list": torch.tensor([0, 5, 1, 0], dtype=torch.int32)}),
    ("finalize_rows", "sum of experts", {"scales": zeros(3, 2, dtype=torch.float32)}),
    ("finalize_rows", "sum of experts", {"expanded_src_to_dst_row": zeros(6, dtype=torch.int64)}),
    ("finalize_order", "sum of experts", {"drop_pad_mode": None}),
    ("finalize_sums", "sum of experts", {"skip2": zeros(3, 8)}),
    ("finalize_sums", "sum of experts", {"bias": zeros(4, 8)}),
    ("one_device", "norm", {"gamma": torch.empty(8, dtype=HALF, device="meta")}),
]  # fmt: skip

# Rules that need a call of their own: what breaks them would break an earlier one as well, or take gigabytes.
BUILT: list[tuple[str, Callable[[], Call]]] = [
    ("attention_head_dim", lambda: attention(dim=64)),
    ("attention_head_dim", lambda: attention(dim=96)),
    ("attention_head_dim", lambda: attention(kv_heads=4, dim=192)),
    ("attention_latent", lambda: latent(heads=6)),
    ("attention_cache", lambda: attention(heads=256, kv_heads=256, dim=256)),
    ("attention_cache_size", lambda: _of_many_blocks(attention((1, 1), (130, 5)))),
]


def _changed(call: Call, changes: dict[str, object]) -> Call:
    names = POSITIONAL[call.name]
    args = tuple(changes.get(name, value) for name, value in zip(names, call.args, strict=False))
    return Call(call.name, args, {**call.kwargs, **{k: v for k, v in changes.items() if k not in names}})


def _of_many_blocks(call: Call) -> Call:
    """With a cache of 2**31 values, which takes no memory on the device that has none."""
    cache = torch.empty(2**16, 128, 256, dtype=HALF, device="meta")
    everything = {**dict(zip(POSITIONAL[ATTENTION], call.args, strict=True)), **call.kwargs}
    on_meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in everything.items()}
    return _changed(call, on_meta | {"key": cache, "value": cache})


@pytest.mark.parametrize("name", LEGAL)
def test_a_call_within_the_limits_passes(name: str) -> None:
    check(LEGAL[name]())


@pytest.mark.parametrize(("rule", "legal", "changes"), BROKEN, ids=[f"{r}-{n}-{'-'.join(c)}" for r, n, c in BROKEN])
def test_a_broken_limit_is_refused_by_its_name(rule: str, legal: str, changes: dict[str, object]) -> None:
    call = _changed(LEGAL[legal](), changes)
    with pytest.raises(ContractViolation, match=rf"^{call.name}: {rule}: "):
        check(call)


@pytest.mark.parametrize(("rule", "make"), BUILT, ids=[rule for rule, _ in BUILT])
def test_a_limit_that_needs_a_call_of_its_own_is_refused_by_its_name(rule: str, make: Callable[[], Call]) -> None:
    with pytest.raises(ContractViolation, match=rf": {rule}: "):
        check(make())


def test_every_rule_of_every_operator_is_broken_by_some_call() -> None:
    rules = {rule.__name__ for operator in POSITIONAL for rule in rules_of(operator)}
    assert rules == {rule for rule, _, _ in BROKEN} | {rule for rule, _ in BUILT}


def test_every_operator_has_a_legal_call() -> None:
    assert {make().name for make in LEGAL.values()} == set(POSITIONAL)


def test_an_operator_whose_limits_are_unknown_is_refused() -> None:
    with pytest.raises(ContractViolation, match="npu_new_thing: its documented limits are not known"):
        check(Call("npu_new_thing", (), {}))


def test_an_argument_that_a_rule_needs_and_nobody_gave_is_a_violation() -> None:
    with pytest.raises(ContractViolation, match="is not given"):
        check(_changed(LEGAL["experts"](), {"group_list": None}))
