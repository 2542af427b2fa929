"""Draws a result as matplotlib figures. No display is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from console.loadgen.benchmark import Result, Run
from console.loadgen.outcome import Outcome
from console.loadgen.report.goodput import Goodput
from console.loadgen.report.summary import Slo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import ArrayLike

DPI: Final = 150
"""Sharp on screens with two pixels a point."""
_WIDTH_IN: Final = 10.5
"""As wide as the text of the report."""
_INK, _FAINT = "#1f2933", "#d5dbe1"
_BLUE, _ORANGE, _GREEN, _RED = "#2563a8", "#d9771f", "#2f8f5b", "#c2392b"
_STYLE: Final[Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "figure.facecolor": "white",
}
_BINS: Final = 60
"""Bins of the chart over time: a second each, of a run of a minute."""


def figures(result: Result) -> Mapping[str, Figure]:
    """All pictures of a result, by name."""
    shown = result.shown
    slo = result.options.slo
    with rc_context(_STYLE):
        drawn = {"latency": _latency(shown, slo), "timeline": _timeline(shown[-1], slo)}
        if result.found is not None:
            return {"goodput": _goodput(result.found), **drawn}
    return drawn


def _figure(rows: int, columns: int, height_in: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=DPI, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex="col" if rows > 1 else False)
    return figure, list(axes.flat)


def _latency(runs: Sequence[Run], slo: Slo) -> Figure:
    """Cumulative shares of requests and of gaps over the latency: one line a run."""
    figure, (first, gap, rest) = _figure(1, 3, 3.6)
    for run in runs:
        good = [outcome for outcome in run.outcomes if outcome.ok]
        gaps = [outcome.gaps_s for outcome in good if len(outcome.gaps_s)]
        label = run is runs[0]
        _share(first, [o.ttft_s for o in good], _BLUE, "TTFT" if label else "")
        _share(gap, np.concatenate(gaps) if gaps else [], _BLUE, "every gap (ITL)" if label else "")
        _share(gap, [g[0] for g in gaps], _ORANGE, "second token" if label else "")
        tpots = [o.tpot_s for o in good if o.tpot_s is not None]
        _share(rest, tpots, _GREEN, "TPOT" if label else "")
    titles = ("Time to first token", "Between messages", "Time per output token")
    for axes, title in zip((first, gap, rest), titles, strict=True):
        axes.set(title=title, xlabel="ms", ylim=(0, 1.02))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_xlim(left=0)
    _zoom(gap, [g for run in runs for o in run.outcomes if o.ok for g in o.gaps_s])
    _limit(first, slo.ttft_ms)
    _limit(gap, slo.itl_p99_ms)
    _limit(rest, slo.tpot_ms)
    if gap.lines:
        gap.legend(loc="center right")
    return figure


def _share(axes: Axes, seconds: ArrayLike, colour: str, label: str) -> None:
    values = np.sort(1e3 * np.asarray(seconds, dtype=np.float64))
    if values.size:
        shares = np.arange(1, values.size + 1) / values.size
        axes.step(values, shares, where="post", color=colour, linewidth=1.6, label=label or None)


def _zoom(axes: Axes, gaps_s: Sequence[float]) -> None:
    """Hides the longest one in a thousand gaps: they would flatten all others."""
    if gaps_s:
        axes.set_xlim(0, 1.3e3 * float(np.percentile(gaps_s, 99.9)))


def _limit(axes: Axes, limit_ms: float | None) -> None:
    """Marks a service level. A level far beyond all measured values is written at the edge."""
    if limit_ms is None:
        return
    _, right = axes.get_xlim()
    if limit_ms > 2 * right:
        text = f"SLO {limit_ms:g} \N{RIGHTWARDS ARROW}"
        axes.annotate(text, (0.99, 0.03), xycoords="axes fraction", ha="right", color=_RED)
        return
    axes.set_xlim(right=max(right, 1.05 * limit_ms))
    axes.axvline(limit_ms, color=_RED, linewidth=1, linestyle="--")
    _beside(axes, limit_ms, f"SLO {limit_ms:g}", _RED)


def _beside(axes: Axes, at: float, text: str, colour: str, **style: Any) -> None:
    """Writes beside the foot of an upright line, on the side with more room."""
    is_right = at < sum(axes.get_xlim()) / 2
    axes.annotate(
        text,
        (at, 0.03),
        (5 if is_right else -5, 0),
        textcoords="offset points",
        color=colour,
        ha="left" if is_right else "right",
        **style,
    )


def _timeline(run: Run, slo: Slo) -> Figure:
    """Three charts over time: first tokens, requests under way, tokens a second."""
    figure, (first, running, tokens) = _figure(3, 1, 6.4)
    good = [outcome for outcome in run.outcomes if outcome.ok]
    bad = [outcome for outcome in run.outcomes if not outcome.ok]
    dots: dict[str, Any] = {"s": 9, "color": _BLUE, "linewidths": 0, "clip_on": False}
    first.scatter([o.sent_s for o in good], [1e3 * o.ttft_s for o in good], **dots)
    if bad:
        crosses: dict[str, Any] = {"s": 22, "color": _RED, "marker": "x", "clip_on": False}
        first.scatter([o.sent_s for o in bad], [0.0] * len(bad), **crosses, label="failed")
    if slo.ttft_ms is not None:
        first.axhline(slo.ttft_ms, color=_RED, linewidth=1, linestyle="--", label="SLO")
    if bad or slo.ttft_ms is not None:
        first.legend(loc="upper left", ncols=2)
    first.set(title="Time to first token, by the time of sending", ylabel="ms")
    first.set_ylim(bottom=0)
    at_s, under_way = _under_way(run.outcomes)
    running.fill_between(at_s, under_way, step="post", color=_BLUE, alpha=0.25, linewidth=0)
    running.step(at_s, under_way, where="post", color=_BLUE, linewidth=1)
    running.set(title="Requests under way", ylim=(0, None))
    until_s = max(at_s)
    edges, rates = _token_rates(good, until_s)
    tokens.stairs(rates, edges, fill=True, color=_GREEN, alpha=0.6)
    tokens.set(title="Output tokens a second", xlabel="seconds", ylim=(0, None))
    tokens.set_xlim(0, until_s)
    return figure


def _under_way(outcomes: Sequence[Outcome]) -> tuple[Sequence[float], Sequence[int]]:
    begins = [(outcome.sent_s, 1) for outcome in outcomes]
    ends = [(outcome.ended_s, -1) for outcome in outcomes]
    changes = sorted(begins + ends)
    return [at_s for at_s, _ in changes], np.cumsum([change for _, change in changes]).tolist()


def _token_rates(outcomes: Sequence[Outcome], until_s: float) -> tuple[ArrayLike, ArrayLike]:
    """Bin edges in seconds, and tokens a second in each bin.

    A request's tokens are spread evenly over its messages."""
    edges = np.linspace(0.0, until_s, _BINS + 1)
    rates = np.zeros(_BINS)
    for outcome in outcomes:
        counts, _ = np.histogram(outcome.arrivals_s, edges)
        rates += counts * (outcome.tokens / len(outcome.arrivals_s) / edges[1])
    return edges, rates


