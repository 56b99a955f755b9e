"""Laws of leases and pulls: every block has one owner, and only that owner gives it back."""

import pytest

from kv_cache import CacheInvariantError, KVCacheManager
from tests.kv_model import new_kv

BOTH = {"FullAttention": 12, "SlidingWindow": 12}


def started(request_id: str = "r") -> KVCacheManager:
    kv = new_kv(BOTH)
    assert kv.allocate_slots(request_id, 0, 10)
    return kv


def num_used(kv: KVCacheManager) -> set[int]:
    return {kv.num_usable_blocks()[key] - free for key, free in kv.num_free_blocks().items()}


def test_leased_blocks_of_every_type_outlive_their_request() -> None:
    kv = started()
    kv.lease("r", "l")
    assert not kv.owns_blocks("r")
    assert num_used(kv) == {3}
    assert {usage.leased for usage in kv.usage().values()} == {3}
    assert kv.allocate_slots("r", 0, 4)
    kv.free("r")
    assert num_used(kv) == {3}
    kv.release_lease("l")
    assert num_used(kv) == {0}
    kv.check()


def test_nothing_can_be_given_back_twice() -> None:
    kv = started()
    kv.lease("r", "l")
    for call in (lambda: kv.free("r"), lambda: kv.lease("r", "m"), lambda: kv.release_lease("m")):
        with pytest.raises(KeyError):
            call()
    kv.release_lease("l")
    with pytest.raises(KeyError):
        kv.release_lease("l")
    kv.check()


def test_a_lease_id_in_use_is_refused_and_changes_nothing() -> None:
    kv = started()
    kv.lease("r", "l")
    assert kv.allocate_slots("s", 0, 4)
    with pytest.raises(ValueError, match="exists already"):
        kv.lease("s", "l")
    kv.free("s")
    kv.check()


def test_blocks_freed_under_a_pull_wait_for_its_end() -> None:
    kv = new_kv(BOTH)
    assert kv.allocate_received_slots("r", 9, 1)
    used = num_used(kv)
    kv.begin_pull("r", "p")
    kv.free("r")
    assert not kv.owns_blocks("r")
    assert num_used(kv) == used
    assert kv.allocate_received_slots("r", 9, 1)  # the same request, by a new pull
    kv.begin_pull("r", "q")
    kv.end_pull("p")
    assert num_used(kv) == used
    kv.end_pull("q")
    assert num_used(kv) == used
    kv.free("r")
    assert num_used(kv) == {0}
    kv.check()


def test_while_a_pull_writes_nothing_moves() -> None:
    kv = started()
    kv.begin_pull("r", "p")
    for call in (
        lambda: kv.allocate_slots("r", 10, 1),
        lambda: kv.lease("r", "l"),
        lambda: kv.begin_pull("r", "q"),
    ):
        with pytest.raises(ValueError, match="pull"):
            call()
    assert kv.allocate_slots("s", 0, 1)
    with pytest.raises(ValueError, match="in progress"):
        kv.begin_pull("s", "p")
    kv.end_pull("p")
    with pytest.raises(KeyError):
        kv.end_pull("p")
    assert kv.allocate_slots("r", 10, 1)
    kv.check()


@pytest.mark.parametrize("holder", ["lease", "pull"])
def test_a_recount_finds_a_holder_that_lost_its_blocks_in_one_type(holder: str) -> None:
    kv = started()
    if holder == "lease":
        kv.lease("r", "x")
    else:
        kv.begin_pull("r", "x")
        kv.free("r")
    kv.check()
    kv.managers["SlidingWindow"].release((holder, "x"))
    with pytest.raises(CacheInvariantError, match="holders"):
        kv.check()
