"""Laws of `transfer.pairing`: every head is read once, from a rank that holds it, and holders share the work."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kv_tiles import FULL, SLIDING, Cache, Read, heads_of, reads, split
from transfer.layout import BufferKey, EngineLayout
from transfer.pairing import Tile, pair
from transfer.plan import ReadPlanner

NUM_LAYERS = 12
LAYERS = tuple(range(NUM_LAYERS))
TABLE = {FULL: [1, 2, 3], SLIDING: [1, 2, 3]}
# KV heads, then tensor-parallel sizes of source and destination
SIZES = [(4, 8, 1), (4, 8, 2), (4, 8, 4), (4, 1, 8), (4, 2, 8), (4, 4, 8), (2, 4, 1), (2, 1, 4), (2, 2, 4), (1, 8, 8)]


def grouped(num_heads: int, size: int) -> EngineLayout:
    return split([Cache(name, FULL, num_heads, LAYERS) for name in "kv"], [(LAYERS, size)])


def all_tiles(source: EngineLayout, dest: EngineLayout) -> list[list[Tile]]:
    return [pair(source, dest, rank) for rank in range(dest.num_ranks)]


def bytes_served(source: EngineLayout, dest: EngineLayout) -> Counter[int]:
    """By source rank, for 12 tokens read by all ranks of the destination."""
    served = Counter(dict.fromkeys(range(source.num_ranks), 0))
    for rank in range(dest.num_ranks):
        stats = ReadPlanner(source, dest, rank).plan(TABLE, TABLE, 0, 12).stats()
        served.update({source_rank: stat.num_bytes for source_rank, stat in stats.items()})
    return served


@given(reads())
def test_every_head_of_every_buffer_comes_once_from_a_rank_that_holds_it(read: Read) -> None:
    got = Counter(
        (tile.dest_index, head)
        for tile in pair(read.source, read.dest, read.rank)
        for head in range(tile.first_head, tile.end_head)
    )
    heads = {
        (i, head)
        for i, b in enumerate(read.dest.of_rank(read.rank))
        for head in range(b.first_head, b.end_head)
    }  # fmt: skip
    assert got == Counter(heads)
    for tile in pair(read.source, read.dest, read.rank):
        assert tile.source.key == tile.dest.key
        assert read.source.of_rank(tile.source.rank)[tile.source_index] == tile.source
        assert read.dest.of_rank(read.rank)[tile.dest_index] == tile.dest
        assert tile.source.first_head <= tile.first_head < tile.end_head <= tile.source.end_head


SPANS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 4)).filter(lambda span: sum(span) <= 4), max_size=3
).map(lambda spans: [*spans, (0, 4)])  # fmt: skip


def of_spans(spans: list[tuple[int, int]]) -> EngineLayout:
    """Each rank holds (first head, number of heads) of four, in every layer."""
    (whole,) = split([Cache("k", FULL, 4, (0,))], [((0,), 1)]).buffers
    buffers = [
        replace(whole, layer=layer, rank=rank, first_head=first, num_heads=num, num_bytes=0)
        for rank, (first, num) in enumerate(spans)
        for layer in LAYERS
    ]
    return EngineLayout(version=2, model="m", buffers=tuple(buffers))


@given(SPANS, SPANS)
def test_ranks_whose_heads_overlap_share_every_head_and_no_tile_is_cut_in_vain(
    holders: list[tuple[int, int]], readers: list[tuple[int, int]]
) -> None:
    served: Counter[tuple[int, int]] = Counter()  # (head, source rank)
    for rank, (first_head, num) in enumerate(readers):
        tiles = pair(of_spans(holders), of_spans(readers), rank)
        heads = [(tile.dest_index, head) for tile in tiles for head in range(tile.first_head, tile.end_head)]
        assert heads == [(i, head) for i in range(NUM_LAYERS) for head in range(first_head, first_head + num)]
        assert not any(a.dest is b.dest and a.source is b.source for a, b in pairwise(tiles))
        served.update((head, t.source.rank) for t in tiles for head in range(t.first_head, t.end_head))
    for head in range(4):
        loads = [served[head, rank] for rank, (first, num) in enumerate(holders) if first <= head < first + num]
        assert max(loads) - min(loads) <= 1


@given(reads(), st.randoms(use_true_random=False))
def test_the_order_of_buffers_does_not_change_who_reads_what_from_whom(read: Read, random: Random) -> None:
    def who(source: EngineLayout, dest: EngineLayout) -> set[tuple[BufferKey, int, int, int]]:
        tiles = pair(source, dest, read.rank)
        return {(tile.dest.key, tile.first_head, tile.end_head, tile.source.rank) for tile in tiles}

    def shuffled(layout: EngineLayout) -> EngineLayout:
        return replace(layout, buffers=tuple(random.sample(layout.buffers, len(layout.buffers))))

    assert who(shuffled(read.source), shuffled(read.dest)) == who(read.source, read.dest)


@pytest.mark.parametrize(("num_heads", "source_size", "dest_size"), SIZES)
def test_each_rank_gets_exactly_its_heads_and_all_their_bytes(num_heads: int, source_size: int, dest_size: int) -> None:
    source, dest = grouped(num_heads, source_size), grouped(num_heads, dest_size)
    for rank, tiles in enumerate(all_tiles(source, dest)):
        first, num = heads_of(num_heads, dest_size, rank)
        per_buffer: dict[int, list[int]] = {}
        for tile in tiles:
            per_buffer.setdefault(tile.dest_index, []).extend(range(tile.first_head, tile.end_head))
        assert per_buffer == {i: list(range(first, first + num)) for i in range(2 * NUM_LAYERS)}
        expected = sum(b.bytes_per_token for b in dest.of_rank(rank)) * 12
        assert ReadPlanner(source, dest, rank).plan(TABLE, TABLE, 0, 12).num_bytes == expected


@pytest.mark.parametrize(("num_heads", "source_size", "dest_size"), SIZES)
def test_ranks_that_hold_the_same_heads_serve_as_much_as_each_other(
    num_heads: int, source_size: int, dest_size: int
) -> None:
    served = bytes_served(grouped(num_heads, source_size), grouped(num_heads, dest_size))
    assert len(set(served.values())) == 1  # 12 layers share evenly in every case


@pytest.mark.parametrize("source_size", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("dest_size", [1, 2, 3, 8])
def test_a_latent_cache_is_read_once_by_each_rank_and_shared_by_the_holders(source_size: int, dest_size: int) -> None:
    latent = [Cache("nope_cache", FULL, 1, LAYERS, dim=4), Cache("rope_cache", FULL, 1, LAYERS, dim=1)]
    source, dest = (split(latent, [(LAYERS, size)]) for size in (source_size, dest_size))
    served = bytes_served(source, dest)
    layer_bytes = 5 * 2 * 12  # both caches, int16, 12 tokens
    assert served.total() == dest_size * NUM_LAYERS * layer_bytes
    assert max(served.values()) - min(served.values()) <= layer_bytes


def test_alternating_attention_types_are_shared_evenly() -> None:
    caches = [Cache("k", FULL, 1, LAYERS[::2]), Cache("w", SLIDING, 1, LAYERS[1::2], window=64)]
    source, dest = split(caches, [(LAYERS, 2)]), split(caches, [(LAYERS, 1)])
    turns = Counter((tile.dest.attn_type, tile.source.rank) for tile in pair(source, dest, 0))
    assert turns == Counter({(FULL, 0): 3, (FULL, 1): 3, (SLIDING, 0): 3, (SLIDING, 1): 3})


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_equal_splits_read_from_the_rank_of_the_same_number_alone(size: int) -> None:
    source, dest = grouped(4, size), grouped(4, size)
    for rank in range(size):
        assert ReadPlanner(source, dest, rank).source_ranks == (rank,)


def test_layers_come_from_the_stage_that_holds_them() -> None:
    caches = [Cache("k", FULL, 4, LAYERS)]
    source = split(caches, [(LAYERS[:7], 2), (LAYERS[7:], 2)])
    dest = split(caches, [(LAYERS[:4], 1), (LAYERS[4:], 1)])
    found = {(tile.dest.rank, tile.dest.layer, tile.source.rank) for tiles in all_tiles(source, dest) for tile in tiles}
    stages = [(0, LAYERS[:4], (0, 1)), (1, LAYERS[4:7], (0, 1)), (1, LAYERS[7:], (2, 3))]
    assert found == {
        (rank, layer, holder) for rank, layers, holders in stages for layer in layers for holder in holders
    }


def test_buffers_are_paired_by_name_not_by_order() -> None:
    source = grouped(4, 1)
    dest = replace(source, buffers=tuple(sorted(source.buffers, key=lambda b: str(b.key))))
    tiles = pair(source, dest, 0)
    assert len(tiles) == 24
    for tile in tiles:
        assert source.buffers[tile.source_index].key == dest.buffers[tile.dest_index].key


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_the_destination_has_not_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not one of 0 to 1"):
        ReadPlanner(grouped(4, 1), grouped(4, 2), rank)


def test_what_the_source_lacks_is_refused_by_name() -> None:
    dest = grouped(4, 2)
    with pytest.raises(ValueError, match="layer 11 k is missing in the source"):
        pair(
            split([Cache("k", FULL, 4, LAYERS[:11])], [(LAYERS, 1)]),
            split([Cache("k", FULL, 4, LAYERS)], [(LAYERS, 1)]),
            0,
        )
    lower = EngineLayout(version=2, model="m", buffers=tuple(b for b in dest.buffers if b.rank == 0))
    assert pair(lower, dest, 0)
    with pytest.raises(ValueError, match="layer 0 k: no rank of the source holds heads 2 to 3"):
        pair(lower, dest, 1)


def test_a_cache_that_means_something_else_is_refused() -> None:
    source, dest = (split([Cache("k", FULL, 4, (0,), dtype=dtype)], [((0,), 1)]) for dtype in ("float16", "bfloat16"))
    with pytest.raises(ValueError, match="layer 0 k: dtype differs: 'float16' and 'bfloat16'"):
        pair(source, dest, 0)
