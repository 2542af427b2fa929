"""Exports spans: a bounded queue, one thread, one exporter.

Invariant: ended = dropped + exported + failed + waiting. Ending a span never waits for anything.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

if TYPE_CHECKING:
    import grpc
    from opentelemetry.sdk.trace import ReadableSpan

logger = logging.getLogger(__name__)

MAX_BATCH_SPANS: Final = 512
"""OpenTelemetry's own default."""


class ExportCounts(NamedTuple):
    """Number of spans since the start, by outcome."""

    exported: int
    dropped: int
    """Spans that found the queue full."""
    failed: int
    """Spans in batches that the receiver did not accept."""
    waiting: int


class QueueingProcessor(BatchSpanProcessor):
    """Batches spans as the SDK does, counts all of them, and drops without a log line if full."""

    def __init__(
        self,
        exporter: SpanExporter,
        max_queued_spans: int,
        schedule_delay_ms: int,
        receiver: str = "",
    ) -> None:
        self._counting = _CountingExporter(exporter, receiver)
        self._max_queued_spans = max_queued_spans
        self._lock = threading.Lock()
        self._accepted = 0
        self._dropped = 0
        super().__init__(
            self._counting,
            # Our own bound is smaller, so the SDK drops no span uncounted.
            max_queue_size=max_queued_spans + MAX_BATCH_SPANS,
            schedule_delay_millis=schedule_delay_ms,
            max_export_batch_size=MAX_BATCH_SPANS,
        )

    @property
    def counts(self) -> ExportCounts:
        """Number of ended spans, by outcome."""
        with self._lock:
            exported, failed = self._counting.exported, self._counting.failed
            waiting = self._accepted - exported - failed
            return ExportCounts(exported, self._dropped, failed, waiting)

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a recorded span, or drops it if the queue is full."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._lock:
            # Spans that the exporter has taken no longer count, even if it is slow.
            if self._accepted - self._counting.taken >= self._max_queued_spans:
                self._dropped += 1
                return
            self._accepted += 1
        super().on_end(span)

    def give_up(self) -> None:
        """Ends the exporter, even in the middle of a batch."""
        self._counting.shutdown()


class _CountingExporter(SpanExporter):
    """Counts its exporter's spans. Logs once when the exporter begins to fail and when it recovers.

    These lines name `receiver`, the address of the receiver.
    """

    def __init__(self, exporter: SpanExporter, receiver: str) -> None:
        self._exporter = exporter
        self._where = {"receiver": receiver} if receiver else {}
        self._over = threading.Lock()
        self._failing = False
        self.taken = 0
        self.exported = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = self._try(spans)
        if result is SpanExportResult.SUCCESS:
            self.exported += len(spans)
        else:
            self.failed += len(spans)
        self._log_change(failing=result is not SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        if self._over.acquire(blocking=False):
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def _try(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            return self._exporter.export(spans)
        except Exception:
            return SpanExportResult.FAILURE

    def _log_change(self, *, failing: bool) -> None:
        if failing is self._failing:
            return
        self._failing = failing
        if failing:
            logger.warning(
                "spans are not taken by their receiver: they are dropped", extra=self._where
            )
        else:
            logger.info("spans are taken by their receiver again", extra=self._where)


class RenewedExporter(SpanExporter):
    """Makes its exporter anew when that is out of date.

    Args:
        make: makes an exporter.
        version: changes when the last one is out of date.
    """

    def __init__(self, make: Callable[[], SpanExporter], version: Callable[[], int]) -> None:
        self._make = make
        self._version = version
        self._made_at = version()
        self._exporter = make()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Exports by an exporter that is up to date."""
        if (version := self._version()) != self._made_at:
            old, self._exporter, self._made_at = self._exporter, self._make(), version
            old.shutdown()
        return self._exporter.export(spans)

    def shutdown(self) -> None:
        """Ends the exporter."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """See the SDK."""
        return self._exporter.force_flush(timeout_millis)


def otlp_exporter(
    endpoint: str,
    timeout_s: float,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str = "",
) -> SpanExporter:
    """Makes the SDK's OTLP/gRPC exporter and silences its log, which repeats each failure.

    Args:
        endpoint: address of the receiver. One without a scheme is used without TLS.
        timeout_s: time after which an unaccepted batch is dropped.
        credentials: for TLS; None: the system's authorities.
        server_name: name in the receiver's certificate; "": that of the endpoint.
    """
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    for name in ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    options = (("grpc.ssl_target_name_override", server_name),) if server_name else None
    return OTLPSpanExporter(
        url, credentials=credentials, timeout=timeout_s, channel_options=options
    )
