"""An NPU whose operators run on the host: real torch_npu for devices, memory and views, plain torch for arithmetic.

Inside `EmulatedNpu` every operator that touches a tensor on an NPU is caught. Those of torch run on the host, on the
device's own memory; those of torch_npu run as references, whose results must have the shapes and types that the library
itself infers (its kernels for the device "meta"). As on a card, tensors of two devices in one operator are an error,
and so is an operator that nobody has described. What it cannot show: numbers of real kernels, and the order of work,
because here all work is done at once.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.npu.references import REFERENCES

# Run by torch_npu itself: what makes, shares or describes memory and computes nothing.
_OF_THE_LIBRARY = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::set_",
    "aten::resize_",
    "aten::record_stream",
    "aten::is_pinned",
    "aten::_pin_memory",
}
_COPIES = {"aten::copy_", "aten::_to_copy"}
# Their result has a size or a value that only the device knows, so the host waits for it.
_READ_BACK = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::bincount",
    "aten::repeat_interleave",
}


class NotEmulated(Exception):
    """An operator was used as no card would allow, or as nobody has described it."""


class EmulatedNpu(TorchDispatchMode):
    """`calls` are torch_npu's operators that were used, with the shapes and types of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: set[tuple[str, str]] = set()
        self.references: dict[str, Callable[..., Any]] = dict(REFERENCES)
        self._may_read = True

    @contextmanager
    def no_host_reads(self) -> Iterator[None]:
        """Inside, whatever makes the host wait for the device is an error."""
        self._may_read = False
        try:
            yield
        finally:
            self._may_read = True

    @contextmanager
    def in_all_threads(self) -> Iterator[None]:
        """Also catches what threads do that are started inside; a mode belongs to one thread."""
        run = threading.Thread.run

        def run_caught(thread: threading.Thread) -> None:
            with self:
                run(thread)

        threading.Thread.run = run_caught  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            threading.Thread.run = run  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name: str = func._schema.name
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        target = _target(tensors, kwargs.get("device"))
        if target is None:
            return func(*args, **kwargs)
        self._check_devices(name, tensors, target)
        if name in _OF_THE_LIBRARY or (_is_view(func) and not _is_composite(func)):
            return func(*args, **kwargs)
        if _is_view(func):  # a view or a copy, as its parts will tell
            with self:
                return func.decompose(*args, **kwargs)
        return self._compute(func, name, target, args, kwargs)

    def _check_devices(self, name: str, tensors: list[torch.Tensor], target: torch.device) -> None:
        if not self._may_read and _waits(name, tensors, target):
            raise NotEmulated(f"{name} makes the host wait for the device")
        devices = {str(tensor.device) for tensor in tensors if tensor.dim() or tensor.device.type != "cpu"}
        if name not in _COPIES and len(devices) > 1:
            raise NotEmulated(f"{name}: tensors are on different devices: {', '.join(sorted(devices))}")

    def _compute(self, func: Any, name: str, target: torch.device, args: Any, kwargs: Any) -> Any:
        on_host: list[tuple[torch.Tensor, torch.Tensor]] = []

        def lower(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                on_host.append((host_view(leaf) if leaf.device.type == "npu" else leaf, leaf))
                return on_host[-1][0]
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        def lift(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            for lowered, original in on_host:
                if leaf is lowered:
                    return original
            return _on_device(leaf, target) if target.type == "npu" else leaf

        run = self._reference(func, name, args, kwargs) if name.startswith("npu::") else func
        return tree_map(lift, run(*tree_map(lower, args), **tree_map(lower, kwargs)))

    def _reference(self, func: Any, name: str, args: Any, kwargs: Any) -> Callable[..., Any]:
        short = name.removeprefix("npu::")
        if short not in self.references:
            raise NotEmulated(f"{name} has no reference")
        self.calls.add((short, _describe(args, kwargs)))
        inferred = func(*tree_map(_as_meta, args), **tree_map(_as_meta, kwargs))

        def run(*lowered: Any, **named: Any) -> Any:
            results = self.references[short](*lowered, **named)
            _compare(name, inferred, results)
            return results

        return run


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of `tensor`, which is on an NPU, as a tensor of the host; valid as long as `tensor` is."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    bytes_of_it = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(bytes_of_it, tensor.storage_offset(), tensor.size(), tensor.stride())


def _target(tensors: list[torch.Tensor], asked: Any) -> torch.device | None:
    """Where the result belongs; None when no NPU has to do with it."""
    of_tensors = next((tensor.device for tensor in tensors if tensor.device.type == "npu"), None)
    wanted = None if asked is None else torch.device(asked)
    if of_tensors is None and (wanted is None or wanted.type != "npu"):
        return None
    return wanted or of_tensors


def _waits(name: str, tensors: list[torch.Tensor], target: torch.device) -> bool:
    """Whether the host has to know what the device made, to go on."""
    is_mask = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])  # as many results as it has ones
    is_copied_back = name in _COPIES and "cpu" in (target.type, tensors[0].device.type if name == "aten::copy_" else "")
    return name in _READ_BACK or is_copied_back or (name == "aten::index" and is_mask)


def _is_view(func: Any) -> bool:
    aliases = (result.alias_info for result in func._schema.returns)
    return any(alias is not None and not alias.is_write for alias in aliases)


def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _on_device(result: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=device)
    host_view(made).copy_(result)
    return made


def _as_meta(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")


def _compare(name: str, inferred: Any, results: Any) -> None:
    expected, found = tree_flatten(inferred)[0], tree_flatten(results)[0]
    shapes = [(list(t.shape), t.dtype) for t in expected], [(list(t.shape), t.dtype) for t in found]
    if shapes[0] != shapes[1]:
        raise NotEmulated(f"{name}: the library infers {shapes[0]}, the reference returns {shapes[1]}")


def _describe(args: Any, kwargs: Any) -> str:
    def shown(leaf: Any) -> str:
        if isinstance(leaf, torch.Tensor):
            return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, list):
            return "[" + ", ".join(shown(item) for item in leaf) + "]"
        return repr(leaf)

    named = [f"{key}={shown(value)}" for key, value in kwargs.items() if value is not None]
    return ", ".join([shown(arg) for arg in args] + named)
