"""Steps of vLLM's engine, for `benchmarks.engine`: run by the Python of a vLLM environment.

Imports nothing of this project. The only argument is JSON: `model`, `dtype`, `batched_tokens`, `max_model_len`,
`max_seqs`, and `eager` (true leaves vLLM's compilation out). Every line on stdin is one task in JSON, every line on
stdout answers one with `times_s`, the seconds of the engine's steps in order. `{"start": prompts}` submits token ids
and runs until every request has its first token, `{"steps": n}` runs n more steps, `{"stop": true}` aborts everything.
The first line on stdout, unasked, names vLLM's version.

The engine runs in this process (no second one, no HTTP), text is not made and no prefix is cached, so that a step is
scheduling, model and sampling, as it is on our side. Between tasks the process blocks on stdin.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def make_engine(options: dict[str, Any]) -> Any:
    from vllm import LLM

    llm = LLM(
        model=options["model"],
        dtype=options["dtype"],
        max_model_len=options["max_model_len"],
        max_num_batched_tokens=options["batched_tokens"],
        max_num_seqs=options["max_seqs"],
        enforce_eager=options["eager"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    return llm.llm_engine


class Run:
    """The requests of one engine; tokens are greedy and never end by themselves."""

    def __init__(self, engine: Any) -> None:
        from vllm import SamplingParams

        self._engine = engine
        self._params = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True, detokenize=False)
        self._names: list[str] = []
        self._num_started = 0

    def start(self, prompts: list[list[int]]) -> list[float]:
        for prompt in prompts:
            self._names.append(str(self._num_started))
            self._num_started += 1
            self._engine.add_request(self._names[-1], {"prompt_token_ids": prompt}, self._params)
        times_s, waiting = [], set(self._names)
        while waiting:
            times_s.append(self._step(waiting))
        return times_s

    def steps(self, count: int) -> list[float]:
        return [self._step(set()) for _ in range(count)]

    def stop(self) -> list[float]:
        self._engine.abort_request(self._names)
        self._names = []
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return []

    def _step(self, waiting: set[str]) -> float:
        start = time.perf_counter()
        outputs = self._engine.step()
        spent = time.perf_counter() - start
        waiting -= {output.request_id for output in outputs if output.outputs[0].token_ids}
        return spent


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever vLLM prints must not stand among the answers
    import vllm

    engine = make_engine(json.loads(sys.argv[1]))
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    run = Run(engine)
    for line in sys.stdin:
        task = json.loads(line)
        if "start" in task:
            times_s = run.start(task["start"])
        else:
            times_s = run.steps(task["steps"]) if "steps" in task else run.stop()
        print(json.dumps({"times_s": times_s}), file=answers, flush=True)


if __name__ == "__main__":
    main()
