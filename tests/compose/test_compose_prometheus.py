"""A real Prometheus, started and configured as the compose file does, scrapes a real run.

Every expression of dashboards, alerts and recording rules runs, and names only what is there.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_kit import COMPOSE, Host, ask
from debian import program
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_until

from baton.client.generation import Generation
from baton.errors import BatonError
from telemetry.names import Metric

pytestmark = pytest.mark.timeout(300)  # several processes start, on a machine that may be shared
SETTLED_S = 90.0
ELSEWHERE = {
    Metric.GPU_UTILIZATION,
    Metric.GPU_POWER,
    Metric.GPU_MEMORY_USED,
    Metric.GPU_MEMORY_TOTAL,
    f"{Metric.SPECULATION_DRAFTED}_total",
    f"{Metric.SPECULATION_ACCEPTED}_total",
    f"{Metric.RANK_BUSY}_total",
    f"{Metric.RANK_SKEW}_total",
    f"{Metric.RANK_PAIRS}_total",
    Metric.BALANCE_RATIO,
    Metric.ADAPTER_SLOTS,
    f"{Metric.ADAPTER_LOADS}_total",
    f"{Metric.ADAPTER_EVICTIONS}_total",
    f"{Metric.ADAPTER_WAITS}_total",
    f"{Metric.ADAPTER_WAIT_SECONDS}_total",
}
"""Shown by workers on GPUs, by those that draft, have ranks or take adapters, and by routers that
balance."""
NAME = re.compile(r"\b(?:baton_|gen_ai_|baton:)[\w:]+")
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


class Prometheus:
    """Its query API."""

    def __init__(self, address: str) -> None:
        self.url = f"http://{address}"

    def get(self, path: str, **query: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from None

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """What it finds once it finds anything: a scrape that takes too long on a busy machine
        makes its series end until the next."""
        return wait_until(
            lambda: self.query(expression),
            SETTLED_S,
            poll_s=0.3,
            show=lambda: (expression, self.get("targets")),
        )

    def value(self, expression: str) -> float:
        (sample,) = self.wait_for(expression)
        return float(sample["value"][1])


@pytest.fixture(scope="module")
def results(host: Host) -> list[Generation]:
    return [ask(host, f"Request {number}", 40) for number in range(6)]


@pytest.fixture(scope="module")
def prometheus(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    for path in (COMPOSE / "prometheus").glob("*.yml"):
        text = path.read_text().replace("router:9090", f"{host.router_ip}:9090")
        text = re.sub(r"(interval: )\d+s", r"\g<1>1s", text)
        (folder / path.name).write_text(text.replace("/etc/prometheus", str(folder)))
    by_address(folder / "prometheus.yml", host)
    command = host.services["prometheus"]["command"]
    given = [
        word.replace("=/etc/prometheus", f"={folder}").replace("=/prometheus", f"={folder}/data")
        for word in command
    ]
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program("prometheus"), *given, f"--web.listen-address={address}"],
            stdout=log,
            stderr=log,
        )
    try:
        wait_ready(address, folder / "log")
        yield Prometheus(address)
    finally:
        process.kill()
        process.wait(10)


def by_address(config: Path, host: Host) -> None:
    """No name server is here for Prometheus: who looks up the router's name gets its address."""
    content = yaml.safe_load(config.read_text())
    for job in content["scrape_configs"]:
        for looked_up in job.pop("dns_sd_configs", ()):
            assert looked_up["names"] == ["router"]
            target = f"{host.router_ip}:{looked_up['port']}"
            job["static_configs"] = [{"targets": [target]}]
    config.write_text(yaml.safe_dump(content))


def wait_ready(address: str, log: Path) -> None:
    def is_ready() -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://{address}/-/ready", timeout=2):
            return True
        return False

    wait_until(is_ready, poll_s=0.1, show=log.read_text)


