"""Laws of `transfer.layout`: every difference is named, order does not matter, nonsense is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tests.kv_tiles import FULL, SLIDING, Cache, split
from transfer.layout import BufferLayout, EngineLayout, compare

BASE = BufferLayout(
    layer=0, cache_name="k_cache", attn_type="FullAttention", block_size=4, first_head=0, num_heads=2, total_heads=4,
    dim=3, dtype="bfloat16", num_bytes=10 * 48,
)  # fmt: skip


def engine(*buffers: BufferLayout, model: str = "m", version: int = 1) -> EngineLayout:
    return EngineLayout(version=version, model=model, buffers=buffers)


def layers(num: int) -> list[BufferLayout]:
    return [replace(BASE, layer=i, cache_name=name) for i in range(num) for name in ("k_cache", "v_cache")]


def test_sizes_follow_the_memory_layout() -> None:
    assert (BASE.bytes_per_head, BASE.bytes_per_token, BASE.bytes_per_block, BASE.num_blocks) == (6, 12, 48, 10)


def test_equal_layouts_have_no_difference() -> None:
    assert compare(engine(*layers(12)), engine(*layers(12))) == []


def test_order_of_buffers_is_no_difference() -> None:
    assert compare(engine(*layers(12)), engine(*reversed(layers(12)))) == []


def test_number_of_blocks_and_order_in_memory_are_no_difference() -> None:
    assert compare(engine(BASE), engine(replace(BASE, num_bytes=96))) == []
    assert compare(engine(BASE), engine(replace(BASE, is_heads_first=True))) == []


CACHES = [Cache("k", FULL, 4, (0, 1, 2)), Cache("latent", FULL, 1, (1,), dim=3), Cache("w", SLIDING, 2, (2,), window=8)]


@pytest.mark.parametrize("sizes", list(product((1, 2, 4, 8, 16), repeat=2)))
def test_number_of_ranks_and_layers_per_rank_are_no_difference(sizes: tuple[int, int]) -> None:
    whole = split(CACHES, [((0, 1, 2), sizes[0])])
    staged = split(CACHES, [((0,), sizes[1]), ((1, 2), sizes[1])])
    assert compare(whole, staged) == compare(staged, whole) == []


@pytest.mark.parametrize(
    ("spans", "held"),
    [([(3, 1), (0, 1), (1, 1)], "0 to 1, 3 to 3"), ([(0, 3), (1, 1)], "0 to 2"), ([(2, 2), (1, 2)], "1 to 3")],
)
def test_heads_that_no_rank_holds_are_named(spans: list[tuple[int, int]], held: str) -> None:
    ranks = [
        replace(BASE, rank=rank, first_head=first, num_heads=num, num_bytes=0)
        for rank, (first, num) in enumerate(spans)
    ]
    whole = replace(BASE, num_heads=4, num_bytes=0)
    place = "layer 0 k_cache: heads held by all ranks differ"
    assert compare(engine(*ranks), engine(whole)) == [f"{place}: {held} and 0 to 3"]
    assert compare(engine(whole), engine(*ranks)) == [f"{place}: 0 to 3 and {held}"]


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("attn_type", "SlidingWindow"),
        ("block_size", 8),
        ("total_heads", 8),
        ("dim", 6),
        ("dtype", "float16"),
        ("sliding_window", 32),
    ],
)
def test_each_difference_is_named_with_both_values(field: str, other: object) -> None:
    changed = replace(BASE, num_bytes=0, **{field: other})
    (reason,) = compare(engine(BASE), engine(changed))
    for part in ("layer 0", "k_cache", field, repr(getattr(BASE, field)), repr(other)):
        assert part in reason


@pytest.mark.parametrize(("change", "held"), [({"first_head": 2}, "2 to 3"), ({"num_heads": 1}, "0 to 0")])
def test_other_heads_are_named_with_both_values(change: dict[str, int], held: str) -> None:
    (reason,) = compare(engine(BASE), engine(replace(BASE, num_bytes=0, **change)))
    assert reason == f"layer 0 k_cache: heads held by all ranks differ: 0 to 1 and {held}"


def test_model_and_version_must_agree() -> None:
    reasons = compare(engine(BASE, model="a", version=1), engine(BASE, model="b", version=2))
    assert reasons == ["version differs: 1 and 2", "model differs: 'a' and 'b'"]


def test_missing_buffers_are_named_from_both_sides() -> None:
    a, b = replace(BASE, layer=1), replace(BASE, layer=2, cache_name="v_cache")
    assert compare(engine(BASE, a), engine(BASE, b)) == [
        "layer 1 k_cache is present in the first layout and missing in the second",
        "layer 2 v_cache is present in the second layout and missing in the first",
    ]


def test_every_differing_buffer_is_reported() -> None:
    other = [replace(b, dtype="float16") for b in layers(3)]
    assert len(compare(engine(*layers(3)), engine(*other))) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "object"}, "dtype 'object' is not one of"),
        ({"layer": -1}, "layer must be at least 0, given -1"),
        ({"block_size": 0}, "block_size must be at least 1, given 0"),
        ({"dim": 0}, "dim must be at least 1, given 0"),
        ({"num_heads": 5}, "heads 0 to 5 do not lie in the model's 4"),
        ({"num_bytes": 47}, "47 bytes are not a whole number of blocks of 48"),
        ({"num_heads": 0}, "num_heads must be at least 1, given 0"),
        ({"rank": -1}, "rank must be at least 0, given -1"),
        ({"num_bytes": 48 * 2**60}, "num_bytes and bytes per block must be at most"),
        ({"num_bytes": 0, "dim": 2**62}, "num_bytes and bytes per block must be at most"),
        ({"sliding_window": -1}, "sliding_window must not be negative, given -1"),
    ],
)
def test_nonsense_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(BASE, **change)


def test_a_buffer_described_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="layer 0 k_cache is described twice for rank 0"):
        engine(BASE, BASE)


@pytest.mark.parametrize("ranks", [(1,), (0, 2), (0, 1, 2**32 - 1)])
def test_ranks_with_a_gap_are_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"ranks must count from 0 without a gap, given \[.*\]"):
        engine(*(replace(BASE, rank=rank) for rank in ranks))


def test_ranks_that_disagree_on_a_cache_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks 0 and 1 disagree: layer 0 k_cache: dim differs: 3 and 6"):
        engine(BASE, replace(BASE, rank=1, dim=6, num_bytes=0))


def test_each_rank_numbers_its_own_buffers_from_zero_in_the_order_of_the_description() -> None:
    mixed = engine(*(replace(BASE, layer=layer, rank=rank) for layer, rank in ((5, 1), (3, 0), (2, 1), (1, 0))))
    assert mixed.num_ranks == 2
    assert [[b.layer for b in mixed.of_rank(rank)] for rank in range(2)] == [[3, 1], [5, 2]]
    for (rank, key), index in mixed.index_of().items():
        assert mixed.of_rank(rank)[index].key == key


@pytest.mark.parametrize("rank", [-1, 1, 2])
def test_a_rank_that_is_none_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not one of 0 to 0"):
        engine(BASE).of_rank(rank)


def test_one_attention_type_has_one_block_size() -> None:
    with pytest.raises(ValueError, match="one block table cannot serve both"):
        engine(BASE, replace(BASE, layer=1, block_size=8, num_bytes=0))
