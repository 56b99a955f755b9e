"""Between the protobuf message of a cache layout and `transfer`'s own."""

from __future__ import annotations

from dataclasses import fields

from pd_service.rpc import kv_transfer_pb2
from transfer.layout import BufferLayout, EngineLayout

_BUFFER_FIELDS = tuple(field.name for field in fields(BufferLayout))  # named alike in the message


def layout_to_wire(layout: EngineLayout) -> kv_transfer_pb2.CacheLayout:
    buffers = [
        kv_transfer_pb2.CacheBuffer(**{name: getattr(buffer, name) for name in _BUFFER_FIELDS})
        for buffer in layout.buffers
    ]
    return kv_transfer_pb2.CacheLayout(version=layout.version, model=layout.model, buffers=buffers)


def layout_from_wire(message: kv_transfer_pb2.CacheLayout) -> EngineLayout:
    """Raises ValueError naming what cannot be a layout."""
    buffers = tuple(
        BufferLayout(**{name: getattr(buffer, name) for name in _BUFFER_FIELDS}) for buffer in message.buffers
    )
    return EngineLayout(version=message.version, model=message.model, buffers=buffers)
