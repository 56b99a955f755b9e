"""The table of NPU calls in deploy/npu-calls.md: `python -m tests.npu.call_table` writes it, a test compares.

Every family prefills two prompts and decodes a token of each on an emulated NPU; each distinct call is listed once.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

if __name__ == "__main__":
    from tests.npu import load_emulation as load_emulation  # before anything imports torch_npu

import torch

from pd_service.device import get_device
from pd_service.ops import contracts
from tests.model_parity import save_random
from tests.model_runner import Runner, load
from tests.npu.emulator import EmulatedNpu
from tests.npu.families import BLOCK, FAMILIES
from tests.npu.schemas import SCHEMAS

PATH = Path(__file__).parent.parent.parent / "deploy" / "npu-calls.md"
_STEPS = [{0: list(range(3, 145)), 1: [7, 8]}, {0: [5], 1: [9]}]
_HEAD = """# What is called on an NPU

Every operator of torch_npu that the service calls: its schema in torch_npu 2.13.0, the documented limits that
`pd_service/ops/contracts*.py` check, and the calls of one prefill and one decode of every model family (small models,
blocks of 128 tokens) on an emulated device, without the arguments that equal the schema's defaults. All else is
computed by operators of torch itself.

Checked against torch_npu 2.13.0's schemas and shape kernels, run on an emulated device, not run on Ascend hardware.
Written by `python -m tests.npu.call_table`, in the environment of `make test-npu`.

## What a run on hardware has to settle

1. A band (`sparse_mode` 4) while each request has one new token: the documentation says it is ignored then, published
   recipes rely on it. If it is ignored, a token sees up to 127 keys too many of its own request.
2. `pre_tokens` W - 1 for a window of W tokens, the one that asks included: W keys, not W + 1.
3. Heads of 64 that share keys: documented only for heads that do not, used all the same by published recipes of
   gpt-oss. Here they take the slower way of torch's operators, as do heads of 256; `npu.paged_attention` decides.
4. Latent attention in its absorbed form over chunks of hundreds of tokens: allowed, as far as the documentation says.
5. Cosines and sines beyond 1, which yarn's amplitude makes: the rotation documents the range from -1 to 1.
6. Which of several equal maxima `argmax` returns: greedy sampling takes the first one on a CPU.
"""


def calls_of_every_family() -> dict[str, list[str]]:
    """The calls of each operator, as text. Must run in an emulation."""
    emulated = EmulatedNpu()
    with emulated, tempfile.TemporaryDirectory() as directory:
        get_device("npu")
        for name, config in FAMILIES.items():
            model_dir = save_random(config, Path(directory) / name)
            model = load(model_dir, block_size=BLOCK, dtype=torch.bfloat16, device="npu")
            runner = Runner(model, block_size=BLOCK, num_blocks=20, device="npu")
            for chunks in _STEPS:
                runner.step(chunks)
    found: dict[str, list[str]] = {name: [] for name in SCHEMAS}
    for name, shown in sorted(emulated.calls):
        found[name].append(shown)
    return found


def table(calls: dict[str, list[str]]) -> str:
    parts = [_HEAD]
    for name, schema in SCHEMAS.items():
        limits = "\n".join(f"- `{rule.__name__}`: {_first_words(rule)}" for rule in contracts.rules_of(name))
        parts.append(f"## {name}\n\n```\n{schema}\n```\n\nLimits\n\n{limits}\n\nCalls\n\n```")
        parts.append("\n".join(calls[name]) + "\n```\n")
    return "\n".join(parts)


def _first_words(rule: contracts.Check) -> str:
    """The first paragraph of what the rule says of itself."""
    assert rule.__doc__
    return " ".join(rule.__doc__.partition("\n\n")[0].split())


if __name__ == "__main__":
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(table(calls_of_every_family()))
