"""Every name that leaves a process in a span, a metric or a log.

OpenTelemetry's semantic conventions (version in `SCHEMA_URL`) give the names where they can. Other
names start with `baton.`, or with `baton_` in metrics. Names contain units. No name here is for a
prompt, an output or the text of an exception. Spans have no other attributes than those named here:
see `undeclared`.

The spans of one request, by the process that writes them:

    [router]   baton.inference.v1.InferenceService/StreamGenerate       SERVER
               or POST /v1/completions, /v1/chat/completions
               or BATCH /v1/chat/completions: a line of a batch         INTERNAL
                 text_completion MODEL, or chat MODEL                   INTERNAL
                   router.admit
                   router.tokenize
                   router.queue
                   router.route                                         one per attempt
                   prefill                                              CLIENT, one per attempt
    [prefill]        prefill.queue
                     kv.fetch                                           pages of another worker
    [holder]         kv.give                                            the same, at their holder
    [prefill]        prefill.compute
                     kv.send
                   decode                                               CLIENT, one per attempt
    [decode]         kv.grant
                     kv.receive                                         links to kv.send
                     decode.generate

An attempt that one worker runs whole has only the leg `decode`. Then prefill.queue and
prefill.compute are below that leg. If the decode worker took the prompt over, they are below it,
too, and the leg `prefill` has ended early.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

FINGERPRINT: Final = "__meta_baton_fingerprint"
"""Label of a worker at the router's `/discovery`: workers that have it alike exchange KV.
Prometheus drops labels of this beginning, so it makes no series."""
FAILURE_UNIT: Final = "__meta_baton_failure_unit"
"""Another one, of workers that end together, such as those of an expert group."""
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
SCOPE: Final = "baton"
"""The instrumentation scope of all spans."""


class Service:
    """Values of `service.name`. `service.instance.id` names the process, such as "prefill-0"."""

    ROUTER: Final = "baton-router"
    PREFILL: Final = "baton-prefill"
    DECODE: Final = "baton-decode"
    BOTH: Final = "baton-worker"
    CLIENT: Final = "baton-client"


class SpanName:
    """Names of spans. RPC spans have names `package.Service/Method`, HTTP spans `METHOD route`."""

    ADMIT: Final = "router.admit"
    TOKENIZE: Final = "router.tokenize"
    QUEUE: Final = "router.queue"
    ROUTE: Final = "router.route"
    PREFILL: Final = "prefill"
    PREFILL_QUEUE: Final = "prefill.queue"
    PREFILL_COMPUTE: Final = "prefill.compute"
    KV_SEND: Final = "kv.send"
    DECODE: Final = "decode"
    KV_FETCH: Final = "kv.fetch"
    KV_GIVE: Final = "kv.give"
    KV_GRANT: Final = "kv.grant"
    KV_RECEIVE: Final = "kv.receive"
    DECODE_GENERATE: Final = "decode.generate"

    @staticmethod
    def request(operation: str, model: str) -> str:
        """Name of the span around one generation."""
        return f"{operation} {model}"

    @staticmethod
    def is_request(name: str) -> bool:
        """Whether a span is around one generation."""
        kinds = Attr.TEXT_COMPLETION, Attr.CHAT, Attr.EMBEDDINGS, Attr.SCORE
        return name.startswith(tuple(f"{kind} " for kind in kinds))


class Attr:
    """Keys of span attributes, and a few fixed values of the conventions."""

    # Resource.
    SERVICE_NAME: Final = "service.name"
    SERVICE_NAMESPACE: Final = "service.namespace"
    SERVICE_INSTANCE_ID: Final = "service.instance.id"

    # RPC and HTTP spans.
    RPC_SYSTEM_NAME: Final = "rpc.system.name"
    RPC_METHOD: Final = "rpc.method"
    RPC_RESPONSE_STATUS_CODE: Final = "rpc.response.status_code"
    HTTP_REQUEST_METHOD: Final = "http.request.method"
    HTTP_ROUTE: Final = "http.route"
    HTTP_RESPONSE_STATUS_CODE: Final = "http.response.status_code"

    # A line of a batch: the id of the batch.
    BATCH_ID: Final = "baton.batch.id"

    # Any span that failed: a short stable word.
    ERROR_TYPE: Final = "error.type"

    # The request span.
    OPERATION_NAME: Final = "gen_ai.operation.name"
    TEXT_COMPLETION: Final = "text_completion"
    CHAT: Final = "chat"
    EMBEDDINGS: Final = "embeddings"
    SCORE: Final = "score"
    PROVIDER_NAME: Final = "gen_ai.provider.name"
    REQUEST_MODEL: Final = "gen_ai.request.model"
    REQUEST_STREAM: Final = "gen_ai.request.stream"
    REQUEST_CHOICES: Final = "gen_ai.request.choice.count"
    REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
    REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
    REQUEST_TOP_P: Final = "gen_ai.request.top_p"
    REQUEST_TOP_K: Final = "gen_ai.request.top_k"
    REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
    REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
    RESPONSE_ID: Final = "gen_ai.response.id"
    RESPONSE_MODEL: Final = "gen_ai.response.model"
    RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
    RESPONSE_FIRST_TOKEN_S: Final = "gen_ai.response.time_to_first_chunk"
    INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
    CACHED_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
    OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"

    # router.queue and router.route.
    QUEUE_DEPTH: Final = "baton.queue.depth"
    QUEUE_TOKENS: Final = "baton.queue.tokens"
    ROUTE_PREFILL: Final = "baton.route.prefill"
    ROUTE_DECODE: Final = "baton.route.decode"
    ROUTE_ATTEMPT: Final = "baton.route.attempt"
    ROUTE_LOCAL_REASON: Final = "baton.route.local_reason"
    """Reason why a decode worker computes the prompt itself; its leg has it, too."""

    # The legs, prefill and decode.
    WORKER_ID: Final = "baton.worker.id"
    ATTEMPT_ID: Final = "baton.attempt.id"
    WORK_MODE: Final = "baton.work.mode"

    # prefill.compute.
    PREFILL_TOKENS: Final = "baton.prefill.tokens"
    """Prompt tokens computed here."""
    PREFILL_CACHED_TOKENS: Final = "baton.prefill.cached_tokens"
    PREFILL_LOADED_TOKENS: Final = "baton.prefill.loaded_tokens"
    """Cached tokens whose pages came from a tier below the pool for this request."""
    PREFILL_LOADED_FROM: Final = "baton.prefill.loaded_from"
    """The tiers that they came from, with commas between."""
    PREFILL_CHUNKS: Final = "baton.prefill.chunks"

    # prefill.compute and decode.generate.
    RANK_SKEW_MS: Final = "baton.ranks.skew_ms"
    """How long the fastest rank waited for the slowest, summed over the steps within the span."""

    # kv.fetch, with pages, bytes, transport and GB/s as below.
    FETCH_HOLDER: Final = "baton.fetch.holder"
    FETCH_WANTED_PAGES: Final = "baton.fetch.wanted_pages"

    # kv.give, with pages, bytes, transport, pushes, times and GB/s of the pushes as below.
    GIVE_LOADED_PAGES: Final = "baton.give.loaded_pages"
    """Pages that were in host memory and had to be loaded into the pool first."""
    GIVE_HELD_MS: Final = "baton.give.held_ms"
    """From the arrival of the fetch until its pages were held in the pool."""

    # kv.grant, kv.send, kv.receive.
    TRANSFER_ID: Final = "baton.transfer.id"
    KV_PAGES: Final = "baton.kv.pages"
    """Pages granted, sent or received, without those held already."""
    KV_HELD_PAGES: Final = "baton.kv.held_pages"
    """Pages of the prompt that the decode worker had already."""
    KV_BYTES: Final = "baton.kv.bytes"
    KV_PUSHES: Final = "baton.kv.pushes"
    KV_DESCRIPTORS: Final = "baton.kv.descriptors"
    KV_NOTIFICATIONS: Final = "baton.kv.notifications"
    KV_TRANSPORT: Final = "baton.kv.transport"
    KV_POSTING_MS: Final = "baton.kv.posting_ms"
    KV_WIRE_MS: Final = "baton.kv.wire_ms"
    """From the first push posted to the last one done."""
    KV_EXPOSED_MS: Final = "baton.kv.exposed_ms"
    """From the end of the last chunk's compute to the last push done."""
    KV_GIGABYTES_PER_S: Final = "baton.kv.gigabytes_per_s"
    KV_WAITED_MS: Final = "baton.kv.waited_ms"
    """Wait for pages and a slot before the grant."""

    # decode.generate.
    DECODE_TOKENS: Final = "baton.decode.tokens"
    DECODE_STEPS: Final = "baton.decode.steps"
    DECODE_ITL_P50_MS: Final = "baton.decode.itl_p50_ms"
    DECODE_ITL_P99_MS: Final = "baton.decode.itl_p99_ms"
    DECODE_LONGEST_GAP_MS: Final = "baton.decode.longest_gap_ms"
    """Longest time between two tokens of one choice that were both sampled here."""
    DECODE_LONGEST_GAP_AT_MS: Final = "baton.decode.longest_gap_at_ms"
    """End of that time, from the beginning of the span."""
    DECODE_DRAFTED: Final = "baton.decode.drafted_tokens"
    """Drafts that were verified for the choices that have ended."""
    DECODE_ACCEPTED: Final = "baton.decode.accepted_tokens"
    """Drafts among them that are in the output."""
    DECODE_PREEMPTIONS: Final = "baton.decode.preemptions"
    DECODE_JOIN_WAIT_MS: Final = "baton.decode.join_wait_ms"
    """Time between complete KV and joining the batch."""
    DECODE_SECOND_TOKEN_GAP_MS: Final = "baton.decode.second_token_gap_ms"
    """From the first token, sampled at the prefill worker, to the second."""
    DECODE_GAP_PARTS_MS: Final = "baton.decode.gap_parts_ms"
    """Its parts: until all pages were seen, the step loop had taken the request, a step with it was
    launched, and begun on the device, and its token was out."""


