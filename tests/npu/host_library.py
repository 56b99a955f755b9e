"""The operators of torch_npu on host tensors, where torch_npu is not: its schemas, our references.

Importing this defines the namespace `npu`, once per process, from `schemas.tsv`, rows of torch_npu 2.13.0's own table:
names and types of arguments are checked by torch as that library has them. So `pd_service.ops.npu` runs anywhere, and
every call of it is checked against its documented limits.
"""

from __future__ import annotations

import torch

from pd_service.ops import npu
from tests.npu.references import REFERENCES
from tests.npu.schemas import SCHEMAS as SCHEMAS


def _define() -> torch.library.Library:
    library = torch.library.Library("npu", "DEF")
    for name, schema in SCHEMAS.items():
        library.define(schema.removeprefix("npu::"))
        library.impl(name, REFERENCES[name], "CPU")
    return library


LIBRARY = _define()  # the operators are gone when nobody holds it
npu._IS_CHECKED = True
