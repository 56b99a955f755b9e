"""Laws of `transfer.layout`: every difference is named, order does not matter, nonsense is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

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


def test_number_of_blocks_is_no_difference() -> None:
    assert compare(engine(BASE), engine(replace(BASE, num_bytes=96))) == []


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("attn_type", "SlidingWindow"),
        ("block_size", 8),
        ("first_head", 2),
        ("num_heads", 1),
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
        ({"sliding_window": -1}, "sliding_window must not be negative, given -1"),
    ],
)
def test_nonsense_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(BASE, **change)


def test_a_buffer_described_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="layer 0 k_cache is described twice"):
        engine(BASE, BASE)


def test_one_attention_type_has_one_block_size() -> None:
    with pytest.raises(ValueError, match="one block table cannot serve both"):
        engine(BASE, replace(BASE, layer=1, block_size=8, num_bytes=0))
