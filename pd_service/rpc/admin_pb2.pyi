from pd_service.rpc import engine_pb2 as _engine_pb2
from pd_service.rpc import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("model", "membership_version", "pools", "engines", "controller_life")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_VERSION_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_LIFE_FIELD_NUMBER: _ClassVar[int]
    model: str
    membership_version: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    engines: _containers.RepeatedCompositeFieldContainer[EngineMemberStatus]
    controller_life: int
    def __init__(self, model: _Optional[str] = ..., membership_version: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[EngineMemberStatus, _Mapping]]] = ..., controller_life: _Optional[int] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("role", "desired", "ready", "replaced", "last_failure", "min_replicas", "max_replicas", "waits_for")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    role: str
    desired: int
    ready: int
    replaced: int
    last_failure: str
    min_replicas: int
    max_replicas: int
    waits_for: str
    def __init__(self, role: _Optional[str] = ..., desired: _Optional[int] = ..., ready: _Optional[int] = ..., replaced: _Optional[int] = ..., last_failure: _Optional[str] = ..., min_replicas: _Optional[int] = ..., max_replicas: _Optional[int] = ..., waits_for: _Optional[str] = ...) -> None: ...

class EngineMemberStatus(_message.Message):
    __slots__ = ("member", "status", "problem")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    member: Member
    status: _engine_pb2.EngineStatus
    problem: str
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., status: _Optional[_Union[_engine_pb2.EngineStatus, _Mapping]] = ..., problem: _Optional[str] = ...) -> None: ...

class WatchMembershipRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Membership(_message.Message):
    __slots__ = ("version", "members", "pools", "is_stopping", "controller_life")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    IS_STOPPING_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_LIFE_FIELD_NUMBER: _ClassVar[int]
    version: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    is_stopping: bool
    controller_life: int
    def __init__(self, version: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., is_stopping: _Optional[bool] = ..., controller_life: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("engine_id", "role", "address", "incarnation", "state", "host", "progress", "reason", "held")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    role: str
    address: str
    incarnation: str
    state: str
    host: str
    progress: str
    reason: str
    held: int
    def __init__(self, engine_id: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., state: _Optional[str] = ..., host: _Optional[str] = ..., progress: _Optional[str] = ..., reason: _Optional[str] = ..., held: _Optional[int] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("replicas",)
    class ReplicasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.ScalarMap[str, int]
    def __init__(self, replicas: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("engine_id", "limit_s")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    limit_s: float
    def __init__(self, engine_id: _Optional[str] = ..., limit_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("member",)
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    member: Member
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopResponse(_message.Message):
    __slots__ = ("controller",)
    CONTROLLER_FIELD_NUMBER: _ClassVar[int]
    controller: str
    def __init__(self, controller: _Optional[str] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id", "limit")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    limit: int
    def __init__(self, request_id: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("requests", "usual", "reach")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    USUAL_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[ExplainedRequest]
    usual: _containers.RepeatedCompositeFieldContainer[UsualPhase]
    reach: str
    def __init__(self, requests: _Optional[_Iterable[_Union[ExplainedRequest, _Mapping]]] = ..., usual: _Optional[_Iterable[_Union[UsualPhase, _Mapping]]] = ..., reach: _Optional[str] = ...) -> None: ...

class ExplainedRequest(_message.Message):
    __slots__ = ("request_id", "accepted_unix", "outcome", "error", "prompt_tokens", "answers")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_UNIX_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    accepted_unix: float
    outcome: str
    error: str
    prompt_tokens: int
    answers: _containers.RepeatedCompositeFieldContainer[ExplainedAnswer]
    def __init__(self, request_id: _Optional[str] = ..., accepted_unix: _Optional[float] = ..., outcome: _Optional[str] = ..., error: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., answers: _Optional[_Iterable[_Union[ExplainedAnswer, _Mapping]]] = ...) -> None: ...

class ExplainedAnswer(_message.Message):
    __slots__ = ("index", "completion_tokens", "cached_tokens", "retries", "ttft_ms", "phases", "hops", "guilty")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    GUILTY_FIELD_NUMBER: _ClassVar[int]
    index: int
    completion_tokens: int
    cached_tokens: int
    retries: int
    ttft_ms: float
    phases: _generation_pb2.PhaseTimes
    hops: _containers.RepeatedCompositeFieldContainer[Hop]
    guilty: GuiltyHop
    def __init__(self, index: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., retries: _Optional[int] = ..., ttft_ms: _Optional[float] = ..., phases: _Optional[_Union[_generation_pb2.PhaseTimes, _Mapping]] = ..., hops: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ..., guilty: _Optional[_Union[GuiltyHop, _Mapping]] = ...) -> None: ...

class Hop(_message.Message):
    __slots__ = ("at_ms", "ms", "what", "engine_id", "detail")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    at_ms: float
    ms: float
    what: str
    engine_id: str
    detail: str
    def __init__(self, at_ms: _Optional[float] = ..., ms: _Optional[float] = ..., what: _Optional[str] = ..., engine_id: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class UsualPhase(_message.Message):
    __slots__ = ("phase", "median_ms")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_MS_FIELD_NUMBER: _ClassVar[int]
    phase: str
    median_ms: float
    def __init__(self, phase: _Optional[str] = ..., median_ms: _Optional[float] = ...) -> None: ...

class GuiltyHop(_message.Message):
    __slots__ = ("phase", "usual_ms", "excess_ms")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    USUAL_MS_FIELD_NUMBER: _ClassVar[int]
    EXCESS_MS_FIELD_NUMBER: _ClassVar[int]
    phase: str
    usual_ms: float
    excess_ms: float
    def __init__(self, phase: _Optional[str] = ..., usual_ms: _Optional[float] = ..., excess_ms: _Optional[float] = ...) -> None: ...

class CheckPeersRequest(_message.Message):
    __slots__ = ("prefill", "decode")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill: str
    decode: str
    def __init__(self, prefill: _Optional[str] = ..., decode: _Optional[str] = ...) -> None: ...

class CheckPeersResponse(_message.Message):
    __slots__ = ("pairs",)
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    pairs: _containers.RepeatedCompositeFieldContainer[CheckedPair]
    def __init__(self, pairs: _Optional[_Iterable[_Union[CheckedPair, _Mapping]]] = ...) -> None: ...

class CheckedPair(_message.Message):
    __slots__ = ("prefill", "decode", "report")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    prefill: str
    decode: str
    report: _engine_pb2.PeerReport
    def __init__(self, prefill: _Optional[str] = ..., decode: _Optional[str] = ..., report: _Optional[_Union[_engine_pb2.PeerReport, _Mapping]] = ...) -> None: ...