@pytest.fixture(scope="module")
def settled(host: Host, prometheus: Prometheus, results: list[Generation]) -> Prometheus:
    """Prometheus, once it has seen counters move and has evaluated the rules on that."""
    deadline = time.monotonic() + SETTLED_S
    number = 0
    wanted = [
        "baton:ttft_met:ratio5m >= 0",
        "baton:tpot_met:ratio5m >= 0",
        "baton:handoff_exposed:p99_5m >= 0",
        "baton:output_tokens:rate1m > 0",
    ]
    while not prometheus.query(" and on () ".join(wanted)):
        assert time.monotonic() < deadline, prometheus.get("targets")
        # Unlike those before from its first word: what is held already is not handed off.
        results.append(ask(host, f"{(number := number + 1)} more " * 30, 5))
        time.sleep(0.5)
    return prometheus


def dashboards() -> Iterator[str]:
    for path in sorted((COMPOSE / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            yield from (target["expr"] for target in panel["targets"])


def rules() -> list[dict[str, Any]]:
    files = (COMPOSE / "prometheus" / name for name in ("recording.yml", "alerts.yml"))
    groups = (group for file in files for group in yaml.safe_load(file.read_text())["groups"])
    return [rule for group in groups for rule in group["rules"]]


def test_the_router_and_every_worker_are_scraped(host: Host, settled: Prometheus) -> None:
    settled.wait_for("count(up == 1) == 3")
    targets = settled.get("targets")["activeTargets"]
    workers = {
        (target["labels"]["worker"], target["labels"]["role"], target["labels"]["model"])
        for target in targets
        if target["labels"]["job"] == "baton-worker"
    }
    assert workers == {("prefill-2", "prefill", "tiny"), ("decode-3", "decode", "tiny")}


def test_every_rule_and_every_panel_runs(settled: Prometheus) -> None:
    found = [rule for group in settled.get("rules")["groups"] for rule in group["rules"]]
    assert len(found) == len(rules())
    assert {rule["health"] for rule in found} == {"ok"}, found
    for expression in dashboards():
        settled.query(expression)


def test_every_name_is_one_that_a_process_shows(host: Host, settled: Prometheus) -> None:
    shown = {rule["record"] for rule in rules() if "record" in rule}
    for container in host.containers[:3]:
        ip = container.words["0.0.0.0"]
        with urllib.request.urlopen(f"http://{ip}:9090/metrics", timeout=5) as answer:
            for family in text_string_to_metric_families(answer.read().decode()):
                shown |= {family.name + suffix for suffix in SUFFIXES.get(family.type, ("",))}
    expressions = [*dashboards(), *(rule["expr"] for rule in rules())]
    named = {name for expression in expressions for name in NAME.findall(expression)}
    assert len(named) > 40
    assert named - shown == ELSEWHERE


def test_what_the_panels_show_is_what_was_run(settled: Prometheus, results: Any) -> None:
    assert settled.wait_for(f"sum(baton_output_tokens_total) >= {6 * 40}")
    assert settled.value("baton:output_tokens:rate1m") > 0
    assert 0 <= settled.value("baton:ttft_met:ratio5m") <= 1
    assert settled.wait_for('sum(baton_kv_transfers_total{outcome="sent"}) >= 6')
    assert settled.value('max(baton_kv_pages_capacity{role="decode"})') > 0
    assert settled.wait_for("baton:kv_in_use:ratio")
    assert settled.value("baton:handoff_exposed:p99_5m") >= 0


def test_exemplars_lead_to_traces(settled: Prometheus, results: list[Generation]) -> None:
    traces = {result.trace_id for result in results}
    for metric in ("time_to_first_token", "request_duration", "time_per_output_token"):
        query = f"gen_ai_server_{metric}_seconds_bucket"
        now = time.time()
        found = settled.get("query_exemplars", query=query, start=f"{now - 600}", end=f"{now}")
        ids = {one["labels"]["trace_id"] for series in found for one in series["exemplars"]}
        assert ids & traces, metric


def test_nobody_is_paged(settled: Prometheus) -> None:
    firing = settled.query('ALERTS{alertstate="firing", severity="page"}')
    # A shared machine may well be slower than the objectives.
    late = {"BatonFirstTokenLate", "BatonTokensSlow"}
    assert [alert for alert in firing if alert["metric"]["alertname"] not in late] == []


def test_a_request_that_fails_is_counted(host: Host, settled: Prometheus) -> None:
    with pytest.raises(BatonError):
        ask(host, "", 5)
    assert settled.wait_for('baton_requests_total{outcome="INVALID_FIELD"} >= 1')
