"""Between the protobuf messages of the Engine service and the project's own values."""

from __future__ import annotations

from pd_service.errors import PdError, TransferFailed, from_code
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
_TIMES_FIELDS = (
    "queue_ms",
    "compute_ms",
    "received_ms",
    "wire_ms",
    "confirm_ms",
    "kv_bytes",
    "plane",
    "cached_tokens",
    "hidden_wire_ms",
    "hidden_kv_bytes",
    "plan_ms",
    "num_runs",
)
_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_LOAD_FIELDS = ("running", "waiting", "queued_tokens", "free_blocks", "total_blocks")


def request_to_wire(request: EngineRequest, deadline_ms: int) -> engine_pb2.Submit:
    message = engine_pb2.Submit(
        request_id=request.request_id,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        max_new_tokens=request.max_new_tokens,
        prefill_only=request.prefill_only,
        deadline_ms=deadline_ms,
        priority=request.priority,
        cache_salt=request.cache_salt,
        sampling=_sampling_to_wire(request.sampling),
    )
    if request.ticket is not None:
        message.ticket.CopyFrom(ticket_to_wire(request.ticket))
    return message


def request_from_wire(message: engine_pb2.Submit) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(message.request_id),
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        max_new_tokens=message.max_new_tokens,
        prefill_only=message.prefill_only,
        ticket=ticket_from_wire(message.ticket) if message.HasField("ticket") else None,
        priority=message.priority,
        cache_salt=message.cache_salt,
        sampling=_sampling_from_wire(message.sampling),
    )


def _sampling_to_wire(sampling: EngineSampling) -> engine_pb2.EngineSampling:
    return engine_pb2.EngineSampling(
        **{name: getattr(sampling, name) for name in _SAMPLING_FIELDS},
        stop_token_ids=sorted(sampling.stop_token_ids),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        logit_bias=dict(sampling.logit_bias),
    )


def _sampling_from_wire(message: engine_pb2.EngineSampling) -> EngineSampling:
    return EngineSampling(
        **{name: getattr(message, name) for name in _SAMPLING_FIELDS},
        stop_token_ids=frozenset(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        logit_bias=tuple(sorted(message.logit_bias.items())),
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
    return generation_pb2.TokenLogprobs(logprob=logprobs.logprob, top=top, rank=logprobs.rank)


def logprobs_from_wire(message: generation_pb2.TokenLogprobs) -> TokenLogprobs:
    top = tuple((one.token_id, one.logprob) for one in message.top)
    return TokenLogprobs(message.logprob, top, message.rank)


def event_to_wire(event: TokenEvent) -> engine_pb2.RequestEvent:
    message = engine_pb2.RequestEvent(
        request_id=event.request_id, token_ids=event.token_ids, num_drafted=event.num_drafted
    )
    message.logprobs.extend(logprobs_to_wire(one) for one in event.logprobs)
    message.prompt_logprobs.extend(logprobs_to_wire(one) for one in event.prompt_logprobs)
    if event.finish is not None:
        message.finish = event.finish.value
    if event.ticket is not None:
        message.ticket.CopyFrom(ticket_to_wire(event.ticket))
    if event.error is not None:
        message.error.code = type(event.error).__name__
        message.error.message = str(event.error)
        if isinstance(event.error, TransferFailed):
            message.error.reason = event.error.reason.value
    if event.times is not None:
        message.times.CopyFrom(engine_pb2.EngineTimes(**{name: getattr(event.times, name) for name in _TIMES_FIELDS}))
    return message


def event_from_wire(message: engine_pb2.RequestEvent) -> TokenEvent:
    return TokenEvent(
        request_id=RequestId(message.request_id),
        token_ids=tuple(message.token_ids),
        logprobs=tuple(logprobs_from_wire(one) for one in message.logprobs),
        prompt_logprobs=tuple(logprobs_from_wire(one) for one in message.prompt_logprobs),
        num_drafted=message.num_drafted,
        finish=FinishReason(message.finish) if message.finish else None,
        ticket=ticket_from_wire(message.ticket) if message.HasField("ticket") else None,
        times=(
            EngineTimes(**{name: getattr(message.times, name) for name in _TIMES_FIELDS})
            if message.HasField("times")
            else None
        ),
        error=_error_from_wire(message.error) if message.HasField("error") else None,
    )


def _error_from_wire(message: engine_pb2.RequestError) -> PdError:
    return from_code(message.code, message.message, message.reason)
