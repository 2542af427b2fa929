"""`baton doctor`: findings of this machine and of clusters that are made up; the real one is in
the end-to-end tests."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from console.cli import app
from console.doctor import cluster, host
from console.doctor.finding import Level
from console.doctor.path import check_path
from console.top.scrape import AdapterAt, Known, Scrape, Scraped, TopError
from telemetry.names import Metric

NOBODY = "127.0.0.1:1"


def doctor(*arguments: str, **environment: str):
    return CliRunner().invoke(app, ["doctor", *arguments], env=environment)


def plain(text: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()


def test_nothing_running_is_a_warning_unless_somebody_expects_it() -> None:
    result = doctor("--no-self-test", BATON_ROUTER_ADMIN="")
    lines = plain(result.output)
    assert max(map(len, lines)) <= 100
    assert any("python" in line and "ok" in line for line in lines)
    assert result.exit_code == 0, result.output
    result = doctor("--no-self-test", "--admin", NOBODY)
    assert result.exit_code == 1
    text = " ".join(" ".join(plain(result.output)).split())
    assert f"http://{NOBODY}/metrics does not answer" in text
    assert "-> start one with `baton up`" in text


def test_two_distributions_of_one_package_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def found() -> list[str]:
        return [f.found for f in host.check_host() if f.subject == "baton-client"]

    assert found() == []
    monkeypatch.syspath_prepend(tmp_path)
    for name, version in (("client", "0.2.0"), ("llm", "0.1.0")):
        folder = tmp_path / f"baton_{name}-{version}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.4\nName: baton-{name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)
    assert found() == ["0.2.0, beside baton-llm 0.1.0"]


@pytest.mark.parametrize(
    ("value", "level"),
    [
        ("all", Level.OK),
        ("^ib", Level.OK),
        ("rc,tcp,cuda", Level.OK),
        ("tcp", Level.WARNING),
        ("sm,self", Level.ERROR),
    ],
)
def test_transports_that_are_ruled_out_are_explained(
    monkeypatch: pytest.MonkeyPatch, value: str, level: Level
) -> None:
    monkeypatch.setenv("UCX_TLS", value)
    (finding,) = [f for f in host.check_host() if f.subject == "UCX_TLS"]
    assert finding.level is level
    assert bool(finding.advice) == (level is not Level.OK)


@pytest.mark.parametrize("variable", host.ALLOCATOR_VARIABLES)
@pytest.mark.parametrize(
    ("value", "is_bad"),
    [
        ("max_split_size_mb:128, expandable_segments: True", True),
        ("backend:cudaMallocAsync", True),
        ("expandable_segments:False", False),
        ("", False),
    ],
)
def test_memory_that_cannot_be_mapped_is_found_before_a_worker_refuses_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, is_bad: bool
) -> None:
    for name in host.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    found = [f for f in host.check_host() if f.subject in host.ALLOCATOR_VARIABLES]
    assert [(f.subject, f.level) for f in found] == [(variable, Level.ERROR)] * is_bad


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(host, "PORTS", {port: "somebody"})
        (finding,) = [f for f in host.check_host() if f.subject == "ports"]
    assert finding.level is Level.WARNING
    assert str(port) in finding.found


def test_the_transport_is_measured_here() -> None:
    (finding,) = check_path()
    assert finding.level is not Level.ERROR, finding
    assert re.search(r"nixl/\w+, \d+\.\d GB/s, \d+ us a page", finding.found)


def worker(name: str, role: str, attached: bool = True) -> Known:
    return Known(name, role, "127.0.0.1:2" if attached else "", attached)


def seen(*workers: Known, **values: dict[tuple[tuple[str, str], ...], float]) -> Scrape:
    named = {
        getattr(Metric, metric): {frozenset(labels): value for labels, value in found.items()}
        for metric, found in values.items()
    }
    samples = {one.name: Scraped(0.0, named) for one in workers if one.attached}
    return Scrape(0.0, Scraped(0.0, {}), workers, samples)


def look(monkeypatch: pytest.MonkeyPatch, what: Scrape):
    monkeypatch.setattr(cluster, "scrape", lambda admin, **_: what)
    return cluster.check_cluster("somewhere", expected=True)


P, D = worker("prefill-0", "prefill"), worker("decode-0", "decode")
TO_D = (("peer", "decode-0"), ("transport", "nixl/tcp"))


def test_a_slow_path_is_an_error_with_its_figures_and_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = {(("peer", "decode-0"), ("cause", "slow_tcp_only")): 0.0}
    found = look(
        monkeypatch,
        seen(P, PEER_HEALTHY=slow, PEER_BANDWIDTH={TO_D: 4e8}, PEER_LATENCY={TO_D: 5e-4}),
    )
    (path,) = found.paths
    assert path == ("prefill-0", "decode-0", "nixl/tcp", 0.4, 500.0, "slow_tcp_only")
    (finding,) = [f for f in found.findings if f.subject == "prefill-0"]
    assert finding.level is Level.ERROR
    assert "UCX_TLS" in finding.advice


def test_what_is_overdue_is_said_with_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    overdue = {"QUARANTINES_OVERDUE": {(): 2.0}, "QUARANTINE_OLDEST": {(): 63.4}}
    found = look(monkeypatch, seen(D, **overdue)).findings
    assert [f.found for f in found if f.level is Level.WARNING] == [
        "2 transfers in quarantine for over 5 s, the oldest for 63 s"
    ]
    young = seen(D, TRANSFERS_QUARANTINED={(): 2.0}, QUARANTINE_OLDEST={(): 1.0})
    assert not [f for f in look(monkeypatch, young).findings if f.level is Level.WARNING]


def test_who_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = look(monkeypatch, seen(P, worker("decode-0", "decode", attached=False))).findings
    assert [(f.level, f.subject) for f in gone] == [
        (Level.ERROR, "router"),
        (Level.WARNING, "decode-0"),
    ]
    nobody = look(monkeypatch, seen()).findings
    assert [(f.level, f.found) for f in nobody] == [(Level.ERROR, "no worker is attached")]


def test_workers_of_a_model_that_exchange_nothing_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode workers compute the prompts then, and all seems well."""
    alike = [one._replace(model="n", kind="1") for one in (P, D)]
    apart = [P._replace(model="m", kind="1"), D._replace(model="m", kind="2")]
    assert not [f for f in look(monkeypatch, seen(*alike)).findings if f.subject == "model n"]
    (finding,) = (f for f in look(monkeypatch, seen(*apart)).findings if f.subject == "model m")
    assert finding.level is Level.WARNING
    assert finding.found == "its workers differ: prefill-0 | decode-0"


