"""Steps of vLLM's engine, for `benchmarks.engine`: run by the Python of a vLLM environment.

Imports nothing of this project. The only argument is JSON: `model`, `dtype`, `batched_tokens`, `max_model_len`,
`max_seqs`, and `eager` (true leaves vLLM's compilation out). Every line on stdin is one task in JSON: `prompts`, token
ids of requests that start together, and `new_tokens`, greedy tokens of each; every line on stdout answers one with
`times_s`, the seconds of every engine step in order, and `tokens`, the new ids of each request. The first line on
stdout, unasked, names vLLM's version.

The engine runs in this process (no second one, no HTTP), text is not made, and no prefix is cached, so that a step is
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


def run(engine: Any, task: dict[str, Any], name: int) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=task["new_tokens"], ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(task["prompts"]):
        engine.add_request(f"{name}-{index}", {"prompt_token_ids": prompt}, params)
    times_s, tokens = [], {}
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        outputs = engine.step()
        times_s.append(time.perf_counter() - start)
        tokens |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
    return {"times_s": times_s, "tokens": [tokens[f"{name}-{index}"] for index in range(len(task["prompts"]))]}


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever vLLM prints must not stand among the answers
    import vllm

    engine = make_engine(json.loads(sys.argv[1]))
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for name, line in enumerate(sys.stdin):
        print(json.dumps(run(engine, json.loads(line), name)), file=answers, flush=True)


if __name__ == "__main__":
    main()
