"""Laws of the router: which engine comes first, and whether a prompt is worth a hand-over."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_service.gateway.router import choose_way, rank_decode, rank_prefill
from pd_service.request import Load


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    engine_id: str
    load: Load = field(default_factory=Load)
    num_live: int = 0
    pending_tokens: int = 0


NUMBERS = st.integers(min_value=0, max_value=5)
LOADS = st.builds(Load, running=NUMBERS, waiting=NUMBERS, queued_tokens=NUMBERS, free_blocks=NUMBERS)
SNAPSHOTS = st.lists(
    st.builds(Snapshot, engine_id=st.text("ab", min_size=1), load=LOADS, num_live=NUMBERS, pending_tokens=NUMBERS),
    unique_by=lambda snapshot: snapshot.engine_id,
)


@given(SNAPSHOTS, st.randoms(use_true_random=False))
def test_a_ranking_has_every_engine_once_and_does_not_depend_on_the_order_given(snapshots, random) -> None:
    shuffled = random.sample(snapshots, len(snapshots))
    for rank in (rank_prefill, rank_decode):
        ranked = rank(snapshots)
        assert sorted(ranked, key=lambda c: c.engine_id) == sorted(snapshots, key=lambda c: c.engine_id)
        assert rank(shuffled) == ranked


@given(SNAPSHOTS, st.integers(0, 5))
def test_the_preferred_engine_moves_ahead_and_the_others_keep_their_order(snapshots, which) -> None:
    """Ahead of all for a prefill; for a decode ahead of those with as many waiting requests."""
    preferred = snapshots[which].engine_id if which < len(snapshots) else "gone"
    for rank in (rank_prefill, rank_decode):
        plain, moved = rank(snapshots), rank(snapshots, preferred)
        assert [c for c in moved if c.engine_id != preferred] == [c for c in plain if c.engine_id != preferred]
        ahead = [c.engine_id for c in moved].index(preferred) if preferred != "gone" else 0
        if rank is rank_prefill:
            assert ahead == 0
        else:
            assert all(c.load.waiting < moved[ahead].load.waiting for c in moved[:ahead])


def first(rank, *snapshots: Snapshot) -> str:
    return rank(snapshots)[0].engine_id


def test_prefill_prefers_the_fewest_tokens_before_ours_then_the_most_free_blocks_then_the_id() -> None:
    busy = Snapshot(engine_id="a", load=Load(queued_tokens=10, free_blocks=9))
    idle = Snapshot(engine_id="b", load=Load(queued_tokens=9, free_blocks=1))
    roomy = Snapshot(engine_id="c", load=Load(queued_tokens=9, free_blocks=2))
    twin = Snapshot(engine_id="d", load=Load(queued_tokens=9, free_blocks=2))
    assert [c.engine_id for c in rank_prefill([busy, twin, idle, roomy])] == ["c", "d", "b", "a"]


def test_prefill_counts_what_was_sent_since_the_snapshot() -> None:
    sent = Snapshot(engine_id="a", pending_tokens=5)
    known = Snapshot(engine_id="b", load=Load(queued_tokens=4))
    assert first(rank_prefill, sent, known) == "b"


def test_decode_avoids_queues_first_then_many_requests_then_few_free_blocks() -> None:
    queue = Snapshot(engine_id="a", load=Load(waiting=1, free_blocks=9))
    crowd = Snapshot(engine_id="b", load=Load(running=4, free_blocks=9))
    tight = Snapshot(engine_id="c", load=Load(running=2, free_blocks=1))
    roomy = Snapshot(engine_id="d", load=Load(running=2, free_blocks=2))
    assert [c.engine_id for c in rank_decode([queue, crowd, tight, roomy])] == ["d", "c", "b", "a"]


def test_decode_counts_requests_that_the_snapshot_does_not_show_yet() -> None:
    sent = Snapshot(engine_id="a", num_live=3)
    known = Snapshot(engine_id="b", load=Load(running=2))
    assert first(rank_decode, sent, known) == "b"


@pytest.mark.parametrize(
    ("num_tokens", "limit", "is_local", "reason"),
    [
        (1, 0, False, "always_disaggregated"),
        (8, 8, True, "short_prompt"),
        (9, 8, False, "long_prompt"),
    ],
)
def test_only_prompts_up_to_the_limit_stay_on_one_engine(
    num_tokens: int, limit: int, is_local: bool, reason: str
) -> None:
    choice = choose_way(num_tokens, limit)
    assert (choice.is_local, choice.reason) == (is_local, reason)
