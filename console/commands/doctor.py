"""`baton doctor`: finds problems and says what to do about them."""

from __future__ import annotations

import importlib.util
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape

from console.commands.tls_options import (
    CaOption,
    CertOption,
    KeyOption,
    read_admin_over,
)
from console.commands.trace import ROUTER_ADMIN_ADDRESS, AdminOption
from console.doctor.finding import Finding, Level, warning
from serving.installing import install_line
from serving.output import stderr, stdout

if TYPE_CHECKING:
    from console.doctor.cluster import Path

WIDTH: Final = 100
"""Columns of the output: it is read in terminals and pasted into issues."""
_MARKS: Final = {
    Level.OK: "[green]ok   [/]",
    Level.WARNING: "[yellow]warn [/]",
    Level.ERROR: "[bold red]ERROR[/]",
}
_INDENT: Final = 22
"""Columns before a finding: mark and name stand there."""


def doctor(
    admin: AdminOption = None,
    model: Annotated[
        str, typer.Option(help="Check this model's folder or GGUF file, and nothing else.")
    ] = "",
    self_test: Annotated[
        bool, typer.Option(help="Push pages between two agents on this machine.")
    ] = True,
    tls_ca: CaOption = "",
    tls_cert: CertOption = "",
    tls_key: KeyOption = "",
) -> None:
    """Look for problems that stop Baton or slow it down here, and say what to do.

    It checks this machine, measures the KV transport on it, and checks the cluster behind a router:
    its workers, the paths between them, and transfers that hang. Exit code 1 means an error.

    With --model it says of a folder whether the model runs here, how, and how much memory is left
    for KV. No weights are read.

    Examples: [cyan]baton doctor --admin ROUTER:9090[/], [cyan]baton doctor --model FOLDER[/]
    """
    levels: Counter[Level] = Counter()
    if model:
        levels += _show_model(model)
    else:
        read_admin_over(tls_ca, tls_cert, tls_key, admin or ROUTER_ADMIN_ADDRESS)
        levels += _show_machine(self_test)
        levels += _show_cluster(admin)
    errors, warnings = levels[Level.ERROR], levels[Level.WARNING]
    stdout.print(f"\nerrors: {errors}, warnings: {warnings}")
    if errors:
        raise typer.Exit(1)


def _show_model(name: str) -> Counter[Level]:
    title = f"model {name}"
    if importlib.util.find_spec("torch") is None:
        return _show(title, [warning("model", "not looked at", install_line("service"))])
    from console.doctor.model import check_model

    return _show(title, check_model(name))


def _show_machine(self_test: bool) -> Counter[Level]:
    from console.doctor.host import check_host
    from console.doctor.path import check_path

    levels = _show("this machine", check_host())
    return levels + _show("KV transport", check_path()) if self_test else levels


def _show_cluster(admin: str | None) -> Counter[Level]:
    address = admin or ROUTER_ADMIN_ADDRESS
    title = f"cluster at {address}"
    if importlib.util.find_spec("prometheus_client") is None:
        missing = warning("router", "not looked at", install_line("service"))
        return _show(title, [missing])
    from console.doctor.cluster import check_cluster

    seen = check_cluster(address, expected=admin is not None)
    levels = _show(title, seen.findings)
    _show_paths(seen.paths)
    return levels


def _show(title: str, findings: Iterable[Finding]) -> Counter[Level]:
    """Prints findings as they come. Returns the number of findings of each level."""
    stdout.print(f"\n[bold]{escape(title)}[/]")
    levels: Counter[Level] = Counter()
    for finding in _awaited(title, findings):
        levels[finding.level] += 1
        found, *more = _wrapped(finding.found)
        stdout.print(f"  {_MARKS[finding.level]} {escape(finding.subject):<13} {escape(found)}")
        for line in more:
            stdout.print(" " * _INDENT + escape(line))
        for line in _wrapped(f"-> {finding.advice}") if finding.advice else ():
            stdout.print(" " * _INDENT + f"[cyan]{escape(line)}[/]")
    return levels


def _awaited(title: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings. While one is awaited, the terminal says what is looked at."""
    waiting = iter(findings)
    while True:
        with stderr.status(f"looking at {title}"):
            if (finding := next(waiting, None)) is None:
                return
        yield finding


def _show_paths(paths: Sequence[Path]) -> None:
    if not paths:
        return
    stdout.print("\n[bold]paths between workers[/]")
    stdout.print(f"  {'from':<18} {'to':<18} {'transport':<14} {'GB/s':>7} {'us a page':>10}")
    for path in paths:
        speed = f"{path.gigabytes_per_s:.2f}" if path.gigabytes_per_s else "-"
        latency = f"{path.latency_us:.0f}" if path.latency_us else "-"
        line = (
            f"  {path.source[:18]:<18} {path.target[:18]:<18} {path.transport or '-':<14} "
            f"{speed:>7} {latency:>10}  {path.cause}"
        )
        stdout.print(escape(line.rstrip()))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - _INDENT, subsequent_indent="   " * text.startswith("->"))
