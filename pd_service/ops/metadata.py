"""What attention needs to know about one step, passed as an argument through the model's forward."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True, kw_only=True)
class ForwardMetadata:
    """One batch of requests whose new tokens stand one request after the other.

    `query_lens[i]` new tokens of request i follow `kv_lens[i] - query_lens[i]` tokens that are in the cache already.
    Lengths are Python ints, so that no operator has to read them back from a device. `block_table[attn_type]` is
    int32 [requests, blocks], padded with the null block 0; `slot_mapping[attn_type]` is int32 [tokens], the cache slot
    `block id * block_size + offset` of each new token. `scratch` lets an operator keep what all layers share, such as
    a mask, for the duration of the step.
    """

    query_lens: list[int]
    kv_lens: list[int]
    block_size: int
    block_table: dict[str, torch.Tensor]
    slot_mapping: dict[str, torch.Tensor]
    scratch: dict[object, object] = field(default_factory=dict)
