"""A story that follows a script, and small tokenizers of the two common kinds, for the tests of the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pd_service.gateway.generation import (
    Generation,
    GenerationDelta,
    GenerationFinish,
    StoryEnd,
    StoryEvent,
    StoryTokens,
)
from pd_service.gateway.intake import ClientRequest, Intake, Job
from pd_service.gateway.recent import RecentRequests
from pd_service.gateway.tokenizer import Tokenizer
from pd_service.metrics import GatewayMetrics, Outcome
from pd_service.request import FinishReason

BEGIN, END = "<s>", "</s>"
PLAIN_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BEGIN_TEMPLATE = "{{ bos_token }}" + PLAIN_TEMPLATE
_CORPUS = ["hello hello world the quick brown fox jumps over the lazy dog ", "  日本語 žluťoučký kůň 🙂🙂 "] * 8


def byte_level_tokenizer(
    directory: Path, *, adds_begin: bool = True, template: str | None = BEGIN_TEMPLATE
) -> Tokenizer:
    """A byte-level BPE tokenizer: every single byte is a token, and so are some pieces of characters."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return _saved(backend, directory, adds_begin=adds_begin, template=template)


def _saved(backend: Backend, directory: Path, *, adds_begin: bool, template: str | None) -> Tokenizer:
    if adds_begin:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, backend.token_to_id(BEGIN))]
        )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BEGIN, eos_token=END)
    wrapped.chat_template = template
    wrapped.save_pretrained(directory)
    return Tokenizer(directory)


Step = StoryEvent | asyncio.Event | Exception


class FakeStory:
    """Yields the events of its script; waits at an `asyncio.Event`, raises an exception."""

    def __init__(self, *script: Step, retries: int = 0) -> None:
        self.script = script
        self.retries = retries
        self.jobs: list[Job] = []
        self.started: asyncio.Queue[Job] = asyncio.Queue()
        self.num_open = 0

    async def run(self, job: Job) -> AsyncGenerator[StoryEvent, None]:
        self.jobs.append(job)
        self.started.put_nowait(job)
        self.num_open += 1
        phases = job.phases
        phases.queue_ms, phases.kv_bytes, phases.plane, phases.retries = 1.5, 64, "shm", self.retries
        try:
            for item in self.script:
                if isinstance(item, asyncio.Event):
                    await item.wait()
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            self.num_open -= 1


def tokens(*token_ids: int) -> StoryTokens:
    return StoryTokens(token_ids=token_ids)


def end(finish: FinishReason = FinishReason.LENGTH) -> StoryEnd:
    return StoryEnd(finish=finish)


def make_generation(
    tokenizer: Tokenizer, story: FakeStory, *, max_model_len: int = 64, max_requests: int = 8
) -> Generation:
    intake = Intake(
        model_name="tiny",
        max_model_len=max_model_len,
        vocab_size=380,
        eos_token_ids=[1],
        tokenizer=tokenizer,
        max_requests=max_requests,
    )
    return Generation(intake=intake, story=story, metrics=GatewayMetrics(), recent=RecentRequests(4))


async def collect(
    generation: Generation, request: ClientRequest, deadline: float | None = None
) -> list[GenerationDelta | GenerationFinish]:
    async with aclosing(generation.generate(request, deadline)) as events:
        return [event async for event in events]


def outcomes(generation: Generation) -> dict[str, int]:
    """The outcome counters that are not zero."""
    value = generation.metrics.registry.get_sample_value
    counts = {outcome.value: int(value("pd_requests_total", {"outcome": outcome.value}) or 0) for outcome in Outcome}
    return {name: count for name, count in counts.items() if count}


def is_idle(generation: Generation, story: FakeStory) -> bool:
    """No request is live anywhere."""
    gauge = generation.metrics.registry.get_sample_value("pd_live_requests")
    return generation.intake.num_live == 0 and story.num_open == 0 and gauge == 0
