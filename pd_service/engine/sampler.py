"""From logits to tokens. The random number of a token depends on (seed, position) and nothing else, so that a request
continues identically in another batch, after a preemption, and on another engine.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch

from pd_service.engine.step import SampledToken
from pd_service.request import EngineSampling, TokenLogprobs


def sample(logits: torch.Tensor, sampling: Sequence[EngineSampling], positions: Sequence[int]) -> list[SampledToken]:
    """One token per row of `logits` float32 [rows, vocab]; `positions[i]` is the position row i's new token takes."""
    greedy = logits.argmax(dim=-1).tolist()
    tokens = []
    for row, (params, position) in enumerate(zip(sampling, positions, strict=True)):
        token = greedy[row]
        if params.temperature > 0.0:
            token = _draw(logits[row], params, uniform(params.seed, position))
        logprobs = None if params.logprobs is None else _logprobs(logits[row], token, params.logprobs)
        tokens.append(SampledToken(token, logprobs))
    return tokens


def uniform(seed: int, position: int) -> float:
    """In [0, 1), a function of its arguments alone: the top 53 bits of BLAKE2b over both as little-endian uint64."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _draw(logits: torch.Tensor, params: EngineSampling, u: float) -> int:
    """Inverse-transform sampling: the first token whose cumulated probability exceeds u times the mass kept.

    Temperature first, then top-k, top-p, min-p, each on what the one before kept. Without filters vocabulary order
    serves as well as descending order, and saves the sort.
    """
    # Dividing differences to the maximum keeps a tiny temperature from overflowing to inf - inf.
    scaled = (logits.double() - logits.max().double()) / params.temperature
    probs = torch.softmax(scaled, dim=-1)
    ids: torch.Tensor | None = None
    if params.top_k or params.top_p < 1.0 or params.min_p > 0.0:
        probs, ids = torch.sort(probs, descending=True, stable=True)
        probs = probs[: _num_kept(probs, params)]
    mass = probs.cumsum(dim=-1)
    index = int(torch.searchsorted(mass, u * mass[-1], right=True))
    index = min(index, len(mass) - 1)
    return index if ids is None else int(ids[index])


def _num_kept(probs: torch.Tensor, params: EngineSampling) -> int:
    """How many of the descending `probs` [vocab] pass all filters; at least one."""
    kept = min(params.top_k, len(probs)) if params.top_k else len(probs)
    if params.top_p < 1.0:
        mass = probs[:kept].cumsum(dim=-1)
        # A token is kept if the mass before it is still below top_p of what top-k left.
        kept = int(((mass - probs[:kept]) < params.top_p * mass[-1]).sum())
    if params.min_p > 0.0:
        kept = int((probs[:kept] >= params.min_p * probs[0]).sum())
    return max(kept, 1)


def _logprobs(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Of the model's own distribution, before temperature and filters."""
    logprobs = torch.log_softmax(logits, dim=-1)
    if not num_top:
        return TokenLogprobs(float(logprobs[token]))
    values, ids = torch.topk(logprobs, min(num_top, len(logprobs)))
    return TokenLogprobs(float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
