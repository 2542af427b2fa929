"""Puts a result into tables and words, for the terminal and for the report."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Final, NamedTuple

from baton.version import __version__
from console.loadgen.benchmark import LATENCIES, Result
from console.loadgen.report.goodput import Goodput
from console.loadgen.report.summary import Percentiles, Slo, Summary
from console.loadgen.report.turns import TurnFigures
from console.loadgen.workload import Conversations

SLO_NAMES: Final = {
    "ttft_ms": "TTFT",
    "itl_p99_ms": "ITL p99",
    "tpot_ms": "TPOT",
    "e2e_ms": "E2E",
}
_NONE: Final = "-"


class Words(NamedTuple):
    """A table of words."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def rate_text(rate: float) -> str:
    """A rate in words."""
    if not rate:
        return "one by one"
    return "1 request/s" if rate == 1 else f"{rate:.3g} requests/s"


def latency_table(summary: Summary) -> Words:
    """Percentiles of one run, ms."""
    rows = [_latency_row(label, getattr(summary, name)) for name, label in LATENCIES.items()]
    if summary.simulated_ttft_ms is not None:
        rows.insert(1, _latency_row("TTFT, simulated", summary.simulated_ttft_ms))
    head = ("ms", "mean", "p50", "p90", "p95", "p99", "max", "n")
    title = f"{rate_text(summary.offered_rate)}, seed {summary.seed}"
    return Words(title, head, tuple(rows))


def _latency_row(label: str, found: Percentiles | None) -> tuple[str, ...]:
    if found is None:
        return (label, *[_NONE] * 6, "0")
    values = (found.mean, found.p50, found.p90, found.p95, found.p99, found.max)
    return (label, *map(figure, values), f"{found.count:,}")


def turn_table(turns: Sequence[TurnFigures]) -> Words:
    """Conversations by turn. Shares are of the prompts' tokens, but for the last column."""
    names = sorted({name for one in turns for name in one.sources})
    traced = any(one.on_decode is not None for one in turns)
    head = ("turn", "n", "prompt", "TTFT p50", "p90", "p99", "cached", *names)
    rows = tuple(
        (
            *(str(one.turn), f"{one.requests:,}", f"{one.prompt_tokens:,.0f}"),
            *(figure(value) for value in (one.ttft_ms.p50, one.ttft_ms.p90, one.ttft_ms.p99)),
            f"{one.cached_share:.0%}",
            *(f"{one.sources.get(name, 0):.0%}" for name in names),
            *([_NONE if one.on_decode is None else f"{one.on_decode:.0%}"] if traced else []),
        )
        for one in turns
    )
    return Words("by turn, ms", (*head, *(["on decode"] if traced else [])), rows)


def figure(value: float) -> str:
    """Writes milliseconds in about six characters."""
    digits = 2 if value < 100 else 1 if value < 10_000 else 0
    return f"{value:.{digits}f}"


def facts(summary: Summary, slo: Slo) -> tuple[tuple[str, str], ...]:
    """Further facts about one run: names and sentences."""
    said = [
        ("served", _served(summary)),
        (
            "rates",
            f"{summary.request_rate:.2f} requests/s · {summary.input_token_rate:,.0f} prompt and "
            f"{summary.output_token_rate:,.0f} output tokens/s · "
            f"{summary.tokens_per_message:.2f} tokens a message",
        ),
    ]
    if summary.attainment is not None:
        within = f"{summary.attainment:.1%} of the requests, {summary.good_rate:.2f}/s"
        said.append(("SLO", f"{within} ({limits(slo)})"))
    return (*said, ("client", _client(summary)))


def _served(summary: Summary) -> str:
    errors = [f"{count:,} x {word}" for word, count in summary.statuses.items() if word != "OK"]
    served = f"{summary.ok:,} of {summary.requests:,} requests in {summary.wall_s:.1f} s"
    return " · ".join([served, *errors])


def _client(summary: Summary) -> str:
    client = summary.client
    processes = "process" if client.senders == 1 else "processes"
    said = [f"{client.senders} {processes}, busiest {client.busiest_cpu_share:.0%} of a core"]
    if client.lag_ms is not None:
        said.append(f"sent late p99 {client.lag_ms.p99:.1f} ms")
    if client.loop_lag_ms is not None:
        said.append(f"event loop late p99 {client.loop_lag_ms.p99:.1f} ms")
    return " · ".join(said)


