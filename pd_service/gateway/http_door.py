"""The HTTP door: the OpenAI API's completions and chat completions, health and metrics.

Errors always have the form {"error": {"message", "type", "param", "code"}}. A failure before the first token is a
status; one in mid-stream is an error event after which the stream ends without a finish reason and without [DONE]. A
client that goes away cancels its request at once, also while nothing is being sent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from http import HTTPStatus

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from pd_service.errors import InvalidRequest, PdError, PromptTooLong, Unavailable, UnknownModel
from pd_service.gateway.generation import Generation
from pd_service.gateway.intake import ClientRequest, new_request_id
from pd_service.gateway.openai_answers import Answer, ChatAnswer, CompletionAnswer, Json
from pd_service.gateway.openai_api import ChatBody, CompletionBody, GenerationBody, parse_body

_log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20
_RETRY_AFTER_S = 1  # what a client is told to wait when it meets a full or an empty service
_CODES: dict[type[PdError], str] = {
    UnknownModel: "model_not_found",  # these two as OpenAI spells them; the others are the class's name
    PromptTooLong: "context_length_exceeded",
    PdError: "internal_error",
}

Readiness = Callable[[], str | None]
Scrape = Callable[[], Awaitable[bytes]]


class BodyTooLarge(InvalidRequest):
    """The request's body is over the limit."""

    http_code = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


def make_app(generation: Generation, readiness: Readiness, scrape: Scrape | None = None) -> FastAPI:
    """The application. `readiness` says why the service cannot answer now, or None when it can.

    `scrape` renders the metrics; None: those of this gateway alone.
    """
    app = FastAPI(title="pd-service", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(PdError, _pd_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(ClientDisconnect, _gone_while_sending)
    app.add_exception_handler(Exception, _unforeseen)
    _add_generating_routes(app, generation)
    _add_model_routes(app, generation.intake.model_name)
    _add_operating_routes(app, generation, readiness, scrape)
    return app


def _add_generating_routes(app: FastAPI, generation: Generation) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        return await _answer(request, generation, CompletionBody, CompletionAnswer)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        return await _answer(request, generation, ChatBody, ChatAnswer)


def _add_model_routes(app: FastAPI, model_name: str) -> None:
    model = {"id": model_name, "object": "model", "created": 0, "owned_by": "pd-service"}

    @app.get("/v1/models")
    async def list_models() -> Json:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> Json:
        if model_id != model_name:
            raise UnknownModel(f"model: {model_id!r} is not served here; served: {model_name!r}", "model")
        return model


def _add_operating_routes(app: FastAPI, generation: Generation, readiness: Readiness, scrape: Scrape | None) -> None:
    @app.get("/health")
    async def health() -> Json:
        reason = readiness()
        if reason is not None:
            raise Unavailable(reason)
        return {"status": "ok"}

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        text = generation.metrics.render() if scrape is None else await scrape()
        return Response(text, media_type=CONTENT_TYPE_LATEST)


async def _answer(
    request: Request, generation: Generation, body_kind: type[GenerationBody], answer_kind: type[Answer]
) -> Response:
    request_id = request.headers.get("x-request-id") or new_request_id()
    with generation.metrics.counting_refusal():
        body = parse_body(body_kind, await _read_body(request))
        client_request = body.client_request(request_id)
    intake = generation.intake
    answer = answer_kind(body, request_id=request_id, model=intake.model_name, tokenizer=intake.tokenizer)
    kind = _StreamedResponse if body.stream else _WholeResponse
    return kind(generation, client_request, answer)


async def _read_body(request: Request) -> bytes:
    """Raises BodyTooLarge before more than the limit is in memory."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"body: over {MAX_BODY_BYTES} bytes, which is the most that is taken")
    return bytes(content)


class _WholeResponse(Response):
    """Runs a generation and answers in one piece. Errors are raised before anything is sent."""

    def __init__(self, generation: Generation, request: ClientRequest, answer: Answer) -> None:
        super().__init__()
        self._generation = generation
        self._request = request
        self._answer = answer
        self._id_header = {"x-request-id": request.request_id}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _while_connected(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._generation.generate(self._request)) as events:
            all_events = [event async for event in events]
        response = JSONResponse(self._answer.whole(all_events), headers=self._id_header)
        await response(scope, receive, send)


class _StreamedResponse(_WholeResponse):
    """Runs a generation and sends each event as it comes. Errors before the first event are raised, later ones sent."""

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._generation.generate(self._request)) as events:
            first = await anext(events)
            await self._start(send)
            try:
                await self._send(send, *self._answer.chunks(first))
                async for event in events:
                    await self._send(send, *self._answer.chunks(event))
                await _send_data(send, "[DONE]")
            except PdError as error:
                await self._send(send, _error_body(error))
            except Exception:
                _log.exception("request %s failed in mid-stream for a reason no one foresaw", self._request.request_id)
                await self._send(send, _INTERNAL_ERROR)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send) -> None:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **self._id_header}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": raw})

    async def _send(self, send: Send, *messages: Json) -> None:
        for message in messages:
            await _send_data(send, json.dumps(message, separators=(",", ":")))


async def _send_data(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


async def _while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Awaits `work` to its end, or cancels it when the client goes. Nobody is left to hear of that."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_client_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()  # without effect when it is done
        watcher.cancel()
        await asyncio.wait((task, watcher))
    if not task.cancelled():
        task.result()


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error_body(error: PdError) -> Json:
    if error.http_code == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "overloaded_error"
    else:
        kind = "invalid_request_error" if error.http_code < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    snake_case = re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()
    code = _CODES.get(type(error), snake_case)
    return {"error": {"message": str(error), "type": kind, "param": getattr(error, "field", None), "code": code}}


_INTERNAL_ERROR: Json = {
    "error": {
        "message": "internal error; the gateway's log has the details",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
}


async def _pd_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PdError)
    is_passing = error.http_code in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
    headers = {"retry-after": str(_RETRY_AFTER_S)} if is_passing else None
    return JSONResponse(_error_body(error), error.http_code, headers)


async def _http_exception(request: Request, error: Exception) -> Response:
    """Paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return JSONResponse(body, error.status_code, error.headers)


async def _gone_while_sending(request: Request, error: Exception) -> Response:
    """The client left before its request was complete; nobody reads this."""
    return Response(status_code=HTTPStatus.BAD_REQUEST)


async def _unforeseen(request: Request, error: Exception) -> Response:
    return JSONResponse(_INTERNAL_ERROR, HTTPStatus.INTERNAL_SERVER_ERROR)
