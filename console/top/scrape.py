"""Reads the metrics of routers and of their workers over HTTP, all at one moment."""

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

from telemetry.names import FAILURE_UNIT, FINGERPRINT, Metric

TIMEOUT_S: Final = 3.0
"""A process that is slower is shown as silent, as Prometheus would."""
_AT_ONCE: Final = 16
"""Processes that are read side by side: a silent one holds up one thread alone."""

Labels = frozenset[tuple[str, str]]
Bucket = tuple[float, float]
"""Upper bound, and the number of values at or below it."""


class TopError(Exception):
    """There is nothing to show. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Scraped:
    """The metrics of one process."""

    at_s: float
    """Time of reading, by `time.monotonic`."""
    values: Mapping[str, Mapping[Labels, float]]
    """Values by name, then by labels."""

    def total(self, name: str, **labels: str) -> float:
        """Sums all samples of a name that have these labels; 0 without a sample."""
        wanted = set(labels.items())
        found = self.values.get(name, {})
        return sum(value for have, value in found.items() if wanted <= have)

    def has(self, name: str) -> bool:
        """Whether a sample of the name exists."""
        return bool(self.values.get(name))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums the samples of a name by the value of one label."""
        sums: dict[str, float] = {}
        for have, value in self.values.get(name, {}).items():
            key = dict(have).get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return sums

    def buckets(self, name: str) -> list[Bucket]:
        """Buckets of a histogram, summed over its labels, by bound. The last bound is infinite."""
        sums = self.by_label(f"{name}_bucket", "le")
        return sorted((float(bound), count) for bound, count in sums.items())


NOTHING: Final = Scraped(0.0, {})


class Known(NamedTuple):
    """A worker that a router knows."""

    name: str
    role: str
    admin: str
    """HOST:PORT of its admin port; "": unknown."""
    attached: bool
    model: str = ""
    kind: str = ""
    """Workers of one model that have it alike exchange KV; "": unknown."""
    unit: str = ""
    """Workers that have it alike end together, as those of an expert group; "": it ends alone."""


class Target(NamedTuple):
    """What a router says of an attached worker."""

    admin: str = ""
    model: str = ""
    kind: str = ""
    unit: str = ""


class AdapterAt(NamedTuple):
    """An adapter, as a router knows it."""

    name: str
    model: str
    digests: Mapping[str, str]
    """Digest of its content, by worker that has it."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """Routers and their workers at one moment."""

    at_s: float
    router: Scraped
    """The router's metrics; the sums if there are several routers."""
    workers: Sequence[Known] = ()
    samples: Mapping[str, Scraped] = field(default_factory=dict)
    """Metrics by worker, without the workers that did not answer."""
    routers: int = 1
    """Number of routers that were read."""
    balance: str = ""
    """What the first router says of the balance of roles; "": there is none."""
    adapters: Sequence[AdapterAt] = ()
    """What the first router says of adapters, if that was asked for."""

    def routers_of(self, worker: str) -> int | None:
        """Number of routers that a worker is attached to; None if unknown."""
        found = self.samples.get(worker, NOTHING)
        return int(found.total(Metric.WORK_STREAMS)) if found.has(Metric.WORK_STREAMS) else None


def scrape(admin: str, *, adapters: bool = False) -> Scrape:
    """Reads the router, then all workers that it knows, in parallel.

    Args:
        admin: HOST:PORT of the router's admin port, or https://HOST:PORT; several are separated by
            commas.
        adapters: whether the adapters are asked for. The answer has each on each worker.

    Raises:
        TopError: one of them is not a router.
    """
    admins = admin.split(",")
    router = _together([_parse(_get(f"{base_url(one)}/metrics")) for one in admins])
    known = _known(router, {name: at for one in admins for name, at in _targets(one).items()})
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = pool.map(_samples, (worker.admin for worker in known))
        samples = {
            worker.name: answer
            for worker, answer in zip(known, answers, strict=True)
            if answer is not None
        }
    own = _balance(admins[0]), _adapters(admins[0]) if adapters else ()
    return Scrape(time.monotonic(), router, known, samples, len(admins), *own)


def _together(routers: Sequence[Scraped]) -> Scraped:
    """Sums the metrics of several routers: all metrics that are shown of a router are counts."""
    values: dict[str, dict[Labels, float]] = {}
    for samples in routers:
        for name, counted in samples.values.items():
            sums = values.setdefault(name, {})
            for labels, value in counted.items():
                sums[labels] = sums.get(labels, 0.0) + value
    return Scraped(routers[-1].at_s, values)


def _targets(admin: str) -> dict[str, Target]:
    """The attached workers, by name."""
    try:
        listed = json.loads(_get(f"{base_url(admin)}/discovery"))
        found = ((one["targets"][0], one["labels"]) for one in listed)
        said = ("model", FINGERPRINT, FAILURE_UNIT)
        return {
            labels["worker"]: Target(at, *(labels.get(name, "") for name in said))
            for at, labels in found
        }
    except (ValueError, KeyError, IndexError, TypeError):
        raise TopError(f"{base_url(admin)} is no router's admin port") from None


def _balance(admin: str) -> str:
    """What a router says of the balance; "" if it is of a release without."""
    try:
        return str(json.loads(_get(f"{base_url(admin)}/roles"))["balance"])
    except (TopError, ValueError, KeyError, TypeError):
        return ""


def _adapters(admin: str) -> list[AdapterAt]:
    """The adapters that a router knows; none if it is of a release without."""
    try:
        listed = json.loads(_get(f"{base_url(admin)}/adapters"))["adapters"]
        return [AdapterAt(one["name"], one["model"], dict(one["workers"])) for one in listed]
    except (TopError, ValueError, KeyError, TypeError):
        return []


def _known(router: Scraped, where: Mapping[str, Target]) -> list[Known]:
    """All workers in `baton_worker_up`: prefill first; workers that left are last."""
    found = []
    for labels, up in router.values.get(Metric.WORKER_UP, {}).items():
        have = dict(labels)
        name = have["worker"]
        at = where.get(name, Target()) if up else Target()
        found.append(Known(name, have["role"], at.admin, bool(up), at.model, at.kind, at.unit))
    order = {"prefill": 0, "decode": 1, "both": 2}
    found.sort(key=lambda one: (not one.attached, order.get(one.role, 3), one.name))
    return found


def _samples(admin: str) -> Scraped | None:
    """Metrics of a worker; None if it does not answer."""
    try:
        return _parse(_get(f"http://{admin}/metrics")) if admin else None
    except TopError:
        return None


def base_url(admin: str) -> str:
    """The URL of an admin address: HOST:PORT, or https://HOST:PORT of a proxy before it."""
    return admin.rstrip("/") if admin.startswith("https://") else f"http://{admin}"


def _get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return str(response.read(), "utf-8")
    except urllib.error.HTTPError as error:
        with error:
            raise TopError(f"{url} answered {error.code}: is this a router's admin port?") from None
    except (OSError, ValueError, http.client.HTTPException):
        raise TopError(f"{url} does not answer: does the router run there?") from None


def _parse(page: str) -> Scraped:
    """Parses Prometheus' text format.

    Raises:
        TopError: the page has another format.
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
    return Scraped(time.monotonic(), values)
