"""Attention on a CPU: writing the cache, grouped-query and latent attention over its blocks.

Attention reads exactly the slots a query may see, one request at a time:

      position   0 ········ lo ·············· kv_len - query_len ········ kv_len
                 │ skipped  │ seen by the first query ···│ the new tokens │
      block      │ null     │ real blocks, read as one view if their ids ascend without a gap, else gathered

One padded call for many decodes was measured and not taken: on shapes of a 135M model it saves at most 6 % of a step of
32 short requests and loses beyond 200 tokens, because padding needs a gather while a view needs no copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F

from pd_service.ops import composed, get_ops, native
from pd_service.ops.metadata import ForwardMetadata


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write `key` and `value` [tokens, heads, dim] into the caches [blocks, block_size, heads, dim].

    `slot_mapping` [tokens] holds flat slots, `block id * block_size + offset`, each at most once.
    """
    if native.write_kv(key, value, k_cache, v_cache, slot_mapping):
        return
    slots = slot_mapping.long()
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, key)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, value)


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: ForwardMetadata,
    attn_type: str,
    scale: float,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of `query` [tokens, heads, dim] over the caches [blocks, block_size, kv_heads, dim].

    The last query of each request stands at position kv_len - 1. With `sliding_window` W (the current token counts)
    position p sees p-W+1..p; what lies wholly before the first query's window is not read, so its blocks may be null.
    `sinks` [heads] are scores of one more key each, which everyone sees and whose value is nothing (arXiv 2309.17453).
    The new tokens' keys and values must be in the cache already. Returns [tokens, heads, dim].
    """
    answers = native.paged_attention(
        query, k_cache, v_cache, metadata, attn_type, scale, sliding_window=sliding_window, sinks=sinks
    )
    if answers is not None:
        return answers
    num_kv_heads = k_cache.shape[2]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    k_slots, v_slots = _heads_first(k_cache), _heads_first(v_cache)
    for read in _reads(metadata, attn_type, sliding_window):
        key, value = read.take(k_cache, k_slots), read.take(v_cache, v_slots)
        if read.query_len == 1:
            # The heads of a group ask the same keys, so they are that many queries of one head: nothing is repeated.
            grouped = (1, num_kv_heads, -1, query.shape[-1])
            answer = _attend(query[read.start].view(grouped), key, value, scale, sinks)
            out[read.start].view(grouped).copy_(answer)
        else:
            stop = read.start + read.query_len
            chunk = query[read.start : stop].transpose(0, 1).unsqueeze(0)  # [1, heads, query_len, dim]
            answer = _attend(chunk, key, value, scale, sinks, mask=read.mask, is_causal=read.mask is None)
            out[read.start : stop] = answer[0].transpose(0, 1)
    return out


def rotate_write_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: ForwardMetadata,
    attn_type: str,
    scale: float,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """All that follows the projections: `rotary` of queries and keys, `write_kv`, `paged_attention`, in this order.

    `query` is [tokens, heads, dim], `key` and `value` are [tokens, kv_heads, dim]. Returns [tokens, heads, dim].
    """
    answers = native.rotate_write_attend(
        query,
        key,
        value,
        cos,
        sin,
        k_cache,
        v_cache,
        metadata,
        attn_type,
        scale,
        sliding_window=sliding_window,
        sinks=sinks,
    )
    if answers is not None:
        return answers
    return composed.rotate_write_attend(
        get_ops("cpu"), query, key, value, cos, sin, k_cache, v_cache, metadata, attn_type, scale, sliding_window, sinks
    )


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """[1, heads, rows, dim] for `query` of that shape; `key` and `value` are [1, kv_heads, length, dim].

    A sink's share of the softmax follows from the logarithm of the sum of all others, which the fused operator returns
    as well. `sinks` holds one per head and row, or one per head.
    """
    if sinks is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True
        )
    bias = None if mask is None else torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    answer, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, is_causal=is_causal, attn_mask=bias, scale=scale
    )
    shares = torch.sigmoid(log_sums - sinks.view(1, query.shape[1], -1))  # of what is not the sink
    return cast(torch.Tensor, answer * shares.unsqueeze(-1))


SCORES_AT_ONCE = 2**20  # bounds what `latent_attention` holds beside its result: 4 MB of float32, twice
FEW_QUERIES = 32  # get the bits they would get one by one, so that guesses are verified as plain decoding chooses


def latent_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    nope_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    metadata: ForwardMetadata,
    attn_type: str,
    scale: float,
) -> torch.Tensor:
    """Causal attention whose heads share one key and one value: multi-head latent attention in its absorbed form.

    The key of a slot is its row of `nope_cache` [blocks, block_size, 1, rank] beside that of `rope_cache`
    [blocks, block_size, 1, rope_dim], its value the row of `nope_cache` alone. `q_latent` [tokens, heads, rank] and
    `q_rope` [tokens, heads, rope_dim] ask for them. Which slots a query sees is as in `paged_attention`; the new tokens
    must be in the caches already. Returns [tokens, heads, rank].
    """
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    nope_slots, rope_slots = _heads_first(nope_cache), _heads_first(rope_cache)
    for read in _reads(metadata, attn_type, None):
        latent, rope = read.take(nope_cache, nope_slots)[0, 0], read.take(rope_cache, rope_slots)[0, 0]
        at_once = max(1, SCORES_AT_ONCE // (read.length * out.shape[1]))
        if read.query_len <= FEW_QUERIES and out.dtype == torch.float32:
            at_once = 1  # float32 sums depend on the number of rows, those of bfloat16 do not
        for first in range(0, read.query_len, at_once):
            rows = slice(read.start + first, read.start + min(first + at_once, read.query_len))
            visible = read.length - (read.start + read.query_len - rows.stop)  # by the last query of these rows
            out[rows] = _attend_latent(q_latent[rows], q_rope[rows], latent[:visible], rope[:visible], scale)
    return out


def _attend_latent(
    q_latent: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, scale: float
) -> torch.Tensor:
    """[rows, heads, rank] for queries [rows, heads, …] of which the last sees all of `latent` and `rope` [keys, …].

    All heads of all rows are the rows of one product.
    """
    num_rows, num_heads, rank = q_latent.shape
    scores = torch.mm(q_latent.reshape(-1, rank), latent.t())
    scores = torch.addmm(scores, q_rope.reshape(-1, rope.shape[1]), rope.t(), beta=scale, alpha=scale)
    if num_rows > 1:  # the triangle of the new keys; [rows, heads, keys]
        unseen = torch.ones(num_rows, num_rows, dtype=torch.bool, device=scores.device).triu_(1)
        scores.view(num_rows, num_heads, -1)[:, :, -num_rows:].masked_fill_(unseen.unsqueeze(1), -torch.inf)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(latent.dtype)
    return torch.mm(weights, latent).view(num_rows, num_heads, rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """What one request's queries read: `length` slots from `first_slot`, of the cache itself or of gathered `blocks`.

    The queries are `query_len` rows of the batch from `start`. `mask` [query_len, length] is True where a query may
    look; None: the plain triangle, or everything for a single query.
    """

    start: int
    query_len: int
    first_slot: int
    length: int
    blocks: torch.Tensor | None
    mask: torch.Tensor | None

    def take(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[1, kv_heads, length, dim] of `cache`, whose `_heads_first` view is `slots`."""
        if self.blocks is not None:
            slots = _heads_first(cache.index_select(0, self.blocks))
        return slots.narrow(2, self.first_slot, self.length)


