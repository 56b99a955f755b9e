"""Laws of tickets that begin with the prompt's first step: at the scheduler that computes, at the one that follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pd_service.engine.messages import Hold, Withdrawn
from pd_service.engine.request_state import PullStats, token_digest
from pd_service.errors import InvalidRequest, TransferFailed
from pd_service.request import FinishReason, RequestId
from tests.scheduling import VOCAB, Driver, continuation, new_request

# ---- who computes


def told(driver: Driver) -> list[tuple[int, int | None]]:
    """Of each word about what is ready: tokens, and the token after all of them."""
    return [(hold.num_ready, hold.next_token) for hold in driver.holds if isinstance(hold, Hold)]


def test_a_ticket_begins_with_the_first_step_and_grows_with_each() -> None:
    driver, request = Driver(budget=4), new_request("a", 9, prefill_only=True)
    driver.add(request)
    assert not driver.holds
    batch = driver.begin()
    assert told(driver) == [(0, None)]
    driver.end(batch)
    driver.run()
    assert told(driver) == [(0, None), (4, None), (8, None), (9, continuation(request.token_ids, 1)[0])]
    for hold in driver.holds:
        assert isinstance(hold, Hold)
        assert (hold.num_tokens, hold.token_digest) == (9, token_digest(request.token_ids))


def test_a_ticket_begins_with_what_the_prefix_cache_has() -> None:
    driver = Driver(budget=4, prefix_cache=True)
    driver.add(new_request("a", 9, prompt="p"))
    driver.run()
    driver.add(new_request("b", 11, prefill_only=True, prompt="p"))
    driver.begin()
    assert told(driver) == [(8, None)]


def test_what_a_prompt_gives_back_on_the_way_is_not_told_before_its_end() -> None:
    attn_types = ("FullAttention", "SlidingWindow")
    driver = Driver(budget=4, attn_types=attn_types, window=4)
    driver.add(new_request("a", 20, prefill_only=True))
    driver.run()
    *before, last = driver.holds
    assert all(isinstance(hold, Hold) and hold.tables.keys() == {"FullAttention"} for hold in before)
    assert isinstance(last, Hold)
    assert last.tables.keys() == set(attn_types)


def test_a_request_that_stays_here_has_no_ticket() -> None:
    driver = Driver(budget=4)
    driver.add(new_request("a", 9))
    driver.run()
    assert not driver.holds


def cancel(driver: Driver) -> None:
    driver.step()
    driver.scheduler.cancel(RequestId("a"))


def cancel_in_flight(driver: Driver) -> None:
    batch = driver.begin()
    driver.scheduler.cancel(RequestId("a"))
    driver.end(batch)


def fail_step(driver: Driver) -> None:
    driver.scheduler.fail_step(driver.begin(), RuntimeError("planned"))


@pytest.mark.parametrize("end", [cancel, cancel_in_flight, fail_step])
def test_whoever_does_not_become_complete_is_withdrawn_once(end: Callable[[Driver], None]) -> None:
    driver = Driver(budget=4)
    driver.add(new_request("a", 9, prefill_only=True))
    end(driver)
    driver.run()
    assert [hold for hold in driver.holds if isinstance(hold, Withdrawn)] == [driver.holds[-1]]
    assert driver.is_empty


@pytest.mark.parametrize("changes", [{"max_new_tokens": 1}, {"stop": frozenset(range(VOCAB))}])
def test_a_request_that_ends_with_its_first_token_is_withdrawn(changes: dict[str, object]) -> None:
    driver = Driver()
    driver.add(new_request("a", 9, prefill_only=True, **changes))  # type: ignore[arg-type]
    driver.run()
    assert driver.holds[-1] == Withdrawn(RequestId("a"))


def test_a_request_that_waits_has_nothing_to_withdraw() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(new_request("a", 9))
    driver.add(new_request("b", 9, prefill_only=True))
    driver.scheduler.cancel(RequestId("b"))
    driver.run()
    assert not driver.holds


def test_a_preempted_prompt_is_withdrawn_and_begins_again() -> None:
    driver = Driver(num_blocks=9, budget=4)
    driver.add(new_request("decode", 4, max_new_tokens=25))
    driver.step()
    driver.add(new_request("a", 16, prefill_only=True))
    driver.step()
    driver.scheduler._preempt(driver.scheduler._requests[RequestId("a")])
    driver.run()
    words = [type(hold) for hold in driver.holds]
    assert words[:3] == [Hold, Hold, Withdrawn]
    assert told(driver)[2][0] == 0
    assert driver.held == ["a"]


# ---- who follows


def test_the_token_that_comes_with_the_kv_is_none_of_those_asked_for() -> None:
    driver, request = Driver(), new_request("a", 9, max_new_tokens=4, gets_token=True)
    driver.add(request)
    driver.run()
    assert driver.tokens["a"] == continuation(request.token_ids, 5)[1:]
    assert driver.finish["a"] is FinishReason.LENGTH
    counters = driver.scheduler.counters
    assert (counters.received_tokens, counters.computed_tokens) == (9, 4)
    assert driver.is_empty


@pytest.mark.parametrize("length", range(1, 18))
def test_a_follower_is_promised_what_the_same_request_with_its_token_is(length: int) -> None:
    early, late = Driver(), Driver()
    early.add(new_request("a", length, gets_token=True))
    late.add(new_request("a", length + 1, with_ticket=True))
    assert early.num_free == late.num_free
    needs = [driver.scheduler._admission._need(driver.scheduler._requests[RequestId("a")]) for driver in (early, late)]
    assert needs[0] == needs[1]


def test_all_full_blocks_of_a_prompt_can_be_here_already() -> None:
    driver = Driver(prefix_cache=True)
    driver.add(new_request("a", 9, prompt="p"))
    driver.run()
    driver.add(new_request("b", 8, gets_token=True, prompt="p"))
    assert driver.orders["b"].first_token == 8
    driver.run()
    assert driver.tokens["b"] == continuation(new_request("b", 8, prompt="p").token_ids, 5)[1:]


def test_a_follower_that_is_preempted_computes_its_tokens_and_the_one_that_came() -> None:
    driver, request = Driver(), new_request("a", 9, gets_token=True)
    driver.add(request)
    driver.arrive("a")
    driver.scheduler._preempt(driver.scheduler._requests[RequestId("a")])
    driver.add(new_request("b", 2))
    driver.run()
    assert driver.tokens["a"] == continuation(request.token_ids, 5)[1:]


@pytest.mark.parametrize("token", [-1, VOCAB, 2**32 - 1])
def test_a_holder_that_names_no_token_fails_the_request_alone(token: int) -> None:
    driver = Driver()
    driver.add(new_request("a", 9, gets_token=True))
    driver.add(new_request("b", 9))
    driver.scheduler.kv_arrived(RequestId("a"), PullStats(), token, 0.0)
    driver.pulls.clear()
    driver.run()
    assert isinstance(driver.errors["a"], TransferFailed)
    assert driver.finish["b"] is FinishReason.LENGTH
    assert driver.is_empty


def test_the_token_to_come_counts_against_the_models_length() -> None:
    driver = Driver(max_model_len=32)
    driver.add(new_request("fits", 27, gets_token=True))
    driver.add(new_request("too long", 28, gets_token=True))
    assert isinstance(driver.errors["too long"], InvalidRequest)
    assert driver.errors.keys() == {"too long"}
