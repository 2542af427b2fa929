"""A benchmark from its options to its result: runs with fresh seeds, or a search for goodput."""

from __future__ import annotations

import itertools
import platform
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, NamedTuple

from baton.tls import NO_FILES, TlsFiles
from console.loadgen.endpoints import Asked, Target
from console.loadgen.errors import BenchError, WrongUseError
from console.loadgen.fleet import Fleet
from console.loadgen.outcome import Outcome, SenderReport
from console.loadgen.report import goodput
from console.loadgen.report.goodput import Goodput
from console.loadgen.report.queue_simulation import single_server_waits_s
from console.loadgen.report.summary import (
    Percentiles,
    Slo,
    Summary,
    gathered,
    percentiles,
    summarize,
)
from console.loadgen.report.turns import TurnFigures, read_places, turn_figures
from console.loadgen.sender import Sending
from console.loadgen.servers import served
from console.loadgen.spans import span_figures
from console.loadgen.workload import (
    Conversations,
    LoadPlan,
    Workload,
    shared_prefix_share,
)
from serving.output import rounded

LATENCIES: Final[Mapping[str, str]] = {
    "ttft_ms": "TTFT",
    "second_gap_ms": "second-token gap",
    "itl_ms": "ITL",
    "tpot_ms": "TPOT",
    "e2e_ms": "E2E",
}
"""Fields of a summary, and their names for people."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of a search for goodput; see `goodput.search`."""

    wanted_attainment: float = 0.9
    tolerance: float = 0.05
    max_probes: int = 16


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of a benchmark."""

    targets: tuple[Target, ...]
    """Requests go to them in turn."""
    workload: Workload | Conversations
    rate: float = 0.0
    """Requests a second, as in `Workload.plan`, or conversations. A search begins at this rate."""
    repeats: int = 1
    seed: int = field(default_factory=lambda: secrets.randbits(31))
    """Seed of the first run; later runs count up from it."""
    model: str = ""
    """"": the only model served."""
    api_key: str = ""
    files: TlsFiles = NO_FILES
    """Files of TLS, for targets with grpcs:// and https:// alone."""
    vocabulary: int = 32_000
    force_length: bool = True
    senders: int = 1
    warm_ups: int = 4
    timeout_s: float = 120.0
    slo: Slo = field(default_factory=Slo)
    search: SearchOptions | None = None
    """None: no search, but `repeats` runs at `rate`."""
    idle_ttft_ms: float | None = None
    """Simulate a queue before one server that takes this long for each request."""
    max_lag_ms: float | None = None
    """Largest delay of the client, at the 99th percentile, in a valid result; None: a part of the
    time between tokens."""
    admin: str = ""
    """HOST:PORT of a router's admin port; spans are read there."""

    def __post_init__(self) -> None:
        if self.search and not self.slo.given:
            raise WrongUseError(
                "goodput needs a service level: --slo-ttft-ms, --slo-itl-p99-ms, ..."
            )
        if self.search and self.rate <= 0:
            raise WrongUseError("goodput needs a rate to begin with: --rate")


