"""Declares every metric: its kind, its help, its labels, its buckets.

A metric without a unit in its name counts the things that it names. `telemetry.metrics.router` and
`telemetry.metrics.worker` count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from telemetry.names import Metric


def _seconds(*milliseconds: float) -> tuple[float, ...]:
    return tuple(ms / 1e3 for ms in milliseconds)


_FINE_MS: Final = (0.5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 25, 30, 40, 50, 75)
_COARSE_MS: Final = (1, 2.5, 5, 7.5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 400, 500, 750)
_STEP_S: Final = _seconds(*_FINE_MS, 100, 150, 250, 500, 1_000, 2_500)
"""Bounds for steps: 1 ms apart up to 10 ms, since decode steps take as long."""
_LATENCY_S: Final = _seconds(*_COARSE_MS, 1_000, 1_500, 2_000, 3_000, 5_000, 10_000, 30_000)
_DURATION_S: Final = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30),
    *(45, 60, 120, 300, 600),
)
_BATCH: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Sequences of a step: batch buckets of CUDA graphs, roughly."""

_RATIO: Final = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 30)
"""Ratios of forecast and truth: finer around 1."""

_MODEL: Final = "gen_ai_request_model"
_ERROR: Final = "error_type"


OWN_FAULTS: Final = (
    "INTERNAL",
    "KV_TRANSFER_FAILED",
    "NUMERICAL_ERROR",
    "POISON_REQUEST",
    "WORKER_LOST",
    "WORKER_LOST_MID_STREAM",
)
"""Outcomes of requests that are Baton's own fault: neither the caller's nor the load's."""
CALLERS_FAULTS: Final = (
    "CONTEXT_LENGTH_EXCEEDED",
    "INVALID_FIELD",
    "MALFORMED_REQUEST",
    "MODEL_NOT_FOUND",
    "UNAUTHENTICATED",
)
"""Reasons for which no server could have served a request."""
OVERLOADED: Final = ("DEADLINE_UNREACHABLE", "NO_WORKERS", "QUEUE_FULL", "QUEUE_TIMEOUT")
"""Reasons of refusals that more workers would avoid."""
AGAIN: Final = ("sooner", "bound", "unreachable", "in_flight", "event", "fetch")
"""Why pages are computed that another worker holds; `router.placement.forecasts` explains them."""
LOSS_CAUSES: Final = ("congested", "frozen", "socket_closed", "stream_ended")
"""Causes of a worker's loss; `router.workers.link.Loss` explains them."""


