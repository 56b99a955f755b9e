from pd_service.rpc import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GatewayMessage(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "release", "holders")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    hello: GatewayHello
    submit: Submit
    cancel: Cancel
    release: ReleaseTicket
    holders: Holders
    def __init__(self, hello: _Optional[_Union[GatewayHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., release: _Optional[_Union[ReleaseTicket, _Mapping]] = ..., holders: _Optional[_Union[Holders, _Mapping]] = ...) -> None: ...

class Holders(_message.Message):
    __slots__ = ("holders",)
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedCompositeFieldContainer[Holder]
    def __init__(self, holders: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("address", "incarnation")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class GatewayHello(_message.Message):
    __slots__ = ("version", "incarnation", "model")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    version: int
    incarnation: str
    model: str
    def __init__(self, version: _Optional[int] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class EngineHello(_message.Message):
    __slots__ = ("version", "incarnation", "role", "load")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    version: int
    incarnation: str
    role: str
    load: Load
    def __init__(self, version: _Optional[int] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "token_ids", "num_prompt_tokens", "max_new_tokens", "prefill_only", "ticket", "sampling", "deadline_ms", "priority", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ONLY_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    max_new_tokens: int
    prefill_only: bool
    ticket: Ticket
    sampling: EngineSampling
    deadline_ms: int
    priority: int
    cache_salt: str
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., prefill_only: _Optional[bool] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., sampling: _Optional[_Union[EngineSampling, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class EngineSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    prompt_logprobs: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("address", "incarnation", "lease_id", "num_tokens", "token_digest")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    lease_id: str
    num_tokens: int
    token_digest: bytes
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ..., lease_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., token_digest: _Optional[bytes] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ReleaseTicket(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class EngineMessage(_message.Message):
    __slots__ = ("hello", "events")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    hello: EngineHello
    events: StepEvents
    def __init__(self, hello: _Optional[_Union[EngineHello, _Mapping]] = ..., events: _Optional[_Union[StepEvents, _Mapping]] = ...) -> None: ...

class StepEvents(_message.Message):
    __slots__ = ("events", "load")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[RequestEvent]
    load: Load
    def __init__(self, events: _Optional[_Iterable[_Union[RequestEvent, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("request_id", "token_ids", "logprobs", "finish", "ticket", "error", "times", "prompt_logprobs", "num_drafted")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprobs]
    finish: str
    ticket: Ticket
    error: RequestError
    times: EngineTimes
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprobs]
    num_drafted: int
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprobs, _Mapping]]] = ..., finish: _Optional[str] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., error: _Optional[_Union[RequestError, _Mapping]] = ..., times: _Optional[_Union[EngineTimes, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprobs, _Mapping]]] = ..., num_drafted: _Optional[int] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ("code", "message", "reason")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    reason: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EngineTimes(_message.Message):
    __slots__ = ("queue_ms", "compute_ms", "received_ms", "wire_ms", "confirm_ms", "kv_bytes", "plane", "cached_tokens", "hidden_wire_ms", "hidden_kv_bytes", "plan_ms", "num_runs")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_MS_FIELD_NUMBER: _ClassVar[int]
    WIRE_MS_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_MS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLANE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_WIRE_MS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLAN_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    compute_ms: float
    received_ms: float
    wire_ms: float
    confirm_ms: float
    kv_bytes: int
    plane: str
    cached_tokens: int
    hidden_wire_ms: float
    hidden_kv_bytes: int
    plan_ms: float
    num_runs: int
    def __init__(self, queue_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., received_ms: _Optional[float] = ..., wire_ms: _Optional[float] = ..., confirm_ms: _Optional[float] = ..., kv_bytes: _Optional[int] = ..., plane: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., hidden_wire_ms: _Optional[float] = ..., hidden_kv_bytes: _Optional[int] = ..., plan_ms: _Optional[float] = ..., num_runs: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "queued_tokens", "free_blocks", "total_blocks")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    queued_tokens: int
    free_blocks: int
    total_blocks: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ...) -> None: ...

class EngineStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("incarnation", "role", "pid", "choices", "holders", "load", "blocks", "leases", "pulls", "steps", "computed_tokens", "received_tokens", "preemptions", "cached_tokens", "drafted_tokens", "accepted_tokens", "leases_ended", "lease_refusals", "digests_same", "digests_different", "pulls_confirmed", "pull_bytes", "pull_runs", "pull_failures")
    class LeasesEndedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PullFailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASES_ENDED_FIELD_NUMBER: _ClassVar[int]
    LEASE_REFUSALS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_SAME_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_DIFFERENT_FIELD_NUMBER: _ClassVar[int]
    PULLS_CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    PULL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PULL_RUNS_FIELD_NUMBER: _ClassVar[int]
    PULL_FAILURES_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    role: str
    pid: int
    choices: _containers.RepeatedCompositeFieldContainer[Choice]
    holders: int
    load: Load
    blocks: _containers.RepeatedCompositeFieldContainer[BlockUsage]
    leases: int
    pulls: int
    steps: int
    computed_tokens: int
    received_tokens: int
    preemptions: int
    cached_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    leases_ended: _containers.ScalarMap[str, int]
    lease_refusals: int
    digests_same: int
    digests_different: int
    pulls_confirmed: int
    pull_bytes: int
    pull_runs: int
    pull_failures: _containers.ScalarMap[str, int]
    def __init__(self, incarnation: _Optional[str] = ..., role: _Optional[str] = ..., pid: _Optional[int] = ..., choices: _Optional[_Iterable[_Union[Choice, _Mapping]]] = ..., holders: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockUsage, _Mapping]]] = ..., leases: _Optional[int] = ..., pulls: _Optional[int] = ..., steps: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., received_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., leases_ended: _Optional[_Mapping[str, int]] = ..., lease_refusals: _Optional[int] = ..., digests_same: _Optional[int] = ..., digests_different: _Optional[int] = ..., pulls_confirmed: _Optional[int] = ..., pull_bytes: _Optional[int] = ..., pull_runs: _Optional[int] = ..., pull_failures: _Optional[_Mapping[str, int]] = ...) -> None: ...

class EngineMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineMetrics(_message.Message):
    __slots__ = ("exposition",)
    EXPOSITION_FIELD_NUMBER: _ClassVar[int]
    exposition: bytes
    def __init__(self, exposition: _Optional[bytes] = ...) -> None: ...

class CheckPeerRequest(_message.Message):
    __slots__ = ("address", "incarnation")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class PeerReport(_message.Message):
    __slots__ = ("problem", "plane", "plane_reason", "round_trip_ms", "bytes_per_second", "buffers")
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    PLANE_FIELD_NUMBER: _ClassVar[int]
    PLANE_REASON_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_MS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    problem: str
    plane: str
    plane_reason: str
    round_trip_ms: float
    bytes_per_second: float
    buffers: int
    def __init__(self, problem: _Optional[str] = ..., plane: _Optional[str] = ..., plane_reason: _Optional[str] = ..., round_trip_ms: _Optional[float] = ..., bytes_per_second: _Optional[float] = ..., buffers: _Optional[int] = ...) -> None: ...

class BlockUsage(_message.Message):
    __slots__ = ("attn_type", "used", "total")
    ATTN_TYPE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    attn_type: str
    used: int
    total: int
    def __init__(self, attn_type: _Optional[str] = ..., used: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("what", "chosen", "reason")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    what: str
    chosen: str
    reason: str
    def __init__(self, what: _Optional[str] = ..., chosen: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