class Run(NamedTuple):
    """One run: its figures, and every request of it."""

    summary: Summary
    outcomes: Sequence[Outcome]
    turns: tuple[TurnFigures, ...] = ()
    """Figures of conversations, by turn."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a benchmark."""

    options: BenchOptions
    model: str
    dropped_rows: int
    """Requests of the trace that the model's context cannot hold."""
    shared_prefix_share: float
    """Share of the first run's prompt tokens that an ideal prefix cache would find."""
    runs: tuple[Run, ...]
    """All runs; the probes of a search."""
    found: Goodput | None = None
    spans: Mapping[str, Any] = field(default_factory=dict)
    began_unix_s: float = 0.0

    @property
    def complaints(self) -> tuple[str, ...]:
        """Reasons why the figures measure the client and not the server."""
        return tuple(
            f"run {number}: {complaint}"
            for number, run in enumerate(self.runs, 1)
            for complaint in run.summary.client.complaints
        )

    @property
    def bottleneck(self) -> str:
        """What the complaints blame."""
        busy = [run.summary.client.is_machine_busy for run in self.runs]
        complaining = [bool(run.summary.client.complaints) for run in self.runs]
        return "this machine is busy" if busy == complaining else "the client was the bottleneck"

    @property
    def unserved(self) -> str:
        """One line about the ends of all requests if none was served; else empty."""
        if any(run.summary.ok for run in self.runs):
            return ""
        became: Counter[str] = Counter()
        for run in self.runs:
            became.update(run.summary.statuses)
        words = " · ".join(f"{count:,} x {word}" for word, count in became.most_common())
        return f"none of {became.total():,} requests was served: {words}"

    @property
    def shown(self) -> tuple[Run, ...]:
        """The runs to show: all, or the one at which a search ended."""
        if self.found is None:
            return self.runs
        best = [run for run in self.runs if run.summary.offered_rate == self.found.rate]
        return tuple(best[-1:]) or self.runs[-1:]

    def ranges(self) -> dict[str, dict[str, tuple[float, float]]]:
        """The smallest and largest value of each percentile of each latency over the runs."""
        return {
            name: {
                quantile: (min(values), max(values))
                for quantile in ("p50", "p90", "p95", "p99")
                if (values := [getattr(one, quantile) for one in found])
            }
            for name in LATENCIES
            if (found := [one for run in self.runs if (one := getattr(run.summary, name))])
        }


class Watcher:
    """Hears of the progress of a benchmark; this one does nothing."""

    def run_begins(self, plan: LoadPlan) -> None:
        """Requests are being written and connections warmed up."""

    def on_progress(self, sent: int, ended: int) -> None:
        """Reports the number of requests sent and ended so far."""

    def run_ended(self, summary: Summary) -> None:
        """A run is over."""


def measure(options: BenchOptions, watcher: Watcher | None = None) -> Result:
    """Runs a benchmark.

    Raises:
        BenchError: the benchmark cannot run, or a sender process did not end.
        BatonError: a router does not answer.
    """
    watcher = watcher or Watcher()
    began_unix_s = time.time()
    models = [
        served(target, options.model, options.api_key, options.files) for target in options.targets
    ]
    context = min((one.max_context_tokens for one in models if one.max_context_tokens), default=0)
    workload, dropped = _fitting(options.workload, context)
    asked = Asked(
        *(models[0].model, options.force_length, options.timeout_s, options.api_key),
        files=options.files,
        ids=isinstance(options.workload, Conversations),
    )
    sending = Sending(options.targets, asked, options.vocabulary, options.warm_ups)
    seeds = itertools.count(options.seed)
    runs: list[Run] = []
    shares: list[float] = []
    with Fleet(options.senders, sending) as fleet:

        def run_at(rate: float) -> Summary:
            plan = workload.plan(rate, next(seeds))
            shares.append(shared_prefix_share(plan))
            watcher.run_begins(plan)
            runs.append(_run(fleet, plan, rate or plan.rate, options, watcher.on_progress))
            watcher.run_ended(runs[-1].summary)
            return runs[-1].summary

        found = None
        if search := options.search:
            found = goodput.search(run_at, options.rate, **asdict(search))
        else:
            for _ in range(options.repeats):
                run_at(options.rate)
    trace_ids = [one.trace_id for one in runs[-1].outcomes if one.trace_id]
    return Result(
        options=options,
        model=models[0].model,
        dropped_rows=dropped,
        shared_prefix_share=shares[0],
        runs=tuple(runs),
        found=found,
        spans=span_figures(options.admin, trace_ids) if options.admin else {},
        began_unix_s=began_unix_s,
    )


def _fitting(
    workload: Workload | Conversations, context: int
) -> tuple[Workload | Conversations, int]:
    """Drops requests of the trace that exceed the context; returns how many were dropped.
    Conversations are cut."""
    if isinstance(workload, Conversations):
        most = min(workload.context_tokens, context or workload.context_tokens)
        return replace(workload, context_tokens=most), 0
    if not workload.trace or not context:
        return workload, 0
    rows = workload.trace
    fit = tuple(row for row in rows if row.prompt_tokens + row.output_tokens <= context)
    if not fit:
        raise BenchError(f"the model's context of {context} tokens holds no request of the trace")
    return replace(workload, trace=fit), len(rows) - len(fit)


