"""One engine driven by hand, step by step: all of the product but its thread and its network.

Its scheduler recounts everything after each step, and what came out of the steps is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import ByteSize

from kv_cache import calculate_block_num
from kv_cache.cache_utils import calculate_fixed_block_memory_bytes
from pd_service.config import EngineConfig, EngineSettings, SpeculativeSettings
from pd_service.engine.execution_engine import ExecutionEngine
from pd_service.engine.messages import Hold, Message, PullOrder, Submit, Withdrawn
from pd_service.models.config import fingerprint, load_model_config
from pd_service.models.loader import build_model
from pd_service.node.engine_layout import describe_layout
from pd_service.request import EngineRequest, EngineSampling, FinishReason, RequestId
from transfer.planes.base import Buffers

MAX_STEPS = 2000  # a bound against requests that never end


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How one engine is cut. `chunk` tokens run in a step; `num_drafts` guesses of `drafter` are verified at once.

    `num_tokens` fit into the caches that grow with a request; windows have what `max_requests` need.
    """

    block_size: int = 4
    chunk: int = 64
    num_drafts: int = 0
    drafter: Literal["mtp", "ngram"] = "mtp"
    max_requests: int = 6
    num_tokens: int = 400
    max_model_len: int = 128

    def config(self, model_dir: Path) -> EngineConfig:
        speculative = SpeculativeSettings()
        if self.num_drafts:
            speculative = SpeculativeSettings(method=self.drafter, num_tokens=self.num_drafts, ngram_min=1)
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
            with_draft=self.num_drafts > 0 and self.drafter == "mtp",
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
    have ended; `holds` and `pulls` that nobody has answered yet; `computing` is how far the prompts have come."""

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
        self.computing: dict[RequestId, Hold] = {}
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
        for hold in output.holds:
            if isinstance(hold, Withdrawn):
                del self.computing[hold.request_id]
            elif hold.next_token is None:
                self.computing[hold.request_id] = hold
            else:
                self.computing.pop(hold.request_id, None)
                self.holds[hold.request_id] = hold
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
