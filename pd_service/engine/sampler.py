"""From logits to tokens, and what the model thought of them.

A row's token depends on its logits, seed, position and own history, never on the batch around it; the random number
on (seed, position) alone. So a request continues identically in another batch, after a preemption, and on another
engine. Log probabilities are the model's own: before bias, penalties, temperature and filters. Whatever device computed
the logits, all but the maximum is taken on the host.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pd_service.engine.step import SampledToken
from pd_service.request import EngineSampling, TokenLogprobs

_ROWS_AT_ONCE = 64  # bounds the copy of the logits that log probabilities take


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """How the next token of one request is chosen; it takes `position`.

    `token_ids` are all tokens before it, needed only if `sampling.needs_history`. Those from `num_prompt_tokens` on
    are output, whichever engine made them, so that the first token counts once after a hand-over, a retry or a
    preemption.
    """

    sampling: EngineSampling
    position: int
    token_ids: Sequence[int] = ()
    num_prompt_tokens: int = 0


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """One token per row of `logits` float32 [rows, vocab], which stay as they are."""
    most_likely = logits.argmax(dim=-1).tolist()
    return [_choose(logits[i : i + 1], most_likely[i], row) for i, row in enumerate(rows)]


def prompt_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """What `logits` [rows, vocab] say of `token_ids`: row i judges token i, with the `num_top` most likely beside it.

    The rows of prompt positions 0, 1, … judge the prompt's tokens 1, 2, …; nothing judges the first.
    """
    judged: list[TokenLogprobs] = []
    for begin in range(0, len(token_ids), _ROWS_AT_ONCE):
        end = begin + _ROWS_AT_ONCE
        judged += _judge(logits[begin:end].cpu(), torch.tensor(token_ids[begin:end]), num_top)
    return judged


def uniform(seed: int, position: int) -> float:
    """In [0, 1), a function of its arguments alone: the top 53 bits of BLAKE2b over both as little-endian uint64."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _choose(logits: torch.Tensor, most_likely: int, row: SampleRow) -> SampledToken:
    """`logits` [1, vocab], of which `most_likely` is the first maximum."""
    sampling, chosen_from, token = row.sampling, logits[0], most_likely
    if sampling.logit_bias or sampling.needs_history:
        chosen_from = _adjusted(logits[0].cpu(), row)
        token = int(chosen_from.argmax())
    if sampling.temperature > 0.0:
        token = _draw(chosen_from.cpu(), sampling, uniform(sampling.seed, row.position))
    if sampling.logprobs is None:
        return SampledToken(token)
    return SampledToken(token, prompt_logprobs(logits, [token], sampling.logprobs)[0])


def _adjusted(logits: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """A copy of `logits` [vocab] with bias and penalties, in vLLM's order.

    Repetition (Keskar et al. 2019, CTRL, as vLLM applies it): the logit of each token in prompt or output is divided
    by the penalty if positive, else multiplied. Frequency and presence (OpenAI API reference, "Parameter details"):
    minus count × frequency penalty, minus presence penalty where the count is not 0, over the output.
    """
    adjusted, sampling = logits.clone(), row.sampling
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        adjusted[torch.tensor(ids)] += torch.tensor(values, dtype=logits.dtype)
    if sampling.repetition_penalty != 1.0:
        known = torch.tensor(row.token_ids)  # repeated ids write the same value twice
        before, penalty = adjusted[known], sampling.repetition_penalty
        adjusted[known] = torch.where(before > 0, before / penalty, before * penalty)
    output = row.token_ids[row.num_prompt_tokens :]
    if output and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = torch.bincount(torch.tensor(output), minlength=len(logits))  # [vocab]
        adjusted -= counts * sampling.frequency_penalty + (counts > 0) * sampling.presence_penalty
    return adjusted


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
        probs, ids = _kept(probs, params)
    mass = probs.cumsum(dim=-1)
    index = int(torch.searchsorted(mass, u * mass[-1], right=True))
    index = min(index, len(mass) - 1)
    return index if ids is None else int(ids[index])


def _kept(probs: torch.Tensor, params: EngineSampling) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of `probs` [vocab] that pass all filters: probabilities, most likely first, equal ones by id; and ids.

    Sorting a whole vocabulary takes milliseconds, and few tokens are kept as a rule. Those above any floor are a
    beginning of the whole order, so the floor is lowered until the last one kept lies above it.
    """
    size, depth = len(probs), 8
    most_likely = float(probs.max())
    while True:
        ids = (probs >= most_likely * 2.0**-depth).nonzero()[:, 0]
        values, order = torch.sort(probs[ids], descending=True, stable=True)
        kept = _num_kept(values, params)
        if len(values) >= min(params.top_k or size, size) or (kept < len(values) and not params.top_k):
            return values[:kept], ids[order[:kept]]
        depth += depth // 2  # until the floor underflows to 0, and these are all tokens


def _num_kept(probs: torch.Tensor, params: EngineSampling) -> int:
    """How many of the descending `probs` pass all filters; at least one."""
    kept = min(params.top_k, len(probs)) if params.top_k else len(probs)
    if params.top_p < 1.0:
        mass = probs[:kept].cumsum(dim=-1)
        # A token is kept if the mass before it is still below top_p of what top-k left; without top-k that is 1.
        left = mass[-1] if params.top_k else 1.0
        kept = int(((mass - probs[:kept]) < params.top_p * left).sum())
    if params.min_p > 0.0:
        kept = int((probs[:kept] >= params.min_p * probs[0]).sum())
    return max(kept, 1)


def _judge(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> list[TokenLogprobs]:
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])  # [rows, 1]
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    values, ids = torch.topk(logprobs, min(num_top, logprobs.shape[-1]), dim=-1)
    return [
        TokenLogprobs(logprob, tuple(zip(top_ids, top_values, strict=True)), rank)
        for logprob, top_ids, top_values, rank in zip(
            chosen[:, 0].tolist(), ids.tolist(), values.tolist(), ranks.tolist(), strict=True
        )
    ]
