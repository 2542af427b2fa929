"""`baton trace`: draws a request's waterfall from its spans."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import typer

from baton.addresses import port_of
from console.commands.tls_options import (
    CaOption,
    CertOption,
    KeyOption,
    read_admin_over,
)
from console.tracing.traces import fetch
from console.tracing.waterfall import draw
from serving.output import stdout

ROUTER_ADMIN_ADDRESS = "127.0.0.1:9090"


def checked_admin(given: str | None) -> str | None:
    """The addresses of admin ports, without what a URL of one has around it.

    Raises:
        typer.BadParameter: one is neither HOST:PORT nor has https:// before it.
    """
    addresses = [
        one.strip().removeprefix("http://").rstrip("/") for one in (given or "").split(",")
    ]
    for one in addresses if given else ():
        scheme, host = urlsplit(one)[:2]
        if not port_of(one) and (scheme != "https" or not host):
            wrong = f"an admin address is HOST:PORT or https://HOST:PORT, not {one!r}"
            raise typer.BadParameter(wrong)
    return ",".join(addresses) if given else given


AdminOption = Annotated[
    str | None,
    typer.Option(
        "--admin",
        callback=checked_admin,
        envvar="BATON_ROUTER_ADMIN",
        metavar="HOST:PORT",
        help=f"The router's admin address. Default: {ROUTER_ADMIN_ADDRESS}. Separate several by "
        "commas; the first one has the traces. https://HOST:PORT where a proxy with TLS stands "
        "before it.",
    ),
]


def trace(
    trace_id: Annotated[str | None, typer.Argument(help="Default: the latest request's.")] = None,
    admin: AdminOption = None,
    tls_ca: CaOption = "",
    tls_cert: CertOption = "",
    tls_key: KeyOption = "",
) -> None:
    """Draw a request's waterfall from the spans that the router keeps.

    The router keeps them when it runs with --trace-store, as under [cyan]baton up[/]. Where
    JAEGER_URL is set, a Jaeger is asked instead.

    Example: [cyan]baton trace 0af7651916cd43dd8448eb211c80319c[/]
    """
    read_admin_over(tls_ca, tls_cert, tls_key, admin or ROUTER_ADMIN_ADDRESS)
    show_trace(trace_id, admin)


def show_trace(trace_id: str | None, admin: str | None) -> None:
    """Fetches and draws one trace.

    Raises:
        TraceError: the trace is not found.
    """
    first, _, _ = (admin or ROUTER_ADMIN_ADDRESS).partition(",")
    stdout.print(draw(fetch(first, trace_id)))