def _heads_first(cache: torch.Tensor) -> torch.Tensor:
    """A view [1, heads, slots, dim] of `cache` [blocks, block_size, heads, dim]."""
    return cache.view(-1, *cache.shape[2:]).transpose(0, 1).unsqueeze(0)


def _reads(metadata: ForwardMetadata, attn_type: str, window: int | None) -> list[_Read]:
    """The reads of every request of the step, computed by the first layer that asks and shared by the others."""
    memo = ("cpu.reads", attn_type, window)
    if memo not in metadata.scratch:
        table = metadata.block_table[attn_type].tolist()
        masks: dict[tuple[int, int, int], torch.Tensor | None] = {}
        reads, start = [], 0
        for query_len, kv_len, blocks in zip(metadata.query_lens, metadata.kv_lens, table, strict=True):
            reads.append(_plan(start, query_len, kv_len, blocks, metadata.block_size, window, masks))
            start += query_len
        metadata.scratch[memo] = reads
    return cast(list[_Read], metadata.scratch[memo])


def _plan(
    start: int,
    query_len: int,
    kv_len: int,
    blocks: list[int],
    block_size: int,
    window: int | None,
    masks: dict[tuple[int, int, int], torch.Tensor | None],
) -> _Read:
    past = kv_len - query_len
    lo = 0 if window is None else max(0, past - window + 1)
    used = blocks[lo // block_size : -(-kv_len // block_size)]
    is_one_run = used == list(range(used[0], used[0] + len(used)))
    shape = (query_len, past - lo, window or kv_len)
    if shape not in masks:
        masks[shape] = _mask(*shape)
    return _Read(
        start=start,
        query_len=query_len,
        first_slot=lo % block_size + (used[0] * block_size if is_one_run else 0),
        length=kv_len - lo,
        blocks=None if is_one_run else torch.tensor(used),
        mask=masks[shape],
    )


def _mask(query_len: int, past: int, window: int) -> torch.Tensor | None:
    """[query_len, past + query_len], True where query i (at past + i) sees key j: i + past - window < j <= i + past.

    None when the triangle alone says it (no past, no window in the way), or when the only query sees every key.
    """
    if query_len == 1 or (past == 0 and query_len <= window):
        return None
    ones = torch.ones(query_len, past + query_len, dtype=torch.bool)
    return ones.tril_(past).triu_(past - window + 1)
