"""Laws of the scheduler, on the real KV manager and a model that hashes its tokens."""

from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pd_service.engine.messages import PullOrder
from pd_service.engine.outbox import Outbox
from pd_service.errors import EngineFailed, InvalidRequest, Overloaded, TransferFailed
from pd_service.request import EngineSampling, FinishReason, Load, RequestId
from tests.scheduling import Driver, continuation, new_request, next_token


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 8, 16, 17, 40])
def test_output_is_what_an_undisturbed_run_gives(num_tokens: int) -> None:
    driver = Driver()
    request = new_request("a", num_tokens, max_new_tokens=9)
    driver.add(request)
    driver.run()
    assert driver.tokens["a"] == continuation(request.token_ids, 9)
    assert driver.finish["a"] is FinishReason.LENGTH
    assert driver.is_empty


def test_a_stop_token_ends_the_request_and_is_not_delivered() -> None:
    request = new_request("a", 5, max_new_tokens=9)
    expected = continuation(request.token_ids, 9)
    driver = Driver()
    driver.add(new_request("a", 5, max_new_tokens=9, stop=frozenset({expected[3]})))
    driver.run()
    assert driver.tokens["a"] == expected[:3]
    assert driver.finish["a"] is FinishReason.STOP
    assert driver.is_empty


def test_prefill_only_gives_one_token_and_holds_its_blocks_until_released() -> None:
    driver = Driver()
    driver.add(new_request("a", 9, prefill_only=True))
    driver.run()
    assert driver.finish["a"] is FinishReason.PREFILLED
    assert len(driver.tokens["a"]) == 1
    assert driver.held == ["a"]
    assert driver.num_free == 32 - 3
    driver.scheduler.cancel(RequestId("a"))  # a held request belongs to its lease
    assert driver.num_free == 32 - 3
    driver.scheduler.release_held(RequestId("a"))
    driver.scheduler.release_held(RequestId("a"))
    assert driver.is_empty


def test_a_request_cancelled_during_a_step_that_fails_hears_nothing_of_it() -> None:
    driver = Driver()
    driver.add(new_request("a", 5))
    batch = driver.begin()
    driver.scheduler.cancel(RequestId("a"))
    driver.scheduler.fail_step(batch, RuntimeError("planned"))
    driver.collect()
    assert not driver.errors
    assert driver.is_empty


@pytest.mark.parametrize("changes", [{"max_new_tokens": 1}, {"stop": frozenset(range(1000))}])
def test_prefill_that_ends_with_its_first_token_holds_nothing(changes: dict[str, object]) -> None:
    driver = Driver()
    driver.add(new_request("a", 9, prefill_only=True, **changes))  # type: ignore[arg-type]
    driver.run()
    assert driver.finish["a"] in (FinishReason.LENGTH, FinishReason.STOP)
    assert not driver.held
    assert driver.is_empty


def test_three_poolfuls_of_prefills_leave_nothing_behind() -> None:
    driver = Driver(num_blocks=6)
    for i in range(18):
        driver.add(new_request(f"r{i}", 9, prefill_only=True))
        driver.run()
        driver.scheduler.release_held(RequestId(f"r{i}"))
    assert len(driver.tokens) == 18
    assert driver.is_empty


