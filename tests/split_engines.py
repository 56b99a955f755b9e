"""Two engines and the hand-over between them, by the real planner and memory plane, driven by hand.

It is late, after the prompt was computed, or early: then the decode engine has its blocks while that goes on, and reads
after each chunk. After each pull every byte of KV that the reader may look at is compared with the holder's, whichever
way it came there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pd_service.engine.messages import Hold, KvArrived, PullOrder, ReleaseHeld, Submit
from pd_service.engine.request_state import PullStats
from pd_service.request import EngineRequest, RequestId, Ticket
from tests.stepped_engine import Shape, SteppedEngine
from transfer.guard import ReadGuard
from transfer.plan import OneRankPlanner, plan_read
from transfer.planes.base import Runs
from transfer.planes.memory import MemoryPlane


def plan_pull(source: SteppedEngine, dest: SteppedEngine, hold: Hold, order: PullOrder) -> Runs:
    return plan_read(source.layout, dest.layout, hold.tables, order.tables, order.first_token, hold.num_tokens)


@dataclass(slots=True)
class Following:
    """An early pull: by attention type the first token that is still to be read."""

    order: PullOrder
    first: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.first = dict.fromkeys(self.order.tables, self.order.first_token)

    def plan(self, source: SteppedEngine, dest: SteppedEngine, hold: Hold) -> Runs:
        """What has become ready; it counts as read from here on."""
        part = {key: token for key, token in self.first.items() if key in hold.tables and token <= hold.num_ready}
        planner = OneRankPlanner(source.layout, dest.layout)
        runs = planner.plan(hold.tables, self.order.tables, part, hold.num_ready, hold.num_tokens)
        self.first |= dict.fromkeys(part, hold.num_ready)
        return runs


def read(source: SteppedEngine, dest: SteppedEngine, runs: Runs) -> None:
    """Moves the bytes."""
    server = MemoryPlane().serve(source.buffers, ReadGuard(source.layout))
    reader = MemoryPlane().connect(server.endpoint, b"token", dest.buffers)
    reader.read("lease", runs, 60.0)
    reader.close()
    server.close()


def expected_pull_bytes(source: SteppedEngine, dest: SteppedEngine, hold: Hold, order: PullOrder) -> int:
    """Counted token by token: all that is missing and has a block on both sides."""
    sizes = {buffer.attn_type: buffer.block_size for buffer in source.layout.buffers}
    return sum(
        buffer.bytes_per_token
        for buffer in dest.layout.buffers
        for token in range(order.first_token, hold.num_tokens)
        if order.tables[buffer.attn_type][token // buffer.block_size]
        and hold.tables[buffer.attn_type][token // sizes[buffer.attn_type]]
    )


def check_same_kv(source: SteppedEngine, dest: SteppedEngine, hold: Hold, order: PullOrder) -> None:
    """Wherever both sides have a block for a token, it holds the same bytes.

    But for what a draft layer left in blocks that were here already: at their last position it depends on the token
    after them, which need not be the same text.
    """
    for index, buffer in enumerate(dest.layout.buffers):
        is_draft = buffer.layer >= dest.num_model_layers
        tokens = torch.arange(order.first_token if is_draft else 0, hold.num_tokens)
        rows = []
        for engine, tables in ((source, hold.tables), (dest, order.tables)):
            size = engine.layout.buffers[index].block_size
            blocks = torch.tensor(tables[buffer.attn_type])[tokens // size]
            rows.append((blocks, engine.cache(index)[blocks, tokens % size]))
        (src_blocks, src_bytes), (dst_blocks, dst_bytes) = rows
        is_live = (src_blocks > 0) & (dst_blocks > 0)
        assert torch.equal(src_bytes[is_live], dst_bytes[is_live]), f"{buffer.place} differs"


class Split:
    """A prompt on one engine, its continuation on another. `pulled_bytes` of each request that was handed over."""

    def __init__(self, model_dir: Path, prefill: Shape, decode: Shape) -> None:
        self.prefill = SteppedEngine(model_dir, prefill)
        self.decode = SteppedEngine(model_dir, decode)
        self.pulled_bytes: dict[RequestId, int] = {}

    def compute_prompt(self, request: EngineRequest) -> EngineRequest:
        """Up to the ticket: what the decode engine is asked for then. The blocks stay with the prefill engine."""
        self.start_prompt(request)
        return self.finish_prompt(request)

    def start_prompt(self, request: EngineRequest) -> None:
        self.prefill.step(Submit(replace(request, prefill_only=True)))

    def finish_prompt(self, request: EngineRequest) -> EngineRequest:
        self.prefill.step_until(lambda: request.request_id in self.prefill.finish)
        return self.with_ticket(request)

    def with_ticket(self, request: EngineRequest) -> EngineRequest:
        """The request after its prompt was computed."""
        hold = self.prefill.holds[request.request_id]
        first = self.prefill.tokens[request.request_id]
        return replace(
            request,
            token_ids=(*request.token_ids, *first),
            max_new_tokens=request.max_new_tokens - len(first),
            ticket=_ticket(hold),
        )

    def with_early_ticket(self, request: EngineRequest) -> EngineRequest:
        """The request while its prompt is computed; the first token will come with its KV."""
        hold = self.prefill.computing[request.request_id]
        return replace(request, max_new_tokens=request.max_new_tokens - 1, ticket=_ticket(hold))

    def hand_over_early(self, request: EngineRequest) -> None:
        """As `hand_over`, while the prompt is computed. The decode engine has begun by the end of its first chunk."""
        request_id = request.request_id
        self.start_prompt(request)
        if request_id in self.prefill.finish:  # it had one chunk only
            self.prefill.computing[request_id] = replace(self.prefill.holds[request_id], next_token=None)
        self.decode.core.handle(Submit(self.with_early_ticket(request)), 0.0)
        self.decode.step_until(lambda: request_id in self.decode.pulls)
        following, num_bytes = Following(self.decode.pulls[request_id]), 0
        while request_id not in self.prefill.finish:
            runs = following.plan(self.prefill, self.decode, self.prefill.computing[request_id])
            read(self.prefill, self.decode, runs)
            num_bytes += runs.num_bytes
            self.prefill.step()
        self.prefill.computing.pop(request_id, None)
        self.end_pull(request_id, following.plan(self.prefill, self.decode, self.prefill.holds[request_id]), num_bytes)

    def pull(self, request_id: RequestId) -> None:
        """Answers the decode engine's order, confirms it and gives the holder its blocks back."""
        hold, order = self.prefill.holds[request_id], self.decode.pulls[request_id]
        self.end_pull(request_id, plan_pull(self.prefill, self.decode, hold, order), 0)

    def end_pull(self, request_id: RequestId, runs: Runs, num_bytes_before: int) -> None:
        """Reads what is left."""
        hold, order = self.prefill.holds.pop(request_id), self.decode.pulls.pop(request_id)
        num_bytes = num_bytes_before + runs.num_bytes
        assert num_bytes == expected_pull_bytes(self.prefill, self.decode, hold, order)
        read(self.prefill, self.decode, runs)
        check_same_kv(self.prefill, self.decode, hold, order)
        self.pulled_bytes[request_id] = num_bytes
        self.prefill.core.handle(ReleaseHeld(request_id), 0.0)
        assert hold.next_token is not None
        self.decode.core.handle(KvArrived(request_id, PullStats(kv_bytes=num_bytes), hold.next_token), 0.0)

    def hand_over(self, request: EngineRequest) -> None:
        """Prompt and pull; the request then runs on the decode engine."""
        self.accept(self.compute_prompt(request))

    def accept(self, onward: EngineRequest) -> None:
        """The decode engine gets a request with a ticket, and pulls."""
        self.decode.core.handle(Submit(onward), 0.0)
        self.decode.step_until(lambda: onward.request_id in self.decode.pulls)
        self.pull(onward.request_id)

    def run(self, request: EngineRequest) -> list[int]:
        """The request's output, computed by both engines."""
        self.hand_over(request)
        return self.finish(request)

    def finish(self, request: EngineRequest) -> list[int]:
        self.decode.step_until(lambda: request.request_id in self.decode.finish)
        return self.output(request.request_id)

    def output(self, request_id: RequestId) -> list[int]:
        return self.prefill.tokens[request_id] + self.decode.tokens[request_id]

    @property
    def is_empty(self) -> bool:
        return self.prefill.is_empty and self.decode.is_empty


def _ticket(hold: Hold) -> Ticket:
    return Ticket(
        address="prefill",
        incarnation="prefill",
        lease_id=hold.request_id,
        num_tokens=hold.num_tokens,
        token_digest=hold.token_digest,
    )
