"""Who takes part in `benchmarks.engine`: our engine, transformers in this process, vLLM in another.

A side runs one set of requests at a time, greedily: `start` until each has its first token, `steps` of one token each,
`stop`. Times are seconds of single steps. Sides compute in turns and are idle in between: none of them polls.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from pd_service.config import EngineConfig
from pd_service.engine.execution_engine import ExecutionEngine
from pd_service.engine.messages import Cancel, Submit
from pd_service.request import EngineRequest, EngineSampling, RequestId

THREADS = 2
MAX_MODEL_LEN, MAX_SEQS, MAX_NEW_TOKENS = 2048, 64, 1000
OUR_BATCHED_TOKENS = 512  # chunks of this size stay in the caches
PEER_BATCHED_TOKENS = 1024
PEER_SCRIPT = Path(__file__).with_name("engine_peer.py")
STOP_TIMEOUT_S = 20.0

Prompts = Sequence[Sequence[int]]


class Side(Protocol):
    name: str

    def start(self, prompts: Prompts) -> list[float]: ...

    def steps(self, count: int) -> list[float]: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


def engine_config(model_dir: Path, dtype: str, **settings: Any) -> EngineConfig:
    """One process with both roles, as everything here measures it."""
    return EngineConfig.model_validate(
        {
            "role": "mixed",
            "model_dir": model_dir,
            "dtype": dtype,
            "threads": THREADS,
            "kv_cache_bytes": 2**31,
            "settings": {"max_model_len": MAX_MODEL_LEN, "planes": ("memory",), **settings},
        }
    )


def make_request(name: str, prompt: Sequence[int]) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        max_new_tokens=MAX_NEW_TOKENS,
        sampling=EngineSampling(),
    )


class Ours:
    name = "ours"

    def __init__(self, model_dir: Path, dtype: str, batched_tokens: int = OUR_BATCHED_TOKENS) -> None:
        self.engine = ExecutionEngine(
            engine_config(
                model_dir, dtype, max_num_batched_tokens=batched_tokens, max_num_seqs=MAX_SEQS, prefix_cache=False
            )
        )
        self._names: list[RequestId] = []
        self._num_started = 0

    def start(self, prompts: Prompts) -> list[float]:
        for prompt in prompts:
            request = make_request(f"request-{self._num_started}", prompt)
            self._num_started += 1
            self._names.append(request.request_id)
            self.engine.handle(Submit(request), 0.0)
        times_s, waiting = [], set(self._names)
        while waiting:
            times_s.append(self._step(waiting))
        return times_s

    def steps(self, count: int) -> list[float]:
        return [self._step(set()) for _ in range(count)]

    def stop(self) -> None:
        self.engine.step([Cancel(name) for name in self._names])
        self._names = []

    def close(self) -> None:
        self.engine.close()

    def _step(self, waiting: set[RequestId]) -> float:
        """Raises RuntimeError when the engine refused a request."""
        start = time.perf_counter()
        output = self.engine.step()
        spent = time.perf_counter() - start
        for event in output.events if output is not None else ():
            if event.error is not None:
                raise RuntimeError(f"our engine refused {event.request_id}: {event.error}")
            waiting.discard(event.request_id)
        return spent


class Transformers:
    """The reference, eager, in this process: all prompts of a set are of one length and make one batch."""

    name = "transformers"

    def __init__(self, model_dir: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()
        self._cache: Any = None
        self._ids = torch.empty(0, 0, dtype=torch.int64)

    def start(self, prompts: Prompts) -> list[float]:
        self._ids = torch.tensor([list(prompt) for prompt in prompts])
        return [self._step()]

    def steps(self, count: int) -> list[float]:
        return [self._step() for _ in range(count)]

    def stop(self) -> None:
        self._cache = None

    def close(self) -> None:
        self._model = None

    def _step(self) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model(self._ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
            self._cache, self._ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        return time.perf_counter() - start


class Peer:
    """vLLM, see `engine_peer.py`. Raises RuntimeError when it ends."""

    name = "vLLM"

    def __init__(self, python: str, model_dir: Path, dtype: str, *, eager: bool = False) -> None:
        options = {
            "model": str(model_dir),
            "dtype": dtype,
            "batched_tokens": PEER_BATCHED_TOKENS,
            "max_model_len": MAX_MODEL_LEN,
            "max_seqs": MAX_SEQS,
            "eager": eager,
        }
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{THREADS - 1}",  # the automatic choice takes one core of two
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        self._process = subprocess.Popen(
            [python, "-I", str(PEER_SCRIPT), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | settings,
        )
        self.version: str = self._answer()["version"]
        self.idle_cpu_s = self._cpu_s_while_idle(1.0)

    def start(self, prompts: Prompts) -> list[float]:
        return self._ask({"start": [list(prompt) for prompt in prompts]})

    def steps(self, count: int) -> list[float]:
        return self._ask({"steps": count})

    def stop(self) -> None:
        self._ask({"stop": True})

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, task: dict[str, object]) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return cast(list[float], self._answer()["times_s"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            return answer
        raise RuntimeError(f"the peer ended with exit code {self._process.wait()}; its last words are on stderr")

    def _cpu_s_while_idle(self, seconds: float) -> float:
        """Processor time it takes while nobody asks it anything: a peer that polls would spoil our figures."""
        before = self._cpu_s()
        time.sleep(seconds)
        return self._cpu_s() - before

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
