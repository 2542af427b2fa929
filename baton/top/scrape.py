"""The metrics of routers and of their workers, read over HTTP at one moment."""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from telemetry.names import Metric

TIMEOUT_S: Final = 3.0
_AT_ONCE: Final = 16

Labels = frozenset[tuple[str, str]]
Bucket = tuple[float, float]
"""Upper bound and how many values are at or below it."""


class TopError(Exception):
    """There is nothing to show; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What one process said of itself."""

    at_s: float
    """Of `time.monotonic`."""
    values: Mapping[str, Mapping[Labels, float]]
    """By name, then by labels."""

    def total(self, name: str, **labels: str) -> float:
        """Sum over all samples of the name that have these labels; 0 of none."""
        wanted = set(labels.items())
        found = self.values.get(name, {})
        return sum(value for have, value in found.items() if wanted <= have)

    def has(self, name: str) -> bool:
        """Whether there is any sample of the name."""
        return bool(self.values.get(name))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums by the value of one label."""
        sums: dict[str, float] = {}
        for have, value in self.values.get(name, {}).items():
            key = dict(have).get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return sums

    def buckets(self, name: str) -> list[Bucket]:
        """Of a histogram, summed over its labels, by bound; the last bound is infinite."""
        sums = self.by_label(f"{name}_bucket", "le")
        return sorted((float(bound), count) for bound, count in sums.items())


NOTHING: Final = Samples(0.0, {})


class Known(NamedTuple):
    """A worker that a router knows."""

    name: str
    role: str
    admin: str
    """"": unknown."""
    attached: bool


@dataclass(frozen=True, slots=True)
class Scrape:
    """Routers and their workers at one moment."""

    at_s: float
    router: Samples
    """Of several, the sums."""
    workers: Sequence[Known] = ()
    samples: Mapping[str, Samples] = field(default_factory=dict)
    """By worker; those that did not answer are missing."""
    routers: int = 1
    """That were asked."""

    def routers_of(self, worker: str) -> int | None:
        """How many a worker is attached to; None where it does not say."""
        found = self.samples.get(worker, NOTHING)
        return int(found.total(Metric.WORK_STREAMS)) if found.has(Metric.WORK_STREAMS) else None


def scrape(admin: str) -> Scrape:
    """Reads the router, then all workers that it knows, at once.

    Args:
        admin: HOST:PORT of the router's admin port; of several, with commas between.

    Raises:
        TopError: one of them is no router.
    """
    admins = admin.split(",")
    router = _together([_parse(_get(f"http://{one}/metrics")) for one in admins])
    known = _known(router, {name: at for one in admins for name, at in _targets(one).items()})
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = pool.map(_samples, (worker.admin for worker in known))
        samples = {
            worker.name: answer
            for worker, answer in zip(known, answers, strict=True)
            if answer is not None
        }
    return Scrape(time.monotonic(), router, known, samples, len(admins))


def _together(routers: Sequence[Samples]) -> Samples:
    """The sums of what several counted: what is read of a router are counts."""
    values: dict[str, dict[Labels, float]] = {}
    for samples in routers:
        for name, counted in samples.values.items():
            sums = values.setdefault(name, {})
            for labels, value in counted.items():
                sums[labels] = sums.get(labels, 0.0) + value
    return Samples(routers[-1].at_s, values)


def _targets(admin: str) -> dict[str, str]:
    """Admin addresses of the workers that are attached, by name."""
    try:
        listed = json.loads(_get(f"http://{admin}/discovery"))
        return {one["labels"]["worker"]: one["targets"][0] for one in listed}
    except (ValueError, KeyError, IndexError, TypeError):
        raise TopError(f"http://{admin} is no router's admin port") from None


def _known(router: Samples, where: Mapping[str, str]) -> list[Known]:
    """Every worker of `baton_worker_up`, prefill first, those that left last."""
    found = []
    for labels, up in router.values.get(Metric.WORKER_UP, {}).items():
        have = dict(labels)
        name = have["worker"]
        found.append(Known(name, have["role"], where.get(name, "") if up else "", bool(up)))
    order = {"prefill": 0, "decode": 1, "both": 2}
    found.sort(key=lambda one: (not one.attached, order.get(one.role, 3), one.name))
    return found


def _samples(admin: str) -> Samples | None:
    """Of a worker; None where it does not answer."""
    try:
        return _parse(_get(f"http://{admin}/metrics")) if admin else None
    except TopError:
        return None


def _get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return str(response.read(), "utf-8")
    except urllib.error.HTTPError as error:
        with error:
            raise TopError(f"{url} answered {error.code}: is this a router's admin port?") from None
    except (OSError, ValueError, http.client.HTTPException):
        raise TopError(f"{url} does not answer: does the router run there?") from None


def _parse(page: str) -> Samples:
    """Prometheus' text format.

    Raises:
        TopError: it is something else.
    """
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if not math.isnan(sample.value):
                    by_labels = values.setdefault(sample.name, {})
                    by_labels[frozenset(sample.labels.items())] = sample.value
    except (ValueError, KeyError, IndexError):
        raise TopError(
            "what answers there are no metrics: is this a router's admin port?"
        ) from None
    return Samples(time.monotonic(), values)
