"""Laws of the scheduler: whatever is admitted together comes to its end."""

import random

import pytest

from pd_service.request import RequestId
from tests.scheduling import Driver, continuation, new_request


def test_a_long_prompt_gets_back_the_blocks_that_a_younger_request_grew_into() -> None:
    """Two prompt tokens and one token of the other per step: when the prompt needs its last block, it is taken."""
    driver = Driver(num_blocks=10, block_size=4, budget=3)
    long, short = new_request("long", 28, max_new_tokens=8), new_request("short", 1, max_new_tokens=30)
    driver.add(long)
    driver.add(short)
    driver.run()
    assert driver.tokens["long"] == continuation(long.token_ids, 8)
    assert driver.tokens["short"] == continuation(short.token_ids, 30)
    assert driver.scheduler.counters.preemptions
    assert driver.is_empty


@pytest.mark.parametrize("seed", range(50))
def test_every_mix_of_long_and_short_requests_ends_in_a_tiny_pool(seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver(num_blocks=rng.randint(8, 12), block_size=4, budget=rng.randint(1, 6), max_num_seqs=4)
    requests = [new_request(f"r{i}", rng.randint(1, 20), max_new_tokens=rng.randint(1, 12)) for i in range(8)]
    for request in requests:
        driver.add(request)
    driver.run()
    assert driver.tokens == {r.request_id: continuation(r.token_ids, r.max_new_tokens) for r in requests}
    assert driver.is_empty


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("num_blocks", [31, 53], ids=["room for one", "room for three"])
def test_window_blocks_that_several_share_are_promised_to_each_who_moves_on(num_blocks: int, most: int) -> None:
    """Four windows of 16 tokens stand on the same 15 blocks; once they have moved on, each needs 16 of its own."""
    driver = Driver(
        num_blocks=num_blocks,
        block_size=1,
        budget=4,
        max_num_seqs=4,
        attn_types=("SlidingWindow",),
        window=16,
        max_preemptions=most,
        prefix_cache=True,
    )
    requests = [new_request(name, 21, max_new_tokens=40, prompt="same") for name in "abcd"]
    driver.add(requests[0])
    while "a" not in driver.tokens:
        driver.step()
    for request in requests[1:]:
        driver.add(request)
    driver.run()
    assert driver.tokens == {r.request_id: continuation(r.token_ids, 40) for r in requests}
    assert driver.scheduler.counters.preemptions == 0
    assert driver.is_empty


def test_a_window_that_has_left_what_it_shared_owes_nothing_any_more() -> None:
    driver = Driver(num_blocks=56, block_size=1, budget=4, attn_types=("SlidingWindow",), window=16, prefix_cache=True)
    for name in "ab":
        driver.add(new_request(name, 21, max_new_tokens=40, prompt="same"))
        while name not in driver.tokens:
            driver.step()
    driver.add(new_request("c", 21, max_new_tokens=4))
    assert driver.scheduler.load().waiting == 1
    while driver.scheduler.load().waiting:
        driver.step()
    assert len(driver.tokens["b"]) <= 17  # as many as it takes to leave them
    driver.run()
    assert driver.is_empty


def test_a_pulled_window_is_charged_what_its_next_token_sees() -> None:
    """16 of 60 tokens and one block of growth fit beside the other, the 20 of a prompt in chunks would not."""
    driver = Driver(num_blocks=20, block_size=1, budget=4, attn_types=("SlidingWindow",), window=16)
    driver.add(new_request("other", 1, max_new_tokens=3))
    request = new_request("pulled", 60, with_ticket=True)
    driver.add(request)
    assert driver.pulls == ["pulled"]
    driver.run()
    assert driver.tokens["pulled"] == continuation(request.token_ids, 4)
    assert driver.is_empty


def test_growth_is_promised_to_a_request_whose_kv_is_still_on_its_way() -> None:
    driver = Driver(num_blocks=8, block_size=4, max_preemptions=0)
    pulled, other = new_request("pulled", 9, max_new_tokens=16, with_ticket=True), new_request("other", 9, 12)
    for request in (pulled, other):
        driver.add(request)
    assert driver.scheduler.load().waiting == 1  # 3 blocks are taken, 3 promised, and the other needs 5
    driver.run()
    for request in (pulled, other):
        assert driver.tokens[request.request_id] == continuation(request.token_ids, request.max_new_tokens)
    assert driver.is_empty


@pytest.mark.parametrize(("num_blocks", "num_new", "num_tokens"), [(10, 16, 4), (11, 16, 7)])
def test_who_was_preempted_as_often_as_allowed_is_spared_when_others_grow(
    num_blocks: int, num_new: int, num_tokens: int
) -> None:
    """The last is preempted once by the two before it; when one of them has ended, the other grows on beside it."""
    driver = Driver(num_blocks=num_blocks, block_size=4, budget=8, max_preemptions=1)
    requests = [
        new_request("long", 4, max_new_tokens=32),
        new_request("short", 4, max_new_tokens=12),
        new_request("last", num_tokens, max_new_tokens=num_new),
    ]
    for request in requests:
        driver.add(request)
    last = driver.scheduler._requests[requests[-1].request_id]
    driver.run()
    assert last.preemptions == 1
    assert driver.tokens == {r.request_id: continuation(r.token_ids, r.max_new_tokens) for r in requests}
    assert driver.is_empty


def test_a_preempted_window_owes_nothing_for_what_it_shared() -> None:
    driver = Driver(num_blocks=43, block_size=1, budget=4, attn_types=("SlidingWindow",), window=16, prefix_cache=True)
    for name in "ab":
        driver.add(new_request(name, 21, max_new_tokens=40, prompt="same"))
        while name not in driver.tokens:
            driver.step()
    state = driver.scheduler._requests[RequestId("b")]
    assert state.num_borrowed == {"SlidingWindow": 15}
    driver.scheduler._preempt(state)
    driver.step()
    assert driver.scheduler.load().waiting == 0
    driver.run()
    assert driver.is_empty
