"""Draws the figures on a terminal of at least 100 columns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from console.top.view import View, WorkerView

WIDTH: Final = 100
"""Width of the layout, columns."""
_NAME_WIDTH: Final = 12
_BAR_CELLS: Final = 8
_UNKNOWN: Final = "-"
_PAGE_LOOKS: Final = {
    "used": ("█", "green"),
    "granted": ("▓", "cyan"),
    "quarantined": ("X", "red"),
    "cached": ("▒", "bright_black"),
}
"""Glyph and colour by state. The glyphs differ, for terminals without colours."""
_ROLE_COLOURS: Final = {"prefill": "magenta", "decode": "green", "both": "magenta"}
_STATE_COLOURS: Final = {"unreachable": "yellow", "gone": "red"}


def draw(view: View, admin: str) -> RenderableType:
    """Draws the whole screen."""
    return Group(
        _head(view, admin),
        Text(),
        Columns([_requests(view), _latencies(view)], padding=(0, 4)),
        Text(),
        _workers(view),
        *_prompts(view),
        *_line(
            "wait for the slowest rank, a step",
            {worker.name: _ms(worker.rank_skew_ms) for worker in view.workers},
        ),
        *_line(
            "rows of the fullest rank's experts, of the mean",
            {worker.name: _hundredths(worker.fullest_experts) for worker in view.workers},
        ),
        *_line(
            "time that stages compute, first to last",
            {worker.name: _shares(worker.stage_shares) for worker in view.workers},
        ),
        *_line(
            "tokens a row and verified step",
            {worker.name: _tenths(worker.tokens_a_verify) for worker in view.workers},
        ),
        *_line(
            "adapters in use, of slots",
            {worker.name: _of(worker.adapter_slots) for worker in view.workers},
        ),
        *_line(
            "output tokens/s by adapter",
            {name: rate(by_adapter) for name, by_adapter in view.adapter_rates.items()},
        ),
        *([Text("\nbalance  ", "dim").append(view.balance)] if view.balance else []),
        *_notes(view),
    )


def _head(view: View, admin: str) -> Text:
    up = sum(worker.state != "gone" for worker in view.workers)
    window = "since the start" if view.window_s is None else f"last {view.window_s:.0f} s"
    left = f"baton top  {admin}  {up} worker{'' if up == 1 else 's'}"
    right = f"percentiles: {window}  {time.strftime('%H:%M:%S')}"
    text = Text(left, "bold")
    text.append(right.rjust(max(1, WIDTH - len(left))), "not bold dim")
    if view.silent_s:
        lost = f"\nthe router has not answered for {view.silent_s:.0f} s: what follows is older"
        text.append(lost, "bold red")
    return text


def _requests(view: View) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(justify="right")
    grid.add_row("under way", f"{view.inflight:,}")
    grid.add_row("queued", f"{view.queued_requests:,}")
    grid.add_row("queued tokens", f"{view.queued_tokens:,}")
    grid.add_row("requests/s", rate(view.request_rate))
    if len(view.method_rates) > 1:
        for method, by_method in view.method_rates.items():
            grid.add_row(f"  {_short(method)}", rate(by_method))
    grid.add_row("errors/s", _alarm(rate(view.error_rate), bool(view.error_rate)))
    grid.add_row("prompt tokens/s", rate(view.prompt_token_rate))
    grid.add_row("output tokens/s", rate(view.output_token_rate))
    again = f"{view.retries:,} / {view.failovers:,} / {view.rejections:,}"
    grid.add_row("retried/resumed/refused", again)
    grid.add_row("bad requests", f"{view.bad_requests:,}")
    grid.add_row("events behind", f"{view.events_behind:,}")
    return grid


def _short(method: str) -> str:
    """The name of a method: `responses`, `Generate`, `batch embeddings`."""
    batch = "batch " if method.startswith("BATCH ") else ""
    return batch + method.rpartition("/v1/")[2].rpartition(".")[2].rpartition("Service/")[2]


def _latencies(view: View) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("ms", style="dim", width=18, no_wrap=True)
    for name in ("p50", "p90", "p99", "n"):
        table.add_column(name, justify="right", width=8, no_wrap=True)
    for label, found in view.latencies.items():
        cells = (found.p50_ms, found.p90_ms, found.p99_ms)
        table.add_row(label, *map(milliseconds, cells), short(found.count))
    return table


def _workers(view: View) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("worker", width=_NAME_WIDTH, no_wrap=True)
    widths = {
        "run": 7,
        "wait": 4,
        "queued": 6,
        "prompt/s": 8,
        "out/s": 6,
        "step": 6,
        "p99": 6,
    }
    for name, width in widths.items():
        table.add_column(name, justify="right", width=width, no_wrap=True)
    table.add_column("KV pages", width=_BAR_CELLS + 5, no_wrap=True)
    for name, width in {"sent": 9, "expos.": 6, "gpu": 4}.items():
        table.add_column(name, justify="right", width=width, no_wrap=True)
    for worker in view.workers:
        table.add_row(*_row(worker))
    if not view.workers:
        table.add_row(Text("none", "dim"))
    return table


def _row(worker: WorkerView) -> list[RenderableType]:
    name = Text(worker.name, _ROLE_COLOURS.get(worker.role, ""), overflow="ellipsis")
    if worker.state != "up":
        return [name, *[_UNKNOWN] * 7, Text(worker.state, _STATE_COLOURS[worker.state])]
    return [
        name,
        f"{worker.running}/{worker.max_running}",
        _alarm(str(worker.waiting), worker.waiting > 0, "yellow"),
        short(worker.queued_prompt_tokens),
        rate(worker.prompt_token_rate),
        rate(worker.output_token_rate),
        milliseconds(worker.step.p50_ms),
        milliseconds(worker.step.p99_ms),
        _pages(worker.pages, worker.groups),
        _bytes_a_second(worker.sent_byte_rate),
        milliseconds(worker.exposed.p50_ms),
        _UNKNOWN if worker.gpu_share is None else f"{worker.gpu_share:.0%}",
    ]


def _pages(pages: dict[str, int], groups: dict[str, float]) -> Text:
    """A bar of the pool's pages by state, and the share that cannot be granted. Below it each group
    of layers, where there are several, and the share of its pages that is in use."""
    total = max(1, sum(pages.values()))
    bar = Text()
    for state, (glyph, colour) in _PAGE_LOOKS.items():
        if count := pages[state]:
            bar.append(glyph * max(1, round(_BAR_CELLS * count / total)), colour)
    bar.truncate(_BAR_CELLS)
    bar.append("░" * (_BAR_CELLS - len(bar)), "bright_black")
    held = total - pages["free"] - pages["cached"]
    bar.append(f"{held / total:5.0%}")
    for group, share in sorted(groups.items()):
        name = group.replace("window-", "win-")[:_BAR_CELLS]
        bar.append(f"\n{name:<{_BAR_CELLS}}{share:5.0%}", "bright_black")
    return bar


def _prompts(view: View) -> list[Text]:
    """Where the prompts' tokens came from, and what was fetched from peers."""
    found: Counter[str] = Counter()
    for worker in view.workers:
        found.update(worker.found)
    total = sum(found.values()) + sum(worker.computed for worker in view.workers)
    if not total:
        return []
    shares = [f"{source} {tokens / total:.0%}" for source, tokens in found.most_common()]
    text = Text("\nprompt tokens  ", "dim").append(", ".join([*shares, "the rest computed"]))
    rates = [w.fetched_byte_rate for w in view.workers if w.fetched_byte_rate is not None]
    if "peer" in found and rates:
        text.append(f"  fetched {_bytes_a_second(sum(rates))}")
    return [text]


