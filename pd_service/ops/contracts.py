"""What torch_npu's operators demand of a call, as documented and not checked by the library before it is too late.

A rule is a function named after itself that says what is wrong with a call, or None. `check` asks every rule of the
operator in their order and raises at the first that is broken. Rules look at shapes, types and Python values; contents
of a tensor only where it lies on the host, so that no check ever waits for a device. Needs no torch_npu.

Source, unless a rule says otherwise: the operators' pages in op-plugin's docs (custom_APIs/torch_npu), for Atlas A2/A3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

Check = Callable[["Arguments"], str | None]

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
GROUPED_INNER_LIMIT = 65536
MOST_EXPERTS = 10240

_CHECKS: dict[str, list[Check]] = {}

# Names of the arguments that we pass by position.
POSITIONAL = {
    "npu_fused_infer_attention_score_v2": ("query", "key", "value"),
    "npu_scatter_nd_update_": ("input", "indices", "updates"),
    "npu_rms_norm": ("input", "gamma", "epsilon"),
    "npu_add_rms_norm": ("x1", "x2", "gamma", "epsilon"),
    "npu_rotary_mul": ("input", "r1", "r2", "rotary_mode"),
    "npu_swiglu": ("input", "dim"),
    "npu_geglu": ("input", "dim", "approximate", "activate_left"),
    "npu_clipped_swiglu": ("x",),
    "npu_moe_init_routing_v2": ("x", "expert_idx"),
    "npu_grouped_matmul": ("x", "weight"),
    "npu_moe_finalize_routing": (
        "expanded_permuted_rows",
        "skip1",
        "skip2",
        "bias",
        "scales",
        "expanded_src_to_dst_row",
        "export_for_source_row",
    ),
}


class ContractViolation(Exception):
    """A call that the operator's documentation does not allow: a defect of ours, whatever the user asked for."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the operator `name` of torch_npu's namespace `npu`."""

    name: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object]


class Arguments:
    """The arguments of one call by name; one that was not given, or is None, is absent."""

    def __init__(self, call: Call) -> None:
        given = dict(zip(POSITIONAL[call.name], call.args, strict=False)) | dict(call.kwargs)
        self._values = {name: value for name, value in given.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def tensor(self, name: str) -> torch.Tensor:
        return cast(torch.Tensor, self._values[name])

    def only(self, name: str) -> torch.Tensor:
        """The tensor of a list of one."""
        return cast(Sequence[torch.Tensor], self._values[name])[0]

    def number(self, name: str) -> int:
        return cast(int, self._values[name])

    def text(self, name: str) -> str:
        return cast(str, self._values[name])

    def numbers(self, name: str) -> list[int]:
        return cast(list[int], self._values[name])

    def get(self, name: str) -> object:
        return self._values.get(name)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, those in lists included."""
        found = {name: value for name, value in self._values.items() if isinstance(value, torch.Tensor)}
        for name, value in self._values.items():
            if isinstance(value, list):
                found |= {f"{name}[{i}]": t for i, t in enumerate(value) if isinstance(t, torch.Tensor)}
        return found


