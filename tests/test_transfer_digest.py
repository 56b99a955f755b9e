"""Laws of sampled digests, over engines split in every way and a transfer that puts one byte wrong."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv_tiles import (
    FULL,
    NOISE,
    POISON,
    Cache,
    Memory,
    Read,
    Tables,
    apply,
    empty_memory,
    filled_memory,
    reads,
    split,
    values_of,
)
from transfer import digest
from transfer.digest import KvDigests, Piece, Sampler, describe_places
from transfer.layout import EngineLayout
from transfer.plan import ReadPlan, ReadPlanner
from transfer.planes.base import Buffers


def digests_of(layout: EngineLayout, rank: int, memory: Memory) -> KvDigests:
    buffers = [memory[rank, i] for i in range(len(layout.of_rank(rank)))]
    ptrs, lens = tuple(b.ctypes.data for b in buffers), tuple(len(b) for b in buffers)
    return KvDigests(layout.of_rank(rank), Buffers(ptrs=ptrs, lens=lens))


def drawn(read: Read, rate: float = 1.0, seed: int = 0) -> dict[int, list[Piece]]:
    sampler = Sampler(read.source, read.dest, read.rank)
    return sampler.draw(read.source_tables, read.dest_tables, read.first, read.end, rate, Random(seed))


class Moved:
    """A read that was carried out: both memories after it."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.source = filled_memory(read.source, read.source_tables, values_of(read.source, read.resume))
        self.dest = empty_memory(read.dest, POISON)
        planner = ReadPlanner(read.source, read.dest, read.rank)
        self.plan: ReadPlan = planner.plan(
            read.source_tables, read.dest_tables, read.first, read.end, read.resume
        )  # fmt: skip
        for source_rank, runs in self.plan.runs.items():
            apply(runs, source_rank, self.source, read.rank, self.dest)

    def differing(self) -> list[Piece]:
        """Of all pieces, as holders and reader find out together."""
        found = []
        for rank, pieces in drawn(self.read).items():
            theirs = digests_of(self.read.dest, self.read.rank, self.dest).of(pieces, self.read.dest_tables)
            holder = digests_of(self.read.source, rank, self.source)
            found += holder.differing(theirs, self.read.source_tables)
        return found


def piece_bytes(read: Read, piece: Piece) -> int:
    (of_cache, *_) = [b for b in read.dest.buffers if b.key == piece.key]
    return piece.num_tokens * piece.num_heads * of_cache.bytes_per_head


@settings(max_examples=50)
@given(reads())
def test_what_was_moved_right_is_the_same_and_all_of_it_is_looked_at(read: Read) -> None:
    moved = Moved(read)
    pieces = [piece for of_rank in drawn(read).values() for piece in of_rank]
    assert len(set(pieces)) == len(pieces)
    assert sum(piece_bytes(read, piece) for piece in pieces) == moved.plan.num_bytes
    assert moved.differing() == []


@settings(max_examples=50)
@given(reads(), st.data())
def test_any_one_wrong_byte_is_found_in_exactly_the_piece_it_lies_in(read: Read, data: st.DataObject) -> None:
    moved = Moved(read)
    runs = [(int(b), int(o), int(n)) for r in moved.plan.runs.values()
            for b, o, n in zip(r.dst_buffer, r.dst_offset, r.length, strict=True)]  # fmt: skip
    if not runs:
        return
    buffer, offset, length = data.draw(st.sampled_from(runs))
    at = offset + data.draw(st.integers(0, length - 1))
    moved.dest[read.rank, buffer][at] ^= 1 << data.draw(st.integers(0, 7))
    (wrong,) = moved.differing()
    b = read.dest.of_rank(read.rank)[buffer]
    assert wrong.key == b.key
    index, offset_in_block = divmod(wrong.first_token, b.block_size)
    assert read.dest_tables[b.attn_type][index] == at // b.bytes_per_block
    assert offset_in_block + wrong.num_tokens <= b.block_size


@settings(max_examples=50)
@given(reads(), st.just(0.0) | st.floats(1e-3, 1), st.integers(0, 99))
def test_a_rate_draws_its_part_of_the_pieces_and_one_at_least(read: Read, rate: float, seed: int) -> None:
    everything = {(rank, piece) for rank, pieces in drawn(read).items() for piece in pieces}
    some = [(rank, piece) for rank, pieces in drawn(read, rate, seed).items() for piece in pieces]
    assert set(some) <= everything
    assert len(set(some)) == len(some)
    if rate and everything:
        assert max(1, rate * len(everything)) <= len(some) < rate * len(everything) + 1
    else:
        assert not some


def one_cache(num_blocks: int = 4) -> tuple[EngineLayout, Memory, Tables]:
    layout = split([Cache("k", FULL, 4, (0,))], [((0,), 2)], num_blocks=num_blocks)  # blocks of 4, two heads a rank
    return layout, empty_memory(layout, NOISE), {FULL: [2, 0, 3]}


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (Piece(1, "k", 0, 4, 0, 2), "no such cache"),
        (Piece(0, "v", 0, 4, 0, 2), "no such cache"),
        (Piece(0, "k", 0, 4, 1, 2), "heads 1 to 2 are not all of 0 to 1"),
        (Piece(0, "k", 0, 4, 0, 0), "heads"),
        (Piece(0, "k", 2, 3, 0, 2), "not tokens of one block of 4"),
        (Piece(0, "k", 0, 0, 0, 2), "not tokens of one block of 4"),
        (Piece(0, "k", 4, 4, 0, 2), "there is no block"),
        (Piece(0, "k", 12, 4, 0, 2), "there is no block"),
        (Piece(0, "k", 2**32 - 4, 1, 0, 2), "there is no block"),
    ],
)
def test_a_piece_that_is_not_held_here_is_refused_by_name(piece: Piece, reason: str) -> None:
    layout, memory, tables = one_cache()
    with pytest.raises(ValueError, match=f"layer {piece.layer} {piece.cache_name} tokens.*{reason}"):
        digests_of(layout, 0, memory).of([piece], tables)


def test_a_digest_depends_on_the_content_alone_not_on_where_it_lies() -> None:
    layout, memory, tables = one_cache()
    memory[0, 0][:] = np.arange(len(memory[0, 0])) % 251
    (before,) = digests_of(layout, 0, memory).of([Piece(0, "k", 0, 4, 0, 2)], tables).values()
    size = layout.buffers[0].bytes_per_block
    memory[0, 0][size : 2 * size] = memory[0, 0][2 * size : 3 * size]
    (after,) = digests_of(layout, 0, memory).of([Piece(0, "k", 0, 4, 0, 2)], {FULL: [1, 0, 3]}).values()
    assert before == after


def test_no_pull_has_more_pieces_than_its_message_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "MAX_PIECES", 5)
    layout, _, _ = one_cache(12)
    tables = {FULL: list(range(1, 11))}
    pieces = Sampler(layout, layout).draw(tables, tables, 0, 40, 1.0, Random(0))
    assert sum(map(len, pieces.values())) == 5


def test_places_are_told_to_people_the_first_few_by_name() -> None:
    pieces = [Piece(0, "k", 4 * i, 4, 0, 2) for i in range(5)]
    assert describe_places(pieces[:1]) == "layer 0 k tokens 0 to 3"
    assert describe_places(pieces).endswith("layer 0 k tokens 8 to 11; and 2 more")
