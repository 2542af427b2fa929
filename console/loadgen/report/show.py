"""Shows a benchmark in the terminal: its progress, and its tables at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from console.loadgen.benchmark import LATENCIES, Result, Watcher
from console.loadgen.report.summary import Summary
from console.loadgen.report.tables import (
    Words,
    facts,
    goodput_text,
    latency_table,
    probe_table,
    range_table,
    rate_text,
    turn_table,
)
from console.loadgen.workload import LoadPlan
from serving.output import stderr


class ProgressBar(Watcher):
    """Draws one bar a run, and prints a line at its end."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("connecting", total=None, running=0)
        self._runs = 0

    def run_begins(self, plan: LoadPlan) -> None:
        """Starts a new bar."""
        self._runs += 1
        text = f"run {self._runs}: {rate_text(plan.rate)}"
        self._progress.reset(self._task, description=text, total=len(plan.requests), running=0)

    def on_progress(self, sent: int, ended: int) -> None:
        """Moves the bar."""
        self._progress.update(self._task, completed=ended, running=sent - ended)

    def run_ended(self, summary: Summary) -> None:
        """Prints one line about the run."""
        self._progress.console.print(f"run {self._runs}: {one_line(summary)}", style="dim")


@contextmanager
def progress_bar() -> Iterator[Watcher]:
    """Yields a watcher that draws on stderr."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} of {task.total} ended, {task.fields[running]} under way"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr, transient=True) as progress:
        yield ProgressBar(progress)


def one_line(summary: Summary) -> str:
    """One line about a run."""
    parts = [rate_text(summary.offered_rate), f"{summary.ok} of {summary.requests} served"]
    parts += [
        f"{LATENCIES[name]} p50 {found.p50:.1f}, p99 {found.p99:.1f} ms"
        for name in ("ttft_ms", "itl_ms")
        if (found := getattr(summary, name))
    ]
    if summary.attainment is not None:
        parts.append(f"{summary.attainment:.1%} within the SLO")
    return " · ".join(parts)


def render(result: Result) -> RenderableType:
    """All tables of a result."""
    parts: list[RenderableType] = []
    if result.found is not None:
        parts.append(_table(probe_table(result.found, result.options.slo)))
        parts.append(Text.assemble("  goodput  ", (goodput_text(result.found), "bold")))
    else:
        for run in result.runs:
            parts.append(_table(latency_table(run.summary)))
            if run.turns:
                parts.append(_table(turn_table(run.turns)))
            parts.append(_grid(facts(run.summary, result.options.slo)))
        if len(result.runs) > 1:
            parts.append(_table(range_table(result)))
    if result.unserved:
        parts.append(_warning("NOT VALID: nothing was served", result.unserved))
    if result.complaints:
        remedy = "More sender processes (--senders) or a quieter machine help."
        title = f"NOT VALID: {result.bottleneck}"
        parts.append(_warning(title, *result.complaints, remedy))
    return Group(*parts)


def _table(words: Words) -> Table:
    title = f"\n{words.title}"
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for number, name in enumerate(words.head):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in words.rows:
        table.add_row(*row)
    return table


def _grid(said: tuple[tuple[str, str], ...]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    for name, words in said:
        grid.add_row(f"  {name}", words)
    return grid


def _warning(title: str, *lines: str) -> Panel:
    return Panel("\n".join(lines), title=title, border_style="bold red", expand=False)
