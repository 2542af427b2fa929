"""Writes a result as one self-contained HTML file, and its plots as PNG files."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from string import Template
from typing import Final

from console.loadgen.benchmark import LATENCIES, Result
from console.loadgen.report.charts import DPI, figures
from console.loadgen.report.summary import Percentiles
from console.loadgen.report.tables import (
    Words,
    conditions,
    facts,
    latency_table,
    probe_table,
    range_table,
    rate_text,
)

PAGE_NAME: Final = "report.html"
_CAPTIONS: Final = {
    "goodput": "Goodput: share of requests within the service levels, and tails, over the rate.",
    "latency": "Share of requests (gaps) up to a latency. One line a run; the longest one in a "
    "thousand gaps is out of sight.",
    "timeline": "One run over its time.",
}


def write_report(result: Result, folder: Path) -> Path:
    """Writes `report.html` and one PNG a plot; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for name, figure in figures(result).items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI)
        (folder / f"{name}.png").write_bytes(buffer.getvalue())
        pictures.append(_picture(name, buffer.getvalue()))
    page = folder / PAGE_NAME
    page.write_text(_page(result, pictures), encoding="utf-8")
    return page


def _picture(name: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    caption = escape(_CAPTIONS[name])
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _page(result: Result, pictures: Sequence[str]) -> str:
    began = datetime.fromtimestamp(result.began_unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    addresses = ", ".join(target.address for target in result.options.targets)
    body = [
        _warning("nothing was served", [*filter(None, [result.unserved])]),
        _warning(result.bottleneck, result.complaints),
        _cards(result),
        pictures[0],
        *_tables(result),
        *pictures[1:],
        _section("How it was measured", _facts(conditions(result))),
    ]
    return _PAGE.substitute(
        model=escape(result.model),
        subtitle=escape(f"{began} · {addresses}"),
        body="\n".join(body),
    )


def _tables(result: Result) -> Iterator[str]:
    slo = result.options.slo
    if result.found is not None:
        yield _words(probe_table(result.found, slo))
        return
    for run in result.runs:
        yield _words(latency_table(run.summary), _facts(facts(run.summary, slo)))
    if len(result.runs) > 1:
        yield _words(range_table(result))


def _warning(why: str, complaints: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(complaint)}</li>" for complaint in complaints)
    title = f"<b>Not valid: {why}.</b>"
    return f'<div class="warning">{title}<ul>{items}</ul></div>' if complaints else ""


def _cards(result: Result) -> str:
    """The most important figures of the last run, or of the run at which a search ended."""
    summary = result.shown[-1].summary
    shown = [("requests served", f"{summary.ok:,} of {summary.requests:,}")]
    if result.found is not None:
        shown = [("goodput", rate_text(result.found.rate) if result.found.rate else "none")]
    for name in ("ttft_ms", "itl_ms", "second_gap_ms"):
        found: Percentiles | None = getattr(summary, name)
        if found is not None:
            label = f"{LATENCIES[name]} p50 / p99"
            shown.append((label, f"{found.p50:,.1f} / {found.p99:,.1f} ms"))
    if summary.attainment is not None:
        shown.append(("within the SLO", f"{summary.attainment:.1%}"))
    shown.append(("output tokens/s", f"{summary.output_token_rate:,.0f}"))
    cards = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for label, value in shown
    )
    return f'<div class="cards">{cards}</div>'


def _words(words: Words, below: str = "") -> str:
    titles = "".join(f"<th>{escape(title)}</th>" for title in words.head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in words.rows
    )
    table = f"<table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>"
    return _section(words.title, table + below)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _facts(said: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in said)
    return f"<dl>{items}</dl>"


_PAGE: Final = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$model: baton bench</title>
<style>
:root { --ink: #1f2933; --soft: #5f6b7a; --line: #d5dbe1; --tint: #f4f6f8; --accent: #2563a8; }
body { margin: 0; color: var(--ink); background: #fff; font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { margin: 0; font-size: 1.7rem; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .5rem; font-size: 1.15rem; }
h2::first-letter { text-transform: uppercase; }
.subtitle, figcaption, dl { color: var(--soft); font-size: .875rem; }
.subtitle { margin: .25rem 0 1.5rem; }
.cards { display: grid; gap: .75rem; }
.cards { grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); }
.cards div { background: var(--tint); border-top: 3px solid var(--accent); padding: .7rem .9rem; }
.cards b { display: block; font-size: 1.15rem; white-space: nowrap; }
.cards span { color: var(--soft); font-size: .8rem; }
table { width: 100%; border-collapse: collapse; font-size: .925rem; }
table, .cards b { font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; }
dt { color: var(--ink); }
dd { margin: 0; }
figure { margin: 2.5rem 0 0; }
img { width: 100%; height: auto; display: block; }
.warning { border: 2px solid #c2392b; background: #fdf1ef; padding: .75rem 1rem; }
.warning { margin-bottom: 1.5rem; }
.warning ul { margin: .25rem 0 0; }
</style>
</head>
<body><main>
<h1>$model</h1>
<p class="subtitle">$subtitle</p>
$body
</main></body>
</html>
""")
