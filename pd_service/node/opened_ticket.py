"""A ticket as one claim and its pull see it: how far the holder has come, from the answer to the opening on.

The channel keeps it up to date; the pull waits until there is more to read. Once it has failed it stays so, and the
claim is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from pd_service.errors import TransferFailed
from pd_service.rpc import kv_transfer_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The KV of the first `num_tokens` tokens lies in the holder's blocks `tables`, by attention type.

    `next_token` is None while the holder computes; then there are tables only of those types whose blocks all stay.
    """

    tables: Mapping[str, Sequence[int]]
    num_tokens: int
    next_token: int | None

    @classmethod
    def from_wire(cls, message: pb.Readiness) -> Ready:
        return cls(
            tables={table.attn_type: list(table.block_ids) for table in message.tables},
            num_tokens=message.num_tokens,
            next_token=message.next_token if message.HasField("next_token") else None,
        )


class OpenedTicket:
    """`ready` is how far the holder has come, `lease_s` the time for which the lease lives without renewal.

    `completed_at` is when all was known to be ready, in seconds on the monotonic clock.
    """

    def __init__(self, opened: pb.TicketOpened) -> None:
        self.lease_id = opened.lease_id
        self.pull_id = opened.pull_id
        self.num_tokens = opened.num_tokens
        self.token_digest = opened.token_digest
        self.lease_s = opened.lease_ms / 1e3
        self.completed_at: float | None = None
        self._failure: TransferFailed | None = None
        self._lost: Callable[[TransferFailed], None] = lambda _: None
        self._changed = asyncio.Event()
        self.advance(opened.ready)

    def advance(self, message: pb.Readiness) -> None:
        """The holder says how far it has come."""
        self.ready = Ready.from_wire(message)
        if self.completed_at is None and self.ready.next_token is not None:
            self.completed_at = monotonic()
        self._changed.set()

    def fail(self, error: TransferFailed) -> None:
        """Nothing more comes: whoever waits, or asks later, gets the error."""
        self._failure = error
        self._changed.set()
        self._lost(error)

    def tell_loss(self, lost: Callable[[TransferFailed], None]) -> None:
        """`lost` is called with each failure; at once if it has failed already."""
        self._lost = lost
        if self._failure is not None:
            lost(self._failure)

    def check(self) -> None:
        """Raises TransferFailed if it has failed."""
        if self._failure is not None:
            raise self._failure

    async def more_than(self, num_tokens: int) -> Ready:
        """Waits until more tokens are ready than these, or all and the next one is known. Raises TransferFailed."""
        while True:
            self.check()
            if self.ready.num_tokens > num_tokens or self.ready.next_token is not None:
                return self.ready
            self._changed.clear()
            await self._changed.wait()
