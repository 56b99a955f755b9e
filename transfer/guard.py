"""What a reader may see of the holder's memory: the blocks of leases it was admitted to, and nothing else.

Kept in step with the lease table by the holder: `admit` when a reader opens a ticket, `revoke` when the lease ends.
Planes that serve bytes over a socket ask `check` before they touch memory. Safe to use from any thread.

The guard narrows what can be read; it does not make a read right. A lease may end while bytes are on their way, so only
the confirmation after the read does that.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from transfer.layout import EngineLayout
from transfer.planes.base import Int64Array, ReadRefused, outside

NULL_BLOCK = 0
_Blocks = dict[str, Int64Array]  # ascending distinct ids by attention type, without the null block


class ReadGuard:
    """Decides for one engine. Each reader is known by a random token it presents with every read."""

    def __init__(self, layout: EngineLayout) -> None:
        self._lens = [b.num_bytes for b in layout.buffers]
        self._types = sorted({b.attn_type for b in layout.buffers})
        self._type_of = np.array([self._types.index(b.attn_type) for b in layout.buffers], np.int64)
        self._block_bytes = np.array([b.bytes_per_block for b in layout.buffers], np.int64)
        self._lock = threading.Lock()
        self._leases_of: dict[bytes, set[str]] = {}
        self._admitted: dict[str, dict[bytes, _Blocks]] = {}

    def register_reader(self, token: bytes) -> None:
        """Raises ValueError for a token that is empty or registered already."""
        with self._lock:
            if not token or token in self._leases_of:
                raise ValueError("a reader's token must be new and not empty")
            self._leases_of[token] = set()

    def forget_reader(self, token: bytes) -> None:
        """Refuses every later read with this token; an unknown one is no error."""
        with self._lock:
            for lease_id in self._leases_of.pop(token, ()):
                readers = self._admitted[lease_id]
                del readers[token]
                if not readers:
                    del self._admitted[lease_id]

    def knows(self, token: bytes) -> bool:
        """Whether a reader is registered with this token. Its time tells nothing of how much of the token is right."""
        with self._lock:
            same = [hmac.compare_digest(known, token) for known in self._leases_of]
        return any(same)

    def admit(self, lease_id: str, token: bytes, tables: Mapping[str, Sequence[int]]) -> None:
        """Lets the reader see these blocks (ids by attention type) until the lease is revoked.

        Several readers may be admitted to one lease; admitting one again replaces its blocks. Raises ValueError for a
        token that is not registered.
        """
        ids = {attn_type: np.unique(np.asarray(table, np.int64)) for attn_type, table in tables.items()}
        blocks = {attn_type: found[found != NULL_BLOCK] for attn_type, found in ids.items()}
        self._admit(lease_id, token, blocks)

    def admit_null_blocks(self, lease_id: str, token: bytes) -> None:
        """Lets the reader see block 0 of every buffer, which never holds data, until it is forgotten.

        For measuring a plane. `lease_id` must be no lease's. Raises ValueError as `admit`.
        """
        self._admit(lease_id, token, {attn_type: np.array([NULL_BLOCK], np.int64) for attn_type in self._types})

    def _admit(self, lease_id: str, token: bytes, blocks: _Blocks) -> None:
        with self._lock:
            if token not in self._leases_of:
                raise ValueError(f"cannot admit a reader that is not registered to lease {lease_id!r}")
            self._leases_of[token].add(lease_id)
            self._admitted.setdefault(lease_id, {})[token] = blocks

    def revoke(self, lease_id: str) -> None:
        """Refuses every later read under this lease; an unknown one is no error."""
        with self._lock:
            for token in self._admitted.pop(lease_id, ()):
                self._leases_of[token].discard(lease_id)

    def is_empty(self) -> bool:
        """No reader is registered and no lease is known."""
        with self._lock:
            return not self._leases_of and not self._admitted

    def check(self, token: bytes, lease_id: str, buffer: Int64Array, offset: Int64Array, length: Int64Array) -> None:
        """Raises ReadRefused unless the reader is admitted to the lease and each run lies in its blocks."""
        blocks = self._blocks(token, lease_id)
        problem = outside(buffer, offset, length, self._lens)
        if problem is not None:
            raise ReadRefused(problem)
        wanted = length > 0
        buffer, offset, length = buffer[wanted], offset[wanted], length[wanted]
        first = offset // self._block_bytes[buffer]
        last = (offset + length - 1) // self._block_bytes[buffer]
        run_type = self._type_of[buffer]
        for i, attn_type in enumerate(self._types):
            of_type = run_type == i
            _check_blocks(attn_type, first[of_type], last[of_type], blocks.get(attn_type, np.empty(0, np.int64)))

    def _blocks(self, token: bytes, lease_id: str) -> _Blocks:
        """One message for an unknown reader and an unknown lease, so that a stranger learns nothing from it."""
        found: _Blocks | None = None
        with self._lock:
            for known, blocks in self._admitted.get(lease_id, {}).items():
                if hmac.compare_digest(known, token):
                    found = blocks
        if found is None:
            raise ReadRefused(f"this reader is not admitted to lease {lease_id!r}, or the lease has ended")
        return found


def _check_blocks(attn_type: str, first: Int64Array, last: Int64Array, allowed: Int64Array) -> None:
    """Every block of [first, last] must be in `allowed`, whose ids are distinct and ascending.

    Then the range is allowed exactly if `last` stands `last - first` places behind `first`.
    """
    if not len(first):
        return
    at = np.searchsorted(allowed, first)
    end = at + (last - first)
    fits = end < len(allowed)
    if fits.all():
        fits = (allowed[at] == first) & (allowed[end] == last)
    if not fits.all():
        i = int(np.argmin(fits))
        raise ReadRefused(f"blocks {first[i]} to {last[i]} of {attn_type} are not all part of the lease")
