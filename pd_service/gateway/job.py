"""What a story runs: one answer of one client request, checked, tokenized, with its seed drawn.

The answers of a request are alike but for index, seed and times, and share what they know of engines.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field, replace

from pd_service.gateway.phases import Phases
from pd_service.gateway.router import Affinity
from pd_service.gateway.timeline import Timeline
from pd_service.request import EngineSampling, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One answer that can be run. `deadline` is a time of the event loop's clock, in seconds.

    Three parts change: into `phases` the story writes where the time goes, into `timeline` what happened when, and into
    `affinity` the first answer's story the engines it uses.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: EngineSampling
    max_new_tokens: int
    deadline: float | None
    phases: Phases
    index: int = 0
    priority: int = 0
    cache_salt: str = ""
    affinity: Affinity = field(default_factory=Affinity)
    timeline: Timeline = field(default_factory=Timeline)

    def answer(self, index: int) -> Job:
        """The job of another answer, before anything ran: it waits since the same moment, and leaves the prompt's
        log probabilities to the first."""
        if index == self.index:
            return self
        seed = answer_seed(self.sampling.seed, index)
        sampling = replace(self.sampling, seed=seed, prompt_logprobs=None)
        phases = Phases(mark=self.phases.mark)
        return replace(self, index=index, sampling=sampling, phases=phases, timeline=Timeline())


def answer_seed(seed: int, index: int) -> int:
    """The seed of answer `index` of a request with this seed: 64 bits, equal on all machines; the first keeps it."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<QQ", seed, index), digest_size=8, person=b"answer").digest()
    return int.from_bytes(digest, "little")
