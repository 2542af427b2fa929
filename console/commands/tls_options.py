"""Options of commands that connect to a server with TLS."""

from __future__ import annotations

import urllib.request
from typing import Annotated

import typer

from baton.tls import TlsFiles, check_scheme

CaOption = Annotated[
    str,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        help="PEM file of the authorities to trust. Default: the system's.",
    ),
]
CertOption = Annotated[
    str,
    typer.Option(
        "--tls-cert", metavar="FILE", help="PEM file of a certificate to show, where one is wanted."
    ),
]
KeyOption = Annotated[
    str, typer.Option("--tls-key", metavar="FILE", help="PEM file of the certificate's key.")
]


def grpc_files(ca: str, cert: str, key: str, address: str) -> TlsFiles:
    """The files, for an address that is encrypted if there are any.

    Raises:
        typer.BadParameter: it is not.
    """
    return checked_files(ca, cert, key, address, "grpcs://", "@")


def checked_files(ca: str, cert: str, key: str, address: str, *schemes: str) -> TlsFiles:
    """Checks files for addresses with one of these schemes."""
    files = TlsFiles(ca, cert, key)
    try:
        check_scheme(address, files, *schemes)
        if any(files):
            files.client_context()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return files


def read_admin_over(ca: str, cert: str, key: str, admin: str) -> None:
    """Lets this process read `https://` addresses of admin ports by these files.

    Raises:
        typer.BadParameter: there are files, and the address is not encrypted.
    """
    files = checked_files(ca, cert, key, admin, "https://")
    if any(files):
        handler = urllib.request.HTTPSHandler(context=files.client_context())
        urllib.request.install_opener(urllib.request.build_opener(handler))
