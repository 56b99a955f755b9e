"""One engine: scheduler, KV cache manager and model worker, driven by messages, one step at a time.

    step():  read inbox → schedule → build batch → run the model and sample → commit → hand out what happened

`ExecutionEngine` is plain and synchronous. `EngineLoop` drives it in a thread of its own and runs the model in a second
one, so that messages are answered while a step computes: a request's pull can start, and a cancelled request's blocks
can go, without waiting for the step. The engine's state still has one owner, the loop's thread.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kv_cache import KVCacheManager, PrefixCache, create_single_type_managers
from pd_service.config import EngineConfig
from pd_service.engine.batch import InputRow
from pd_service.engine.messages import Cancel, KvArrived, KvFailed, Message, ReleaseHeld, StepOutput, Submit
from pd_service.engine.model_worker import ModelWorker
from pd_service.engine.scheduler import Scheduler
from pd_service.engine.step import Counters, ScheduledRequest, SchedulerLimits, StepResult
from pd_service.request import EngineRequest, EngineSampling, RequestId

logger = logging.getLogger(__name__)

MODEL_NICENESS = 5  # of the model's thread beside the others; a host without spare cores passes messages sooner so

Batch = list[ScheduledRequest]


class ExecutionEngine:
    def __init__(self, config: EngineConfig, progress: Callable[[str], None] = lambda _: None) -> None:
        self.config = config
        self.worker = ModelWorker(config, progress)
        self.kv_cache_manager = self._init_cache_manager()
        settings = config.settings
        limits = SchedulerLimits(
            max_model_len=self.worker.max_model_len,
            vocab_size=self.worker.model_config.vocab_size,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_waiting=settings.max_waiting,
            max_preemptions=settings.max_preemptions,
            priority_step_s=settings.priority_step_s,
        )
        self.scheduler = Scheduler(
            self.kv_cache_manager,
            limits,
            settings.block_size,
            has_prefix_cache=settings.prefix_cache,
            speculative=settings.speculative,
        )
        progress("warming up")
        self._warm_up()

    def _init_cache_manager(self) -> KVCacheManager:
        worker = self.worker
        # One engine has one model in one dtype: nothing else can be found in its cache.
        prefix_cache = PrefixCache("") if self.config.settings.prefix_cache else None
        managers = create_single_type_managers(worker.cache_info, worker.block_nums, worker.max_model_len)
        return KVCacheManager(
            managers,
            worker.cache_info,
            worker.max_model_len,
            worker.cache_tensors,
            max_step_tokens=self.config.settings.max_step_tokens,
            prefix_cache=prefix_cache,
        )

    def _warm_up(self) -> None:
        """Runs one short request to its end, so that the first real one does not pay for first-use costs."""
        length = min(32, self.config.settings.max_num_batched_tokens, self.worker.max_model_len - 2)
        request = EngineRequest(
            request_id=RequestId("warm-up"),
            token_ids=(0,) * length,
            num_prompt_tokens=length,
            max_new_tokens=2,
            sampling=EngineSampling(),
        )
        self.step([Submit(request)])
        self.step()
        self.scheduler.counters = Counters()

    def handle(self, message: Message, now: float) -> None:
        """One message of the inbox; allowed while a step is in flight."""
        match message:
            case Submit(request):
                self.scheduler.add(request, now)
            case Cancel(request_id):
                self.scheduler.cancel(request_id)
            case KvArrived(request_id, stats, next_token):
                self.scheduler.kv_arrived(request_id, stats, next_token, now)
            case KvFailed(request_id, error):
                self.scheduler.kv_failed(request_id, error)
            case ReleaseHeld(request_id):
                self.scheduler.release_held(request_id)

    def build_model_inputs(self, batch: Batch) -> list[InputRow]:
        """What the model gets: a snapshot that stays right whatever happens to the requests meanwhile."""
        return [self._input_row(scheduled) for scheduled in batch]

    def _input_row(self, scheduled: ScheduledRequest) -> InputRow:
        state, drafts = scheduled.state, scheduled.draft_ids
        request, known = state.request, state.token_ids
        first, end = state.num_computed, state.num_computed + scheduled.num_tokens
        sampling = request.sampling
        is_sampled = end == len(known)
        block_ids = self.kv_cache_manager.get_block_ids(state.request_id)
        if (
            is_sampled
            and scheduled.num_tokens == 1
            and not (drafts or scheduled.max_next_drafts or sampling.needs_history)
        ):
            return InputRow([known[first]], first, block_ids, sampling=sampling)  # most rows of most steps
        return InputRow(
            token_ids=[*known[first:end], *drafts],
            first=first,
            block_ids=block_ids,
            num_drafts=len(drafts),
            sampling=sampling if is_sampled else None,
            next_token_id=0 if is_sampled else known[end],
            history=[*known, *drafts] if is_sampled and sampling.needs_history else (),
            num_prompt_tokens=request.num_prompt_tokens,
            judged_ids=known[first + 1 : end + 1] if state.wants_prompt_logprobs else (),
            num_top_judged=sampling.prompt_logprobs or 0,
            max_next_drafts=scheduled.max_next_drafts,
            num_missing=state.num_missing,
        )

    def step(self, messages: Iterable[Message] = (), now: float = 0.0) -> StepOutput | None:
        """A whole step at once: what tests, simulation and benchmarks drive."""
        for message in messages:
            self.handle(message, now)
        batch = self.scheduler.schedule(now)
        if batch:
            self.scheduler.process_output(batch, self.worker.run(self.build_model_inputs(batch)), now)
        return self.scheduler.take_output()

    def close(self) -> None:
        """Gives the cache memory back at once, whoever still knows the engine."""
        self.kv_cache_manager.cache_tensors = ()
        self.worker.close()


@dataclass(frozen=True, slots=True)
class _StepDone:
    future: Future[list[StepResult]]


class _Stop:
    pass


class EngineLoop:
    """Runs an engine in a thread of its own. `publish` is called in that thread with each output.

    `failed` is called there when the loop itself ends by an error, which is a bug: the engine is of no use any more.
    """

    def __init__(
        self,
        engine: ExecutionEngine,
        publish: Callable[[StepOutput], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._publish = publish
        self._failed = failed
        self._inbox: queue.SimpleQueue[Message | _StepDone | _Stop] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._is_in_step = False
        self.turns = 0  # of the loop; for watchers in other threads

    @property
    def is_busy(self) -> bool:
        """A step is in flight, or messages wait: as long as this holds, `turns` has to grow."""
        return self._is_in_step or not self._inbox.empty()

    def start(self) -> None:
        self._thread.start()

    def put(self, message: Message) -> None:
        """From any thread."""
        self._inbox.put(message)

    def stop(self) -> None:
        """Lets the step in flight end, then ends the thread and gives the cache back."""
        self._inbox.put(_Stop())
        self._thread.join()
        self._engine.close()

    def _run(self) -> None:
        try:
            self._run_steps()
        except BaseException as error:
            logger.critical("the engine's loop failed", exc_info=error)
            self._failed(error)

    def _run_steps(self) -> None:
        with ThreadPoolExecutor(1, thread_name_prefix="model", initializer=_give_way) as model_thread:
            while not self._stopping:
                self.turns += 1
                self._drain()
                batch = self._engine.scheduler.schedule(time.monotonic())
                self._flush()
                if batch:
                    self._is_in_step = True
                    self._run_step(batch, model_thread)
                    self._is_in_step = False
                elif not self._stopping:
                    self._check_when_idle()
                    self._receive(self._inbox.get())

    def _run_step(self, batch: Batch, model_thread: ThreadPoolExecutor) -> None:
        future = model_thread.submit(self._engine.worker.run, self._engine.build_model_inputs(batch))
        future.add_done_callback(lambda f: self._inbox.put(_StepDone(f)))
        while not isinstance(message := self._inbox.get(), _StepDone):
            self._receive(message)
            self._flush()
        error = message.future.exception()
        if error is None:
            self._engine.scheduler.process_output(batch, message.future.result(), time.monotonic())
        elif isinstance(error, Exception):
            logger.error("a step failed", exc_info=error)
            self._engine.scheduler.fail_step(batch, error)
        else:
            raise error
        self._flush()

    def _drain(self) -> None:
        while not self._inbox.empty():
            self._receive(self._inbox.get())

    def _receive(self, message: Message | _StepDone | _Stop) -> None:
        if isinstance(message, _Stop):
            self._stopping = True
        elif not isinstance(message, _StepDone):
            self._engine.handle(message, time.monotonic())

    def _flush(self) -> None:
        output = self._engine.scheduler.take_output()
        if output is not None:
            self._publish(output)

    def _check_when_idle(self) -> None:
        if __debug__ and logger.isEnabledFor(logging.DEBUG):
            self._engine.scheduler.check()


def _give_way() -> None:
    """In the model's thread: whoever has a message to pass on comes before whoever computes."""
    os.nice(MODEL_NICENESS)
