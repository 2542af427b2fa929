"""`baton batch`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypedDict

import typer

from console.batching.server import Server, is_url
from console.commands.ask import TokenOption
from console.commands.tls_options import CaOption, CertOption, KeyOption, checked_files
from router.batching.journal import Journal
from router.batching.lines import read_lines
from router.batching.running import LOWEST_PRIORITY, run
from serving.output import stderr

DEFAULT_URL = "http://127.0.0.1:8000"


class _Rest(TypedDict):
    at_once: int
    priority: int
    on_line: Callable[[bool], None]


def batch(
    source: Annotated[
        Path,
        typer.Argument(metavar="IN.jsonl", help="Requests in OpenAI's batch format, one a line."),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUT.jsonl",
            help="Results. If the file is there, lines that have one are not run again.",
        ),
    ],
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="Router to ask, over HTTP.")
    ] = DEFAULT_URL,
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="FOLDER", help="Run this model in this process, without a router."
        ),
    ] = "",
    at_once: Annotated[
        int, typer.Option("--at-once", min=1, max=1024, help="Requests under way at once.")
    ] = 32,
    priority: Annotated[
        int,
        typer.Option(
            "--priority",
            min=-LOWEST_PRIORITY,
            max=LOWEST_PRIORITY,
            help="Priority of lines that set none: lower numbers run first, and others have 0.",
        ),
    ] = LOWEST_PRIORITY,
    token: TokenOption = "",
    ca: CaOption = "",
    cert: CertOption = "",
    key: KeyOption = "",
) -> None:
    """Run a file of requests (chats, completions, embeddings), and write their results.

    Started again after any end, kill -9 too, it goes on where it stopped. Exit code 1 means that
    it stopped, or that a line has failed, now or before.
    """
    if not is_url(url):
        wrong = f"a router is http://HOST:PORT or https://HOST:PORT, not {url!r}"
        raise typer.BadParameter(wrong, param_hint="--url")
    files = checked_files(ca, cert, key, url, "https://")
    if source.resolve() == target.resolve():
        raise typer.BadParameter("OUT.jsonl must be another file than IN.jsonl")
    total = sum(1 for _ in read_lines(source))
    with Journal(target) as journal, _bar(total, len(journal.done)) as advance:
        rest = _Rest(at_once=at_once, priority=priority, on_line=lambda _: advance())
        if model:
            from local.llm import LLM

            with LLM(model) as llm:
                llm.batch(source, journal, **rest)
        else:
            with Server(url, at_once, token, files) as server:
                asyncio.run(run(read_lines(source), journal, server.send, **rest))
    stderr.print(f"{total} lines have a result")
    if journal.failed:
        stderr.print(f"{journal.failed} of them failed: their results say why")
        raise typer.Exit(1)


@contextmanager
def _bar(total: int, done: int) -> Iterator[Callable[[], None]]:
    """Draws the progress on a terminal. Yields a callback for a line that is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = stderr.is_terminal
    with Progress(*columns, console=stderr, transient=True, disable=not shown) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda: bar.advance(task)