def limits(slo: Slo) -> str:
    """The service levels in words."""
    return ", ".join(f"{SLO_NAMES[name]} <= {limit:g} ms" for name, limit in slo.given.items())


def probe_table(found: Goodput, slo: Slo) -> Words:
    """The runs of a search, by rate."""
    head = ("req/s", "requests", "served", "within", "TTFT p50", "p99", "ITL p50", "p99")
    rows = (
        (
            f"{probe.offered_rate:.3g}",
            f"{probe.requests:,}",
            f"{probe.ok:,}",
            f"{probe.attainment or 0.0:.1%}",
            *_p50_p99(probe.ttft_ms),
            *_p50_p99(probe.itl_ms),
        )
        for probe in found.by_rate()
    )
    title = f"goodput: {found.wanted_attainment:.0%} of the requests within {limits(slo)}"
    return Words(title, head, tuple(rows))


def _p50_p99(found: Percentiles | None) -> tuple[str, str]:
    return (_NONE, _NONE) if found is None else (f"{found.p50:,.1f}", f"{found.p99:,.1f}")


def goodput_text(found: Goodput) -> str:
    """The result of a search in one line."""
    if not found.rate:
        tried = found.by_rate()[0].offered_rate
        return f"no rate was sustained, down to {tried:.3g} requests/s"
    above = f"{found.missed_rate:.3g} were not" if found.missed_rate else "none tried was too high"
    return f"{found.rate:.3g} requests/s sustained; {above}"


def range_table(result: Result) -> Words:
    """The smallest and largest percentiles over the runs."""
    rows = (
        (
            LATENCIES[name],
            *(f"{figure(low)} - {figure(high)}" for low, high in by_quantile.values()),
        )
        for name, by_quantile in result.ranges().items()
    )
    title = f"range over {len(result.runs)} runs"
    return Words(title, ("ms", "p50", "p90", "p95", "p99"), tuple(rows))


def conditions(result: Result) -> tuple[tuple[str, str], ...]:
    """The conditions of a measurement: names and words."""
    options = result.options
    lengths = _lengths(result) + (", forced" if options.force_length else "")
    said = [
        ("endpoints", ", ".join(f"{t.protocol}: {t.address}" for t in options.targets)),
        ("lengths", lengths),
        ("arrivals", _arrivals(result)),
        ("prompt tokens shared", f"{result.shared_prefix_share:.1%}"),
        ("service levels", limits(options.slo) or "none"),
        ("first seed", str(options.seed)),
        ("warm-up", f"{options.warm_ups} requests of each client process before each run"),
        ("client", f"Baton {__version__} on {platform.node()}, {os.cpu_count()} cores"),
    ]
    if result.found is not None:
        said.insert(0, ("goodput", goodput_text(result.found)))
    return tuple(said)


def _lengths(result: Result) -> str:
    workload = result.options.workload
    if isinstance(workload, Conversations):
        return (
            f"{workload.conversations:,} conversations of {workload.turns} turns: "
            f"{workload.system_tokens:,} tokens first, messages of {workload.median_tokens:g} "
            f"(median) and {workload.p90_tokens:g} (p90), {workload.output_tokens:,} output tokens"
        )
    if not workload.trace:
        return f"{workload.prompt_tokens:,} prompt and {workload.output_tokens:,} output tokens"
    lengths = f"from a trace of {len(workload.trace):,} requests"
    if result.dropped_rows:
        lengths += f", {result.dropped_rows:,} of them too long for the model"
    return lengths


def _arrivals(result: Result) -> str:
    rate, workload = result.options.rate, result.options.workload
    if isinstance(workload, Conversations):
        begin = f"{rate:g} conversations/s begin" if rate else "all begin at once"
        return f"{begin}, {workload.think_s:g} s of thought on average between turns"
    if workload.trace_arrivals:
        own = "the trace's own times"
        return f"{own}, stretched to {rate:g} requests/s" if rate else own
    if result.found is not None:
        return "Poisson, open loop"
    return f"Poisson, {rate:g} requests/s, open loop" if rate else "one after another"