def _line(title: str, values: Mapping[str, str]) -> list[Text]:
    """What some workers alone have: a value by worker, empty where there is none."""
    shown = ", ".join(f"{name} {value}" for name, value in values.items() if value)
    return [Text(f"\n{title}  ", "dim").append(shown)] if shown else []


def _ms(value: float | None) -> str:
    return "" if value is None else f"{milliseconds(value)} ms"


def _of(counts: tuple[int, int] | None) -> str:
    return "" if counts is None else f"{counts[0]}/{counts[1]}"


def _shares(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.0%}" for value in values)


def _hundredths(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _tenths(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _notes(view: View) -> list[Text]:
    """A legend of the bar, and a line for each problem."""
    legend = Text("\n")
    for state, (glyph, colour) in _PAGE_LOOKS.items():
        legend.append(f"{glyph} ", colour).append(f"{state}  ", "dim")
    notes = [legend.append("· step and exposed in ms, p50", "dim")]
    if view.most_routers > view.routers:
        text = f"requests and latencies are of {view.routers} of {view.most_routers} routers: "
        notes.append(Text(f"{text}name all with --admin, and commas between", "yellow"))
    for worker in view.workers:
        if worker.state == "unreachable":
            where = worker.admin or "an address that it has not announced"
            text = f"{worker.name} serves, but its metrics at {where} do not answer from here"
            notes.append(Text(text, "yellow"))
        bad = {k: n for k, n in worker.transfers.items() if k in ("failed", "aborted") and n}
        if bad or worker.preemptions:
            bad |= {"preempted": worker.preemptions} if worker.preemptions else {}
            said = ", ".join(f"{count:,} {what}" for what, count in bad.items())
            notes.append(Text(f"{worker.name}: {said} since its start", "yellow"))
        if stuck := {what: count for what, count in worker.overdue.items() if count}:
            said = ", ".join(f"{count:,} {what}" for what, count in stuck.items())
            notes.append(Text(f"{worker.name}: {said} overdue: see `baton doctor`", "red"))
    return notes


def _alarm(text: str, wrong: bool, colour: str = "red") -> Text:
    return Text(text, colour if wrong else "")


def rate(value: float | None) -> str:
    """Writes a rate a second in at most six characters."""
    if value is None:
        return _UNKNOWN
    return f"{value:.1f}" if value < 100 else short(value)


def short(value: float) -> str:
    """Writes a count in at most six characters."""
    for limit, divisor, unit in ((1e5, 1, ""), (1e8, 1e3, "k"), (1e11, 1e6, "M")):
        if value < limit:
            return f"{value / divisor:,.0f}{unit}"
    return f"{value / 1e9:,.0f}G"


def milliseconds(value: float | None) -> str:
    """Writes milliseconds in at most six characters."""
    if value is None:
        return _UNKNOWN
    digits = 2 if value < 10 else 1 if value < 1000 else 0
    return f"{value:.{digits}f}"


def _bytes_a_second(value: float | None) -> str:
    """Writes bytes a second in at most nine characters."""
    if value is None:
        return _UNKNOWN
    units = ["B/s", "kB/s", "MB/s"]
    while value >= 999.5 and units:
        value /= 1000
        units.pop(0)
    return f"{value:.{1 if 0 < value < 99.95 else 0}f} {units[0] if units else 'GB/s'}"
