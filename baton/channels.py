"""Channels from clients to a router, in clear or through a proxy that ends TLS before it.

An address is HOST:PORT, or grpcs://HOST:PORT for TLS. Which certificates are trusted is gRPC's own
affair: those that come with it, or the file that GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import grpc
import grpc.aio

TLS_SCHEME: Final = "grpcs://"

ChannelOptions = Sequence[tuple[str, int | str]]


def open_channel(address: str, options: ChannelOptions = ()) -> grpc.Channel:
    """A channel that connects when it is first used."""
    if (host_port := address.removeprefix(TLS_SCHEME)) != address:
        return grpc.secure_channel(host_port, grpc.ssl_channel_credentials(), options=options)
    return grpc.insecure_channel(address, options=options)


def open_aio_channel(address: str, options: ChannelOptions = ()) -> grpc.aio.Channel:
    """The same for the running event loop."""
    if (host_port := address.removeprefix(TLS_SCHEME)) != address:
        return grpc.aio.secure_channel(host_port, grpc.ssl_channel_credentials(), options=options)
    return grpc.aio.insecure_channel(address, options=options)
