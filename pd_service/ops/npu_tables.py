"""What all layers of a step share on an NPU, made once per step and kept in the metadata's scratch: tables and masks.

Made from lengths, which are Python integers, and from tables that are on the device: nothing is read back from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch

from pd_service.ops.contracts_attention import MASK_SIZE
from pd_service.ops.metadata import ForwardMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The blocks that the new tokens of a step can look at: int32 [requests, blocks], and the keys in them.

    `kv_lens[i]` counts from the first token of the first block of row i; the last of them is the request's last token.
    """

    block_table: torch.Tensor
    kv_lens: list[int]


def visible_tables(metadata: ForwardMetadata, attn_type: str, window: int | None) -> Tables:
    """Tables that begin with the first block the window of a request's first new token touches.

    block      0    1    2    3              null blocks have no part in it, whether an operator
    window                 ├────────┤        honours a window or not
    table            [2,   3]
    """
    memo = ("npu.tables", attn_type, window)
    if memo not in metadata.scratch:
        metadata.scratch[memo] = _begin_late(metadata, attn_type, window)
    return cast(Tables, metadata.scratch[memo])


def _begin_late(metadata: ForwardMetadata, attn_type: str, window: int | None) -> Tables:
    table, size = metadata.block_table[attn_type], metadata.block_size
    pasts = [kv - new for kv, new in zip(metadata.kv_lens, metadata.query_lens, strict=True)]
    firsts = [0 if window is None else max(0, past - window + 1) // size for past in pasts]
    kv_lens = [kv - first * size for kv, first in zip(metadata.kv_lens, firsts, strict=True)]
    if not any(firsts):
        return Tables(block_table=table, kv_lens=kv_lens)
    width = -(-max(kv_lens) // size)
    most = table.shape[1] - 1
    index = [[min(first + i, most) for i in range(width)] for first in firsts]
    return Tables(block_table=table.gather(1, torch.tensor(index, device=table.device)), kv_lens=kv_lens)


@lru_cache(maxsize=8)
def causal_triangle(device: torch.device) -> torch.Tensor:
    """bool [2048, 2048], True above the diagonal, where nobody looks: the mask of every causal call."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu_(1)
