"""Metrics: who counts what; `telemetry.metric_table` declares them.

Each process has one registry, a `RouterMetrics` or a `WorkerMetrics`. Events are counted when
they happen, by the methods here; states are read from a snapshot when Prometheus asks, so that the
step loop writes nothing that nobody reads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.process_collector import ProcessCollector

from telemetry.collectors import Row, Samples, Snapshot
from telemetry.export import ExportCounts
from telemetry.gpu import GpuLoad
from telemetry.metric_table import DECLARED, LOSS_CAUSES, OVERLOADED, OWN_FAULTS
from telemetry.names import Metric

LEFT_SHOWN_S: Final = 3600.0
"""A worker that left is shown as down for so long."""


class ProcessMetrics:
    """The registry of a process, with what every process has."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._loop_lag = self._histogram(Metric.LOOP_LAG)
        self._drain_began_s = 0.0
        self._watch(lambda: self, _PROCESS_ROWS)

    def draining(self) -> None:
        """The process takes no more work and finishes what it has."""
        self._drain_began_s = self._drain_began_s or time.monotonic()

    @property
    def drain_s(self) -> float:
        """Since the process began to drain; 0 before."""
        return time.monotonic() - self._drain_began_s if self._drain_began_s else 0.0

    @property
    def loop_tasks(self) -> int:
        """Of the loop that is running here."""
        try:
            return len(asyncio.all_tasks())
        except RuntimeError:  # Collected outside of any loop.
            return 0

    def watch_spans(self, counts: Callable[[], ExportCounts]) -> None:
        """Shows what becomes of this process's spans."""
        self._watch(counts, _SPAN_ROWS)

    def loop_lagged(self, seconds: float) -> None:
        """The event loop woke up this much late."""
        self._loop_lag.observe(seconds)

    def _counter(self, name: str) -> Counter:
        declared = DECLARED[name]
        return Counter(name, declared.help, declared.labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        declared = DECLARED[name]
        return Histogram(
            name,
            declared.help,
            declared.labels,
            buckets=declared.buckets,
            registry=self.registry,
        )

    def _watch(self, take: Callable[[], object], rows: Sequence[Row]) -> None:
        self.registry.register(Snapshot(take, rows))


class WorkerUp(NamedTuple):
    """A worker whose stream stands."""

    worker_id: str
    role: str
    model: str


class RouterLoad(NamedTuple):
    """How a router stands."""

    inflight_requests: int = 0
    queued_requests: int = 0
    queued_tokens: int = 0
    workers: Sequence[WorkerUp] = ()
    queue_drain_s: Mapping[str, float] = MappingProxyType({})
    """By model, how long what waits takes at the measured rate; not there where none is known."""


class RouterMetrics(ProcessMetrics):
    """Of a router process."""

    def __init__(
        self, load: Callable[[], RouterLoad], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._requests = self._counter(Metric.REQUESTS)
        self._rejections = self._counter(Metric.REJECTIONS)
        self._unread = self._counter(Metric.UNREAD_STREAMS)
        self._prompt_tokens = self._counter(Metric.PROMPT_TOKENS)
        self._output_tokens = self._counter(Metric.OUTPUT_TOKENS)
        self._retries = self._counter(Metric.RETRIES)
        self._failovers = self._counter(Metric.FAILOVERS)
        self._local_prefills = self._counter(Metric.LOCAL_PREFILLS)
        self._queue_wait = self._histogram(Metric.QUEUE_WAIT)
        self._first_token = self._histogram(Metric.TIME_TO_FIRST_TOKEN)
        self._per_token = self._histogram(Metric.TIME_PER_OUTPUT_TOKEN)
        self._inter_token = self._histogram(Metric.INTER_TOKEN)
        self._of_model: dict[str, tuple[Counter, Histogram]] = {}
        """Output tokens and the times between them: looked up once, not for every token."""
        self._duration = self._histogram(Metric.REQUEST_DURATION)
        self._workers_lost = self._counter(Metric.WORKERS_LOST)
        self._watch(load, _ROUTER_ROWS)
        self.registry.register(Samples(Metric.WORKER_UP, _WorkersUp(load, clock)))
        self.registry.register(
            Samples(
                Metric.QUEUE_DRAIN,
                lambda: {(model,): wait_s for model, wait_s in load().queue_drain_s.items()},
            )
        )

        for reason in OVERLOADED:
            self._rejections.labels(reason)

    def worker_attached(self, role: str, model: str) -> None:
        """A worker joined. What alerts wait for is shown from here on, at 0: a series that begins
        at 50 has not risen, as Prometheus sees it."""
        for cause in LOSS_CAUSES:
            self._workers_lost.labels(role, cause)
        for outcome in OWN_FAULTS:
            self._requests.labels(model, outcome)

    def worker_lost(self, role: str, cause: str) -> None:
        """A worker is gone that had not said that it leaves; `cause` is one of `LOSS_CAUSES`."""
        self._workers_lost.labels(role, cause).inc()

    def rejected(self, reason: str) -> None:
        """A request was refused before any work; `reason` is one of the error table's."""
        self._rejections.labels(reason).inc()

    def waited(self, seconds: float) -> None:
        """A request left the queue for a worker."""
        self._queue_wait.observe(seconds)

    def retried(self, cause: str) -> None:
        """An attempt failed before the first token, and another began."""
        self._retries.labels(cause).inc()

    def failed_over(self, cause: str) -> None:
        """An attempt failed after the first token, and another goes on with the stream."""
        self._failovers.labels(cause).inc()

    def prefilled_locally(self, reason: str) -> None:
        """A decode worker computes an attempt's prompt; `reason` is a short stable word."""
        self._local_prefills.labels(reason).inc()

    def first_token(
        self, model: str, seconds: float, prompt_tokens: int, trace_id: str = ""
    ) -> None:
        """A request's first token left for the client, so long after its arrival."""
        self._prompt_tokens.labels(model).inc(prompt_tokens)
        self._first_token.labels(model).observe(seconds, _exemplar(trace_id))

    def tokens(self, model: str, count: int, seconds_since_last: float | None) -> None:
        """A message of tokens left for the client; None for its first."""
        if (of_model := self._of_model.get(model)) is None:
            of_model = self._output_tokens.labels(model), self._inter_token.labels(model)
            self._of_model[model] = of_model
        output_tokens, inter_token = of_model
        output_tokens.inc(count)
        if seconds_since_last is not None:
            inter_token.observe(seconds_since_last)

    def unread(self) -> None:
        """An answer was given up a little after its deadline, because its client did not read."""
        self._unread.inc()

    def ended(
        self,
        model: str,
        outcome: str,
        duration_s: float,
        *,
        per_token_s: float | None = None,
        trace_id: str = "",
    ) -> None:
        """A request ended; `outcome` is "OK" or the reason of the error table."""
        error = "" if outcome == "OK" else outcome
        self._requests.labels(model, outcome).inc()
        self._duration.labels(model, error).observe(duration_s, _exemplar(trace_id))
        if not error and per_token_s is not None:
            self._per_token.labels(model).observe(per_token_s, _exemplar(trace_id))


class PeerPath(NamedTuple):
    """The path to another worker."""

    peer: str
    transport: str
    gigabytes_per_s: float
    latency_us: float
    cause: str
    """Why it is to be avoided; empty: it is not."""


class WorkerMetrics(ProcessMetrics):
    """Of a worker process.

    Args:
        load: latest snapshot, with the attributes of `engine.types.EngineLoad`.
        transfer: counts, with the attributes of `kv_transfer.events.TransferCounters`; None where
            nothing is handed off.
        streams: routers attached.
    """

    def __init__(
        self,
        load: Callable[[], object],
        transfer: Callable[[], object] | None = None,
        streams: Callable[[], int] = int,
    ) -> None:
        super().__init__()
        self._step = self._histogram(Metric.STEP_SECONDS)
        self._batch = self._histogram(Metric.BATCH_SIZE)
        self._second_token = self._histogram(Metric.SECOND_TOKEN_GAP)
        self._transfer_s = self._histogram(Metric.TRANSFER_SECONDS)
        self._exposed_s = self._histogram(Metric.TRANSFER_EXPOSED)
        self._transfer_failures = self._counter(Metric.TRANSFER_FAILURES)
        self._watch(load, _ENGINE_ROWS)
        if transfer is not None:
            self._watch(transfer, _TRANSFER_ROWS)
        self._watch(streams, (Row(Metric.WORK_STREAMS, float),))

    def watch_peers(self, peers: Callable[[], Sequence[PeerPath]]) -> None:
        """Shows the paths to the worker's peers, by name."""
        for metric, labels, value in _PEER_SAMPLES:
            self.registry.register(Samples(metric, partial(_of_paths, peers, labels, value)))

    def watch_overdue(self, take: Callable[[], object]) -> None:
        """Shows transfers that do not end; attributes as of `baton.worker_overdue.Overdue`."""
        self._watch(take, _OVERDUE_ROWS)

    def watch_gpu(self, read: Callable[[], GpuLoad | None]) -> None:
        """Shows how the worker's GPU stands."""
        self._watch(read, _GPU_ROWS)

    def second_token(self, gap_s: float) -> None:
        """A request ended whose second token came so long after its first."""
        self._second_token.observe(gap_s)

    def stepped(self, seconds: float, decoded_sequences: int) -> None:
        """A step has settled; a step of prompts alone has decoded none."""
        self._step.observe(seconds)
        if decoded_sequences:
            self._batch.observe(decoded_sequences)

    def sent(self, transport: str, seconds: float, exposed_s: float) -> None:
        """A transfer is complete at the other side."""
        self._transfer_s.labels(transport).observe(seconds)
        self._exposed_s.labels(transport).observe(max(0.0, exposed_s))

    def transfer_failed(self, cause: str) -> None:
        """A transfer cannot complete; `cause` is a short stable word."""
        self._transfer_failures.labels(cause).inc()


class _WorkersUp:
    """Who is attached, and who was: names of workers that come and go must not pile up."""

    def __init__(self, load: Callable[[], RouterLoad], clock: Callable[[], float]) -> None:
        self._load = load
        self._clock = clock
        self._seen_s: dict[WorkerUp, float] = {}

    def __call__(self) -> dict[tuple[str, ...], float]:
        now_s, up = self._clock(), set(self._load().workers)
        known = self._seen_s | dict.fromkeys(up, now_s)
        self._seen_s = {one: at_s for one, at_s in known.items() if now_s - at_s < LEFT_SHOWN_S}
        return {worker: float(worker in up) for worker in self._seen_s}


def _exemplar(trace_id: str) -> dict[str, str] | None:
    return {"trace_id": trace_id} if trace_id else None


_LabelsOfPath = Callable[[PeerPath], tuple[str, str]]
_OfPath = Callable[[PeerPath], float]


def _of_paths(
    peers: Callable[[], Sequence[PeerPath]], labels: _LabelsOfPath, value: _OfPath
) -> dict[tuple[str, ...], float]:
    return {labels(peer): value(peer) for peer in peers()}


def _used_pages(load: Any) -> float:
    unused = load.free_pages, load.evictable_pages, load.granted_pages, load.quarantined_pages
    return max(0.0, float(load.total_pages - sum(unused)))


_PROCESS_ROWS: Final = (
    Row(Metric.DRAIN_SECONDS, attrgetter("drain_s")),
    Row(Metric.LOOP_TASKS, attrgetter("loop_tasks")),
)
_PEER_SAMPLES: Final[Sequence[tuple[str, _LabelsOfPath, _OfPath]]] = (
    (Metric.PEER_HEALTHY, attrgetter("peer", "cause"), lambda path: float(not path.cause)),
    (
        Metric.PEER_BANDWIDTH,
        attrgetter("peer", "transport"),
        lambda path: 1e9 * path.gigabytes_per_s,
    ),
    (Metric.PEER_LATENCY, attrgetter("peer", "transport"), lambda path: path.latency_us / 1e6),
)
_ROUTER_ROWS: Final = (
    Row(Metric.INFLIGHT, attrgetter("inflight_requests")),
    Row(Metric.QUEUE_DEPTH, attrgetter("queued_requests")),
    Row(Metric.QUEUE_TOKENS, attrgetter("queued_tokens")),
)
_ENGINE_ROWS: Final = (
    Row(Metric.PROGRESS, attrgetter("progress")),
    Row(Metric.STEPS, attrgetter("steps")),
    Row(Metric.LAST_STEP_SECONDS, lambda load: load.step_ms / 1e3),
    Row(Metric.RUNNING_SEQUENCES, attrgetter("running_sequences")),
    Row(Metric.MAX_SEQUENCES, attrgetter("max_sequences")),
    Row(Metric.WAITING_REQUESTS, attrgetter("waiting_requests")),
    Row(Metric.QUEUED_PREFILL_TOKENS, attrgetter("queued_prefill_tokens")),
    Row(Metric.PREFILL_TOKENS, attrgetter("prompt_tokens_computed"), ("computed",)),
    Row(Metric.PREFILL_TOKENS, attrgetter("prompt_tokens_cached"), ("cached",)),
    Row(Metric.PREFILL_RATE, attrgetter("prefill_tokens_per_s")),
    Row(Metric.SAMPLED_TOKENS, attrgetter("tokens_sampled")),
    Row(Metric.PREEMPTIONS, attrgetter("preemptions")),
    Row(Metric.KV_DAMAGED_PAGES, attrgetter("damaged_pages")),
    Row(Metric.KV_PAGES_TOTAL, attrgetter("total_pages")),
    Row(Metric.KV_PAGES, attrgetter("free_pages"), ("free",)),
    Row(Metric.KV_PAGES, attrgetter("evictable_pages"), ("cached",)),
    Row(Metric.KV_PAGES, attrgetter("granted_pages"), ("granted",)),
    Row(Metric.KV_PAGES, attrgetter("quarantined_pages"), ("quarantined",)),
    Row(Metric.KV_PAGES, _used_pages, ("used",)),
)
_TRANSFER_ROWS: Final = (
    Row(Metric.TRANSFERS, attrgetter("transfers_sent"), ("sent",)),
    Row(Metric.TRANSFERS, attrgetter("transfers_received"), ("received",)),
    Row(Metric.TRANSFERS, attrgetter("transfers_aborted"), ("aborted",)),
    Row(Metric.TRANSFERS, attrgetter("transfers_failed"), ("failed",)),
    Row(Metric.TRANSFER_BYTES, attrgetter("bytes_sent")),
    Row(Metric.TRANSFER_DESCRIPTORS, attrgetter("descriptors_posted")),
    Row(Metric.TRANSFERS_QUARANTINED, attrgetter("quarantined_transfers")),
    Row(Metric.SENDS_IN_PROGRESS, attrgetter("sends_in_progress")),
    Row(Metric.EXPIRED_GRANTS, attrgetter("expired_grants")),
    Row(Metric.STALE_NOTIFICATIONS, attrgetter("stale_notifications")),
)
_OVERDUE_ROWS: Final = (
    Row(Metric.QUARANTINES_OVERDUE, attrgetter("quarantines")),
    Row(Metric.QUARANTINE_OLDEST, attrgetter("oldest_quarantine_s")),
    Row(Metric.SENDS_STUCK, attrgetter("sends")),
    Row(Metric.SEND_OLDEST, attrgetter("oldest_send_s")),
)
_GPU_ROWS: Final = (
    Row(Metric.GPU_UTILIZATION, attrgetter("utilization")),
    Row(Metric.GPU_MEMORY_USED, attrgetter("memory_used_bytes")),
    Row(Metric.GPU_MEMORY_TOTAL, attrgetter("memory_total_bytes")),
    Row(Metric.GPU_POWER, attrgetter("power_watts")),
)
_SPAN_ROWS: Final = (
    Row(Metric.SPANS, attrgetter("exported"), ("exported",)),
    Row(Metric.SPANS, attrgetter("dropped"), ("dropped",)),
    Row(Metric.SPANS, attrgetter("failed"), ("failed",)),
)
