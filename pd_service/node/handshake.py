"""What a reader and a holder say first, and every reason why the two cannot work together.

Pure: messages and values in, reasons out. Each side names all differences at once, each with the reader's value before
the holder's, so that one look at either log is enough. No reasons: KV can move.
"""

from __future__ import annotations

from collections.abc import Sequence

from pd_service.config import PROTOCOL_VERSION
from pd_service.node.layout_wire import layout_from_wire
from pd_service.rpc import kv_transfer_pb2 as pb
from transfer.layout import EngineLayout, compare


def reasons_against_reader(
    hello: pb.ReaderHello, incarnation: str, layout: EngineLayout, planes: Sequence[str]
) -> list[str]:
    """At the holder, which is `incarnation` and offers `planes`."""
    reasons = _versions(hello.version, PROTOCOL_VERSION)
    if hello.holder_incarnation != incarnation:
        reasons.append(f"incarnation: the reader asks for {hello.holder_incarnation!r}, the holder is {incarnation!r}")
    try:
        reasons += _layouts(layout_from_wire(hello.layout), layout)
    except ValueError as error:
        reasons.append(f"the reader's layout is malformed: {error}")
    if not set(hello.planes) & set(planes):
        reasons.append(f"data planes: the reader has {_names(hello.planes)}, the holder offers {_names(planes)}")
    return reasons


def reasons_against_holder(hello: pb.HolderHello, incarnation: str, layout: EngineLayout) -> list[str]:
    """At the reader, which asked for `incarnation`."""
    reasons = _versions(PROTOCOL_VERSION, hello.version)
    if hello.incarnation != incarnation:
        reasons.append(f"incarnation: the reader asks for {incarnation!r}, the holder is {hello.incarnation!r}")
    try:
        reasons += _layouts(layout, layout_from_wire(hello.layout))
    except ValueError as error:
        reasons.append(f"the holder's layout is malformed: {error}")
    return reasons


def _versions(reader: int, holder: int) -> list[str]:
    return [] if reader == holder else [f"protocol version: the reader has {reader}, the holder {holder}"]


def _layouts(reader: EngineLayout, holder: EngineLayout) -> list[str]:
    return [f"reader and holder: {reason}" for reason in compare(reader, holder)]


def _names(planes: Sequence[str]) -> str:
    return ", ".join(planes) or "none"
