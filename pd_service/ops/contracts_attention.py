"""The documented limits of `npu_fused_infer_attention_score_v2`, as far as paged caches and layout TND are concerned.

    query  [tokens, heads, dim]                actual_seq_qlen   where each request's tokens end, counted from the first
    key    [blocks, block_size, heads * dim]   actual_seq_kvlen  each request's own length, because keys are paged
                                               block_table       int32 [requests, blocks]

`Q_S` of the documentation is the number of new tokens of a request, taken here as the largest of the batch.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from pd_service.ops.contracts import Arguments, rule

OPERATOR = "npu_fused_infer_attention_score_v2"
MASK_SIZE = 2048  # the operators tile one triangle of this size over sequences of any length
MOST_REQUESTS = 4096
LATENT_DIM, ROPE_DIM = 512, 64
LATENT_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
_MASKED_MODES = (2, 3, 4)
_HALVES = (torch.float16, torch.bfloat16)


@rule(OPERATOR)
def attention_said(a: Arguments) -> str | None:
    """Defaults that are wrong for nearly every model (scale 1.0, layout BSH, no mask) are never relied on."""
    names = ("softmax_scale", "input_layout", "sparse_mode", "num_query_heads", "num_key_value_heads", "block_size")
    missing = [name for name in names if name not in a]
    return f"not given: {', '.join(missing)}" if missing else None


@rule(OPERATOR)
def attention_layout(a: Arguments) -> str | None:
    """TND: the only layout with sinks, and with requests of any lengths in one call."""
    layout, query = a.text("input_layout"), a.tensor("query")
    if layout != "TND":
        return f"input_layout is {layout!r}; 'TND'"
    is_allowed = query.dim() == 3 and query.shape[1] == a.number("num_query_heads")
    return None if is_allowed else f"query {list(query.shape)}; [tokens, {a.number('num_query_heads')}, dim]"


@rule(OPERATOR)
def attention_types(a: Arguments) -> str | None:
    """float16 or bfloat16, the same for queries, keys and values."""
    types = [a.tensor(name).dtype for name in ("query", "key", "value")]
    return None if len(set(types)) == 1 and types[0] in _HALVES else f"types {types}; all float16 or all bfloat16"


@rule(OPERATOR)
def attention_contiguous(a: Arguments) -> str | None:
    """All tensors are contiguous."""
    apart = [name for name, tensor in a.tensors().items() if not tensor.is_contiguous()]
    return f"not contiguous: {', '.join(apart)}" if apart else None


@rule(OPERATOR)
def attention_heads(a: Arguments) -> str | None:
    """Query heads are a multiple of key heads, 64 times at most, and 256 at most."""
    heads, shared = a.number("num_query_heads"), a.number("num_key_value_heads")
    is_allowed = shared >= 1 and heads % shared == 0 and heads // shared <= 64 and heads <= 256
    return None if is_allowed or _is_latent(a) else f"{heads} query heads over {shared} key heads"


@rule(OPERATOR)
def attention_lengths(a: Arguments) -> str | None:
    """Python integers, up to 4096 requests; cumulative for queries, each request's own for paged keys.

    A tensor is accepted silently, and read back from the device in every call.
    """
    if not all(isinstance(a.get(name), list) for name in ("actual_seq_qlen", "actual_seq_kvlen")):
        return "actual_seq_qlen and actual_seq_kvlen must be lists of integers"
    ends, lengths = a.numbers("actual_seq_qlen"), a.numbers("actual_seq_kvlen")
    if not all(type(n) is int for n in ends + lengths) or len(ends) != len(lengths) or len(ends) > MOST_REQUESTS:
        return f"{len(ends)} and {len(lengths)} lengths; integers, as many of both, at most {MOST_REQUESTS}"
    is_rising = all(before <= after for before, after in pairwise([0, *ends]))
    num_tokens = a.tensor("query").shape[0]
    if not ends or not is_rising or ends[-1] != num_tokens or min(lengths) < 1:
        return f"actual_seq_qlen {ends[:8]} must rise to {num_tokens}, actual_seq_kvlen {lengths[:8]} be positive"
    return None


@rule(OPERATOR)
def attention_cache(a: Arguments) -> str | None:
    """Keys and values are blocks [blocks, block_size, heads * dim] of one shape, their row at most 65535 long."""
    key, value = a.tensor("key"), a.tensor("value")
    row = a.number("num_key_value_heads") * a.tensor("query").shape[2]
    if key.shape != value.shape or key.dim() != 3 or key.shape[2] != row:
        return f"key {list(key.shape)}, value {list(value.shape)}; [blocks, block_size, {row}] for both"
    return None if row <= 65535 else f"a row of the cache has {row} values; at most 65535"


@rule(OPERATOR)
def attention_cache_size(a: Arguments) -> str | None:
    """With one new token per request, a cache has no more values than int32 can count."""
    num_values = a.tensor("key").numel()
    is_allowed = _most_new_tokens(a) > 1 or num_values < 2**31
    return None if is_allowed else f"the cache has {num_values} values; under 2**31 for one token per request"


@rule(OPERATOR)
def attention_block_size(a: Arguments) -> str | None:
    """A multiple of 16 up to 1024, and what the cache was made with."""
    size = a.number("block_size")
    is_allowed = size % 16 == 0 and 16 <= size <= 1024 and size == a.tensor("key").shape[1]
    return None if is_allowed else f"block_size {size} for blocks of {a.tensor('key').shape[1]}; 16, 32, … 1024"


@rule(OPERATOR)
def attention_block_table(a: Arguments) -> str | None:
    """int32 [requests, blocks], as wide as the longest request needs. The ids themselves nobody checks but we."""
    if "block_table" not in a:
        return "block_table is not given"
    table, lengths = a.tensor("block_table"), a.numbers("actual_seq_kvlen")
    width = -(-max(lengths) // a.number("block_size"))
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != len(lengths) or table.shape[1] < width:
        return f"{list(table.shape)} of {table.dtype}; int32 [{len(lengths)}, at least {width}]"
    return None


@rule(OPERATOR)
def attention_block_ids(a: Arguments) -> str | None:
    """Ids lie in the cache; seen where the table is on the host."""
    table, num_blocks = a.tensor("block_table"), a.tensor("key").shape[0]
    if table.device.type != "cpu":
        return None
    is_inside = ((table >= 0) & (table < num_blocks)).all()
    return None if is_inside else f"ids from {int(table.min())} to {int(table.max())} in a cache of {num_blocks} blocks"


@rule(OPERATOR)
def attention_head_dim(a: Arguments) -> str | None:
    """Without rope parts 128, or 64 where every query head has its own key head."""
    if _is_latent(a):
        return None
    heads, shared = a.number("num_query_heads"), a.number("num_key_value_heads")
    dim, allowed = a.tensor("query").shape[2], (64, 128) if heads == shared else (128,)
    return None if dim in allowed else f"dim {dim} for {heads} query heads over {shared}; allowed: {allowed}"


@rule(OPERATOR)
def attention_mask(a: Arguments) -> str | None:
    """Modes 2 to 4 want the triangle of 2048; mode 0 goes without a mask. 5 to 8 do not exist, 9 is not ours."""
    mode, mask = a.number("sparse_mode"), a.get("atten_mask")
    if mode == 0:
        return None if mask is None else "sparse_mode 0 with a mask"
    if mode not in _MASKED_MODES:
        return f"sparse_mode is {mode}; allowed: 0, 2, 3, 4"
    is_allowed = isinstance(mask, torch.Tensor) and mask.dtype in (torch.bool, torch.int8, torch.uint8)
    if not is_allowed or tuple(a.tensor("atten_mask").shape) != (MASK_SIZE, MASK_SIZE):
        return f"sparse_mode {mode} wants a mask [{MASK_SIZE}, {MASK_SIZE}] of bool, int8 or uint8"
    return None


@rule(OPERATOR)
def attention_unmasked(a: Arguments) -> str | None:
    """Without a mask every new token sees all keys, so a request may have one new token only."""
    is_allowed = a.number("sparse_mode") != 0 or _most_new_tokens(a) == 1
    return None if is_allowed else f"sparse_mode 0 with {_most_new_tokens(a)} new tokens of one request"


@rule(OPERATOR)
def attention_window(a: Arguments) -> str | None:
    """A window, in tokens before and after the one that asks, is said with mode 4 and with no other."""
    given = a.get("pre_tokens"), a.get("next_tokens")
    if a.number("sparse_mode") != 4:
        return None if given == (None, None) else f"pre_tokens and next_tokens {given} without sparse_mode 4"
    is_allowed = all(isinstance(n, int) and n >= 0 for n in given)
    return None if is_allowed else f"pre_tokens and next_tokens are {given}; both at least 0"


@rule(OPERATOR)
def attention_sink(a: Arguments) -> str | None:
    """bfloat16, one per query head, values of 128 at most, no rope parts."""
    if "learnable_sink" not in a:
        return None
    sink, query = a.tensor("learnable_sink"), a.tensor("query")
    is_allowed = sink.dtype == torch.bfloat16 and tuple(sink.shape) == (query.shape[1],) and not _is_latent(a)
    if not is_allowed or query.shape[2] > 128:
        return f"sink {list(sink.shape)} of {sink.dtype} with queries {list(query.shape)}"
    return None


@rule(OPERATOR)
def attention_rope(a: Arguments) -> str | None:
    """Rope parts come for queries and keys or for neither, 64 wide, in the types and other dimensions of these."""
    if not _is_latent(a):
        return None
    if "query_rope" not in a or "key_rope" not in a:
        return "query_rope and key_rope come together or not at all"
    query, key, q_rope, k_rope = (a.tensor(name) for name in ("query", "key", "query_rope", "key_rope"))
    is_alike = q_rope.dtype == query.dtype and k_rope.dtype == key.dtype
    if not is_alike or q_rope.shape != (*query.shape[:2], ROPE_DIM) or k_rope.shape != (*key.shape[:2], ROPE_DIM):
        return f"query_rope {list(q_rope.shape)}, key_rope {list(k_rope.shape)} of {q_rope.dtype}, {k_rope.dtype}"
    return None


@rule(OPERATOR)
def attention_latent(a: Arguments) -> str | None:
    """Latent attention in its absorbed form: queries of 512, a power of two of heads up to 128, one key head."""
    if not _is_latent(a):
        return None
    heads, shared = a.number("num_query_heads"), a.number("num_key_value_heads")
    dim = a.tensor("query").shape[2]
    is_allowed = dim == LATENT_DIM and heads in LATENT_HEADS and shared == 1 and a.number("sparse_mode") in (0, 3, 4)
    return None if is_allowed else f"dim {dim}, {heads} query heads over {shared}, sparse_mode {a.get('sparse_mode')}"


def _is_latent(a: Arguments) -> bool:
    return "query_rope" in a or "key_rope" in a


def _most_new_tokens(a: Arguments) -> int:
    return max(after - before for before, after in pairwise([0, *a.numbers("actual_seq_qlen")]))
