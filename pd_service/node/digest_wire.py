"""Between the protobuf messages of digests and `transfer`'s own."""

from __future__ import annotations

from collections.abc import Iterable

from pd_service.rpc import kv_transfer_pb2
from transfer.digest import Digests, Piece

_FIELDS = Piece._fields  # named alike in the message


def digests_to_wire(digests: Digests) -> list[kv_transfer_pb2.PieceDigest]:
    return [kv_transfer_pb2.PieceDigest(**piece._asdict(), digest=digest) for piece, digest in digests.items()]


def digests_from_wire(messages: Iterable[kv_transfer_pb2.PieceDigest]) -> Digests:
    return {Piece(*(getattr(message, name) for name in _FIELDS)): message.digest for message in messages}