def test_adapters_that_workers_have_unlike_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "p0", "p1", "p2", "other"
    up = {
        frozenset({("worker", name), ("model", "m" if name != "other" else "n")}): 1.0
        for name in names
    }
    adapters = [
        AdapterAt("even", "m", dict.fromkeys(names[:3], "1")),
        AdapterAt("law", "m", {"p0": "1", "p1": "2", "p2": "1"}),
        AdapterAt("poems", "m", {"p1": "1"}),
    ]
    router = Scraped(0.0, {Metric.WORKER_UP: up})
    waits = {f"{Metric.ADAPTER_WAITS}_total": 4.0, f"{Metric.ADAPTER_WAIT_SECONDS}_total": 6.0}
    values = {name: {frozenset[tuple[str, str]](): value} for name, value in waits.items()}
    workers = [worker(name, "both") for name in names]
    what = Scrape(0.0, router, workers, {"p0": Scraped(0.0, values)}, adapters=adapters)
    findings = [(f.subject, f.found) for f in look(monkeypatch, what).findings]
    assert findings[-3:] == [
        ("adapter law", "its content is another one on p1"),
        ("adapter poems", "not on p0, p2"),
        ("p0", "4 requests waited for a slot of their adapter, 1.5 s each"),
    ]


def test_a_foreign_write_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    damage = {f"{Metric.KV_DAMAGED_PAGES}_total": {frozenset[tuple[str, str]](): 3.0}}
    one = Scrape(0.0, Scraped(0.0, {}), (D,), {"decode-0": Scraped(0.0, damage)})
    assert any(f.level is Level.ERROR and "3 free" in f.found for f in look(monkeypatch, one)[1])


def test_a_router_that_is_gone_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(admin: str, *, adapters: bool) -> Scrape:
        raise TopError("gone")

    monkeypatch.setattr(cluster, "scrape", fails)
    found = cluster.check_cluster("somewhere", expected=False)
    assert [f.level for f in found.findings] == [Level.WARNING]
