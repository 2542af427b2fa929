"""Collectors of metrics that are read when Prometheus asks, not counted when something happens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from telemetry.metric_table import DECLARED

Labels = tuple[str, ...]


class Row(NamedTuple):
    """One sample of a snapshot."""

    metric: str
    read: Callable[[Any], float]
    labels: Labels = ()


class Snapshot(Collector):
    """Rows of a snapshot that is taken once for all of them; none while there is no snapshot."""

    def __init__(self, take: Callable[[], object], rows: Sequence[Row]) -> None:
        self._take = take
        self._rows = rows

    def describe(self) -> Iterable[Family]:
        """Without a snapshot."""
        return [_family(name) for name in dict.fromkeys(row.metric for row in self._rows)]

    def collect(self) -> Iterable[Family]:
        """Every row."""
        snapshot = self._take()
        if snapshot is None:
            return []
        families = {row.metric: _family(row.metric) for row in self._rows}
        for row in self._rows:
            families[row.metric].add_metric(row.labels, row.read(snapshot))
        return families.values()


class Samples(Collector):
    """One metric whose labels come and go."""

    def __init__(self, metric: str, take: Callable[[], Mapping[Labels, float]]) -> None:
        self._metric = metric
        self._take = take

    def describe(self) -> Iterable[Family]:
        """Without a sample."""
        return [_family(self._metric)]

    def collect(self) -> Iterable[Family]:
        """Every sample that there is now."""
        family = _family(self._metric)
        for labels, value in sorted(self._take().items()):
            family.add_metric(labels, value)
        return [family]


def _family(name: str) -> CounterMetricFamily | GaugeMetricFamily:
    declared = DECLARED[name]
    kind = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
    return kind(name, declared.help, labels=declared.labels)