@pytest.mark.parametrize(
    ("request_", "field", "said"),
    [
        (new_request("", 4), "request_id", "empty"),
        (new_request("a", 125, max_new_tokens=4), "max_tokens", "125 tokens and 4"),
        (new_request("a", 100, max_new_tokens=20), "max_tokens", "119 tokens do not fit"),
        (replace(new_request("a", 4), token_ids=(1, 2, 1000, 3)), "prompt", r"1000 is not in [0, 1000)"),
        (replace(new_request("a", 4), num_prompt_tokens=5), "prompt", "num_prompt_tokens 5 is not in [1, 4]"),
        (replace(new_request("a", 4), num_prompt_tokens=0), "prompt", "num_prompt_tokens 0 is not in [1, 4]"),
        (
            replace(new_request("a", 4), sampling=EngineSampling(logit_bias=((3, 1.0), (1000, 1.0)))),
            "logit_bias",
            "1000 is not in [0, 1000)",
        ),
    ],
)
def test_impossible_requests_are_refused_by_name(request_: object, field: str, said: str) -> None:
    driver = Driver(num_blocks=16)
    driver.add(request_)  # type: ignore[arg-type]
    error = next(iter(driver.errors.values()))
    assert isinstance(error, InvalidRequest)
    assert error.field == field
    assert said in str(error)
    assert driver.is_empty


def test_a_request_that_fills_the_cache_to_its_last_slot_is_served() -> None:
    """The last token it generates needs no slot."""
    driver = Driver(num_blocks=4, block_size=4)
    request = new_request("a", 9, max_new_tokens=8)
    driver.add(request)
    driver.run()
    assert driver.tokens["a"] == continuation(request.token_ids, 8)
    assert driver.is_empty


def test_a_second_live_request_with_one_id_leaves_the_first_untouched() -> None:
    driver = Driver()
    request = new_request("a", 5, max_new_tokens=6)
    driver.add(request)
    driver.step()
    driver.add(request)
    assert isinstance(driver.errors.pop("a"), InvalidRequest)
    driver.run()
    assert driver.tokens["a"] == continuation(request.token_ids, 6)


def test_a_full_queue_refuses_and_changes_nothing() -> None:
    driver = Driver(num_blocks=4, max_waiting=1)
    for name in "abc":
        driver.add(new_request(name, 8, max_new_tokens=8))
    assert list(driver.errors) == ["c"]
    assert isinstance(driver.errors["c"], Overloaded)
    driver.run()
    assert {name: len(driver.tokens[name]) for name in "ab"} == {"a": 8, "b": 8}
    assert driver.is_empty