def _run(
    fleet: Fleet,
    plan: LoadPlan,
    rate: float,
    options: BenchOptions,
    on_progress: Callable[[int, int], None],
) -> Run:
    reports = fleet.run(plan, on_progress)
    simulated = _simulated(reports, options.idle_ttft_ms)
    summary = summarize(reports, plan.seed, rate, options.slo, options.max_lag_ms, simulated)
    outcomes = gathered(reports)
    if not plan.conversations:
        return Run(summary, outcomes)
    ids = [one.trace_id for one in outcomes if one.trace_id]
    on_decode = read_places(options.admin, ids) if options.admin else {}
    return Run(summary, outcomes, turn_figures(outcomes, on_decode))


def _simulated(reports: Sequence[SenderReport], idle_ttft_ms: float | None) -> Percentiles | None:
    """TTFT of one server with one queue, if requests came when they were really sent."""
    if idle_ttft_ms is None:
        return None
    sent_s = sorted(outcome.sent_s for outcome in gathered(reports))
    waits_s = single_server_waits_s(sent_s, [idle_ttft_ms / 1e3] * len(sent_s))
    return percentiles([1e3 * wait_s for wait_s in waits_s])


def as_json(result: Result) -> dict[str, Any]:
    """The result as JSON, without single requests."""
    options = result.options
    workload = options.workload
    complaints = [*filter(None, [result.unserved]), *result.complaints]
    return {
        "valid": not complaints,
        "complaints": complaints,
        "began_unix_s": round(result.began_unix_s, 3),
        "host": platform.node(),
        "targets": [f"{target.protocol}: {target.address}" for target in options.targets],
        "model": result.model,
        "workload": {
            "requests": len(result.runs[0].outcomes),
            **_workload_json(workload, result.dropped_rows),
            "rate": options.rate,
            "shared_prefix_share": round(result.shared_prefix_share, 4),
            "forced_lengths": options.force_length,
        },
        "slo": options.slo.given,
        "goodput": None if result.found is None else _goodput_json(result.found),
        "runs": [rounded(asdict(run.summary)) for run in result.runs],
        **_turns_json(result.runs),
        "ranges": rounded(result.ranges()),
        "spans": dict(result.spans),
    }


def request_lines(result: Result) -> Iterator[dict[str, Any]]:
    """One line for each request: its run, times, tokens and status. Times of an answer that is not
    complete are left out."""
    for number, run in enumerate(result.runs, 1):
        for one in run.outcomes:
            line = {
                "run": number,
                "sent_s": one.sent_s,
                "prompt_tokens": one.prompt_tokens,
                "output_tokens": one.tokens,
                "status": one.status,
            }
            times_s = one.times_s if one.ok else {}
            yield rounded({**line, **{f"{name}_ms": 1e3 * at for name, at in times_s.items()}})


def _workload_json(workload: Workload | Conversations, dropped_rows: int) -> dict[str, Any]:
    if isinstance(workload, Conversations):
        return asdict(workload)
    return {
        "prompt_tokens": None if workload.trace else workload.prompt_tokens,
        "output_tokens": None if workload.trace else workload.output_tokens,
        "trace_rows": len(workload.trace) - dropped_rows,
        "dropped_rows": dropped_rows,
        "arrivals": "trace" if workload.trace_arrivals else "poisson",
    }


def _turns_json(runs: Sequence[Run]) -> dict[str, Any]:
    if not any(run.turns for run in runs):
        return {}
    turns = [
        [rounded(one._asdict() | {"ttft_ms": asdict(one.ttft_ms)}) for one in run.turns]
        for run in runs
    ]
    later = (
        percentiles([1e3 * one.ttft_s for one in run.outcomes if one.ok and one.turn > 0])
        for run in runs
    )
    return {
        "turns": turns,
        "ttft_ms_from_turn_2": [rounded(asdict(one)) if one else None for one in later],
    }


def _goodput_json(found: Goodput) -> dict[str, Any]:
    return {
        "rate": found.rate,
        "missed_rate": found.missed_rate,
        "wanted_attainment": found.wanted_attainment,
        "probes": len(found.probes),
    }