def rule(*operators: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        for operator in operators:
            _CHECKS.setdefault(operator, []).append(check)
        return check

    return register


def rules_of(operator: str) -> list[Check]:
    """Its rules, in the order they are asked; each is named, and says what it demands."""
    return list(_CHECKS[operator])


def check(call: Call) -> None:
    """Raises ContractViolation naming operator and rule at the first rule that the call breaks."""
    if call.name not in _CHECKS:
        raise ContractViolation(f"{call.name}: its documented limits are not known here")
    arguments = Arguments(call)
    for one in _CHECKS[call.name]:
        try:
            problem = one(arguments)
        except KeyError as missing:
            problem = f"{missing} is not given"
        if problem is not None:
            raise ContractViolation(f"{call.name}: {one.__name__}: {problem}")


@rule(*POSITIONAL)
def one_device(a: Arguments) -> str | None:
    """All tensors are on one device."""
    devices = {name: str(tensor.device) for name, tensor in a.tensors().items()}
    return None if len(set(devices.values())) == 1 else f"tensors are on different devices: {devices}"


# ---- writing the cache


@rule("npu_scatter_nd_update_")
def scatter_indices(a: Arguments) -> str | None:
    """int32 or int64, of two dimensions at least, the last no longer than the input has dimensions."""
    indices = a.tensor("indices")
    if indices.dtype not in (torch.int32, torch.int64):
        return f"indices are {indices.dtype}; allowed: int32, int64"
    if indices.dim() < 2 or not 1 <= indices.shape[-1] <= a.tensor("input").dim():
        return f"indices have the shape {list(indices.shape)}; a column for each indexed dimension of the input"
    return None


@rule("npu_scatter_nd_update_")
def scatter_updates(a: Arguments) -> str | None:
    """The type of the input; the shape of the indices without their last dimension, then that of a row of the input."""
    into, indices, updates = a.tensor("input"), a.tensor("indices"), a.tensor("updates")
    allowed = (*FLOATS, torch.bool, torch.int8, torch.int64)
    if updates.dtype != into.dtype or into.dtype not in allowed:
        return f"updates of {updates.dtype} into {into.dtype}; both the same and one of {allowed}"
    expected = indices.shape[:-1] + into.shape[indices.shape[-1] :]
    return None if updates.shape == expected else f"updates {list(updates.shape)}, expected {list(expected)}"


@rule("npu_scatter_nd_update_")
def scatter_range(a: Arguments) -> str | None:
    """No index is out of range; seen where the indices are on the host."""
    into, indices = a.tensor("input"), a.tensor("indices")
    if indices.device.type != "cpu" or not indices.numel():
        return None
    size = torch.tensor(into.shape[: indices.shape[-1]])
    is_inside = ((indices >= 0) & (indices < size)).all()
    return None if is_inside else f"an index is outside of {size.tolist()}: {indices.flatten().tolist()}"


# ---- norms


@rule("npu_rms_norm", "npu_add_rms_norm")
def norm_types(a: Arguments) -> str | None:
    """float16, bfloat16 or float32, the same for all."""
    types = {name: tensor.dtype for name, tensor in a.tensors().items()}
    is_allowed = len(set(types.values())) == 1 and set(types.values()) <= set(FLOATS)
    return None if is_allowed else f"types {types}; one of {FLOATS} for all"


@rule("npu_rms_norm", "npu_add_rms_norm")
def norm_shapes(a: Arguments) -> str | None:
    """Up to eight dimensions; gamma has the last ones of the input, both summands one shape."""
    gamma, inputs = a.tensor("gamma"), [t for name, t in a.tensors().items() if name != "gamma"]
    shapes = {tuple(one.shape) for one in inputs}
    shape = inputs[0].shape
    if len(shapes) != 1 or not 2 <= len(shape) <= 8 or gamma.shape != shape[len(shape) - gamma.dim() :]:
        return f"inputs {sorted(shapes)} with gamma {list(gamma.shape)}"
    return None


@rule("npu_rms_norm", "npu_add_rms_norm")
def norm_epsilon_is_given(a: Arguments) -> str | None:
    """The default, 1e-6, is not every model's."""
    return None if "epsilon" in a else "epsilon is not given"


# ---- rotation


@rule("npu_rotary_mul")
def rotary_mode_is_given(a: Arguments) -> str | None:
    """half or interleave, said."""
    mode = a.get("rotary_mode")
    return None if mode in ("half", "interleave") else f"rotary_mode is {mode!r}; allowed: 'half', 'interleave'"


@rule("npu_rotary_mul")
def rotary_types(a: Arguments) -> str | None:
    """float16, bfloat16 or float32, the same for all."""
    types = {name: tensor.dtype for name, tensor in a.tensors().items()}
    is_allowed = len(set(types.values())) == 1 and set(types.values()) <= set(FLOATS)
    return None if is_allowed else f"types {types}; one of {FLOATS} for all"


@rule("npu_rotary_mul")
def rotary_shapes(a: Arguments) -> str | None:
    """[tokens, heads, dim] with cos and sin [tokens, 1 or heads, dim]; dim even and under 896, heads under 1000."""
    x, cos, sin = a.tensor("input"), a.tensor("r1"), a.tensor("r2")
    if x.dim() != 3 or not 0 < x.shape[1] < 1000 or x.shape[2] >= 896 or x.shape[2] % 2:
        return f"input {list(x.shape)}; [tokens, heads < 1000, even dim < 896]"
    tokens, heads, dim = x.shape
    allowed = [(tokens, 1, dim), (tokens, heads, dim)]
    is_allowed = tuple(cos.shape) in allowed and cos.shape == sin.shape
    return None if is_allowed else f"cos {list(cos.shape)} and sin {list(sin.shape)}; one of {allowed} for both"


# ---- activations


@rule("npu_swiglu", "npu_geglu", "npu_clipped_swiglu")
def gated_input(a: Arguments) -> str | None:
    """Contiguous, not empty, two dimensions or more, an even last one, of a floating type."""
    x = next(iter(a.tensors().values()))
    if x.dtype not in FLOATS or not x.is_contiguous() or not x.numel() or x.dim() < 2 or x.shape[-1] % 2:
        return f"{list(x.shape)} of {x.dtype}, contiguous: {x.is_contiguous()}"
    return None


@rule("npu_swiglu", "npu_geglu", "npu_clipped_swiglu")
def gated_dim(a: Arguments) -> str | None:
    """Said, and the last one, which is the one that `gated_input` looks at."""
    return None if a.get("dim") == -1 else f"dim is {a.get('dim')}; -1"


@rule("npu_geglu")
def geglu_form(a: Arguments) -> str | None:
    """Which gelu (0: by erf, 1: by tanh), and which half passes through it, is said."""
    form, side = a.get("approximate"), a.get("activate_left")
    is_said = form in (0, 1) and isinstance(side, bool)
    return None if is_said else f"approximate {form!r}, activate_left {side!r}"


@rule("npu_clipped_swiglu")
def clipped_form(a: Arguments) -> str | None:
    """alpha, limit, bias and whether gate and up alternate are said."""
    missing = [name for name in ("alpha", "limit", "bias", "interleaved") if name not in a]
    return f"not given: {', '.join(missing)}" if missing else None


# ---- experts


@rule("npu_moe_init_routing_v2")
def routing_inputs(a: Arguments) -> str | None:
    """Tokens [rows, hidden] of a floating type, experts int32 [rows, k]."""
    x, chosen = a.tensor("x"), a.tensor("expert_idx")
    is_allowed = x.dim() == chosen.dim() == 2 and x.shape[0] == chosen.shape[0]
    if not is_allowed or x.dtype not in FLOATS or chosen.dtype != torch.int32:
        return f"x {list(x.shape)} of {x.dtype}, expert_idx {list(chosen.shape)} of {chosen.dtype}"
    return None


@rule("npu_moe_init_routing_v2")
def routing_form(a: Arguments) -> str | None:
    """No quantization, none dropped, a count per expert, and of all experts: other forms change what is returned."""
    expected: dict[str, object] = {"quant_mode": -1, "drop_pad_mode": 0, "expert_tokens_num_type": 1}
    expected |= {"expert_tokens_num_flag": True, "row_idx_type": 0}
    differing = {name: a.get(name) for name, value in expected.items() if a.get(name) != value}
    return f"{differing}, expected {expected}" if differing else None


@rule("npu_moe_init_routing_v2")
def routing_experts(a: Arguments) -> str | None:
    """Up to 10240 experts, all of them active; as many rows as there are tokens times k."""
    num, active = a.number("expert_num"), a.numbers("active_expert_range")
    if not 1 <= num <= MOST_EXPERTS or active != [0, num]:
        return f"expert_num {num} (1 to {MOST_EXPERTS}) with active_expert_range {active}"
    rows = a.tensor("expert_idx").numel()
    return None if a.number("active_num") == rows else f"active_num {a.number('active_num')}, expected {rows}"


@rule("npu_grouped_matmul")
def grouped_form(a: Arguments) -> str | None:
    """One tensor in and out (split_item 2 or 3), groups along the rows (group_type 0), sizes (group_list_type 1)."""
    given = a.get("split_item"), a.get("group_type"), a.get("group_list_type")
    is_allowed = given in ((2, 0, 1), (3, 0, 1)) and all(len(a.numbers(name)) == 1 for name in ("x", "weight"))
    return None if is_allowed else f"split_item, group_type, group_list_type are {given}; 2 or 3, 0, 1"


@rule("npu_grouped_matmul")
def grouped_shapes(a: Arguments) -> str | None:
    """x [rows, in] with weight [groups, in, out]; both inner lengths under 65536."""
    x, weight = a.only("x"), a.only("weight")
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1]:
        return f"x {list(x.shape)} with weight {list(weight.shape)}; [rows, in] with [groups, in, out]"
    inner = max(x.shape[1], weight.shape[2])
    return None if inner < GROUPED_INNER_LIMIT else f"an inner length is {inner}; under {GROUPED_INNER_LIMIT}"


