from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReaderMessage(_message.Message):
    __slots__ = ("hello", "open", "renew", "confirm", "drop", "probe")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    hello: ReaderHello
    open: OpenTicket
    renew: RenewTicket
    confirm: ConfirmTicket
    drop: DropTicket
    probe: ProbeHolder
    def __init__(self, hello: _Optional[_Union[ReaderHello, _Mapping]] = ..., open: _Optional[_Union[OpenTicket, _Mapping]] = ..., renew: _Optional[_Union[RenewTicket, _Mapping]] = ..., confirm: _Optional[_Union[ConfirmTicket, _Mapping]] = ..., drop: _Optional[_Union[DropTicket, _Mapping]] = ..., probe: _Optional[_Union[ProbeHolder, _Mapping]] = ...) -> None: ...

class HolderMessage(_message.Message):
    __slots__ = ("hello", "refused", "opened", "confirmed", "ended", "progress", "probed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PROBED_FIELD_NUMBER: _ClassVar[int]
    hello: HolderHello
    refused: Refused
    opened: TicketOpened
    confirmed: TicketConfirmed
    ended: TicketEnded
    progress: TicketProgress
    probed: HolderProbed
    def __init__(self, hello: _Optional[_Union[HolderHello, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., opened: _Optional[_Union[TicketOpened, _Mapping]] = ..., confirmed: _Optional[_Union[TicketConfirmed, _Mapping]] = ..., ended: _Optional[_Union[TicketEnded, _Mapping]] = ..., progress: _Optional[_Union[TicketProgress, _Mapping]] = ..., probed: _Optional[_Union[HolderProbed, _Mapping]] = ...) -> None: ...

class ReaderHello(_message.Message):
    __slots__ = ("version", "incarnation", "holder_incarnation", "layout", "planes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOLDER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    version: int
    incarnation: str
    holder_incarnation: str
    layout: CacheLayout
    planes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[int] = ..., incarnation: _Optional[str] = ..., holder_incarnation: _Optional[str] = ..., layout: _Optional[_Union[CacheLayout, _Mapping]] = ..., planes: _Optional[_Iterable[str]] = ...) -> None: ...

class HolderHello(_message.Message):
    __slots__ = ("version", "incarnation", "layout", "planes", "access_token")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    ACCESS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    version: int
    incarnation: str
    layout: CacheLayout
    planes: _containers.RepeatedCompositeFieldContainer[PlaneOffer]
    access_token: bytes
    def __init__(self, version: _Optional[int] = ..., incarnation: _Optional[str] = ..., layout: _Optional[_Union[CacheLayout, _Mapping]] = ..., planes: _Optional[_Iterable[_Union[PlaneOffer, _Mapping]]] = ..., access_token: _Optional[bytes] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reasons",)
    REASONS_FIELD_NUMBER: _ClassVar[int]
    reasons: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reasons: _Optional[_Iterable[str]] = ...) -> None: ...

class PlaneOffer(_message.Message):
    __slots__ = ("name", "endpoint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    endpoint: bytes
    def __init__(self, name: _Optional[str] = ..., endpoint: _Optional[bytes] = ...) -> None: ...

class CacheLayout(_message.Message):
    __slots__ = ("version", "model", "buffers")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    model: str
    buffers: _containers.RepeatedCompositeFieldContainer[CacheBuffer]
    def __init__(self, version: _Optional[int] = ..., model: _Optional[str] = ..., buffers: _Optional[_Iterable[_Union[CacheBuffer, _Mapping]]] = ...) -> None: ...

class CacheBuffer(_message.Message):
    __slots__ = ("layer", "cache_name", "attn_type", "block_size", "first_head", "num_heads", "total_heads", "dim", "dtype", "num_bytes", "sliding_window", "is_heads_first", "rank")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAME_FIELD_NUMBER: _ClassVar[int]
    ATTN_TYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_HEADS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    IS_HEADS_FIRST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    layer: int
    cache_name: str
    attn_type: str
    block_size: int
    first_head: int
    num_heads: int
    total_heads: int
    dim: int
    dtype: str
    num_bytes: int
    sliding_window: int
    is_heads_first: bool
    rank: int
    def __init__(self, layer: _Optional[int] = ..., cache_name: _Optional[str] = ..., attn_type: _Optional[str] = ..., block_size: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ..., total_heads: _Optional[int] = ..., dim: _Optional[int] = ..., dtype: _Optional[str] = ..., num_bytes: _Optional[int] = ..., sliding_window: _Optional[int] = ..., is_heads_first: _Optional[bool] = ..., rank: _Optional[int] = ...) -> None: ...

class OpenTicket(_message.Message):
    __slots__ = ("lease_id", "pull_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PULL_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    pull_id: int
    def __init__(self, lease_id: _Optional[str] = ..., pull_id: _Optional[int] = ...) -> None: ...

class TicketOpened(_message.Message):
    __slots__ = ("lease_id", "ready", "num_tokens", "token_digest", "lease_ms", "pull_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    PULL_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    ready: Readiness
    num_tokens: int
    token_digest: bytes
    lease_ms: int
    pull_id: int
    def __init__(self, lease_id: _Optional[str] = ..., ready: _Optional[_Union[Readiness, _Mapping]] = ..., num_tokens: _Optional[int] = ..., token_digest: _Optional[bytes] = ..., lease_ms: _Optional[int] = ..., pull_id: _Optional[int] = ...) -> None: ...

class TicketProgress(_message.Message):
    __slots__ = ("lease_id", "ready")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    ready: Readiness
    def __init__(self, lease_id: _Optional[str] = ..., ready: _Optional[_Union[Readiness, _Mapping]] = ...) -> None: ...

class Readiness(_message.Message):
    __slots__ = ("tables", "num_tokens", "next_token")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    num_tokens: int
    next_token: int
    def __init__(self, tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., num_tokens: _Optional[int] = ..., next_token: _Optional[int] = ...) -> None: ...

class BlockTable(_message.Message):
    __slots__ = ("attn_type", "block_ids")
    ATTN_TYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    attn_type: str
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, attn_type: _Optional[str] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RenewTicket(_message.Message):
    __slots__ = ("lease_id", "pull_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PULL_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    pull_id: int
    def __init__(self, lease_id: _Optional[str] = ..., pull_id: _Optional[int] = ...) -> None: ...

class ConfirmTicket(_message.Message):
    __slots__ = ("lease_id", "pull_id", "digests")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PULL_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    pull_id: int
    digests: _containers.RepeatedCompositeFieldContainer[PieceDigest]
    def __init__(self, lease_id: _Optional[str] = ..., pull_id: _Optional[int] = ..., digests: _Optional[_Iterable[_Union[PieceDigest, _Mapping]]] = ...) -> None: ...

class TicketConfirmed(_message.Message):
    __slots__ = ("lease_id", "valid", "pull_id", "differing")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    VALID_FIELD_NUMBER: _ClassVar[int]
    PULL_ID_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    valid: bool
    pull_id: int
    differing: str
    def __init__(self, lease_id: _Optional[str] = ..., valid: _Optional[bool] = ..., pull_id: _Optional[int] = ..., differing: _Optional[str] = ...) -> None: ...

class DropTicket(_message.Message):
    __slots__ = ("lease_id", "pull_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PULL_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    pull_id: int
    def __init__(self, lease_id: _Optional[str] = ..., pull_id: _Optional[int] = ...) -> None: ...

class TicketEnded(_message.Message):
    __slots__ = ("lease_id", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    reason: str
    def __init__(self, lease_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class PieceDigest(_message.Message):
    __slots__ = ("layer", "cache_name", "first_token", "num_tokens", "first_head", "num_heads", "digest")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    layer: int
    cache_name: str
    first_token: int
    num_tokens: int
    first_head: int
    num_heads: int
    digest: int
    def __init__(self, layer: _Optional[int] = ..., cache_name: _Optional[str] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class ProbeHolder(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class HolderProbed(_message.Message):
    __slots__ = ("number", "lease_id")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    number: int
    lease_id: str
    def __init__(self, number: _Optional[int] = ..., lease_id: _Optional[str] = ...) -> None: ...
