from pd_service.rpc import engine_pb2 as _engine_pb2
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
    __slots__ = ("model", "membership_version", "pools", "engines")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_VERSION_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    model: str
    membership_version: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    engines: _containers.RepeatedCompositeFieldContainer[EngineMemberStatus]
    def __init__(self, model: _Optional[str] = ..., membership_version: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[EngineMemberStatus, _Mapping]]] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("role", "desired", "ready", "replaced", "last_failure")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_FIELD_NUMBER: _ClassVar[int]
    role: str
    desired: int
    ready: int
    replaced: int
    last_failure: str
    def __init__(self, role: _Optional[str] = ..., desired: _Optional[int] = ..., ready: _Optional[int] = ..., replaced: _Optional[int] = ..., last_failure: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("version", "members")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, version: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("engine_id", "role", "address", "incarnation", "state", "host", "progress")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    role: str
    address: str
    incarnation: str
    state: str
    host: str
    progress: str
    def __init__(self, engine_id: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., state: _Optional[str] = ..., host: _Optional[str] = ..., progress: _Optional[str] = ...) -> None: ...
