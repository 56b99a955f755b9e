"""Where engines go, and what a waiting engine is told."""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from pd_service.cluster.placement import Host, lacking, preferred_host

ONE_CPU = {"CPU": 1.0}
HOSTS = [Host(node_id=name, resources={"CPU": 4.0}) for name in ("a", "b", "c")]


@given(st.integers(1, 12))
def test_a_spread_pool_differs_by_one_engine_at_most_between_hosts(num_engines: int) -> None:
    standing: list[str] = []
    for _ in range(num_engines):
        node = preferred_host(HOSTS, ONE_CPU, standing, [], "spread")
        assert node is not None
        standing.append(node)
    counts = [standing.count(host.node_id) for host in HOSTS]
    assert max(counts) - min(counts) <= 1


@given(st.integers(1, 12))
def test_a_packed_pool_stands_on_one_host(num_engines: int) -> None:
    standing: list[str] = []
    for _ in range(num_engines):
        node = preferred_host(HOSTS, ONE_CPU, standing, [], "pack")
        assert node is not None
        standing.append(node)
    assert len(set(standing)) == 1


def test_of_equal_hosts_the_one_with_the_fewest_others_is_taken() -> None:
    placement: Literal["spread", "pack"]
    for placement in ("spread", "pack"):
        assert preferred_host(HOSTS, ONE_CPU, [], ["a", "b", "b"], placement) == "c"


def test_only_hosts_that_could_hold_it_are_a_choice() -> None:
    with_npu = Host(node_id="n", resources={"CPU": 1.0, "NPU": 8.0})
    assert preferred_host([*HOSTS, with_npu], {"NPU": 1.0}, [], [], "spread") is None
    two = [with_npu, Host(node_id="m", resources={"NPU": 1.0})]
    assert preferred_host([*HOSTS, *two], {"NPU": 1.0}, ["m"], [], "spread") == "n"


def test_what_is_lacking_is_named_with_what_there_is() -> None:
    free = {"CPU": 0.5}
    assert lacking({"NPU": 1.0}, HOSTS, free) == "needs NPU 1, and no host of the cluster has that"
    assert lacking({"CPU": 8.0}, HOSTS, free) == "needs CPU 8, and no host of the cluster has that"
    assert lacking(ONE_CPU, HOSTS, free) == "needs CPU 1, free in the cluster: CPU 0.5 of 12"
    assert lacking({"CPU": 2.0}, HOSTS, {"CPU": 3.0}) == "needs CPU 2, and no single host has that free"