class Metric:
    """Names of metrics; `telemetry.metrics.table` declares them."""

    TIME_TO_FIRST_TOKEN: Final = "gen_ai_server_time_to_first_token_seconds"
    TIME_PER_OUTPUT_TOKEN: Final = "gen_ai_server_time_per_output_token_seconds"
    REQUEST_DURATION: Final = "gen_ai_server_request_duration_seconds"

    REQUESTS: Final = "baton_requests"
    REQUESTS_BY_METHOD: Final = "baton_requests_by_method"
    BATCH_LINES: Final = "baton_batch_lines"
    BATCHES_RUNNING: Final = "baton_batches_running"
    REJECTIONS: Final = "baton_rejections"
    UNREAD_STREAMS: Final = "baton_unread_streams"
    FAST_CONNECTIONS: Final = "baton_fast_door_connections"
    FAST_CALLS: Final = "baton_fast_door_calls"
    FAST_CLOSED: Final = "baton_fast_door_closed"
    INFLIGHT: Final = "baton_requests_inflight"
    PROMPT_TOKENS: Final = "baton_prompt_tokens"
    OUTPUT_TOKENS: Final = "baton_output_tokens"
    INTER_TOKEN: Final = "baton_inter_token_seconds"
    QUEUE_DEPTH: Final = "baton_queue_depth"
    QUEUE_TOKENS: Final = "baton_queue_tokens"
    QUEUE_DRAIN: Final = "baton_queue_drain_seconds"
    QUEUE_WAIT: Final = "baton_queue_wait_seconds"
    RETRIES: Final = "baton_retries"
    FAILOVERS: Final = "baton_failovers"
    ADAPTER_REQUESTS: Final = "baton_adapter_requests"
    ADAPTER_TOKENS: Final = "baton_adapter_tokens"
    ROLE_CHANGES: Final = "baton_role_changes"
    BALANCE_RATIO: Final = "baton_balance_ratio"
    LOCAL_PREFILLS: Final = "baton_local_prefills"
    FORECAST_RATIO: Final = "baton_first_token_forecast_ratio"
    ROUTED_CACHED_TOKENS: Final = "baton_routed_cached_tokens"
    COMPUTED_AGAIN: Final = "baton_pages_computed_again"
    WORKER_UP: Final = "baton_worker_up"
    WORKERS_LOST: Final = "baton_workers_lost"
    PAGE_EVENTS_BEHIND: Final = "baton_page_events_behind"
    KNOWN_PAGES: Final = "baton_known_pages"
    KNOWN_PAGES_DROPPED: Final = "baton_known_pages_dropped"
    PAGE_MESSAGES_DROPPED: Final = "baton_page_messages_dropped"
    PAGES_ASKED_AGAIN: Final = "baton_pages_asked_again"

    PROGRESS: Final = "baton_engine_turns"
    STEPS: Final = "baton_engine_steps"
    STEP_SECONDS: Final = "baton_engine_step_seconds"
    LAST_STEP_SECONDS: Final = "baton_engine_last_step_seconds"
    BATCH_SIZE: Final = "baton_decode_batch_size"
    RUNNING_SEQUENCES: Final = "baton_running_sequences"
    MAX_SEQUENCES: Final = "baton_max_sequences"
    WAITING_REQUESTS: Final = "baton_waiting_requests"
    QUEUED_PREFILL_TOKENS: Final = "baton_queued_prefill_tokens"
    PREFILL_TOKENS: Final = "baton_prefill_tokens"
    PREFILL_RATE: Final = "baton_prefill_tokens_per_second"
    SAMPLED_TOKENS: Final = "baton_sampled_tokens"
    PREEMPTIONS: Final = "baton_preemptions"
    BEAM_SEARCHES: Final = "baton_beam_searches"
    BEAM_FORKS: Final = "baton_beam_forks"
    KV_PAGES: Final = "baton_kv_pages"
    KV_PAGES_TOTAL: Final = "baton_kv_pages_capacity"
    KV_GROUP_PAGES: Final = "baton_kv_group_pages"
    UNRESUMABLE_TOKENS: Final = "baton_prefix_unresumable_tokens"
    KV_DAMAGED_PAGES: Final = "baton_kv_damaged_pages"
    TIER_LOADED_TOKENS: Final = "baton_kv_tier_loaded_tokens"
    TIER_DECISIONS: Final = "baton_kv_tier_decisions"
    TIER_BYTES: Final = "baton_kv_tier_bytes"
    TIER_BANDWIDTH: Final = "baton_kv_tier_bytes_per_second"
    TIER_FAILURES: Final = "baton_kv_tier_failures"
    TIER_SLOTS: Final = "baton_kv_tier_slots"
    ADAPTER_SLOTS: Final = "baton_adapter_slots"
    ADAPTER_LOADS: Final = "baton_adapter_loads"
    ADAPTER_EVICTIONS: Final = "baton_adapter_evictions"
    ADAPTER_WAITS: Final = "baton_adapter_slot_waits"
    ADAPTER_WAIT_SECONDS: Final = "baton_adapter_slot_wait_seconds"
    HOOK_FAILURES: Final = "baton_hook_failures"
    SPECULATION_DRAFTED: Final = "baton_speculation_drafted_tokens"
    SPECULATION_ACCEPTED: Final = "baton_speculation_accepted_tokens"
    SPECULATION_STEPS: Final = "baton_speculation_steps"
    SPECULATION_DEGRADED: Final = "baton_speculation_degraded"
    RANK_BUSY: Final = "baton_rank_busy_seconds"
    RANK_WAITED: Final = "baton_rank_waited_seconds"
    RANK_SKEW: Final = "baton_rank_skew_seconds"
    RANK_PAIRS: Final = "baton_rank_expert_pairs"

    SECOND_TOKEN_GAP: Final = "baton_second_token_gap_seconds"
    SECOND_TOKEN_PART: Final = "baton_second_token_part_seconds"
    TRANSFERS: Final = "baton_kv_transfers"
    TRANSFER_BYTES: Final = "baton_kv_transfer_sent_bytes"
    TRANSFER_DESCRIPTORS: Final = "baton_kv_transfer_descriptors"
    TRANSFER_SECONDS: Final = "baton_kv_transfer_seconds"
    TRANSFER_EXPOSED: Final = "baton_kv_transfer_exposed_seconds"
    TRANSFER_FAILURES: Final = "baton_kv_transfer_failures"
    TRANSFERS_QUARANTINED: Final = "baton_kv_transfers_quarantined"
    SENDS_IN_PROGRESS: Final = "baton_kv_sends_in_progress"
    QUARANTINES_OVERDUE: Final = "baton_kv_quarantines_overdue"
    QUARANTINE_OLDEST: Final = "baton_kv_quarantine_oldest_seconds"
    SENDS_STUCK: Final = "baton_kv_sends_stuck"
    SEND_OLDEST: Final = "baton_kv_send_oldest_seconds"
    EXPIRED_GRANTS: Final = "baton_kv_grants_expired"
    STALE_NOTIFICATIONS: Final = "baton_kv_stale_notifications"

    FOUND_TOKENS: Final = "baton_prefill_found_tokens"
    FETCHES: Final = "baton_kv_fetches"
    FETCH_PAGES: Final = "baton_kv_fetch_pages"
    FETCH_BYTES: Final = "baton_kv_fetch_bytes"
    FETCH_SECONDS: Final = "baton_kv_fetch_seconds"

    GPU_UTILIZATION: Final = "baton_gpu_utilization_ratio"
    GPU_MEMORY_USED: Final = "baton_gpu_memory_used_bytes"
    GPU_MEMORY_TOTAL: Final = "baton_gpu_memory_total_bytes"
    GPU_POWER: Final = "baton_gpu_power_watts"

    PEER_HEALTHY: Final = "baton_kv_peer_healthy"
    PEER_BANDWIDTH: Final = "baton_kv_peer_bytes_per_second"
    PEER_LATENCY: Final = "baton_kv_peer_latency_seconds"

    WORK_STREAMS: Final = "baton_work_streams"
    PEERS_REFUSED: Final = "baton_peers_refused"

    DRAIN_SECONDS: Final = "baton_drain_seconds"
    LOOP_TASKS: Final = "baton_event_loop_tasks"
    LOOP_LAG: Final = "baton_event_loop_lag_seconds"
    SPANS: Final = "baton_spans"


DECLARED_ATTRIBUTES: Final = frozenset(
    value for key, value in vars(Attr).items() if key.isupper() and "." in value
)


def undeclared(keys: Iterable[str]) -> set[str]:
    """Returns the attribute keys that are not named here. Tests expect none in exported spans."""
    return set(keys) - DECLARED_ATTRIBUTES
