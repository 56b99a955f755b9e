"""A scheduler on a real KV manager and a model that is a hash of the tokens, driven by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kv_cache import KVCacheManager, PrefixCache
from pd_service.config import SpeculativeSettings
from pd_service.engine.messages import Hold, PullOrder, StepOutput, Withdrawn
from pd_service.engine.request_state import PullStats, Status, token_digest
from pd_service.engine.scheduler import Scheduler
from pd_service.engine.step import SampledToken, ScheduledRequest, SchedulerLimits, StepResult
from pd_service.request import EngineRequest, EngineSampling, FinishReason, RequestId, Ticket
from tests.kv_model import new_kv

VOCAB = 1000


def next_token(token_ids: Sequence[int]) -> int:
    """The model: a pure function of everything before."""
    digest = hashlib.blake2b(repr(list(token_ids)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % VOCAB


def continuation(token_ids: Sequence[int], count: int) -> list[int]:
    """What an undisturbed run generates."""
    tokens = list(token_ids)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(token_ids) :]


def new_request(
    name: str,
    num_tokens: int,
    max_new_tokens: int = 4,
    *,
    prefill_only: bool = False,
    with_ticket: bool = False,
    gets_token: bool = False,
    stop: frozenset[int] = frozenset(),
    priority: int = 0,
    prompt: str = "",
    salt: str = "",
) -> EngineRequest:
    """Tokens that depend on the name, so that no two requests are alike, or on `prompt`.

    `with_ticket` for all but the last; with `gets_token` the ticket is for all of them.
    """
    tokens = tuple(continuation([sum((prompt or name).encode())], num_tokens))
    num_held = num_tokens if gets_token else num_tokens - 1
    ticket = Ticket(
        address="holder:1",
        incarnation="i",
        lease_id="l",
        num_tokens=num_held,
        token_digest=token_digest(tokens[:num_held]),
    )
    return EngineRequest(
        request_id=RequestId(name),
        token_ids=tokens,
        num_prompt_tokens=num_tokens,
        max_new_tokens=max_new_tokens,
        sampling=EngineSampling(stop_token_ids=stop),
        prefill_only=prefill_only,
        priority=priority,
        cache_salt=salt,
        ticket=ticket if with_ticket or gets_token else None,
    )


class Driver:
    """Runs steps one by one and keeps what came out of them."""

    def __init__(
        self,
        num_blocks: int = 32,
        *,
        block_size: int = 4,
        budget: int = 16,
        max_num_seqs: int = 8,
        max_waiting: int = 8,
        max_model_len: int = 128,
        attn_types: Sequence[str] = ("FullAttention",),
        window: int = 8,
        max_preemptions: int = 2,
        prefix_cache: bool = False,
        num_drafts: int = 0,
    ) -> None:
        """`num_blocks` usable ones per attention type. `num_drafts` tokens are guessed by a draft layer, some right."""
        self.kv: KVCacheManager = new_kv(
            dict.fromkeys(attn_types, num_blocks + 1),
            block_size=block_size,
            window=window,
            max_model_len=max_model_len,
            max_step_tokens=budget + max(0, num_drafts - 1),
            prefix_cache=PrefixCache("") if prefix_cache else None,
        )
        limits = SchedulerLimits(
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_waiting=max_waiting,
            max_preemptions=max_preemptions,
        )
        speculative = SpeculativeSettings(method="mtp", num_tokens=num_drafts) if num_drafts else None
        self.scheduler = Scheduler(self.kv, limits, block_size, has_prefix_cache=prefix_cache, speculative=speculative)
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}
        self.errors: dict[str, Exception] = {}
        self.pulls: list[str] = []
        self.orders: dict[str, PullOrder] = {}
        self.held: list[str] = []
        self.holds: list[Hold | Withdrawn] = []

    def add(self, request: EngineRequest, now: float = 0.0) -> None:
        self.scheduler.add(request, now)
        self.collect()

    def arrive(self, name: str) -> None:
        self.pulls.remove(name)
        state = self.scheduler._requests.get(RequestId(name))
        token = next_token(state.token_ids) if state is not None else 0
        self.scheduler.kv_arrived(RequestId(name), PullStats(), token, 0.0)
        self.collect()

    def begin(self) -> list[ScheduledRequest]:
        batch = self.scheduler.schedule(0.0)
        assert all(scheduled.state.status is Status.RUNNING for scheduled in batch)
        self.collect()
        return batch

    def end(self, batch: list[ScheduledRequest]) -> None:
        """The step ends: every fully computed request gets its token."""
        if batch:
            self.scheduler.process_output(batch, [_result(scheduled) for scheduled in batch], 0.0)
        self.collect()

    def step(self) -> list[str]:
        """A whole step; returns the names of its requests."""
        batch = self.begin()
        self.end(batch)
        return [s.state.request_id for s in batch]

    def run(self, max_steps: int = 1000) -> None:
        """Steps until there is nothing to run; pulls arrive at once."""
        for _ in range(max_steps):
            for name in list(self.pulls):
                self.arrive(name)
            if not self.step() and not self.pulls:
                return
        raise AssertionError("the requests do not come to an end")

    def collect(self) -> None:
        self.scheduler.check()
        output: StepOutput | None = self.scheduler.take_output()
        if output is None:
            return
        for event in output.events:
            self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish is not None:
                self.finish[event.request_id] = event.finish
            if event.error is not None:
                self.errors[event.request_id] = event.error
        self.pulls += [order.request_id for order in output.pulls]
        self.orders |= {order.request_id: order for order in output.pulls}
        self.holds += output.holds
        for hold in output.holds:
            if isinstance(hold, Hold) and hold.next_token is not None:
                self.held.append(hold.request_id)

    @property
    def num_free(self) -> int:
        return min(self.kv.num_free_blocks().values())

    @property
    def is_empty(self) -> bool:
        """No request is left and every block is free."""
        load = self.scheduler.load()
        return self.kv.num_free_blocks() == self.kv.num_usable_blocks() and not load.running + load.waiting


def _result(scheduled: ScheduledRequest) -> StepResult:
    """What the model says: the next token, and one more behind each guess that was right; then new guesses."""
    if not scheduled.is_sampled:
        return StepResult()
    token_ids, tokens = list(scheduled.state.token_ids), []
    for draft_id in (*scheduled.draft_ids, None):
        token_ids.append(next_token(token_ids))
        tokens.append(SampledToken(token_ids[-1]))
        if token_ids[-1] != draft_id:
            break
    guesses = continuation(token_ids, scheduled.max_next_drafts)
    if guesses and token_ids[-1] % 3 == 0:
        guesses[token_ids[-1] % len(guesses)] += 1  # wrong
    return StepResult(tuple(tokens), tuple(guesses))
