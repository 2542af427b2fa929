"""What the processes of a cluster show on their admin ports."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable

from cluster import Cluster
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_until

SETTLED_S = 30.0


class Figures:
    """One scrape of one process."""

    def __init__(self, page: str) -> None:
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }

    def of(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]

    def all(self, name: str) -> dict[frozenset[tuple[str, str]], float]:
        """By labels."""
        return {labels: value for (one, labels), value in self.samples.items() if one == name}

    def total(self, name: str) -> float:
        return sum(self.all(name).values())


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read(), "utf-8")


def scrape(cluster: Cluster, name: str) -> Figures:
    return Figures(read(f"http://{cluster.admin_addresses[name]}/metrics"))


def scrape_until(cluster: Cluster, name: str, settled: Callable[[Figures], bool]) -> Figures:
    """Figures of a process once what was run has come to rest there."""

    def figures() -> Figures | None:
        found = scrape(cluster, name)
        return found if settled(found) else None

    return wait_until(figures, SETTLED_S, show=lambda: f"{name}: {scrape(cluster, name).samples}")
