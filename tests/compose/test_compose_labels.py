"""Every label, and every value of one, that a rule, an alert or a panel names is there to be found.

A label that nobody sets makes no error in Prometheus: it finds nothing, and the alert stays silent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml
from compose_kit import COMPOSE, ROOT

from telemetry.metrics.table import DECLARED, OVERLOADED, OWN_FAULTS

FROM_DISCOVERY: Final = {"job", "instance", "worker", "role", "model"}
"""What Prometheus adds: the first two to everything, the others to what a worker shows."""
OF_HISTOGRAMS: Final = {"le"}
KINDS: Final = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
OURS: Final = re.compile(r"\b(?:baton_|gen_ai_|baton:)[\w:]+")
MATCHERS: Final = re.compile(r"\b([a-z][\w:]*)\{([^}]*)\}")
MATCHER: Final = re.compile(r"(\w+)(=~|=)\"([^\"]*)\"")
BY: Final = re.compile(r"\b(?:by|on) ?\(([^)]*)\)")
SHOWN: Final = re.compile(r"\{\{ ?(?:or )?\$labels\.(\w+)")
LEGEND: Final = re.compile(r"\{\{(\w+)\}\}")
SOURCES: Final = "".join(
    path.read_text()
    for room in ("router", "serving", "telemetry", "kv_transfer", "worker", "worker_base")
    for path in sorted((ROOT / room).rglob("*.py"))
    if path.name != "metric_table.py"
)
"""Of those who set labels: the table has values for the alerts, and would vouch for itself."""
JOBS: Final = {"baton-router", "baton-worker"}


def recorded() -> dict[str, str]:
    """Expressions of the recording rules, by name."""
    return {rule["record"]: rule["expr"] for rule in rules("recording.yml")}


def rules(name: str) -> list[dict[str, str]]:
    groups = yaml.safe_load((COMPOSE / "prometheus" / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, object]]:
    return [dict(rule) for rule in rules("alerts.yml")]


def targets() -> Iterator[tuple[str, str, str]]:
    """Title, expression and legend."""
    for path in sorted((COMPOSE / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield panel["title"], target["expr"], target["legendFormat"]


def expressions() -> list[str]:
    found = [*recorded().values(), *(str(rule["expr"]) for rule in rules("alerts.yml"))]
    return found + [expression for _, expression, _ in targets()]


def labels_of(name: str) -> set[str]:
    """Labels of a series as Prometheus has it."""
    for declared, about in DECLARED.items():
        if name in {declared + end for end in KINDS[about.kind]}:
            return {*about.labels, *FROM_DISCOVERY, *(OF_HISTOGRAMS if about.buckets else ())}
    if name in recorded():
        return labels_left(recorded()[name])
    assert name in {"up", "process_start_time_seconds"}, name
    return FROM_DISCOVERY


def labels_left(expression: str) -> set[str]:
    """Labels of what an expression finds: those that it groups by, or all of its series'."""
    grouped = [labels for group in BY.findall(expression) for labels in re.findall(r"\w+", group)]
    if grouped or re.search(r"\b(?:sum|count|min|max|absent)\b ?\(", expression):
        return set(grouped)
    return set.union(*(labels_of(name) for name in named(expression)))


def named(expression: str) -> set[str]:
    bare = re.sub(r"\{[^}]*\}|\bon \(\)|" + BY.pattern, "", expression)
    return set(OURS.findall(bare)) | set(re.findall(r"\b(?:up|process_\w+)\b", bare))


def is_known(label: str, value: str) -> bool:
    """Whether some process sets the label to that."""
    if label == "le":
        return True  # test_thresholds_are_bucket_boundaries
    if label == "job":
        return value in JOBS
    return f'"{value}"' in SOURCES


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_an_expression_names_labels_and_values_that_there_are(expression: str) -> None:
    for name, matchers in MATCHERS.findall(expression):
        for label, _, values in MATCHER.findall(matchers):
            assert label in labels_of(name), (name, label)
            assert all(is_known(label, value) for value in values.split("|")), (label, values)
    series = named(expression)
    assert series
    there = set.union(*(labels_of(name) for name in series))
    assert {
        label for group in BY.findall(expression) for label in re.findall(r"\w+", group)
    } <= there


def test_a_legend_shows_labels_that_are_left() -> None:
    wrong = [
        (title, legend)
        for title, expression, legend in targets()
        if not set(LEGEND.findall(legend)) <= labels_left(expression)
    ]
    assert wrong == []


def test_an_alerts_words_name_labels_that_are_left() -> None:
    named_somewhere = 0
    for alert in alerts():
        shown = set(SHOWN.findall(str(alert["annotations"])))
        named_somewhere += len(shown)
        assert shown <= labels_left(str(alert["expr"])), alert["alert"]
    assert named_somewhere > 8


def test_faults_and_refusals_are_those_that_the_code_shows_from_the_start() -> None:
    """What is not, is missed when it happens for the first time."""
    text = (COMPOSE / "prometheus" / "recording.yml").read_text()
    assert {frozenset(one.split("|")) for one in re.findall(r'outcome=~"([^"]+)"', text)} == {
        frozenset(OWN_FAULTS)
    }
    (reasons,) = re.findall(
        r'reason=~"([^"]+)"', Path(COMPOSE / "prometheus/alerts.yml").read_text()
    )
    assert set(reasons.split("|")) == set(OVERLOADED)
