"""The contract every data plane keeps: register buffers, connect, read runs, close.

A plane moves bytes and nothing else. It knows neither requests nor blocks: memory is a list of buffers (the order of
`get_contiguous_buf_infos()`), a transfer is a list of byte runs. The reader always pulls; a plane never writes into the
holder's memory. What a read returned may be used only after the holder confirmed the lease (see `transfer.lease`).

    holder                                     reader
    plane.serve(buffers, guard) -> server      plane.connect(endpoint, token, buffers) -> reader
    server.endpoint  ───── handshake ────►     reader.read(lease_id, runs, timeout_s)
    server.close()                             reader.close()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
T = TypeVar("T")


class PlaneError(Exception):
    """A read failed; nothing of what it wrote may be used."""


class PlaneUnavailable(PlaneError):
    """This plane cannot join the two sides; the message says why, and another plane may."""


class ReadRefused(PlaneError):
    """The holder refused the read: wrong token, ended lease, or bytes outside the lease's blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """One anonymous shared file (memfd) that holds all buffers, mapped here at `base_ptr`, sealed against shrinking.

    It has no name: it is reached through the owner's file descriptor `fd`, and is gone with its last mapping.
    """

    fd: int
    base_ptr: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """The memory of one engine's cache: address and bytes per buffer, and the shared file they lie in, if any.

    `is_addressable`: the addresses are those of memory that the host's processor can read.
    """

    ptrs: tuple[int, ...]
    lens: tuple[int, ...]
    shared: SharedMemory | None = None
    is_addressable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Byte runs to copy, five int64 arrays of one length: source buffer and offset to destination buffer and offset."""

    src_buffer: Int64Array
    src_offset: Int64Array
    dst_buffer: Int64Array
    dst_offset: Int64Array
    length: Int64Array

    def __len__(self) -> int:
        return len(self.length)

    @property
    def num_bytes(self) -> int:
        return int(self.length.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Runs that repeat in several pairs of buffers."""

    pairs: Int64Array  # [pairs, 2]: source buffer, destination buffer
    src_offset: Int64Array  # [runs], like the other two
    dst_offset: Int64Array
    length: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternRuns(Runs):
    """Runs whose patterns are known, so that nobody has to find them again."""

    patterns: tuple[Pattern, ...]

    @classmethod
    def of(cls, patterns: Sequence[Pattern]) -> PatternRuns:
        """The runs of each pattern for each of its pairs of buffers, one pair after the other."""

        def joined(arrays: list[Int64Array]) -> Int64Array:
            return np.concatenate(arrays) if arrays else np.empty(0, np.int64)

        return cls(
            src_buffer=joined([np.repeat(p.pairs[:, 0], len(p.length)) for p in patterns]),
            src_offset=joined([np.tile(p.src_offset, len(p.pairs)) for p in patterns]),
            dst_buffer=joined([np.repeat(p.pairs[:, 1], len(p.length)) for p in patterns]),
            dst_offset=joined([np.tile(p.dst_offset, len(p.pairs)) for p in patterns]),
            length=joined([np.tile(p.length, len(p.pairs)) for p in patterns]),
            patterns=tuple(p for p in patterns if len(p.length)),
        )


def outside(buffer: Int64Array, offset: Int64Array, length: Int64Array, lens: Sequence[int] | Int64Array) -> str | None:
    """The first run that does not lie inside its buffer, in words; None when all do. `lens` is bytes per buffer.

    Safe for any int64 values: they may come from another process.
    """
    known = buffer.view(np.uint64) < len(lens)  # as unsigned, what is negative is large
    size = np.asarray(lens if len(lens) else (0,), np.int64).take(buffer, mode="clip")
    # `size - length` can only overflow where length is negative, which is refused anyway.
    inside = known & ((length | offset) >= 0) & (offset <= size - length)
    if inside.all():
        return None
    i = int(np.argmin(inside))
    where = f"of {size[i]} bytes" if known[i] else f"which does not exist ({len(lens)} buffers)"
    return f"run {i}: {length[i]} bytes at {offset[i]} of buffer {buffer[i]} {where}"


def check_source(runs: Runs, lens: Sequence[int] | Int64Array) -> None:
    """Raises PlaneError unless every run lies inside the holder's buffers, of `lens` bytes."""
    problem = outside(runs.src_buffer, runs.src_offset, runs.length, lens)
    if problem is not None:
        raise PlaneError(f"source {problem}")


def check_destination(runs: Runs, lens: Sequence[int] | Int64Array) -> None:
    """Raises PlaneError unless every run lies inside the reader's buffers, of `lens` bytes."""
    problem = outside(runs.dst_buffer, runs.dst_offset, runs.length, lens)
    if problem is not None:
        raise PlaneError(f"destination {problem}")


def endpoint_field(endpoint: Mapping[str, object], name: str, kind: type[T]) -> T:
    """Field `name` of an endpoint another process described. Raises PlaneUnavailable unless it has that type."""
    value = endpoint.get(name) if isinstance(endpoint, Mapping) else None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise PlaneUnavailable(f"the endpoint's field {name!r} should be {kind.__name__}, given {value!r}")
    return value


class Guard(Protocol):
    """Decides on the holder whether a read may be served. Called from plane threads."""

    def knows(self, token: bytes) -> bool:
        """Whether a reader with this token may connect at all."""

    def check(self, token: bytes, lease_id: str, buffer: Int64Array, offset: Int64Array, length: Int64Array) -> None:
        """Raises ReadRefused unless `token` is known, the lease is open, and each run lies in its blocks."""


class PlaneServer(Protocol):
    """The holder's side. The buffers must stay mapped until `close` has returned."""

    @property
    def endpoint(self) -> Mapping[str, object]:
        """What a reader needs to connect; msgpack types only."""

    def close(self) -> None:
        """Ends every transfer this side can see and releases everything. May be called twice."""


class PlaneReader(Protocol):
    """The reader's side of one (reader, holder) pair. `read` may be called from several threads at once.

    The reader's own buffers must stay mapped until `close` has returned; after that nothing is written into them.
    """

    def read(self, lease_id: str, runs: Runs, timeout_s: float) -> None:
        """Copies all runs, or raises PlaneError (also at the timeout, and when closed meanwhile)."""

    def close(self) -> None:
        """Ends running reads with PlaneError and releases everything. May be called twice."""


class Plane(Protocol):
    """A way to move bytes between two engines."""

    @property
    def name(self) -> str: ...

    def serve(self, buffers: Buffers, guard: Guard) -> PlaneServer:
        """Raises PlaneUnavailable when these buffers cannot be served this way."""

    def connect(self, endpoint: Mapping[str, object], token: bytes, buffers: Buffers) -> PlaneReader:
        """Raises PlaneUnavailable when the endpoint cannot be reached this way."""
