"""Engines driven by hand, step by step, and the hand-over between two of them by the real planner and memory plane.

`SteppedEngine` is a whole engine of the product without thread and network; its scheduler recounts everything after
each step. `Split` lets one compute a prompt and another continue it. After each pull every byte of KV that the reader
may look at is compared with the holder's, whichever way it came there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import ByteSize

from kv_cache import calculate_block_num
from kv_cache.cache_utils import calculate_fixed_block_memory_bytes
from pd_service.config import EngineConfig, EngineSettings, SpeculativeSettings
from pd_service.engine.execution_engine import ExecutionEngine
from pd_service.engine.messages import Hold, KvArrived, Message, PullOrder, ReleaseHeld, Submit
from pd_service.engine.request_state import PullStats
from pd_service.models.config import fingerprint, load_model_config
from pd_service.models.loader import build_model
from pd_service.node.engine_layout import describe_layout
from pd_service.request import EngineRequest, EngineSampling, FinishReason, RequestId, Ticket
from transfer.guard import ReadGuard
from transfer.plan import plan_read
from transfer.planes.base import Buffers, Runs
from transfer.planes.memory import MemoryPlane

MAX_STEPS = 2000  # a bound against requests that never end


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How one engine is cut. `chunk` tokens run in a step; `num_drafts` guesses are verified at once, 0 for none.

    `num_tokens` fit into the caches that grow with a request; windows have what `max_requests` need.
    """

    block_size: int = 4
    chunk: int = 64
    num_drafts: int = 0
    max_requests: int = 6
    num_tokens: int = 400
    max_model_len: int = 128

    def config(self, model_dir: Path) -> EngineConfig:
        speculative = SpeculativeSettings()
        if self.num_drafts:
            speculative = SpeculativeSettings(method="mtp", num_tokens=self.num_drafts)
        settings = EngineSettings(
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.chunk,
            max_num_seqs=self.max_requests,
            speculative=speculative,
            planes=("memory",),
        )
        num_bytes = ByteSize(self._cache_bytes(model_dir, settings))
        return EngineConfig(role="mixed", model_dir=model_dir, kv_cache_bytes=num_bytes, settings=settings)

    def _cache_bytes(self, model_dir: Path, settings: EngineSettings) -> int:
        model = build_model(
            load_model_config(model_dir),
            dtype=torch.float32,
            device="meta",
            block_size=self.block_size,
            with_draft=bool(self.num_drafts),
        )
        info = model.get_cache_info()
        block_nums = calculate_block_num(
            info,
            max_concurrency=self.max_requests,
            max_model_len=self.max_model_len,
            max_step_tokens=settings.max_step_tokens,
        )
        if "FullAttention" in block_nums:
            block_nums["FullAttention"] = -(-self.num_tokens // self.block_size) + 1
        return calculate_fixed_block_memory_bytes(info, block_nums)


class SteppedEngine:
    """`tokens` of each request so far, and of each event (guesses verified, tokens); `finish` or `errors` of those that
    have ended; `holds` and `pulls` that nobody has answered yet."""

    def __init__(self, model_dir: Path, shape: Shape) -> None:
        self.core = ExecutionEngine(shape.config(model_dir))
        self.kv = self.core.kv_cache_manager
        worker = self.core.worker
        self.layout = describe_layout(worker.cache_info, worker.block_nums, fingerprint(model_dir))
        self.num_model_layers = worker.model_config.hf.num_hidden_layers  # draft layers come behind them
        ptrs, lens, _, _ = self.kv.get_contiguous_buf_infos()
        self.buffers = Buffers(ptrs=tuple(ptrs), lens=tuple(lens))
        self.tokens: dict[RequestId, list[int]] = defaultdict(list)
        self.verified: dict[RequestId, list[tuple[int, int]]] = defaultdict(list)
        self.finish: dict[RequestId, FinishReason] = {}
        self.errors: dict[RequestId, Exception] = {}
        self.holds: dict[RequestId, Hold] = {}
        self.pulls: dict[RequestId, PullOrder] = {}

    def step(self, *messages: Message, during: Sequence[Message] = ()) -> None:
        """A whole step after `messages`; those of `during` come while the model computes, as `EngineLoop` has it."""
        for message in messages:
            self.core.handle(message, 0.0)
        batch = self.core.scheduler.schedule(0.0)
        rows = self.core.build_model_inputs(batch)
        for message in during:
            self.core.handle(message, 0.0)
        if batch:
            self.core.scheduler.process_output(batch, self.core.worker.run(rows), 0.0)
        self.core.scheduler.check()
        self._collect()

    def _collect(self) -> None:
        output = self.core.scheduler.take_output()
        if output is None:
            return
        for event in output.events:
            self.tokens[event.request_id] += event.token_ids
            self.verified[event.request_id].append((event.num_drafted, len(event.token_ids)))
            if event.finish is not None:
                self.finish[event.request_id] = event.finish
            if event.error is not None:
                self.errors[event.request_id] = event.error
        self.holds |= output.holds
        self.pulls |= {order.request_id: order for order in output.pulls}

    def step_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(MAX_STEPS):
            if condition():
                return
            self.step()
        raise AssertionError(f"never happened; tokens: {dict(self.tokens)}, errors: {self.errors}")

    def run(self, request: EngineRequest) -> list[int]:
        """The whole request, with whatever else there is to run."""
        self.step(Submit(request))
        self.step_until(lambda: request.request_id in self.finish)
        return self.tokens[request.request_id]

    @property
    def is_empty(self) -> bool:
        """No request is left and every block is free."""
        load = self.core.scheduler.load()
        return self.kv.num_free_blocks() == self.kv.num_usable_blocks() and not load.running + load.waiting

    @contextmanager
    def no_free_blocks(self) -> Iterator[Callable[[], None]]:
        """Others take all free blocks, now and at each call of what this yields; they give them back at its end."""
        taken: list[str] = []

        def take() -> None:
            while self.kv.allocate_slots(name := f"others-{len(taken)}", 0, 1):
                taken.append(name)

        take()
        try:
            yield take
        finally:
            for name in taken:
                self.kv.free(name)

    def preempt(self, request_id: RequestId) -> None:
        """Takes blocks away until a request is preempted: the last in order, which is to be this one."""
        before = self.core.scheduler.counters.preemptions
        with self.no_free_blocks() as take:
            while self.core.scheduler.counters.preemptions == before:
                assert request_id not in self.finish, "it ended before it could be preempted"
                self.step()
                take()
        assert not self.kv.owns_blocks(request_id)

    def cache(self, buffer: int) -> torch.Tensor:
        """The cache tensor behind one buffer of the layout, as bytes [blocks, block_size, bytes per token]."""
        described = self.layout.buffers[buffer]
        tensor = self.kv.cache_tensors[buffer]
        return tensor.view(torch.uint8).view(described.num_blocks, described.block_size, described.bytes_per_token)


def plan_pull(source: SteppedEngine, dest: SteppedEngine, hold: Hold, order: PullOrder) -> Runs:
    return plan_read(source.layout, dest.layout, hold.tables, order.tables, order.first_token, hold.num_tokens)


def read(source: SteppedEngine, dest: SteppedEngine, runs: Runs) -> None:
    """Moves the bytes."""
    server = MemoryPlane().serve(source.buffers, ReadGuard(source.layout))
    reader = MemoryPlane().connect(server.endpoint, b"token", dest.buffers)
    reader.read("lease", runs, 60.0)
    reader.close()
    server.close()


def expected_pull_bytes(dest: SteppedEngine, order: PullOrder) -> int:
    """Counted token by token: all that is missing and has a block."""
    return sum(
        buffer.bytes_per_token
        for buffer in dest.layout.buffers
        for token in range(order.first_token, order.ticket.num_tokens)
        if order.tables[buffer.attn_type][token // buffer.block_size]
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
        ticket = Ticket(
            address="prefill",
            incarnation="prefill",
            lease_id=request.request_id,
            num_tokens=hold.num_tokens,
            token_digest=hold.token_digest,
        )
        return replace(
            request,
            token_ids=(*request.token_ids, *first),
            max_new_tokens=request.max_new_tokens - len(first),
            ticket=ticket,
        )

    def pull(self, request_id: RequestId) -> None:
        """Answers the decode engine's order, confirms it and gives the holder its blocks back."""
        hold, order = self.prefill.holds.pop(request_id), self.decode.pulls.pop(request_id)
        runs = plan_pull(self.prefill, self.decode, hold, order)
        assert runs.num_bytes == expected_pull_bytes(self.decode, order)
        read(self.prefill, self.decode, runs)
        check_same_kv(self.prefill, self.decode, hold, order)
        self.pulled_bytes[request_id] = runs.num_bytes
        self.prefill.core.handle(ReleaseHeld(request_id), 0.0)
        self.decode.core.handle(KvArrived(request_id, PullStats(kv_bytes=runs.num_bytes)), 0.0)

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


def new_request(
    name: str, prompt: tuple[int, ...], max_new_tokens: int, sampling: EngineSampling | None = None
) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        max_new_tokens=max_new_tokens,
        sampling=sampling or EngineSampling(),
    )
