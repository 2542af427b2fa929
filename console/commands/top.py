"""`baton top`: shows a router and its workers, live."""

from __future__ import annotations

import importlib.util
import time
from collections import deque
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.live import Live

from console.commands.tls_options import (
    CaOption,
    CertOption,
    KeyOption,
    read_admin_over,
)
from console.commands.trace import ROUTER_ADMIN_ADDRESS, AdminOption
from console.top.scrape import Scrape, TopError, scrape
from console.top.screen import WIDTH, draw
from console.top.view import View, view
from serving.installing import install_line
from serving.output import print_json, rounded

if TYPE_CHECKING:
    from collections.abc import Iterator

RATES_S: Final = 5.0
"""Rates cover about this time."""
ONCE_S: Final = 1.0
"""Time between the two scrapes of `--once`, which needs two for its rates."""


def top(
    admin: AdminOption = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    window: Annotated[
        float, typer.Option(min=1, help="Seconds that percentiles look back.")
    ] = 30.0,
    once: Annotated[
        bool,
        typer.Option("--once", help="Print it once: percentiles since the processes' start."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a look.")] = False,
    tls_ca: CaOption = "",
    tls_cert: CertOption = "",
    tls_key: KeyOption = "",
) -> None:
    """Watch a router and its workers: load, pages, steps, hand-offs, percentiles. Ctrl-C ends it.

    It reads the metrics that all of them serve. The router has the workers' addresses.

    Example: [cyan]baton top --admin ROUTER:9090[/]
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise TopError(f"this needs prometheus-client: {install_line('service')}")
    address = admin or ROUTER_ADMIN_ADDRESS
    read_admin_over(tls_ca, tls_cert, tls_key, address)
    looks = iter([_look_once(address)]) if once else _looks(address, interval, window)
    if as_json:
        for look in looks:
            print_json(rounded(asdict(look)))
        return
    console = Console(highlight=False)
    if console.width < WIDTH:
        console.width = WIDTH
    if once:
        console.print(draw(next(looks), address))
        return
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        for look in looks:
            live.update(draw(look, address), refresh=True)


def _look_once(address: str) -> View:
    first = scrape(address)
    time.sleep(ONCE_S)
    return view(scrape(address), None, first)


def _looks(address: str, interval_s: float, window_s: float) -> Iterator[View]:
    """Yields one view each `interval_s`, for ever. A router that answered once may come back."""
    past: deque[Scrape] = deque()
    last: View | None = None
    while True:
        began_s = time.monotonic()
        try:
            now = scrape(address)
        except TopError:
            if last is None:
                raise
            yield replace(last, silent_s=began_s - past[-1].at_s)
        else:
            last = _after(past, now, window_s + interval_s / 2)
            yield last
        time.sleep(max(0.0, interval_s - (time.monotonic() - began_s)))


def _after(past: deque[Scrape], now: Scrape, window_s: float) -> View:
    """Returns the view of a scrape, and adds the scrape to the past ones."""
    while past and now.at_s - past[0].at_s > window_s:
        past.popleft()
    recent = [one for one in past if now.at_s - one.at_s <= RATES_S] or list(past)[-1:]
    found = view(now, past[0] if past else None, recent[0] if recent else None)
    past.append(now)
    return found
