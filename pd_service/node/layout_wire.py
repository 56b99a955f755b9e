"""Between the protobuf message of a cache layout and `transfer`'s own."""

from __future__ import annotations

from pd_service.rpc import kv_transfer_pb2
from transfer.layout import BufferLayout, EngineLayout

_BUFFER_FIELDS = (
    "layer",
    "cache_name",
    "attn_type",
    "block_size",
    "first_head",
    "num_heads",
    "total_heads",
    "dim",
    "dtype",
    "num_bytes",
    "sliding_window",
)


def layout_to_wire(layout: EngineLayout) -> kv_transfer_pb2.CacheLayout:
    buffers = [
        kv_transfer_pb2.CacheBuffer(**{name: getattr(buffer, name) for name in _BUFFER_FIELDS})
        for buffer in layout.buffers
    ]
    return kv_transfer_pb2.CacheLayout(version=layout.version, model=layout.model, buffers=buffers)


def layout_from_wire(message: kv_transfer_pb2.CacheLayout) -> EngineLayout:
    buffers = tuple(
        BufferLayout(**{name: getattr(buffer, name) for name in _BUFFER_FIELDS}) for buffer in message.buffers
    )
    return EngineLayout(version=message.version, model=message.model, buffers=buffers)
