from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockSource(_message.Message):
    __slots__ = ("worker_id", "address", "epoch", "blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    epoch: int
    blocks: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., epoch: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class BlockIdentity(_message.Message):
    __slots__ = ("model", "namespace", "kv_dtype", "layout", "block_size", "tp")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    model: str
    namespace: str
    kv_dtype: str
    layout: str
    block_size: int
    tp: int
    def __init__(self, model: _Optional[str] = ..., namespace: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., layout: _Optional[str] = ..., block_size: _Optional[int] = ..., tp: _Optional[int] = ...) -> None: ...

class SendBlocksRequest(_message.Message):
    __slots__ = ("worker_id", "epoch", "target_id", "target_epoch", "identity", "hashes", "first_block", "nonce", "channel", "store", "new_channel", "backends", "timeout_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    NEW_CHANNEL_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    target_id: str
    target_epoch: int
    identity: BlockIdentity
    hashes: bytes
    first_block: int
    nonce: bytes
    channel: str
    store: str
    new_channel: bool
    backends: _containers.RepeatedScalarFieldContainer[str]
    timeout_s: float
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., target_id: _Optional[str] = ..., target_epoch: _Optional[int] = ..., identity: _Optional[_Union[BlockIdentity, _Mapping]] = ..., hashes: _Optional[bytes] = ..., first_block: _Optional[int] = ..., nonce: _Optional[bytes] = ..., channel: _Optional[str] = ..., store: _Optional[str] = ..., new_channel: _Optional[bool] = ..., backends: _Optional[_Iterable[str]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class SendBlocksResponse(_message.Message):
    __slots__ = ("granted", "sent")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    granted: BlocksGranted
    sent: BlocksSent
    def __init__(self, granted: _Optional[_Union[BlocksGranted, _Mapping]] = ..., sent: _Optional[_Union[BlocksSent, _Mapping]] = ...) -> None: ...

class BlocksGranted(_message.Message):
    __slots__ = ("blocks", "tokens", "identity", "backend", "chunk_blocks", "block_bytes")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    tokens: int
    identity: BlockIdentity
    backend: str
    chunk_blocks: int
    block_bytes: int
    def __init__(self, blocks: _Optional[int] = ..., tokens: _Optional[int] = ..., identity: _Optional[_Union[BlockIdentity, _Mapping]] = ..., backend: _Optional[str] = ..., chunk_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class BlocksSent(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Chain(_message.Message):
    __slots__ = ("hashes", "pin")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    pin: ChainPin
    def __init__(self, hashes: _Optional[bytes] = ..., pin: _Optional[_Union[ChainPin, _Mapping]] = ...) -> None: ...

class ChainPin(_message.Message):
    __slots__ = ("blocks", "ttl_s", "tenant")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    ttl_s: float
    tenant: str
    def __init__(self, blocks: _Optional[int] = ..., ttl_s: _Optional[float] = ..., tenant: _Optional[str] = ...) -> None: ...

class FetchChainsRequest(_message.Message):
    __slots__ = ("worker_id", "source", "chains")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    source: BlockSource
    chains: _containers.RepeatedCompositeFieldContainer[Chain]
    def __init__(self, worker_id: _Optional[str] = ..., source: _Optional[_Union[BlockSource, _Mapping]] = ..., chains: _Optional[_Iterable[_Union[Chain, _Mapping]]] = ...) -> None: ...

class CopyChainsRequest(_message.Message):
    __slots__ = ("worker_id", "target", "chains")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    target: BlockSource
    chains: _containers.RepeatedCompositeFieldContainer[Chain]
    def __init__(self, worker_id: _Optional[str] = ..., target: _Optional[_Union[BlockSource, _Mapping]] = ..., chains: _Optional[_Iterable[_Union[Chain, _Mapping]]] = ...) -> None: ...

class ChainCopied(_message.Message):
    __slots__ = ("chain", "blocks", "error")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    chain: int
    blocks: int
    error: str
    def __init__(self, chain: _Optional[int] = ..., blocks: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class ListHotChainsRequest(_message.Message):
    __slots__ = ("worker_id", "max_chains", "max_blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_CHAINS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    max_chains: int
    max_blocks: int
    def __init__(self, worker_id: _Optional[str] = ..., max_chains: _Optional[int] = ..., max_blocks: _Optional[int] = ...) -> None: ...

class HotChain(_message.Message):
    __slots__ = ("chain", "new_blocks", "new_uses", "idle_s")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEW_USES_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    chain: Chain
    new_blocks: int
    new_uses: int
    idle_s: float
    def __init__(self, chain: _Optional[_Union[Chain, _Mapping]] = ..., new_blocks: _Optional[int] = ..., new_uses: _Optional[int] = ..., idle_s: _Optional[float] = ...) -> None: ...

class WorkerGenerateRequest(_message.Message):
    __slots__ = ("worker_id", "request_id", "token_ids", "resumed_tokens", "sampling", "cache_salt", "queue_timeout_s", "n", "first_choice", "priority", "tenant", "pins", "source", "moved")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHOICE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    request_id: str
    token_ids: bytes
    resumed_tokens: int
    sampling: WorkerSampling
    cache_salt: str
    queue_timeout_s: float
    n: int
    first_choice: int
    priority: int
    tenant: str
    pins: _containers.RepeatedCompositeFieldContainer[WorkerPin]
    source: BlockSource
    moved: bool
    def __init__(self, worker_id: _Optional[str] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., resumed_tokens: _Optional[int] = ..., sampling: _Optional[_Union[WorkerSampling, _Mapping]] = ..., cache_salt: _Optional[str] = ..., queue_timeout_s: _Optional[float] = ..., n: _Optional[int] = ..., first_choice: _Optional[int] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., pins: _Optional[_Iterable[_Union[WorkerPin, _Mapping]]] = ..., source: _Optional[_Union[BlockSource, _Mapping]] = ..., moved: _Optional[bool] = ...) -> None: ...

class WorkerPin(_message.Message):
    __slots__ = ("tokens", "ttl_s")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    ttl_s: float
    def __init__(self, tokens: _Optional[int] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class WorkerSampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "min_tokens", "logprobs", "prompt_logprobs", "speculate", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    logprobs: int
    prompt_logprobs: int
    speculate: bool
    grammar: Grammar
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., typical_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., speculate: _Optional[bool] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class WorkerGenerateResponse(_message.Message):
    __slots__ = ("updates", "cached_tokens", "written_tokens", "pinned_tokens", "pins_refused", "prompt_logprobs", "pulled_tokens")
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PINNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PINS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PULLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    updates: _containers.RepeatedCompositeFieldContainer[ChoiceUpdate]
    cached_tokens: int
    written_tokens: int
    pinned_tokens: int
    pins_refused: str
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    pulled_tokens: int
    def __init__(self, updates: _Optional[_Iterable[_Union[ChoiceUpdate, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., written_tokens: _Optional[int] = ..., pinned_tokens: _Optional[int] = ..., pins_refused: _Optional[str] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., pulled_tokens: _Optional[int] = ...) -> None: ...

class ChoiceUpdate(_message.Message):
    __slots__ = ("choice", "token_ids", "logprobs", "finished", "drafted_tokens", "accepted_tokens")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finished: WorkerFinished
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, choice: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finished: _Optional[_Union[WorkerFinished, _Mapping]] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class WorkerFinished(_message.Message):
    __slots__ = ("stopped",)
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    stopped: bool
    def __init__(self, stopped: _Optional[bool] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionOffer(_message.Message):
    __slots__ = ("port", "ticket")
    PORT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    port: int
    ticket: bytes
    def __init__(self, port: _Optional[int] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("start", "cancel", "hold", "resume")
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    start: _containers.RepeatedCompositeFieldContainer[WorkerGenerateRequest]
    cancel: _containers.RepeatedScalarFieldContainer[str]
    hold: _containers.RepeatedScalarFieldContainer[str]
    resume: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, start: _Optional[_Iterable[_Union[WorkerGenerateRequest, _Mapping]]] = ..., cancel: _Optional[_Iterable[str]] = ..., hold: _Optional[_Iterable[str]] = ..., resume: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("news",)
    NEWS_FIELD_NUMBER: _ClassVar[int]
    news: _containers.RepeatedCompositeFieldContainer[SessionNews]
    def __init__(self, news: _Optional[_Iterable[_Union[SessionNews, _Mapping]]] = ...) -> None: ...

class SessionNews(_message.Message):
    __slots__ = ("request_id", "response", "end")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    response: WorkerGenerateResponse
    end: SessionEnd
    def __init__(self, request_id: _Optional[str] = ..., response: _Optional[_Union[WorkerGenerateResponse, _Mapping]] = ..., end: _Optional[_Union[SessionEnd, _Mapping]] = ...) -> None: ...

class SessionEnd(_message.Message):
    __slots__ = ("status", "details")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    status: str
    details: str
    def __init__(self, status: _Optional[str] = ..., details: _Optional[str] = ...) -> None: ...

class StopChoicesRequest(_message.Message):
    __slots__ = ("request_id", "choices")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., choices: _Optional[_Iterable[int]] = ...) -> None: ...

class StopChoicesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("audit",)
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    audit: bool
    def __init__(self, audit: _Optional[bool] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("worker_id", "epoch", "state", "blocks_total", "blocks_live", "blocks_cached", "blocks_free", "running", "waiting", "queued_prefill_tokens", "steps", "pid", "blocks_pinned", "pulls", "pulled_tokens", "sent_blocks", "pull_latency_s", "pull_bytes_per_s", "audit")
    class PullsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LIVE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PINNED_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    PULLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PULL_LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    PULL_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    state: str
    blocks_total: int
    blocks_live: int
    blocks_cached: int
    blocks_free: int
    running: int
    waiting: int
    queued_prefill_tokens: int
    steps: int
    pid: int
    blocks_pinned: int
    pulls: _containers.ScalarMap[str, int]
    pulled_tokens: int
    sent_blocks: int
    pull_latency_s: float
    pull_bytes_per_s: float
    audit: WorkerAudit
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[str] = ..., blocks_total: _Optional[int] = ..., blocks_live: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., blocks_free: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., pid: _Optional[int] = ..., blocks_pinned: _Optional[int] = ..., pulls: _Optional[_Mapping[str, int]] = ..., pulled_tokens: _Optional[int] = ..., sent_blocks: _Optional[int] = ..., pull_latency_s: _Optional[float] = ..., pull_bytes_per_s: _Optional[float] = ..., audit: _Optional[_Union[WorkerAudit, _Mapping]] = ...) -> None: ...

class WorkerAudit(_message.Message):
    __slots__ = ("blocks", "digest", "pinned_blocks", "open_requests", "sessions", "tasks")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    digest: int
    pinned_blocks: int
    open_requests: int
    sessions: int
    tasks: int
    def __init__(self, blocks: _Optional[int] = ..., digest: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., open_requests: _Optional[int] = ..., sessions: _Optional[int] = ..., tasks: _Optional[int] = ...) -> None: ...

class ClearCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearCacheResponse(_message.Message):
    __slots__ = ("cleared_blocks",)
    CLEARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    cleared_blocks: int
    def __init__(self, cleared_blocks: _Optional[int] = ...) -> None: ...

class SetStateRequest(_message.Message):
    __slots__ = ("worker_id", "state")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    state: str
    def __init__(self, worker_id: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...

class SetStateResponse(_message.Message):
    __slots__ = ("epoch", "open_requests")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    open_requests: int
    def __init__(self, epoch: _Optional[int] = ..., open_requests: _Optional[int] = ...) -> None: ...