class Declared(NamedTuple):
    """The declaration of a metric."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


DECLARED: Final[Mapping[str, Declared]] = {
    # Router, by request.
    Metric.TIME_TO_FIRST_TOKEN: Declared(
        "histogram", "From a request's arrival to its first token sent.", (_MODEL,), _LATENCY_S
    ),
    Metric.TIME_PER_OUTPUT_TOKEN: Declared(
        "histogram", "Mean time of a request's tokens after the first.", (_MODEL,), _STEP_S
    ),
    Metric.REQUEST_DURATION: Declared(
        "histogram", "From a request's arrival to its end.", (_MODEL, _ERROR), _DURATION_S
    ),
    Metric.INTER_TOKEN: Declared(
        "histogram", "Time between two messages of tokens to a client.", ("model",), _STEP_S
    ),
    Metric.REQUESTS: Declared("counter", "Requests ended, by outcome.", ("model", "outcome")),
    Metric.REQUESTS_BY_METHOD: Declared(
        "counter", "Requests ended, by the method that clients called.", ("method",)
    ),
    Metric.BATCH_LINES: Declared(
        "counter", "Lines of batches that have a result, by outcome.", ("outcome",)
    ),
    Metric.REJECTIONS: Declared("counter", "Requests refused before any work.", ("reason",)),
    Metric.UNREAD_STREAMS: Declared(
        "counter", "Answers given up after their deadline, because their clients did not read."
    ),
    Metric.FAST_CONNECTIONS: Declared("gauge", "Connections of the fast door."),
    Metric.FAST_CALLS: Declared("gauge", "Calls under way at the fast door."),
    Metric.FAST_CLOSED: Declared(
        "counter",
        "Connections that the fast door ended, by cause: idle, old (age, grace), a client that does"
        " not answer (silent) or not read (unread), one that breaks HTTP/2 (h2, preface,"
        " frame_size), or asks too much of it (frames, resets, calls, headers).",
        ("cause",),
    ),
    Metric.PROMPT_TOKENS: Declared(
        "counter", "Prompt tokens of requests that began to answer.", ("model",)
    ),
    Metric.OUTPUT_TOKENS: Declared("counter", "Tokens sent to clients.", ("model",)),
    Metric.QUEUE_WAIT: Declared("histogram", "Time in the router's queue.", (), _LATENCY_S),
    Metric.RETRIES: Declared("counter", "Attempts begun again, by cause.", ("cause",)),
    Metric.FAILOVERS: Declared(
        "counter", "Streams resumed on other workers, by cause.", ("cause",)
    ),
    Metric.ADAPTER_REQUESTS: Declared(
        "counter",
        "Requests with an adapter that ended, by adapter (16 names, and `other`) and outcome, `ok`"
        " or `failed`.",
        ("adapter", "outcome"),
    ),
    Metric.ADAPTER_TOKENS: Declared(
        "counter",
        "Tokens of such requests, by adapter and kind: `prompt` of those that began to answer, and"
        " `output`.",
        ("adapter", "kind"),
    ),
    Metric.ROLE_CHANGES: Declared(
        "counter",
        "Changes of a worker's role that this router asked for, by who wanted them.",
        ("to", "cause"),
    ),
    Metric.LOCAL_PREFILLS: Declared(
        "counter", "Prompts that a decode worker computed by itself, by reason.", ("reason",)
    ),
    Metric.FORECAST_RATIO: Declared(
        "histogram",
        "Time from dispatch to the first token, as a multiple of the time foretold.",
        (),
        _RATIO,
    ),
    Metric.ROUTED_CACHED_TOKENS: Declared(
        "counter", "Prompt tokens cached at their worker: foretold, and found.", ("kind",)
    ),
    Metric.COMPUTED_AGAIN: Declared(
        "counter",
        "KV pages computed although another worker holds them, by reason.",
        ("reason",),
    ),
    # Router, its present state.
    Metric.BALANCE_RATIO: Declared(
        "gauge",
        "Use of a model's prefill and decode workers over its target. Only with `--balance`.",
        ("model", "role"),
    ),
    Metric.INFLIGHT: Declared("gauge", "Requests waiting or running."),
    Metric.BATCHES_RUNNING: Declared("gauge", "Batches that this router runs."),
    Metric.QUEUE_DEPTH: Declared("gauge", "Requests in the router's queue."),
    Metric.QUEUE_TOKENS: Declared("gauge", "Prompt tokens in the router's queue."),
    Metric.QUEUE_DRAIN: Declared(
        "gauge", "Time to empty the queue at the measured rate; absent while unknown.", ("model",)
    ),
    Metric.WORKER_UP: Declared(
        "gauge",
        "1 while the worker is attached; 0 for an hour after it left.",
        ("worker", "role", "model"),
    ),
    Metric.WORKERS_LOST: Declared(
        "counter", "Workers lost that had not announced their leave.", ("role", "cause")
    ),
    # Router: what it knows of the workers' pages.
    Metric.PAGE_EVENTS_BEHIND: Declared(
        "gauge", "Events of a worker's pages that the router has not heard.", ("worker",)
    ),
    Metric.KNOWN_PAGES: Declared(
        "gauge", "Pages that the router knows, by worker and tier.", ("worker", "tier")
    ),
    Metric.KNOWN_PAGES_DROPPED: Declared(
        "counter", "Keys of pages that were dropped because the router's index was full."
    ),
    Metric.PAGE_MESSAGES_DROPPED: Declared(
        "counter",
        "Messages of pages dropped: unordered, of unknown content or oversized.",
        ("reason",),
    ),
    Metric.PAGES_ASKED_AGAIN: Declared(
        "counter",
        "Times that a worker was asked for its pages again: a message was dropped, or none came.",
        ("reason",),
    ),
    # Worker: engine.
    Metric.PROGRESS: Declared("counter", "Turns of the step loop, idle ones included."),
    Metric.STEPS: Declared("counter", "Steps settled."),
    Metric.STEP_SECONDS: Declared("histogram", "A step, launch to settled.", (), _STEP_S),
    Metric.LAST_STEP_SECONDS: Declared("gauge", "Duration of the last step."),
    Metric.BATCH_SIZE: Declared("histogram", "Sequences decoded in a step.", (), _BATCH),
    Metric.RUNNING_SEQUENCES: Declared("gauge", "Sequences in the batch."),
    Metric.MAX_SEQUENCES: Declared("gauge", "Slots for sequences."),
    Metric.WAITING_REQUESTS: Declared("gauge", "Requests waiting for pages or a slot."),
    Metric.QUEUED_PREFILL_TOKENS: Declared("gauge", "Prompt tokens not computed yet."),
    Metric.PREFILL_TOKENS: Declared(
        "counter", "Prompt tokens, computed here or found in the prefix cache.", ("source",)
    ),
    Metric.FOUND_TOKENS: Declared(
        "counter",
        "Prompt tokens that need not be computed, by source: the pool, a tier, or peers.",
        ("source",),
    ),
    Metric.PREFILL_RATE: Declared("gauge", "Moving rate of computing prompts; 0 while unknown."),
    Metric.SAMPLED_TOKENS: Declared("counter", "Tokens sampled."),
    Metric.PREEMPTIONS: Declared("counter", "Sequences preempted."),
    Metric.BEAM_SEARCHES: Declared("counter", "Beam searches that ended by themselves."),
    Metric.BEAM_FORKS: Declared("counter", "Beams that went on from the pages of another beam."),
    Metric.KV_PAGES: Declared("gauge", "Pages of the KV pool, by state.", ("state",)),
    Metric.KV_PAGES_TOTAL: Declared("gauge", "Pages of the KV pool that can be granted."),
    Metric.KV_GROUP_PAGES: Declared(
        "gauge", "Pages by group of layers and state, of models with several.", ("group", "state")
    ),
    Metric.UNRESUMABLE_TOKENS: Declared(
        "counter",
        "Prompt tokens whose KV was cached and that were computed again, for the window before them"
        " was gone.",
    ),
    Metric.KV_DAMAGED_PAGES: Declared(
        "counter", "Free pages that were written to; counted only with poison_freed_pages."
    ),
    # Worker: tiers below the KV pool.
    Metric.TIER_LOADED_TOKENS: Declared(
        "counter", "Prompt tokens whose KV was loaded into the pool, by tier.", ("tier",)
    ),
    Metric.TIER_DECISIONS: Declared(
        "counter",
        "Prompts with KV below the pool: loaded, or the reason why not.",
        ("decision",),
    ),
    Metric.TIER_BYTES: Declared(
        "counter", "Bytes of KV copied between the pool, host and stores.", ("path",)
    ),
    Metric.TIER_BANDWIDTH: Declared(
        "gauge", "Rate of such copies lately, bytes a second.", ("path",)
    ),
    Metric.TIER_FAILURES: Declared(
        "counter", "Such copies that were late, failed or were dropped.", ("path",)
    ),
    Metric.TIER_SLOTS: Declared("gauge", "Host slots for pages, by state.", ("state",)),
    # Worker: its adapters, if it takes any.
    Metric.ADAPTER_SLOTS: Declared(
        "gauge",
        "Slots for adapters: `used` by requests, `idle` with an adapter, or `empty`.",
        ("state",),
    ),
    Metric.ADAPTER_LOADS: Declared("counter", "Adapters that came into a slot."),
    Metric.ADAPTER_EVICTIONS: Declared("counter", "Adapters that left their slot for another one."),
    Metric.ADAPTER_WAITS: Declared(
        "counter", "Requests that waited until a slot was free for their adapter, and got one."
    ),
    Metric.ADAPTER_WAIT_SECONDS: Declared("counter", "Time for which they waited."),
    Metric.HOOK_FAILURES: Declared(
        "counter", "Failures of hooks, by hook and point.", ("hook", "point")
    ),
    # Worker: drafts, if it verifies any.
    Metric.SPECULATION_DRAFTED: Declared(
        "counter", "Drafts verified, by their place among a row's drafts.", ("position",)
    ),
    Metric.SPECULATION_ACCEPTED: Declared(
        "counter", "Drafts that were the tokens drawn, by their place.", ("position",)
    ),
    Metric.SPECULATION_STEPS: Declared(
        "counter", "Steps that decoded, by the tokens of each row.", ("width",)
    ),
    Metric.SPECULATION_DEGRADED: Declared(
        "counter",
        "Prompts that came without what the draft head keeps: `peer_without`, `peer_differs`,"
        " or of their first pages: `pages_without`.",
        ("cause",),
    ),
    # Worker: its ranks, if there are several.
    Metric.RANK_BUSY: Declared(
        "counter", "Seconds in which a rank computed. Absent on GPUs.", ("rank", "stage")
    ),
    Metric.RANK_WAITED: Declared(
        "counter",
        "Seconds in which a rank added up or waited for others. On GPUs those in which its device "
        "waited; absent where their sums go by NCCL.",
        ("rank", "stage"),
    ),
    Metric.RANK_SKEW: Declared(
        "counter",
        "Seconds for which the fastest rank waited for the slowest. Absent on GPUs whose sums go "
        "by NCCL.",
    ),
    Metric.RANK_PAIRS: Declared(
        "counter",
        "Pairs of a token and an expert that a rank computed, where it holds some experts whole; "
        "of an expert group, each worker tells its own. On GPUs steps of one token are left out.",
        ("rank", "stage"),
    ),
    # Worker: KV transfer.
    Metric.SECOND_TOKEN_GAP: Declared(
        "histogram",
        "From a request's first token to its second, over the hand-off between them.",
        (),
        _STEP_S,
    ),
    Metric.SECOND_TOKEN_PART: Declared(
        "histogram",
        "Parts of that time: until all pages were seen, the step loop had taken the request, a "
        "step with it was launched, and begun on the device, and its token was out.",
        ("part",),
        _STEP_S,
    ),
    Metric.TRANSFERS: Declared("counter", "KV transfers, by outcome.", ("outcome",)),
    Metric.TRANSFER_BYTES: Declared("counter", "KV bytes written to peers."),
    Metric.TRANSFER_DESCRIPTORS: Declared("counter", "Descriptors posted, after merging."),
    Metric.TRANSFER_SECONDS: Declared(
        "histogram", "From a transfer's first push to its last one done.", ("transport",), _STEP_S
    ),
    Metric.TRANSFER_EXPOSED: Declared(
        "histogram", "From the last chunk computed to its push done.", ("transport",), _STEP_S
    ),
    Metric.TRANSFER_FAILURES: Declared("counter", "KV transfers failed, by cause.", ("cause",)),
    Metric.TRANSFERS_QUARANTINED: Declared("gauge", "Transfers whose pages a write may still hit."),
    Metric.SENDS_IN_PROGRESS: Declared("gauge", "Pushes posted and not reported done."),
    Metric.QUARANTINES_OVERDUE: Declared("gauge", "Transfers in quarantine for over 5 s."),
    Metric.QUARANTINE_OLDEST: Declared("gauge", "Age of the oldest quarantine; 0 without one."),
    Metric.SENDS_STUCK: Declared(
        "gauge", "Sends under way over 5 s after their prompt was computed or given up."
    ),
    Metric.SEND_OLDEST: Declared("gauge", "Age of the oldest of those sends; 0 without one."),
    Metric.EXPIRED_GRANTS: Declared("counter", "Grants that were not used in time."),
    Metric.STALE_NOTIFICATIONS: Declared(
        "counter", "Notifications dropped: unknown transfer, old epoch, wrong peer or coverage."
    ),
    # Worker: pages that one worker gets from another.
    Metric.FETCHES: Declared(
        "counter",
        "Fetches of pages from another worker: fetched, short of some pages, or why nothing came.",
        ("outcome",),
    ),
    Metric.FETCH_PAGES: Declared(
        "counter", "Pages got from other workers, or given to them.", ("direction",)
    ),
    Metric.FETCH_BYTES: Declared("counter", "Bytes of those pages.", ("direction",)),
    Metric.FETCH_SECONDS: Declared(
        "histogram", "From the wish for pages to their arrival.", (), _STEP_S
    ),
    # Worker: the GPU of each of its ranks, where NVML can be read. A worker of one rank has rank 0.
    Metric.GPU_UTILIZATION: Declared("gauge", "Share of time in which some kernel ran.", ("rank",)),
    Metric.GPU_MEMORY_USED: Declared("gauge", "GPU memory in use, by all processes.", ("rank",)),
    Metric.GPU_MEMORY_TOTAL: Declared("gauge", "GPU memory.", ("rank",)),
    Metric.GPU_POWER: Declared("gauge", "Power that the GPU draws.", ("rank",)),
    # Worker: its peers.
    Metric.PEER_HEALTHY: Declared(
        "gauge", "0 while routers avoid the path to the peer, for the cause.", ("peer", "cause")
    ),
    Metric.PEER_BANDWIDTH: Declared(
        "gauge", "Bandwidth to the peer, measured when the two met.", ("peer", "transport")
    ),
    Metric.PEER_LATENCY: Declared(
        "gauge", "Latency of one page to the peer, measured when they met.", ("peer", "transport")
    ),
    # Worker: its routers.
    Metric.WORK_STREAMS: Declared("gauge", "Routers attached."),
    # Every process.
    Metric.PEERS_REFUSED: Declared(
        "counter",
        "Refused on internal ports, by cause: no valid certificate, the certificate of another"
        " worker or of no router, or an unknown role.",
        ("cause",),
    ),
    Metric.DRAIN_SECONDS: Declared("gauge", "Time since the process began to drain; 0 before."),
    Metric.LOOP_TASKS: Declared("gauge", "Tasks of the event loop."),
    Metric.LOOP_LAG: Declared("histogram", "Delay of the event loop's wake-ups.", (), _STEP_S),
    Metric.SPANS: Declared("counter", "Spans ended, by outcome.", ("outcome",)),
}
