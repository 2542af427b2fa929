"""Opens channels from clients to a router, in clear or over TLS.

An address is HOST:PORT, or grpcs://HOST:PORT for TLS. Files say whom to trust. Without one gRPC
trusts its own list of authorities, or that in the file that GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names.
A proxy of the environment (`http_proxy`) is taken as gRPC does, but for addresses of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import grpc
import grpc.aio

from baton.addresses import host_of, is_loopback, port_of
from baton.grpc_options import NO_PROXY
from baton.tls import NO_FILES, TlsFiles, check_scheme

TLS_SCHEME: Final = "grpcs://"

_SCHEMES: Final = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")

ChannelOptions = Sequence[tuple[str, int | str]]
C = TypeVar("C")


def check_address(address: str) -> str:
    """Returns the address if it is valid.

    gRPC itself would accept others in silence: it uses port 443 if none is given, and wraps a port
    number that is too large.

    Raises:
        ValueError: it is neither HOST:PORT nor a target with one of gRPC's schemes.
    """
    host_port = address.removeprefix(TLS_SCHEME)
    if not host_port.startswith(_SCHEMES) and not port_of(host_port):
        raise ValueError(f"an address is HOST:PORT or {TLS_SCHEME}HOST:PORT, not {address!r}")
    return address


def open_channel(
    address: str, options: ChannelOptions = (), files: TlsFiles = NO_FILES
) -> grpc.Channel:
    """Opens a channel, which connects on first use.

    Raises:
        ValueError: the address is malformed, or the files do not fit it or each other.
        OSError: a file cannot be read.
    """
    return _open(address, options, files, grpc.insecure_channel, grpc.secure_channel)


def open_aio_channel(
    address: str, options: ChannelOptions = (), files: TlsFiles = NO_FILES
) -> grpc.aio.Channel:
    """Does the same for the running event loop."""
    return _open(address, options, files, grpc.aio.insecure_channel, grpc.aio.secure_channel)


def _open(
    address: str,
    options: ChannelOptions,
    files: TlsFiles,
    in_clear: Callable[[str, ChannelOptions], C],
    over_tls: Callable[[str, grpc.ChannelCredentials, ChannelOptions], C],
) -> C:
    check_address(address)
    check_scheme(address, files, TLS_SCHEME)
    host_port = address.removeprefix(TLS_SCHEME)
    if is_loopback(host_of(host_port)):
        options = [*options, NO_PROXY]
    if host_port != address:
        made = files.channel_credentials() if any(files) else grpc.ssl_channel_credentials()
        name = [("grpc.ssl_target_name_override", files.name)] if files.name else []
        return over_tls(host_port, made, [*options, *name])
    return in_clear(address, options)
