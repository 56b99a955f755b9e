"""Links between the parts of a simulated cluster: in order, late, sometimes silent, sometimes cut."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """One cluster. Times in seconds, pairs are (least, most); blocks are usable ones per attention type.

    The last two are faults of the cluster, for showing that the laws can fail: `skips_confirm` lets a reader take every
    pull for good, `frees_under_pull` lets an engine free the blocks of a cancelled request while a pull writes there.
    """

    num_prefill: int = 2
    num_decode: int = 2
    num_gateways: int = 1
    attn_types: tuple[str, ...] = ("FullAttention",)
    block_size: int = 4
    prefill_blocks: int = 24
    decode_blocks: int = 24
    max_model_len: int = 64
    budget: int = 8
    max_num_seqs: int = 8
    max_waiting: int = 8
    local_prefill_max_tokens: int = 0
    has_prefix_cache: bool = False
    lease_s: float = 1.0
    pull_timeout_s: float = 3.0
    engine_wait_s: float = 60.0
    step_s: tuple[float, float] = (0.01, 0.05)
    block_copy_s: tuple[float, float] = (0.0, 0.05)
    delay_s: tuple[float, float] = (0.0, 0.01)
    notice_s: tuple[float, float] = (0.0, 0.5)  # until an end of a cut connection knows it
    skips_confirm: bool = False
    frees_under_pull: bool = False


class Link:
    """One direction of a connection. A cut one loses what is under way and all that comes later."""

    def __init__(self, rng: random.Random, delay_s: tuple[float, float]) -> None:
        self._rng = rng
        self._delay_s = delay_s
        self._queue: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._free_at = 0.0
        self.is_cut = False

    def send(self, deliver: Callable[..., object], *args: Any) -> None:
        if self.is_cut:
            return
        self._free_at = max(self._free_at, now() + self._rng.uniform(*self._delay_s))
        self._queue.append((deliver, args))
        asyncio.get_running_loop().call_at(self._free_at, self._deliver_next)

    def stall(self, duration_s: float) -> None:
        """Nothing sent from here on arrives before this time has passed."""
        self._free_at = max(self._free_at, now() + duration_s)

    def cut(self) -> None:
        self.is_cut = True
        self._queue.clear()

    def _deliver_next(self) -> None:
        if not self.is_cut:
            deliver, args = self._queue.popleft()
            deliver(*args)


class Connection:
    """Both directions, and who is told when it is cut; each end notices at a time of its own."""

    def __init__(self, rng: random.Random, settings: SimSettings) -> None:
        self._rng = rng
        self._notice_s = settings.notice_s
        self.up = Link(rng, settings.delay_s)
        self.down = Link(rng, settings.delay_s)
        self._ends: list[Callable[[], object]] = []

    @property
    def is_cut(self) -> bool:
        return self.up.is_cut

    def on_cut(self, tell: Callable[[], object]) -> None:
        self._ends.append(tell)

    def cut(self) -> None:
        if self.is_cut:
            return
        self.up.cut()
        self.down.cut()
        for tell in self._ends:
            asyncio.get_running_loop().call_later(self._rng.uniform(*self._notice_s), tell)
