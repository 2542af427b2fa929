"""`baton bench` with real sender processes, against a real server whose capacity is known."""

from __future__ import annotations

import base64
import json
import re
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench_server import CONTEXT_TOKENS, DOUBLED, MODEL, REFUSED, SHORT, SILENT, KnownServer
from typer.testing import CliRunner, Result

from baton.version import __version__
from console.cli import app
from console.loadgen.benchmark import BenchOptions, SearchOptions, Watcher, measure
from console.loadgen.endpoints import Target
from console.loadgen.errors import BenchError
from console.loadgen.report.summary import Slo
from console.loadgen.report.tables import figure
from console.loadgen.trace_files import TraceRow
from console.loadgen.workload import LoadPlan, Workload, prompt_ids

ANY_LAG_MS = 10_000.0
"""Machines that run tests are busy: no result is called invalid for that."""
TRIES = 4
"""Of a measurement that a machine's standing still would spoil: it does not stand still always."""
VOCABULARY = 32_000
TIMEOUT_S = 3.0
"""Long beside the answers that come, even from a machine that stands still for a second."""


def options(server: KnownServer, workload: Workload, **changes: object) -> BenchOptions:
    target = Target("grpc", server.address)
    return BenchOptions(
        (target,), workload, vocabulary=VOCABULARY, max_lag_ms=ANY_LAG_MS, **changes
    )


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "100"})


class Known(Watcher):
    """A server that can serve `PER_S` requests a second, one after the other, by the clock of the
    plan: how fast this machine is decides nothing. Whose turn would not come within `PATIENCE_S` is
    refused."""

    PER_S, PATIENCE_S = 667.0, 0.02

    def __init__(self) -> None:
        self.impatient: set[tuple[int, ...]] = set()

    def run_begins(self, plan: LoadPlan) -> None:
        free_s = 0.0
        for request in plan.requests:
            free_s = max(free_s, request.due_s) + 1 / self.PER_S
            if free_s - request.due_s > self.PATIENCE_S:
                self.impatient.add(tuple(prompt_ids(request, plan.seed, VOCABULARY)))


def test_goodput_of_a_server_of_known_capacity() -> None:
    known = Known()
    with KnownServer(refuses=known.impatient) as server:
        given = options(
            server,
            Workload(num=80, prompt_tokens=10, output_tokens=2),
            rate=400.0,
            seed=9,
            slo=Slo(ttft_ms=ANY_LAG_MS),
            search=SearchOptions(tolerance=0.3, max_probes=6),
            warm_ups=1,
        )
        found = measure(given, known)
    assert all(run.summary.statuses.keys() <= {"OK", "QUEUE_FULL"} for run in found.runs)
    assert found.found is not None
    assert 0.6 <= found.found.rate / known.PER_S <= 1.3
    assert found.found.missed_rate is not None
    assert found.found.missed_rate <= 1.3 * found.found.rate
    by_rate = [probe.attainment for probe in found.found.by_rate()]
    wanted = SearchOptions().wanted_attainment
    assert by_rate[0] is not None
    assert by_rate[-1] is not None
    assert by_rate[-1] < wanted <= by_rate[0]
    assert len({run.summary.seed for run in found.runs}) == len(found.runs)


def test_a_simulated_queue_waits_as_a_real_one() -> None:
    """All come at nearly the same time, so the one in the middle waits for a second: that this
    machine stands still for a part of it does not matter."""
    with KnownServer(service_s=0.05) as server:
        workload = Workload(num=40, prompt_tokens=10, output_tokens=2)
        given = {"rate": 400.0, "seed": 9, "warm_ups": 1, "idle_ttft_ms": 50.0}
        (run,) = measure(options(server, workload, **given)).runs
    ours, simulated = run.summary.ttft_ms, run.summary.simulated_ttft_ms
    assert ours is not None
    assert simulated is not None
    assert simulated.p50 > 800
    assert simulated.p50 - 5 <= ours.p50 <= 1.15 * simulated.p50 + 60


def test_every_request_is_sent_as_planned_by_every_sender_and_over_every_url() -> None:
    workload = Workload(num=60, prompt_tokens=7, output_tokens=3)
    for _ in range(TRIES):
        with KnownServer(gap_s=0.02) as server:
            given = {"rate": 100.0, "seed": 5, "senders": 2, "warm_ups": 0, "api_key": "sk-1"}
            targets = (Target("grpc", server.address),) * 2
            found = measure(replace(options(server, workload, **given), targets=targets))
            prompts = server.prompts
        assert list(server.connections.values()) == [15] * 4
        assert server.authorizations == {"Bearer sk-1"}
        (run,) = found.runs
        if (gap_ms := run.summary.second_gap_ms) and gap_ms.p50 >= 19:
            break
    assert [outcome.number for outcome in run.outcomes] == list(range(60))
    due_s = [request.due_s for request in workload.plan(100.0, 5).requests]
    assert [outcome.due_s for outcome in run.outcomes] == due_s
    assert len(set(prompts)) == 60
    assert run.summary.client.senders == 2
    assert run.summary.second_gap_ms is not None
    assert run.summary.second_gap_ms.p50 >= 19
    assert run.summary.itl_ms is not None
    assert run.summary.itl_ms.count == 120
    assert np.median([outcome.lag_s for outcome in run.outcomes]) < 1.0


