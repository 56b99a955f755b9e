"""Laws of the wire between gateway and engine: what goes in comes out, every field of it."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from pd_service.errors import Overloaded
from pd_service.request import (
    EngineRequest,
    EngineSampling,
    EngineTimes,
    FinishReason,
    RequestId,
    Ticket,
    TokenEvent,
    TokenLogprobs,
)
from pd_service.rpc import engine_pb2
from pd_service.wire import event_from_wire, event_to_wire, request_from_wire, request_to_wire

IDS = st.integers(0, 2**32 - 1)
FLOATS = st.floats(-1000.0, 1000.0, width=32)
TICKET = Ticket(address="a:1", incarnation="i", lease_id="l", num_tokens=3, token_digest=b"d")
SAMPLINGS = st.builds(
    EngineSampling,
    temperature=FLOATS,
    top_k=IDS,
    top_p=FLOATS,
    min_p=FLOATS,
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.frozensets(IDS, max_size=4),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    presence_penalty=FLOATS,
    frequency_penalty=FLOATS,
    repetition_penalty=FLOATS,
    logit_bias=st.dictionaries(IDS, FLOATS, max_size=4).map(lambda bias: tuple(sorted(bias.items()))),
)
REQUESTS = st.builds(
    EngineRequest,
    request_id=st.text(max_size=4).map(RequestId),
    token_ids=st.lists(IDS, max_size=4).map(tuple),
    num_prompt_tokens=IDS,
    max_new_tokens=IDS,
    sampling=SAMPLINGS,
    prefill_only=st.booleans(),
    ticket=st.sampled_from([None, TICKET]),
    priority=st.integers(-100, 100),
    cache_salt=st.text(max_size=4),
)
LOGPROBS = st.lists(
    st.builds(TokenLogprobs, FLOATS, st.lists(st.tuples(IDS, FLOATS), max_size=3).map(tuple), IDS), max_size=3
).map(tuple)


@given(REQUESTS)
def test_a_request_arrives_as_it_was_sent(request: EngineRequest) -> None:
    sent = request_to_wire(request, 5).SerializeToString()
    assert request_from_wire(engine_pb2.Submit.FromString(sent)) == request


@given(LOGPROBS, LOGPROBS, st.sampled_from([None, *FinishReason]), st.integers(0, 2**32 - 1))
def test_an_event_arrives_as_it_was_sent(
    logprobs: tuple[TokenLogprobs, ...],
    prompt_logprobs: tuple[TokenLogprobs, ...],
    finish: FinishReason | None,
    cached_tokens: int,
) -> None:
    event = TokenEvent(
        request_id=RequestId("r"),
        token_ids=(1, 2),
        num_drafted=3,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish=finish,
        times=EngineTimes(queue_ms=1.5, plane="shm", cached_tokens=cached_tokens),
    )
    sent = event_to_wire(event).SerializeToString()
    assert event_from_wire(engine_pb2.RequestEvent.FromString(sent)) == event


def test_no_field_of_the_times_is_forgotten() -> None:
    """A field added to the value and not to the wire is found here."""
    other = {float: 1.5, int: 7, str: "x"}
    times = EngineTimes(**{f.name: other[type(f.default)] for f in dataclasses.fields(EngineTimes)})
    event = TokenEvent(request_id=RequestId("r"), times=times)
    assert event_from_wire(event_to_wire(event)).times == times


def test_an_error_keeps_its_class_and_words() -> None:
    event = TokenEvent(request_id=RequestId("r"), error=Overloaded("full"))
    error = event_from_wire(event_to_wire(event)).error
    assert (type(error), str(error)) == (Overloaded, "full")
