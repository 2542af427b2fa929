"""Collectors of metrics that are read when Prometheus asks, instead of counted with each event."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from telemetry.metrics.table import DECLARED

Labels = tuple[str, ...]


class Row(NamedTuple):
    """One sample of a snapshot."""

    metric: str
    read: Callable[[Any], float]
    labels: Labels = ()


class Snapshots(Collector):
    """Collects rows from several snapshots, each with labels of its own, before those of a row."""

    def __init__(self, take: Callable[[], Mapping[Labels, object]], rows: Sequence[Row]) -> None:
        self._take = take
        self._rows = rows

    def describe(self) -> Iterable[Family]:
        """Returns the metrics without taking a snapshot."""
        return [_family(name) for name in dict.fromkeys(row.metric for row in self._rows)]

    def collect(self) -> Iterable[Family]:
        """Takes the snapshots and returns every row of each. Without any there are no rows."""
        snapshots = self._take()
        if not snapshots:
            return []
        families = {row.metric: _family(row.metric) for row in self._rows}
        for row in self._rows:
            for labels, snapshot in snapshots.items():
                families[row.metric].add_metric((*labels, *row.labels), row.read(snapshot))
        return families.values()


class Snapshot(Snapshots):
    """Collects rows from one snapshot. Without a snapshot there are no rows."""

    def __init__(self, take: Callable[[], object], rows: Sequence[Row]) -> None:
        def one() -> Mapping[Labels, object]:
            snapshot = take()
            return {} if snapshot is None else {(): snapshot}

        super().__init__(one, rows)


class Samples(Collector):
    """Collects one metric with changing labels."""

    def __init__(self, metric: str, take: Callable[[], Mapping[Labels, float]]) -> None:
        self._metric = metric
        self._take = take

    def describe(self) -> Iterable[Family]:
        """Returns the metric without a sample."""
        return [_family(self._metric)]

    def collect(self) -> Iterable[Family]:
        """Returns all present samples."""
        family = _family(self._metric)
        for labels, value in sorted(self._take().items()):
            family.add_metric(labels, value)
        return [family]


class Series:
    """Values of one histogram, for one set of labels. One thread adds them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Adds a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family_values(self) -> tuple[list[tuple[str, float]], float]:
        """Bounds with the number of values up to each, and the sum."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return [*zip(names, map(float, accumulate(self._counts)), strict=True)], self._sum


class Tally(Collector):
    """A histogram that costs a token a fifth of what `prometheus_client.Histogram` takes, which
    locks four values for each."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._series: dict[Labels, Series] = {}

    def of(self, *labels: str) -> Series:
        """Values with these labels."""
        if (series := self._series.get(labels)) is None:
            series = self._series[labels] = Series(DECLARED[self._metric].buckets)
        return series

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Returns the metric without a sample."""
        declared = DECLARED[self._metric]
        return [HistogramMetricFamily(self._metric, declared.help, labels=declared.labels)]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Returns all present samples."""
        (family,) = self.describe()
        for labels, series in sorted(self._series.items()):
            family.add_metric(labels, *series.family_values())
        return [family]


def _family(name: str) -> CounterMetricFamily | GaugeMetricFamily:
    declared = DECLARED[name]
    kind = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
    return kind(name, declared.help, labels=declared.labels)
