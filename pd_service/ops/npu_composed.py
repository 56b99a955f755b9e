"""Attention from torch's own operators, for what the fused one does not document: head sizes other than 128 as a rule.

Requests with equally many new tokens are computed together, so all decodes of a step are one call. Costs a copy of the
keys and values that are looked at. Which of both is used depends on the model alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from pd_service.ops.metadata import ForwardMetadata
from pd_service.ops.npu_tables import Tables, visible_tables

GATHERED_TOKENS = 2**16  # of keys copied at once; bounds what is held beside the result


def attend(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: torch.Tensor,
    metadata: ForwardMetadata,
    attn_type: str,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`query` [tokens, heads, dim] over caches [blocks, block_size, kv_heads, …].

    The rows of `keys`, side by side, are keys of `dim`; those of `values` [..., value_dim] their values. Which of them
    a token sees, and what sinks are, is said at `cpu.paged_attention`. Returns [tokens, heads, value_dim].
    """
    tables = visible_tables(metadata, attn_type, window)
    out = query.new_empty(*query.shape[:2], values.shape[-1])
    for new, requests in _alike(metadata.query_lens, tables, metadata.block_size):
        rows = torch.tensor(_token_rows(metadata.query_lens, requests), device=query.device)
        lengths = [tables.kv_lens[i] for i in requests]
        width = -(-max(lengths) // metadata.block_size)
        chosen = torch.tensor(requests, device=query.device)
        blocks = tables.block_table.index_select(0, chosen)[:, :width].flatten()
        key = torch.cat([_take(cache, blocks, len(requests)) for cache in keys], dim=-1)
        value = _take(values, blocks, len(requests))
        visible = _visible(new, lengths, width * metadata.block_size, window, query.device)
        asked = query.index_select(0, rows).view(len(requests), new, *query.shape[1:])
        answers = _attend(asked, key, value, visible, scale, sinks)
        out.index_copy_(0, rows, answers.flatten(0, 1))
    return out


def _alike(query_lens: Sequence[int], tables: Tables, block_size: int) -> Iterator[tuple[int, list[int]]]:
    """Groups of requests with equally many new tokens, each small enough to be gathered at once."""
    by_length: dict[int, list[int]] = {}
    for request, new in enumerate(query_lens):
        by_length.setdefault(new, []).append(request)
    for new, requests in by_length.items():
        padded = -(-max(tables.kv_lens[i] for i in requests) // block_size) * block_size
        at_once = max(1, GATHERED_TOKENS // padded)
        for first in range(0, len(requests), at_once):
            yield new, requests[first : first + at_once]


def _take(cache: torch.Tensor, blocks: torch.Tensor, num_requests: int) -> torch.Tensor:
    """[requests, keys, kv_heads, …] of the `blocks` of that many requests, as many of each."""
    return cache.index_select(0, blocks).view(num_requests, -1, *cache.shape[2:])


def _token_rows(query_lens: Sequence[int], requests: Sequence[int]) -> list[int]:
    starts = [0]
    for new in query_lens:
        starts.append(starts[-1] + new)
    return [row for i in requests for row in range(starts[i], starts[i + 1])]


def _visible(new: int, lengths: Sequence[int], padded: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [requests, new, padded]: which keys of its request each of the last `new` tokens sees."""
    key = torch.arange(padded, device=device)
    past = torch.tensor(lengths, device=device) - new
    position = past[:, None, None] + torch.arange(new, device=device)[:, None]
    seen = key <= position
    return seen if window is None else seen & (key > position - window)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[requests, new, heads, value_dim] for `query` [requests, new, heads, dim] and [requests, keys, kv_heads, …].

    What nobody sees is no number as likely as not, so it is replaced in the values too: zero times it is not zero.
    """
    num_requests, new, num_heads, dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.view(num_requests, new, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)  # [requests, kv, group, new, dim]
    keys = key.permute(0, 2, 3, 1).unsqueeze(2)  # [requests, kv, 1, dim, keys]
    scores = torch.matmul(grouped, keys).float() * scale
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1)[..., : visible.shape[-1]].to(value.dtype)
    values = value.masked_fill(~visible.any(dim=1)[:, :, None, None], 0).transpose(1, 2).unsqueeze(2)
    answers = torch.matmul(weights, values)  # [requests, kv, group, new, value_dim]
    return answers.permute(0, 3, 1, 2, 4).reshape(num_requests, new, num_heads, -1)
