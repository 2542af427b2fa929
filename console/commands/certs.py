"""`baton certs`: makes the certificates of a cluster."""

from __future__ import annotations

import importlib.util
import ipaddress
import re
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.markup import escape

from serving.installing import install_line
from serving.net.tls import TlsError
from serving.output import stdout

POOLS: Final = ("prefill", "decode", "both")
AUTHORITY_DAYS: Final = 3650
"""No certificate outlives a new authority, which is valid for so long."""
_LABEL: Final = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST: Final = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*")
"""A name of DNS, in ASCII; the first label may stand for any."""


def certs(
    folder: Annotated[Path, typer.Argument(help="Folder for the certificates.", file_okay=False)],
    pool: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Pool of workers, which are named NAME-... and share a certificate. Repeat it for "
            f"several. Default: {', '.join(POOLS)}.",
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name or address at which clients reach the router. Repeat it for several; "
            "localhost is one anyway.",
        ),
    ] = None,
    days: Annotated[
        float, typer.Option(min=0.001, max=AUTHORITY_DAYS, help="How long they are valid.")
    ] = 365,
) -> None:
    """Make the certificates of a cluster: for the router, and for each pool of workers.

    Each gets a folder with ca.pem, cert.pem and key.pem. Give a process its own folder alone. The
    folder `authority` has the key that signs all of them: keep it off the servers. Called again,
    the command replaces the certificates, and running processes take the new ones.

    Example: [cyan]baton certs ./certs --host baton.example[/]
    """
    if importlib.util.find_spec("cryptography") is None:
        raise TlsError(f"this needs cryptography: {install_line('certs')}")
    from serving.net.certificates import write_set

    for name in pool or POOLS:
        if name in ("authority", "router", "baton-router") or "*" in name or not _is_host(name):
            raise typer.BadParameter(f"{name!r} cannot be a pool's name", param_hint="--pool")
    for name in host or ():
        if not _is_host(name):
            wrong = f"{name!r} is no address, and no name of a host in ASCII"
            raise typer.BadParameter(wrong, param_hint="--host")
    try:
        written = write_set(folder, pool or POOLS, host or (), days)
    except ValueError as error:
        raise TlsError(str(error)) from None
    for one in written:
        stdout.print(escape(str(one)), soft_wrap=True)


def _is_host(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return bool(_HOST.fullmatch(name))
