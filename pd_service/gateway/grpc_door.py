"""The gRPC door: `pd.v1.Generation` on grpc.aio, and what every server of ours needs beside it.

Translates messages to the gateway's own types and errors to statuses, nothing else. A call's cancellation and deadline
are the request's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pd_service.errors import InvalidRequest, PdError
from pd_service.gateway.generation import Generation, GenerationDelta, GenerationEvent, GenerationPrompt
from pd_service.gateway.intake import (
    ChatPrompt,
    ClientRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
    sampling_params,
)
from pd_service.gateway.phases import Phases
from pd_service.request import ChatMessage, SamplingParams
from pd_service.rpc import generation_pb2 as pb
from pd_service.rpc import generation_pb2_grpc
from pd_service.wire import logprobs_to_wire

_log = logging.getLogger(__name__)
_Context = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Generation"].full_name


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Serves one `Generation`."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:
        # Not an async generator: grpc.aio would leave one to the garbage collector when a call is cancelled.
        try:
            await self._write_answer(request, context)
        except PdError as error:
            await context.abort(grpc.StatusCode[error.grpc_status], str(error))
        except Exception:
            _log.exception("a request failed for a reason no one foresaw")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error; the gateway's log has the details")

    async def _write_answer(self, request: pb.GenerateRequest, context: _Context) -> None:
        remaining_s: float | None = context.time_remaining()
        deadline = None if remaining_s is None else asyncio.get_running_loop().time() + remaining_s
        async with aclosing(self._generation.generate(self._client_request(request), deadline)) as events:
            async for event in events:
                for response in _responses(event):
                    await context.write(response)

    def _client_request(self, request: pb.GenerateRequest) -> ClientRequest:
        with self._generation.metrics.counting_refusal():
            return ClientRequest(
                prompt=_prompt(request),
                sampling=_sampling(request),
                model=request.model,
                request_id=request.request_id,
                n=request.n if request.HasField("n") else 1,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )


def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "token_ids":
            return TokenPrompt(tuple(request.token_ids.ids))
        case "chat":
            messages = request.chat.messages
            return ChatPrompt(tuple(ChatMessage(role=message.role, content=message.content) for message in messages))
        case _:
            raise InvalidRequest("prompt: none given; one of text, token_ids, chat is needed", "prompt")


def _sampling(request: pb.GenerateRequest) -> SamplingParams:
    given = request.sampling
    optional = ("temperature", "top_p", "seed", "max_tokens", "logprobs", "prompt_logprobs", "repetition_penalty")
    return sampling_params(
        top_k=given.top_k,
        min_p=given.min_p,
        stop_token_ids=tuple(given.stop_token_ids),
        ignore_eos=given.ignore_eos,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logit_bias=dict(given.logit_bias),
        stop=tuple(request.stop),
        **{name: getattr(given, name) for name in optional if given.HasField(name)},
    )


def _responses(event: GenerationEvent) -> list[pb.GenerateResponse]:
    if isinstance(event, GenerationPrompt):
        judged = [logprobs_to_wire(entry) for entry in event.logprobs]
        return [pb.GenerateResponse(prompt=pb.Prompt(token_ids=event.token_ids, logprobs=judged))]
    delta = pb.Delta(text=event.text, index=event.index)
    if isinstance(event, GenerationDelta):
        delta.token_ids.extend(event.token_ids)
        delta.logprobs.extend(logprobs_to_wire(entry) for entry in event.logprobs)
        return [pb.GenerateResponse(delta=delta)]
    held_back = [pb.GenerateResponse(delta=delta)] if event.text else []
    finish = pb.Finish(
        reason=event.reason.value,
        prompt_tokens=len(event.prompt_token_ids),
        completion_tokens=event.num_output_tokens,
        phases=phase_times(event.phases),
        request_id=event.request_id,
        retries=event.phases.retries,
        index=event.index,
        cached_tokens=event.phases.cached_tokens,
    )
    return [*held_back, pb.GenerateResponse(finish=finish)]


def phase_times(phases: Phases) -> pb.PhaseTimes:
    return pb.PhaseTimes(**{field.name: getattr(phases, field.name) for field in pb.PhaseTimes.DESCRIPTOR.fields})


class Health:
    """What grpc.health.v1 says about a server and its services: NOT_SERVING until told otherwise."""

    def __init__(self, server: grpc.aio.Server, service_names: Sequence[str]) -> None:
        self._names = (health.OVERALL_HEALTH, *service_names)
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs know only the threaded one
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def report(self, *, is_serving: bool) -> None:
        """Sets all services and the server as a whole; watchers hear of it."""
        statuses = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._servicer.set(name, statuses.SERVING if is_serving else statuses.NOT_SERVING)


async def add_standard_services(server: grpc.aio.Server, service_names: Sequence[str]) -> Health:
    """Adds reflection and grpc.health.v1 for `service_names`; the caller reports through what is returned."""
    reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    report = Health(server, service_names)
    await report.report(is_serving=False)
    return report
