"""`baton health`: asks whether a process serves."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.addresses import ROUTER_ADDRESS
from console.commands.tls_options import CaOption, CertOption, KeyOption, grpc_files
from serving.output import stdout


def health(
    address: Annotated[
        str,
        typer.Argument(
            help="HOST:PORT of a router or worker (grpcs://HOST:PORT with TLS), or @FILE with it."
        ),
    ] = ROUTER_ADDRESS,
    service: Annotated[
        str, typer.Option(help="Full name of a gRPC service. Default: the process as such.")
    ] = "",
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds.")] = 2.0,
    tls_ca: CaOption = "",
    tls_cert: CertOption = "",
    tls_key: KeyOption = "",
    tls_name: Annotated[
        str,
        typer.Option(metavar="NAME", help="Name in the certificate, if not the address's host."),
    ] = "",
) -> None:
    """Ask a router or a worker whether it serves. Exit code 0 means yes.

    Probes run [cyan]python -m console.health ADDRESS[/], which does the same and starts
    faster.

    Example: [cyan]baton health HOST:50051 --service baton.inference.v1.InferenceService[/]
    """
    from console.health import SERVING, check_at

    files = grpc_files(tls_ca, tls_cert, tls_key, address)
    try:
        status = check_at(address, service, timeout, files._replace(name=tls_name))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    stdout.print(status)
    if status != SERVING:
        raise typer.Exit(1)
