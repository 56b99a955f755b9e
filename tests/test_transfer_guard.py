"""Laws of `transfer.guard`: a reader sees the blocks of its leases and no byte more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.guard import ReadGuard
from transfer.layout import BufferLayout, EngineLayout
from transfer.planes.base import ReadRefused

FULL, SLIDING = "FullAttention", "SlidingWindow"
BLOCK_BYTES = {0: 16, 1: 16, 2: 8}
NUM_BLOCKS = 10


def buffer(layer: int, attn_type: str, block_size: int) -> BufferLayout:
    return BufferLayout(
        layer=layer, cache_name="k", attn_type=attn_type, block_size=block_size, first_head=0, num_heads=1,
        total_heads=1, dim=4, dtype="int8", num_bytes=NUM_BLOCKS * block_size * 4,
    )  # fmt: skip


LAYOUT = EngineLayout(version=1, model="m", buffers=(buffer(0, FULL, 4), buffer(1, FULL, 4), buffer(2, SLIDING, 2)))


def guard() -> ReadGuard:
    made = ReadGuard(LAYOUT)
    made.register_reader(b"alice")
    made.register_reader(b"bob")
    made.admit("lease", b"alice", {FULL: [3, 4, 7], SLIDING: [0, 0, 5]})
    return made


def check(g: ReadGuard, *runs: tuple[int, int, int], token: bytes = b"alice", lease: str = "lease") -> None:
    buffer_, offset, length = (np.array(column, np.int64) for column in zip(*runs, strict=True)) if runs else (
        np.empty(0, np.int64),
    ) * 3  # fmt: skip
    g.check(token, lease, buffer_, offset, length)


def test_a_token_is_known_from_registration_until_it_is_forgotten() -> None:
    g = guard()
    assert g.knows(b"alice")
    assert g.knows(b"bob")
    for stranger in (b"", b"alic", b"alice ", b"eve", bytes(range(256))):
        assert not g.knows(stranger)
    g.forget_reader(b"alice")
    assert not g.knows(b"alice")
    assert g.knows(b"bob")


def test_a_lease_admits_to_every_byte_of_its_blocks() -> None:
    check(guard(), (0, 48, 32), (1, 112, 16), (0, 79, 1), (2, 40, 8), (2, 41, 0))
    check(guard())


@pytest.mark.parametrize(
    "run",
    [
        (0, 47, 1),  # one byte before block 3
        (0, 48, 33),  # one byte after block 4
        (0, 48, 80),  # from block 3 to block 7 across blocks of others
        (0, 0, 16),  # the null block
        (2, 0, 8),  # the null block, although the table holds it
        (2, 48, 8),  # another attention type's ids
        (0, 160, 1),
        (0, 150, 11),
        (0, -1, 1),
        (0, 48, -1),
        (0, 2**63 - 1, 2**63 - 1),
        (3, 0, 0),
        (-1, 48, 1),
    ],
)
def test_anything_else_is_refused(run: tuple[int, int, int]) -> None:
    with pytest.raises(ReadRefused):
        check(guard(), (0, 48, 16), run)


@given(
    st.sets(st.integers(1, NUM_BLOCKS - 1)),
    st.sampled_from([0, 1, 2]),
    st.integers(-20, 200),
    st.integers(-20, 200),
)
def test_a_run_passes_exactly_if_all_its_bytes_are_in_the_lease(
    blocks: set[int], index: int, offset: int, length: int
) -> None:
    g = ReadGuard(LAYOUT)
    g.register_reader(b"t")
    g.admit("x", b"t", {FULL: sorted(blocks), SLIDING: sorted(blocks)})
    size = BLOCK_BYTES[index]
    allowed = length >= 0 and 0 <= offset <= offset + length <= NUM_BLOCKS * size
    allowed = allowed and all(byte // size in blocks for byte in range(offset, offset + length))
    if allowed:
        check(g, (index, offset, length), token=b"t", lease="x")
    else:
        with pytest.raises(ReadRefused):
            check(g, (index, offset, length), token=b"t", lease="x")


@pytest.mark.parametrize(("token", "lease"), [(b"bob", "lease"), (b"alicf", "lease"), (b"", "lease"), (b"alice", "l")])
def test_other_readers_and_other_leases_get_one_and_the_same_refusal(token: bytes, lease: str) -> None:
    with pytest.raises(ReadRefused, match="not admitted to lease"):
        check(guard(), token=token, lease=lease)


def test_a_revoked_lease_admits_nobody() -> None:
    g = guard()
    g.admit("lease", b"bob", {FULL: [3]})
    g.revoke("lease")
    g.revoke("lease")
    for token in (b"alice", b"bob"):
        with pytest.raises(ReadRefused):
            check(g, token=token)


def test_a_forgotten_reader_sees_nothing_and_others_still_do() -> None:
    g = guard()
    g.admit("lease", b"bob", {FULL: [3]})
    g.forget_reader(b"alice")
    g.forget_reader(b"alice")
    with pytest.raises(ReadRefused):
        check(g)
    check(g, (0, 48, 16), token=b"bob")


def test_readers_of_one_lease_see_their_own_blocks_only() -> None:
    g = guard()
    g.admit("lease", b"bob", {FULL: [9]})
    with pytest.raises(ReadRefused):
        check(g, (0, 48, 16), token=b"bob")
    check(g, (0, 144, 16), token=b"bob")


def test_strangers_are_not_admitted_and_tokens_are_used_once() -> None:
    with pytest.raises(ValueError, match="not registered"):
        guard().admit("lease", b"carol", {})
    with pytest.raises(ValueError, match="new and not empty"):
        guard().register_reader(b"alice")
    with pytest.raises(ValueError, match="new and not empty"):
        guard().register_reader(b"")


def test_nothing_is_kept_of_readers_and_leases_that_are_gone() -> None:
    g = guard()
    for i in range(50):
        g.admit(f"l{i}", b"bob", {FULL: [1]})
    for i in range(25):
        g.revoke(f"l{i}")
    g.revoke("lease")
    g.forget_reader(b"bob")
    g.forget_reader(b"alice")
    assert g.is_empty()


def test_null_blocks_are_readable_for_whoever_was_admitted_to_them_until_forgotten() -> None:
    guard = ReadGuard(LAYOUT)
    guard.register_reader(b"reader")
    guard.admit_null_blocks("probe", b"reader")
    for index, buffer in enumerate(LAYOUT.buffers):
        ask = (np.array([index]), np.array([0]), np.array([buffer.bytes_per_block]))
        guard.check(b"reader", "probe", *ask)
        with pytest.raises(ReadRefused, match="not all part of the lease"):
            guard.check(b"reader", "probe", ask[0], ask[1], ask[2] + 1)
        with pytest.raises(ReadRefused, match="not admitted"):
            guard.check(b"stranger", "probe", *ask)
    guard.forget_reader(b"reader")
    assert guard.is_empty()
