"""What a holder and a reader have done since the engine's start, for its status and its metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pd_service.engine.request_state import PullStats
from pd_service.errors import TransferFailed, TransferFailure
from pd_service.rpc.engine_pb2 import EngineStatus
from transfer.lease import ENDED


@dataclass(slots=True)
class HolderCounts:
    """`leases_ended` is by how a lease ended, `lease_refusals` counts questions of readers answered with no."""

    leases_ended: Counter[str] = field(default_factory=Counter)
    lease_refusals: int = 0
    digests_same: int = 0
    digests_different: int = 0

    def write_to(self, status: EngineStatus) -> None:
        status.leases_ended.update({state.value: self.leases_ended[state.value] for state in ENDED})
        status.lease_refusals = self.lease_refusals
        status.digests_same = self.digests_same
        status.digests_different = self.digests_different


@dataclass(slots=True)
class PullCounts:
    """Bytes and runs are those of confirmed pulls; failures count pulls, and tickets lost before their pull."""

    confirmed: int = 0
    num_bytes: int = 0
    num_runs: int = 0
    failures: Counter[TransferFailure] = field(default_factory=Counter)

    def add(self, ended: PullStats | TransferFailed) -> None:
        if isinstance(ended, TransferFailed):
            self.failures[ended.reason] += 1
            return
        self.confirmed += 1
        self.num_bytes += ended.kv_bytes
        self.num_runs += ended.num_runs

    def write_to(self, status: EngineStatus) -> None:
        status.pulls_confirmed = self.confirmed
        status.pull_bytes = self.num_bytes
        status.pull_runs = self.num_runs
        status.pull_failures.update({reason.value: self.failures[reason] for reason in TransferFailure})