@rule("npu_grouped_matmul")
def grouped_types(a: Arguments) -> str | None:
    """x and weight alike; the bias float32 where they are bfloat16, alike otherwise, [groups, out]."""
    x, weight = a.only("x"), a.only("weight")
    if x.dtype != weight.dtype or x.dtype not in FLOATS:
        return f"x {x.dtype}, weight {weight.dtype}; alike, one of {FLOATS}"
    if "bias" not in a:
        return None
    bias, expected = a.only("bias"), torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    is_allowed = bias.dtype == expected and bias.shape == (weight.shape[0], weight.shape[2])
    return None if is_allowed else f"bias {list(bias.shape)} of {bias.dtype}; [groups, out] of {expected}"


@rule("npu_grouped_matmul")
def grouped_sizes(a: Arguments) -> str | None:
    """int64, one for each group; where they are on the host, they add up to the rows."""
    sizes, x = a.tensor("group_list"), a.only("x")
    if sizes.dtype != torch.int64 or tuple(sizes.shape) != a.only("weight").shape[:1]:
        return f"group_list {list(sizes.shape)} of {sizes.dtype}; int64 [groups]"
    if sizes.device.type == "cpu" and (bool((sizes < 0).any()) or int(sizes.sum()) != x.shape[0]):
        return f"group_list {sizes.tolist()} for {x.shape[0]} rows"
    return None


