"""The metrics of every process. `telemetry.metrics.table` declares all metrics.

Each process has one registry: a `RouterMetrics` (`telemetry.metrics.router`) or a `WorkerMetrics`
(`telemetry.metrics.worker`). Their methods count events when they happen. States are read from a
snapshot when Prometheus asks, so that the step loop does no work for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.process_collector import ProcessCollector

from telemetry.export import ExportCounts
from telemetry.metrics.collectors import Row, Samples, Snapshot
from telemetry.metrics.table import DECLARED
from telemetry.names import Metric

Kind = TypeVar("Kind", Counter, Histogram)


class ProcessMetrics:
    """The registry of a process, with the metrics that every process has."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._loop_lag = self._histogram(Metric.LOOP_LAG)
        self._drain_began_s = 0.0
        self._watch(lambda: self, _PROCESS_ROWS)

    def draining(self) -> None:
        """Marks the start of draining: the process refuses new work and finishes the rest."""
        self._drain_began_s = self._drain_began_s or time.monotonic()

    @property
    def drain_s(self) -> float:
        """Seconds since the process began to drain; 0 before."""
        return time.monotonic() - self._drain_began_s if self._drain_began_s else 0.0

    @property
    def loop_tasks(self) -> int:
        """Number of tasks of the running event loop."""
        try:
            return len(asyncio.all_tasks())
        except RuntimeError:  # No event loop runs on this thread.
            return 0

    def watch_spans(self, counts: Callable[[], ExportCounts]) -> None:
        """Shows the numbers of this process's spans, by outcome."""
        self._watch(counts, _SPAN_ROWS)

    def watch_refusals(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Shows the numbers of peers that were refused, by cause."""
        self.registry.register(
            Samples(Metric.PEERS_REFUSED, lambda: {(cause,): n for cause, n in counts().items()})
        )

    def loop_lagged(self, seconds: float) -> None:
        """Counts a late wake-up of the event loop."""
        self._loop_lag.observe(seconds)

    def _counter(self, name: str) -> Counter:
        declared = DECLARED[name]
        counter = Counter(name, declared.help, declared.labels, registry=self.registry)
        return _remembering(counter)

    def _histogram(self, name: str) -> Histogram:
        declared = DECLARED[name]
        histogram = Histogram(
            name,
            declared.help,
            declared.labels,
            buckets=declared.buckets,
            registry=self.registry,
        )
        return _remembering(histogram)

    def _watch(self, take: Callable[[], object], rows: Sequence[Row]) -> None:
        self.registry.register(Snapshot(take, rows))


def _remembering(metric: Kind) -> Kind:
    """The metric, which finds a series by its labels without a lock. No series is ever removed."""
    metric.labels = cache(metric.labels)  # type: ignore[method-assign]
    return metric


_PROCESS_ROWS: Final = (
    Row(Metric.DRAIN_SECONDS, attrgetter("drain_s")),
    Row(Metric.LOOP_TASKS, attrgetter("loop_tasks")),
)
_SPAN_ROWS: Final = (
    Row(Metric.SPANS, attrgetter("exported"), ("exported",)),
    Row(Metric.SPANS, attrgetter("dropped"), ("dropped",)),
    Row(Metric.SPANS, attrgetter("failed"), ("failed",)),
)
