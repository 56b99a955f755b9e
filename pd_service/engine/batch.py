"""One step's batch: what each request brings, and all of it as arrays.

A request with guesses to verify brings each of its positions as a line of one token, as plain decoding would: so the
attention of a position is computed in the same way, to the last bit, whether a guess led to it or not.

    row 0   a chunk of 5 tokens            line 0   5 tokens
    row 1   a decode                       line 1   1 token
    row 2   a decode and 2 guesses         lines 2, 3, 4   1 token each, one block table
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kv_cache import prepare_block_tables, prepare_slot_mapping
from pd_service.ops.metadata import ForwardMetadata
from pd_service.request import EngineSampling


class InputRow(NamedTuple):
    """What one request brings: `token_ids` from position `first` on, the last `num_drafts` of them guesses.

    `sampling` None: no token is wanted yet, and `next_token_id` is the one that follows. `history` are all tokens
    before and among these, if the sampling needs them. Up to `max_next_drafts` guesses are wanted for the next step,
    of a request that may still get `num_missing` tokens. `judged_ids` are the tokens that the first positions' log
    probabilities are wanted of, with `num_top_judged` alternatives each.
    """

    token_ids: Sequence[int]
    first: int
    block_ids: dict[str, list[int]]
    num_drafts: int = 0
    sampling: EngineSampling | None = None
    next_token_id: int = 0
    history: Sequence[int] = ()
    num_prompt_tokens: int = 0
    judged_ids: Sequence[int] = ()
    num_top_judged: int = 0
    max_next_drafts: int = 0
    num_missing: int = 0

    @property
    def num_known(self) -> int:
        return len(self.token_ids) - self.num_drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`starts[i]` is where row i begins among the tokens. `token_ids` and `positions` are int64 [tokens]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    metadata: ForwardMetadata
    starts: list[int]


def make_batch(
    rows: Sequence[InputRow],
    token_ids: Sequence[Sequence[int]],
    firsts: Sequence[int],
    block_size: int,
    device: torch.device,
) -> Batch:
    """The tokens `token_ids[i]` of row i at the positions from `firsts[i]` on, each list at least one long.

    All arrays are on `device`.
    """
    ids: list[int] = []
    positions: list[int] = []
    query_lens: list[int] = []
    kv_lens: list[int] = []
    tables: list[dict[str, list[int]]] = []
    starts: list[int] = []
    for row, tokens, first in zip(rows, token_ids, firsts, strict=True):
        starts.append(len(ids))
        ids += tokens
        end = first + len(tokens)
        positions += range(first, end)
        if row.num_drafts:
            query_lens += [1] * len(tokens)
            kv_lens += range(first + 1, end + 1)
            tables += [row.block_ids] * len(tokens)
        else:
            query_lens.append(len(tokens))
            kv_lens.append(end)
            tables.append(row.block_ids)
    block_table = prepare_block_tables(tables)
    slot_mapping = prepare_slot_mapping(positions, query_lens, block_table, block_size)
    metadata = ForwardMetadata(
        query_lens=query_lens,
        kv_lens=kv_lens,
        block_size=block_size,
        block_table={key: table.to(device) for key, table in block_table.items()},
        slot_mapping={key: slots.to(device) for key, slots in slot_mapping.items()},
    )
    return Batch(
        token_ids=torch.tensor(ids, device=device),
        positions=torch.tensor(positions, device=device),
        metadata=metadata,
        starts=starts,
    )


def take_rows(x: torch.Tensor, indexes: Sequence[int]) -> torch.Tensor:
    """These rows of `x` [rows, ...]."""
    return x.index_select(0, torch.tensor(indexes, device=x.device))