@rule("npu_moe_finalize_routing")
def finalize_rows(a: Arguments) -> str | None:
    """Rows [tokens * k, hidden]; shares [tokens, k] of their type; an int32 index for each."""
    rows, shares, index = (a.tensor(n) for n in ("expanded_permuted_rows", "scales", "expanded_src_to_dst_row"))
    if rows.dim() != 2 or rows.dtype not in FLOATS or shares.dtype != rows.dtype or shares.dim() != 2:
        return f"rows {list(rows.shape)} of {rows.dtype}, scales {list(shares.shape)} of {shares.dtype}"
    is_allowed = index.dtype == torch.int32 and index.dim() == 1 and shares.numel() == index.numel() == rows.shape[0]
    return None if is_allowed else f"index {list(index.shape)} of {index.dtype} for rows {list(rows.shape)}"


@rule("npu_moe_finalize_routing")
def finalize_order(a: Arguments) -> str | None:
    """Nothing dropped, the index in the order of the tokens, as `row_idx_type` 0 gives it: drop_pad_mode 2."""
    mode = a.get("drop_pad_mode")
    return None if mode == 2 else f"drop_pad_mode is {mode!r}; 2"


@rule("npu_moe_finalize_routing")
def finalize_sums(a: Arguments) -> str | None:
    """A second summand needs a first one; biases need the experts they belong to."""
    if "skip2" in a and "skip1" not in a:
        return "skip2 without skip1"
    return "bias without export_for_source_row" if "bias" in a and "export_for_source_row" not in a else None
