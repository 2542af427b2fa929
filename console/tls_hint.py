"""Tells a port that speaks HTTP/1, or TLS and was asked in clear or is not trusted, from one where
nothing answers."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import urllib.error
from typing import Final

_ADDRESS: Final = re.compile(r"ipv[46]:(\S+):(\d+)")
_TIMEOUT_S: Final = 1.0
"""It only improves an error message, so nobody should wait for it."""


def hint(message: str) -> str:
    """What to do about a failed call, if the address in gRPC's message speaks TLS or HTTP/1; else
    "". The other texts are those of gRPC."""
    if "refused" in message or (found := _ADDRESS.search(message)) is None:
        return ""
    host, port = found[1].strip("[]"), int(found[2])
    if "CERTIFICATE_VERIFY_FAILED" in message:
        return f"the certificate of the router at port {port} is not trusted: --tls-ca names its CA"
    if "Hostname Verification" in message:
        return f"the certificate of the router at port {port} is not of the name that was asked for"
    if "WRONG_VERSION_NUMBER" in message:
        return f"the router at port {port} speaks no TLS: name it without grpcs://"
    if "http1" in message:
        return (
            f"the server at port {port} speaks HTTP/1 and was asked by gRPC: name the port that "
            f"`baton up` prints as gRPC (for baton bench http://HOST:{port}/v1 does, too)"
        )
    if not _speaks_tls(host, port):
        return ""
    return f"the router there speaks TLS: name it as grpcs://HOST:{port} (--tls-ca for its CA)"


def over_http(error: Exception) -> str:
    """What is wrong with a URL whose request failed by an error that no later try mends; "" of any
    other error."""
    match error:
        case urllib.error.URLError(reason=Exception() as reason):
            return over_http(reason)
        case ssl.SSLCertVerificationError():
            return f"shows a certificate that is not trusted: {error.verify_message} (--tls-ca)"
        case ssl.SSLError(reason="WRONG_VERSION_NUMBER"):
            return "speaks no TLS: name it with http://"
        case http.client.RemoteDisconnected():
            return ""
        case http.client.BadStatusLine():
            return "does not speak HTTP/1 in clear: is this a router's HTTP port, without TLS?"
    return ""


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # It only looks, and sends nothing.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), _TIMEOUT_S) as opened,
            context.wrap_socket(opened, server_hostname=host),
        ):
            return True
    except ssl.SSLError as error:  # One that asks for a certificate speaks it, too.
        return "CERTIFICATE_REQUIRED" in str(error)
    except OSError:
        return False