def _goodput(found: Goodput) -> Figure:
    """Two charts over the rate: attainment and tail latencies."""
    figure, (share, tail) = _figure(1, 2, 3.8)
    probes = found.by_rate()
    rates = [probe.offered_rate for probe in probes]
    share.plot(rates, [probe.attainment or 0.0 for probe in probes], "o-", color=_BLUE)
    share.axhline(found.wanted_attainment, color=_RED, linewidth=1, linestyle="--")
    share.set(title="Requests within the SLO", xlabel="requests/s", ylim=(0, 1.05))
    share.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for label, field, colour in (("TTFT", "ttft_ms", _BLUE), ("ITL", "itl_ms", _ORANGE)):
        points = [(p.offered_rate, getattr(p, field).p99) for p in probes if getattr(p, field)]
        if points:
            tail.plot(*zip(*points, strict=True), "o-", color=colour, label=f"{label} p99")
    tail.set(title="Latency at the 99th percentile", xlabel="requests/s", ylabel="ms")
    tail.set_yscale("log")
    tail.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    tail.legend(loc="upper left")
    for axes in (share, tail):
        axes.set_xlim(left=0)
        if found.rate:
            axes.axvspan(0, found.rate, color=_GREEN, alpha=0.10, linewidth=0)
            axes.axvline(found.rate, color=_GREEN, linewidth=1.4)
    share.annotate(
        f"wanted: {found.wanted_attainment:.0%}",
        (0, found.wanted_attainment),
        (6, -13),
        textcoords="offset points",
        color=_RED,
    )
    if found.rate:
        _beside(share, found.rate, f"{found.rate:.3g}/s", _GREEN, fontweight="bold")
    return figure
