"""Between the protobuf messages of the Engine service and the project's own values."""

from __future__ import annotations

from pd_service.errors import from_code
from pd_service.request import (
    EngineRequest,
    EngineSampling,
    EngineTimes,
    FinishReason,
    Load,
    RequestId,
    Ticket,
    TokenEvent,
    TokenLogprobs,
)
from pd_service.rpc import engine_pb2, generation_pb2

_TICKET_FIELDS = ("address", "incarnation", "lease_id", "num_tokens", "token_digest")
_TIMES_FIELDS = ("queue_ms", "compute_ms", "received_ms", "wire_ms", "confirm_ms", "kv_bytes", "plane")
_LOAD_FIELDS = ("running", "waiting", "queued_tokens", "free_blocks", "total_blocks")


def request_to_wire(request: EngineRequest, deadline_ms: int) -> engine_pb2.Submit:
    sampling = request.sampling
    message = engine_pb2.Submit(
        request_id=request.request_id,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        max_new_tokens=request.max_new_tokens,
        prefill_only=request.prefill_only,
        deadline_ms=deadline_ms,
        sampling=engine_pb2.EngineSampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            stop_token_ids=sorted(sampling.stop_token_ids),
            logprobs=sampling.logprobs,
        ),
    )
    if request.ticket is not None:
        message.ticket.CopyFrom(ticket_to_wire(request.ticket))
    return message


def request_from_wire(message: engine_pb2.Submit) -> EngineRequest:
    sampling = message.sampling
    return EngineRequest(
        request_id=RequestId(message.request_id),
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        max_new_tokens=message.max_new_tokens,
        prefill_only=message.prefill_only,
        ticket=ticket_from_wire(message.ticket) if message.HasField("ticket") else None,
        sampling=EngineSampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        ),
    )


def ticket_to_wire(ticket: Ticket) -> engine_pb2.Ticket:
    return engine_pb2.Ticket(**{name: getattr(ticket, name) for name in _TICKET_FIELDS})


def ticket_from_wire(message: engine_pb2.Ticket) -> Ticket:
    return Ticket(**{name: getattr(message, name) for name in _TICKET_FIELDS})


def load_to_wire(load: Load) -> engine_pb2.Load:
    return engine_pb2.Load(**{name: getattr(load, name) for name in _LOAD_FIELDS})


def load_from_wire(message: engine_pb2.Load) -> Load:
    return Load(**{name: getattr(message, name) for name in _LOAD_FIELDS})


def logprobs_to_wire(logprobs: TokenLogprobs) -> generation_pb2.TokenLogprobs:
    top = [generation_pb2.TopLogprob(token_id=token, logprob=value) for token, value in logprobs.top]
    return generation_pb2.TokenLogprobs(logprob=logprobs.logprob, top=top)


def logprobs_from_wire(message: generation_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple((top.token_id, top.logprob) for top in message.top))


def event_to_wire(event: TokenEvent) -> engine_pb2.RequestEvent:
    message = engine_pb2.RequestEvent(request_id=event.request_id, token_ids=event.token_ids)
    message.logprobs.extend(logprobs_to_wire(one) for one in event.logprobs)
    if event.finish is not None:
        message.finish = event.finish.value
    if event.ticket is not None:
        message.ticket.CopyFrom(ticket_to_wire(event.ticket))
    if event.error is not None:
        message.error.code = type(event.error).__name__
        message.error.message = str(event.error)
    if event.times is not None:
        message.times.CopyFrom(engine_pb2.EngineTimes(**{name: getattr(event.times, name) for name in _TIMES_FIELDS}))
    return message


def event_from_wire(message: engine_pb2.RequestEvent) -> TokenEvent:
    return TokenEvent(
        request_id=RequestId(message.request_id),
        token_ids=tuple(message.token_ids),
        logprobs=tuple(logprobs_from_wire(one) for one in message.logprobs),
        finish=FinishReason(message.finish) if message.finish else None,
        ticket=ticket_from_wire(message.ticket) if message.HasField("ticket") else None,
        times=(
            EngineTimes(**{name: getattr(message.times, name) for name in _TIMES_FIELDS})
            if message.HasField("times")
            else None
        ),
        error=from_code(message.error.code, message.error.message) if message.HasField("error") else None,
    )