def test_received_request_runs_one_position_and_owns_one_block_more_at_a_multiple() -> None:
    for received in (4, 8, 12, 16):
        driver = Driver()
        request = new_request("a", received + 1, with_ticket=True)
        driver.add(request)
        assert driver.pulls == ["a"]
        assert driver.num_free == 32 - (received // 4 + 1)
        driver.arrive("a")
        batch = driver.begin()
        assert [(s.num_tokens, s.state.num_computed) for s in batch] == [(1, received)]
        driver.end(batch)
        driver.run()
        assert driver.tokens["a"] == continuation(request.token_ids, 4)
        assert driver.is_empty


def test_admission_counts_what_both_need_so_both_finish() -> None:
    driver = Driver(num_blocks=7)
    for name, received in (("a", 16), ("b", 12)):
        driver.add(new_request(name, received + 1, max_new_tokens=4, with_ticket=True))
    driver.run()
    assert {name: len(driver.tokens[name]) for name in "ab"} == {"a": 4, "b": 4}
    assert driver.is_empty


def test_a_received_request_runs_within_two_steps_beside_a_long_prompt() -> None:
    driver = Driver(num_blocks=64, budget=8, max_num_seqs=4)
    driver.add(new_request("long", 100))
    driver.step()
    driver.add(new_request("r", 9, with_ticket=True))
    driver.arrive("r")
    assert "r" in driver.step() + driver.step()


def test_a_waiting_request_that_does_not_fit_never_stops_one_that_has_arrived() -> None:
    driver = Driver(num_blocks=8)
    driver.add(new_request("r", 9, max_new_tokens=8, with_ticket=True))
    driver.add(new_request("big", 24, max_new_tokens=4))
    driver.arrive("r")
    assert driver.step() == ["r"]


def test_preempted_after_hand_over_is_recomputed_here_and_never_pulled_again() -> None:
    driver = Driver(num_blocks=8, budget=8)
    requests = [new_request(name, 9, max_new_tokens=16, with_ticket=True) for name in "ab"]
    for request in requests:
        driver.add(request)
    driver.run()
    assert driver.scheduler.counters.preemptions > 0
    assert driver.scheduler.counters.received_tokens == 16
    for request in requests:
        assert driver.tokens[request.request_id] == continuation(request.token_ids, 16)
    assert driver.is_empty


def test_the_first_in_order_is_never_preempted_by_others_growth() -> None:
    driver = Driver(num_blocks=6, budget=8, max_preemptions=100)
    for name in "abc":
        driver.add(new_request(name, 4, max_new_tokens=20))
    while "a" not in driver.finish:
        before = len(driver.tokens.get("a", []))
        driver.step()
        assert len(driver.tokens["a"]) == before + 1
    driver.run()
    assert set(driver.finish) == set("abc")


@pytest.mark.parametrize("most", [0, 1, 2])
def test_nobody_is_preempted_more_often_than_allowed(most: int) -> None:
    driver = Driver(num_blocks=12, budget=8, max_preemptions=most, max_waiting=20)
    requests = [new_request(f"r{i}", 3 + i, max_new_tokens=20) for i in range(10)]
    for request in requests:
        driver.add(request)
    states = dict(driver.scheduler._requests)
    driver.run()
    counts = [states[request.request_id].preemptions for request in requests]
    assert max(counts) == most  # the pool is small enough that everything allowed happens
    assert driver.tokens == {r.request_id: continuation(r.token_ids, 20) for r in requests}
    assert driver.is_empty


def test_priority_moves_a_request_ahead_of_those_that_wait() -> None:
    driver = Driver(num_blocks=64, max_num_seqs=1)
    driver.add(new_request("running", 4))
    driver.add(new_request("plain", 4))
    driver.add(new_request("urgent", 4, priority=-1))
    driver.add(new_request("patient", 4, priority=1))
    driver.run()
    assert list(driver.finish) == ["running", "urgent", "plain", "patient"]


def test_waiting_long_enough_outweighs_any_priority() -> None:
    driver = Driver(num_blocks=64, max_num_seqs=1)
    driver.add(new_request("running", 4))
    driver.add(new_request("patient", 4, priority=100), now=0.0)
    driver.add(new_request("urgent", 4, priority=-100), now=2001.0)  # 10 s for each of 200 levels
    driver.run()
    assert list(driver.finish) == ["running", "patient", "urgent"]


def test_a_prompt_in_chunks_never_keeps_a_decode_from_its_token() -> None:
    driver = Driver(num_blocks=64, budget=8)
    driver.add(new_request("decode", 4, max_new_tokens=30))
    driver.step()
    driver.add(new_request("long", 100))
    for _ in range(15):
        batch = driver.begin()
        assert {s.state.request_id: s.num_tokens for s in batch} == {"decode": 1, "long": min(7, batch[-1].num_tokens)}
        driver.end(batch)


def test_of_two_prompts_the_first_in_order_has_the_budget() -> None:
    driver = Driver(num_blocks=64, budget=8)
    for name in ("first", "second"):
        driver.add(new_request(name, 20))
    batches = []
    for _ in range(4):
        batch = driver.begin()
        batches.append([(s.state.request_id, s.num_tokens) for s in batch])
        driver.end(batch)
    assert batches[:2] == [[("first", 8)], [("first", 8)]]
    assert batches[2] == [("first", 4), ("second", 4)]
    assert batches[3] == [("first", 1), ("second", 7)]


def test_who_is_preempted_keeps_its_place_in_the_queue() -> None:
    driver = Driver(num_blocks=6, budget=8)
    for name in "abc":
        driver.add(new_request(name, 7, max_new_tokens=14))
    while not driver.scheduler.counters.preemptions:
        driver.step()
    assert [state.request_id for state in driver.scheduler._waiting] == ["b", "c"]
    num_known = sum(7 + len(driver.tokens.get(name, [])) for name in "bc")
    assert driver.scheduler.load().queued_tokens == num_known + 1  # all of those who wait, and one of "a"
    driver.run()
    assert list(driver.finish) == ["a", "b", "c"]


def test_an_order_is_told_even_if_the_load_stays_the_same() -> None:
    load, ticket = Load(), new_request("a", 9, with_ticket=True).ticket
    assert ticket is not None
    outbox = Outbox(load)
    assert outbox.take(load) is None
    outbox.pulls.append(PullOrder(request_id=RequestId("a"), ticket=ticket, first_token=0, tables={}))
    output = outbox.take(load)
    assert output is not None
    assert [order.request_id for order in output.pulls] == ["a"]
    assert outbox.take(load) is None


def test_guesses_leave_half_of_the_spare_budget_to_prompts() -> None:
    driver = Driver(num_blocks=64, budget=9, num_drafts=8)
    driver.add(new_request("decode", 4, max_new_tokens=40))
    driver.step()
    driver.add(new_request("long", 100))
    batch = driver.begin()
    by_name = {s.state.request_id: s for s in batch}
    assert len(by_name["decode"].draft_ids) == 4
    assert by_name["long"].num_tokens == 4
    driver.end(batch)


def test_right_guesses_save_steps_and_wrong_ones_change_nothing() -> None:
    plain, guessing = Driver(), Driver(num_drafts=3)
    for driver in (plain, guessing):
        driver.add(new_request("a", 5, max_new_tokens=40))
        driver.run()
    assert guessing.tokens == plain.tokens
    assert guessing.scheduler.counters.steps < 0.6 * plain.scheduler.counters.steps
    counters = guessing.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert guessing.is_empty


def test_a_known_prompt_starts_behind_what_is_cached() -> None:
    driver = Driver(prefix_cache=True)
    for name in "ab":
        driver.add(new_request(name, 11, prompt="same"))
        driver.run()
    assert driver.tokens["a"] == driver.tokens["b"]
    assert driver.scheduler.counters.cached_tokens == 8
    assert driver.scheduler.counters.computed_tokens == 2 * (11 + 3) - 8


@pytest.mark.parametrize("differs", ["salt", "prompt log probabilities"])
def test_what_must_not_be_shared_is_computed_again(differs: str) -> None:
    driver = Driver(prefix_cache=True)
    first = new_request("a", 11, prompt="same")
    second = new_request("b", 11, prompt="same", salt="other" if differs == "salt" else "")
    if differs != "salt":
        second = replace(second, sampling=replace(second.sampling, prompt_logprobs=0))
    for request in (first, second):
        driver.add(request)
        driver.run()
    assert driver.scheduler.counters.cached_tokens == 0
    assert driver.tokens["a"] == driver.tokens["b"]


def test_a_prompt_judged_once_is_not_computed_again_for_it() -> None:
    """Its first token told, a preempted request takes from the cache what it finds there, like any other."""
    driver = Driver(num_blocks=8, budget=8, prefix_cache=True)
    judged = new_request("b", 9, max_new_tokens=16)
    judged = replace(judged, sampling=replace(judged.sampling, prompt_logprobs=0))
    for request in (new_request("a", 9, max_new_tokens=16), judged):
        driver.add(request)
    driver.run()
    assert driver.scheduler.counters.preemptions
    assert driver.scheduler.counters.cached_tokens
    assert driver.tokens["b"] == continuation(judged.token_ids, 16)
    assert driver.is_empty


def test_a_pull_leaves_out_what_is_cached_here() -> None:
    driver = Driver(prefix_cache=True)
    driver.add(new_request("a", 11, prompt="same"))
    driver.run()
    driver.scheduler.add(new_request("b", 11, prompt="same", with_ticket=True), 0.0)
    output = driver.scheduler.take_output()
    assert output is not None
    assert [order.first_token for order in output.pulls] == [8]
    assert len(output.pulls[0].tables["FullAttention"]) == 3
    driver.pulls.append("b")
    driver.arrive("b")
    driver.run()
    assert driver.tokens["b"] == driver.tokens["a"]
    assert driver.scheduler.counters.received_tokens == 2


def test_shared_blocks_are_counted_once_at_admission() -> None:
    """8 requests of 12 tokens that share 8 of them need 2 + 8 blocks, where 8 x 3 would not fit."""
    driver = Driver(num_blocks=20, prefix_cache=True, budget=64)
    driver.add(new_request("first", 12, prompt="same", max_new_tokens=30))
    driver.step()
    for i in range(7):
        driver.add(new_request(f"r{i}", 12, prompt="same", max_new_tokens=2))
    assert driver.scheduler.load().waiting == 0
    driver.run()
    assert len(driver.finish) == 8
    assert driver.is_empty


@pytest.mark.parametrize("in_flight", [False, True])
def test_cancel_frees_only_when_the_step_in_flight_has_ended(in_flight: bool) -> None:
    driver = Driver()
    driver.add(new_request("a", 8, max_new_tokens=8))
    driver.step()
    batch = driver.begin() if in_flight else []
    driver.scheduler.cancel(RequestId("a"))
    driver.scheduler.check()
    assert (driver.num_free == 32) is not in_flight
    driver.end(batch)
    assert driver.is_empty
    assert len(driver.tokens["a"]) == 1


@pytest.mark.parametrize("arrives", [False, True])
def test_cancel_during_a_pull_waits_for_the_pulls_end(arrives: bool) -> None:
    driver = Driver()
    driver.add(new_request("a", 9, with_ticket=True))
    driver.scheduler.cancel(RequestId("a"))
    assert driver.num_free == 32 - 3
    if arrives:
        driver.arrive("a")
    else:
        driver.scheduler.kv_failed(RequestId("a"), TransferFailed("lost"))
    driver.collect()
    assert driver.is_empty
    assert not driver.errors


def test_a_failed_pull_fails_its_request_alone() -> None:
    driver = Driver()
    for name in "ab":
        driver.add(new_request(name, 9, with_ticket=True))
    driver.scheduler.kv_failed(RequestId("a"), OSError("cut"))
    driver.pulls.remove("a")
    driver.run()
    assert isinstance(driver.errors["a"], TransferFailed)
    assert len(driver.tokens["b"]) == 4
    assert driver.is_empty


def test_a_lost_ticket_fails_its_waiting_request_while_others_run_and_makes_way_for_the_next() -> None:
    driver = Driver(num_blocks=6)
    driver.add(new_request("head", 9))
    driver.add(new_request("big", 17, with_ticket=True))
    driver.add(new_request("small", 5))
    batch = driver.begin()
    assert [scheduled.state.request_id for scheduled in batch] == ["head"]
    driver.scheduler.kv_failed(RequestId("big"), TransferFailed("lost"))
    driver.collect()
    assert isinstance(driver.errors["big"], TransferFailed)
    assert driver.scheduler.load().waiting == 0
    driver.end(batch)
    driver.run()
    assert not driver.orders
    assert [len(driver.tokens[name]) for name in ("head", "small")] == [4, 4]
    assert driver.is_empty


def test_a_ticket_that_is_lost_while_its_pull_is_ordered_fails_its_request_once() -> None:
    driver = Driver()
    driver.add(new_request("a", 9, with_ticket=True))
    assert driver.pulls == ["a"]
    driver.scheduler.kv_failed(RequestId("a"), TransferFailed("its claim says so"))
    driver.collect()
    assert str(driver.errors["a"]) == "its claim says so"
    assert driver.is_empty
    driver.scheduler.kv_failed(RequestId("a"), TransferFailed("its order found no claim"))
    assert driver.scheduler.take_output() is None
    assert driver.scheduler.counters.ignored_messages == 1


def test_a_request_that_waits_to_be_recomputed_has_no_ticket_to_lose() -> None:
    driver = Driver(num_blocks=8, budget=8)
    for name in "ab":
        driver.add(new_request(name, 9, max_new_tokens=16, with_ticket=True))
        driver.arrive(name)
    while not driver.scheduler.counters.preemptions:
        driver.step()
    (waiting,) = driver.scheduler._waiting
    driver.scheduler.kv_failed(waiting.request_id, TransferFailed("late"))
    assert driver.scheduler.counters.ignored_messages == 1
    driver.run()
    assert [len(driver.tokens[name]) for name in "ab"] == [16, 16]


def test_a_failed_step_fails_its_requests_alone() -> None:
    driver = Driver(budget=8)
    driver.add(new_request("a", 5))
    batch = driver.begin()
    driver.add(new_request("b", 5))
    driver.scheduler.fail_step(batch, RuntimeError("out of memory"))
    driver.run()
    assert isinstance(driver.errors["a"], EngineFailed)
    assert len(driver.tokens["b"]) == 4
    assert driver.is_empty


def test_late_and_unknown_messages_change_nothing_and_are_counted() -> None:
    driver = Driver()
    driver.add(new_request("req-10", 5))
    for call in (driver.scheduler.cancel, driver.scheduler.release_held):
        call(RequestId("req-1"))
    driver.scheduler.kv_failed(RequestId("req-10"), TransferFailed("late"))
    assert driver.scheduler.counters.ignored_messages == 3
    driver.run()
    assert len(driver.tokens["req-10"]) == 4


@pytest.mark.parametrize(
    ("num_tokens", "digest"), [(7, None), (9, None), (8, b"other tokens")], ids=["fewer", "more", "others"]
)
def test_a_ticket_for_other_tokens_is_refused(num_tokens: int, digest: bytes | None) -> None:
    request = new_request("a", 9, with_ticket=True)
    assert request.ticket is not None
    ticket = replace(request.ticket, num_tokens=num_tokens, token_digest=digest or request.ticket.token_digest)
    driver = Driver()
    driver.add(replace(request, ticket=ticket))
    assert isinstance(driver.errors["a"], TransferFailed)
    assert driver.is_empty


def test_a_window_is_charged_its_bounded_need() -> None:
    driver = Driver(num_blocks=22, budget=8, window=8, attn_types=("SlidingWindow",), max_model_len=128)
    driver.add(new_request("a", 64, max_new_tokens=8))
    driver.run()
    assert len(driver.tokens["a"]) == 8
    small = Driver(num_blocks=5, budget=8, window=8, attn_types=("SlidingWindow",), max_model_len=128)
    small.add(new_request("a", 64, max_new_tokens=8))
    small.run()
    assert len(small.tokens["a"]) == 8


class SchedulerLaws(RuleBasedStateMachine):
    """Random lives of requests in a tiny pool: tokens are right, blocks add up, all comes to an end."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(
            num_blocks=9, budget=6, max_num_seqs=4, max_waiting=3, attn_types=self.attn_types, **self.options
        )
        self.requests: dict[str, object] = {}
        self.cancelled: set[str] = set()
        self.batch: list[object] = []
        self.lost: set[str] = set()  # whose ticket was lost before a pull could end
        self.count = 0

    attn_types = ("FullAttention", "SlidingWindow")
    options: ClassVar[dict[str, Any]] = {}

    @rule(
        num_tokens=st.integers(1, 20),
        max_new=st.integers(1, 12),
        kind=st.sampled_from(["whole", "prefill", "ticket", "early ticket"]),
        prompt=st.sampled_from(["", "one", "two"]),
        priority=st.integers(-1, 1),
    )
    def add(self, num_tokens: int, max_new: int, kind: str, prompt: str, priority: int) -> None:
        name = f"r{self.count}"
        self.count += 1
        request = new_request(
            name,
            num_tokens,
            max_new,
            prefill_only=kind == "prefill",
            with_ticket=kind == "ticket" and num_tokens > 1,
            gets_token=kind == "early ticket",
            prompt=prompt,
            priority=priority,
        )
        self.requests[name] = request
        self.driver.add(request)

    @precondition(lambda self: not self.batch)
    @rule()
    def begin(self) -> None:
        self.batch = self.driver.begin()  # type: ignore[assignment]

    @precondition(lambda self: self.batch)
    @rule(fails=st.booleans())
    def end(self, fails: bool) -> None:
        batch, self.batch = self.batch, []
        if fails and len(batch) == 1:
            self.driver.scheduler.fail_step(batch, RuntimeError("step"))  # type: ignore[arg-type]
            self.driver.collect()
        else:
            self.driver.end(batch)  # type: ignore[arg-type]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        if name not in self.driver.finish and name not in self.driver.errors:
            self.cancelled.add(name)
        self.driver.scheduler.cancel(RequestId(name))
        self.driver.collect()

    @precondition(lambda self: self.driver.pulls)
    @rule(data=st.data(), fails=st.booleans())
    def pull_ends(self, data: st.DataObject, fails: bool) -> None:
        name = data.draw(st.sampled_from(self.driver.pulls))
        if fails or name in self.lost:
            self.driver.pulls.remove(name)
            self.driver.scheduler.kv_failed(RequestId(name), TransferFailed("lost"))
            self.driver.collect()
        else:
            self.driver.arrive(name)

    @rule(data=st.data())
    def ticket_is_lost(self, data: st.DataObject) -> None:
        """Of a request that waits, or whose pull has been ordered and not begun."""
        states = self.driver.scheduler._requests.values()
        name = data.draw(st.sampled_from(["", *sorted(state.request_id for state in states if state.takes_ticket)]))
        self.lost.add(name)
        self.driver.scheduler.kv_failed(RequestId(name), TransferFailed("lost"))
        self.driver.collect()

    @precondition(lambda self: self.driver.held)
    @rule()
    def lease_ends(self) -> None:
        self.driver.scheduler.release_held(RequestId(self.driver.held.pop(0)))
        self.driver.collect()

    @invariant()
    def tokens_are_right(self) -> None:
        for name, tokens in self.driver.tokens.items():
            request = self.requests[name]
            num_given = int(request.gets_token)  # type: ignore[attr-defined]
            expected = continuation(request.token_ids, num_given + len(tokens))  # type: ignore[attr-defined]
            assert tokens == expected[num_given:]

    def teardown(self) -> None:
        if self.batch:
            self.end(False)
        for _ in range(200):
            while self.driver.held:
                self.lease_ends()
            if self.driver.is_empty:
                break
            self.driver.run()
        assert self.driver.is_empty
        done = set(self.driver.finish) | set(self.driver.errors) | self.cancelled
        assert done == set(self.requests)


class CachingSchedulerLaws(SchedulerLaws):
    options: ClassVar[dict[str, Any]] = {"prefix_cache": True, "max_preemptions": 1}


class GuessingSchedulerLaws(SchedulerLaws):
    options: ClassVar[dict[str, Any]] = {"prefix_cache": True, "num_drafts": 3}


TestSchedulerLaws = SchedulerLaws.TestCase
TestCachingSchedulerLaws = CachingSchedulerLaws.TestCase
TestGuessingSchedulerLaws = GuessingSchedulerLaws.TestCase
for case in (TestSchedulerLaws, TestCachingSchedulerLaws, TestGuessingSchedulerLaws):
    case.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def test_the_model_of_these_tests_depends_on_every_token() -> None:
    assert next_token([1, 2, 3]) != next_token([1, 3, 2])