def test_failures_are_counted_by_what_they_were() -> None:
    kinds = [2, SHORT, DOUBLED, REFUSED, REFUSED, SILENT]
    trace = tuple(TraceRow(0.01 * i, 5, kind) for i, kind in enumerate(kinds))
    too_long = TraceRow(1.0, CONTEXT_TOKENS, 2)
    workload = Workload(0, trace=(*trace, too_long), trace_arrivals=True)
    with KnownServer() as server:
        found = measure(options(server, workload, timeout_s=TIMEOUT_S, warm_ups=0))
    (run,) = found.runs
    assert run.summary.statuses == {
        "OK": 1, "SHORT": 1, "PROTOCOL": 1, "QUEUE_FULL": 2, "TIMEOUT": 1,
    }  # fmt: skip
    assert found.dropped_rows == 1
    (silent,) = (outcome for outcome in run.outcomes if outcome.status == "TIMEOUT")
    assert silent.ended_s - silent.sent_s >= TIMEOUT_S
    assert run.outcomes[0].trace_id == "0" * 31 + "7"


@pytest.mark.parametrize("as_json", [False, True])
def test_where_nothing_was_served_it_says_so(tmp_path: Path, as_json: bool) -> None:
    with KnownServer() as server:
        found = bench(
            *("--url", server.address, "--num", "3", "--rate", "50", "--senders", "1"),
            *("--output-tokens", str(REFUSED), "--warm-ups", "0", "--repeats", "2"),
            *("--max-lag-ms", str(ANY_LAG_MS), "--report", str(tmp_path)),
            *(("--json",) if as_json else ()),
        )
    said = "none of 6 requests was served: 6 x QUEUE_FULL"
    assert found.exit_code == 1, found.output
    assert found.stderr.count(f"not valid: {said}") == 1
    if as_json:
        result = json.loads(found.stdout)
        assert result["valid"] is False
        assert result["complaints"][0] == said
    else:
        assert "NOT VALID: nothing was served" in found.stdout
        assert said in found.stdout
    assert said in (tmp_path / "report.html").read_text()


def test_the_report_has_everything_in_one_file(tmp_path: Path) -> None:
    with KnownServer(service_s=0.002, gap_s=0.002) as server:
        found = bench(
            *("--url", server.address, "--rate", "40", "--num", "40", "--repeats", "2"),
            *("--prompt-tokens", "20", "--output-tokens", "5", "--warm-ups", "1", "--seed", "3"),
            *("--slo-ttft-ms", "500", "--max-lag-ms", str(ANY_LAG_MS)),
            *("--simulate-idle-ttft-ms", "2", "--report", str(tmp_path), "--json"),
            *("--requests", str(tmp_path / "requests.jsonl")),
        )
    assert found.exit_code == 0, found.output
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").open()]
    assert [(one["run"], one["output_tokens"]) for one in lines] == [(1, 5)] * 40 + [(2, 5)] * 40
    assert all(0 < one["ttft_ms"] < one["e2e_ms"] for one in lines)
    result = json.loads(found.stdout)
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert [run["seed"] for run in result["runs"]] == [3, 4]
    assert result["valid"] is True
    low, high = result["ranges"]["ttft_ms"]["p99"]
    assert sorted(run["ttft_ms"]["p99"] for run in result["runs"]) == [low, high]
    page = (tmp_path / "report.html").read_text()
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == 2
    for name, picture in zip(("latency", "timeline"), pictures, strict=True):
        png = base64.b64decode(picture)
        assert png.startswith(b"\x89PNG")
        assert png == (tmp_path / f"{name}.png").read_bytes()
    assert page.count("<table>") == 3
    for words in (
        MODEL,
        f"Baton {__version__} on",
        "TTFT, simulated",
        "second-token gap",
        "range over 2 runs",
    ):
        assert words in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    p99 = result["runs"][0]["ttft_ms"]["p99"]
    assert figure(p99) in page


def test_nobody_there_and_no_such_model() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    gone = bench("--url", f"grpc://127.0.0.1:{port}")
    assert gone.exit_code == 3
    assert len(gone.stderr.strip().splitlines()) == 1
    http = bench("--url", f"http://127.0.0.1:{port}/v1")
    assert http.exit_code == 1
    assert "nobody answers" in " ".join(http.stderr.split())
    with KnownServer() as server:
        other = bench("--url", server.address, "--model", "other")
    assert other.exit_code == 1
    assert f"it serves: {MODEL}" in " ".join(other.stderr.split())


def test_a_warm_up_that_fails_ends_it_at_once() -> None:
    with KnownServer() as server, pytest.raises(BenchError, match="QUEUE_FULL: the queue is full"):
        measure(options(server, Workload(10, 5, REFUSED), rate=5.0))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--url", "peer"), "neither grpc://HOST:PORT nor"),
        (("--goodput", "--rate", "1"), "needs a service level"),
        (("--goodput", "--slo-ttft-ms", "5"), "needs a rate"),
        (("--arrivals", "trace"), "only a trace"),
        (("--trace", "nothing"), "is no trace"),
        (("--trace", "mooncake-conversation", "--num", "601"), "600 requests"),
    ],
)
def test_wrong_use_is_one_line(arguments: tuple[str, ...], complaint: str) -> None:
    found = bench(*arguments)
    assert found.exit_code == 2
    assert complaint in " ".join(found.stderr.split())
    assert "Traceback" not in found.output
