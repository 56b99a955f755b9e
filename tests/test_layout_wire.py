"""Laws of the cache's description: what the model says of its ranks, and that all of it arrives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_cache.cache_info import CacheEntry, CacheLayout, LayerCacheInfo, ModelCacheInfo
from pd_service.node.engine_layout import describe_layout, describe_ranks
from pd_service.node.layout_wire import layout_from_wire, layout_to_wire
from pd_service.rpc import kv_transfer_pb2
from tests.kv_tiles import Read, reads
from transfer.layout import LAYOUT_VERSION, EngineLayout, compare

BLOCK_NUMS = {"FullAttention": 10, "SlidingWindow": 7}


def entry(name: str, attn_type: str, heads: tuple[int, int], window: int | None = None) -> CacheEntry:
    first, num = heads
    return CacheEntry(
        cache_name=name, attn_type=attn_type, dim=8, num_head=num, first_head=first, dtype=torch.bfloat16,
        tensor_setter=lambda _: None, sliding_window=window,
    )  # fmt: skip


def info(*caches: CacheEntry, layout: CacheLayout = CacheLayout.TOKENS_FIRST) -> ModelCacheInfo:
    layers = [LayerCacheInfo(layer_idx=layer, caches=list(caches)) for layer in (1, 0)]
    return ModelCacheInfo(num_layers=2, block_size=4, layer_infos=layers, layout=layout)


def two_ranks(layout: CacheLayout = CacheLayout.TOKENS_FIRST) -> list[ModelCacheInfo]:
    """Four heads in two halves, a latent cache on both, and a window's two heads."""
    return [
        info(entry("k", "FullAttention", (2 * rank, 2)), entry("latent", "FullAttention", (0, 1)),
             entry("w", "SlidingWindow", (rank, 1), 16), layout=layout)
        for rank in range(2)
    ]  # fmt: skip


@given(reads(), st.text(max_size=5), st.integers(0, 2**32 - 1))
def test_a_layout_arrives_as_it_was_sent(read: Read, model: str, version: int) -> None:
    for sent in (read.source, read.dest):
        layout = EngineLayout(version=version, model=model, buffers=sent.buffers)
        message = kv_transfer_pb2.CacheLayout.FromString(layout_to_wire(layout).SerializeToString())
        assert layout_from_wire(message) == layout


def test_a_message_that_is_no_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype '' is not one of"):
        layout_from_wire(kv_transfer_pb2.CacheLayout(buffers=[kv_transfer_pb2.CacheBuffer()]))


NUMBERS = st.integers(0, 4) | st.integers(0, 2**32 - 1)
BUFFERS = st.builds(
    kv_transfer_pb2.CacheBuffer,
    layer=NUMBERS, cache_name=st.text(max_size=2), attn_type=st.sampled_from(["", "FullAttention"]),
    block_size=NUMBERS, first_head=NUMBERS, num_heads=NUMBERS, total_heads=NUMBERS, dim=NUMBERS,
    dtype=st.sampled_from(["", "int8", "float32"]), num_bytes=st.just(0) | st.integers(0, 2**64 - 1),
    sliding_window=NUMBERS, is_heads_first=st.booleans(), rank=st.sampled_from([0, 0, 1, 2**32 - 1]),
)  # fmt: skip


@given(st.lists(BUFFERS, max_size=3))
def test_any_message_is_refused_or_compared_and_never_worse(buffers: list[kv_transfer_pb2.CacheBuffer]) -> None:
    own = describe_ranks(two_ranks(), BLOCK_NUMS, "m")
    try:
        theirs = layout_from_wire(kv_transfer_pb2.CacheLayout(version=LAYOUT_VERSION, model="m", buffers=buffers))
    except ValueError:
        return
    assert compare(own, theirs)
    assert compare(theirs, own)


def test_ranks_describe_their_heads_of_what_all_of_them_hold() -> None:
    layout = describe_ranks(two_ranks(), BLOCK_NUMS, "m")
    assert (layout.version, layout.model, layout.num_ranks) == (LAYOUT_VERSION, "m", 2)
    for rank in range(2):
        described = {
            b.cache_name: (b.first_head, b.num_heads, b.total_heads, b.sliding_window, b.num_blocks)
            for b in layout.of_rank(rank)
        }
        assert described == {
            "k": (2 * rank, 2, 4, 0, 10),
            "latent": (0, 1, 1, 0, 10),
            "w": (rank, 1, 2, 16, 7),
        }
        assert [b.key for b in layout.of_rank(rank)] == [(i, name) for i in (0, 1) for name in ("k", "latent", "w")]


@pytest.mark.parametrize("order", CacheLayout)
def test_an_engine_of_one_rank_can_talk_to_one_of_two_in_either_order(order: CacheLayout) -> None:
    whole = describe_layout(
        info(entry("k", "FullAttention", (0, 4)), entry("latent", "FullAttention", (0, 1)),
             entry("w", "SlidingWindow", (0, 2), 16), layout=order),
        BLOCK_NUMS, "m",
    )  # fmt: skip
    assert {b.is_heads_first for b in whole.buffers} == {order is CacheLayout.HEADS_FIRST}
    assert compare(whole, describe_ranks(two_ranks(), BLOCK_NUMS, "m")) == []


def test_the_described_order_is_that_of_the_tensor() -> None:
    heads, tokens, dim = 3, 4, 8
    for order in CacheLayout:
        (buffer, _) = describe_layout(
            info(entry("k", "FullAttention", (0, heads)), layout=order), BLOCK_NUMS, "m"
        ).buffers
        shape = order.shape(buffer.num_blocks, tokens, heads, dim)
        assert shape[1:3] == ((heads, tokens) if buffer.is_heads_first else (tokens, heads))
        assert torch.empty(shape, dtype=torch.bfloat16).nbytes == buffer.num_bytes
