"""What an engine refuses at its door, before anything is queued or allocated."""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache import KVCacheManager
from pd_service.engine.request_state import token_digest
from pd_service.engine.step import SchedulerLimits
from pd_service.errors import InvalidRequest, TransferFailed, TransferFailure
from pd_service.request import EngineRequest


def check_request(request: EngineRequest, limits: SchedulerLimits, kv_cache_manager: KVCacheManager) -> None:
    """Raises InvalidRequest unless the request can be computed here at all, TransferFailed for a ticket of another."""
    _check_tokens(request, limits)
    if not kv_cache_manager.can_ever_hold(request.max_cached_tokens):
        raise InvalidRequest(
            f"{request.max_cached_tokens} tokens do not fit this engine's KV cache of "
            f"{kv_cache_manager.num_usable_blocks()} blocks",
            "max_tokens",
        )
    _check_ticket(request)


def _check_tokens(request: EngineRequest, limits: SchedulerLimits) -> None:
    length = len(request.token_ids)
    if not request.request_id:
        raise InvalidRequest("request_id must not be empty", "request_id")
    if not length:
        raise InvalidRequest("the prompt is empty; at least 1 token is needed", "prompt")
    if request.max_new_tokens < 1:
        raise InvalidRequest(f"max_new_tokens must be at least 1 (given: {request.max_new_tokens})", "max_tokens")
    if request.num_known_tokens + request.max_new_tokens > limits.max_model_len:
        raise InvalidRequest(
            f"{request.num_known_tokens} tokens and {request.max_new_tokens} to generate are more than the engine's "
            f"{limits.max_model_len}",
            "max_tokens",
        )
    if not 1 <= request.num_prompt_tokens <= length:
        raise InvalidRequest(f"num_prompt_tokens {request.num_prompt_tokens} is not in [1, {length}]", "prompt")
    _check_vocabulary(request.token_ids, limits.vocab_size, "prompt")
    _check_vocabulary([token for token, _ in request.sampling.logit_bias], limits.vocab_size, "logit_bias")


def _check_vocabulary(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """One request's unknown id would end the step of everybody in it."""
    for token in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"token id {token} is not in [0, {vocab_size})", field)


def _check_ticket(request: EngineRequest) -> None:
    ticket = request.ticket
    if ticket is None:
        return
    length = len(request.token_ids)
    if not length - 1 <= ticket.num_tokens <= length:
        message = f"the ticket holds {ticket.num_tokens} tokens, the request needs {length - 1} or {length}"
        raise TransferFailed(message, TransferFailure.WRONG_TOKENS)
    if ticket.token_digest != token_digest(request.token_ids[: ticket.num_tokens]):
        raise TransferFailed("the ticket was made for other tokens than the request's", TransferFailure.WRONG_TOKENS)
