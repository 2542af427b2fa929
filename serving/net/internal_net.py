"""Connections between routers and workers: in clear, or with a certificate at both ends.

Names in a certificate say who may do what:

- The URI `baton://router` marks routers. A worker serves no one else.
- The DNS name `baton-router` marks routers, too: workers demand it where they connect, because a
  client of gRPC's can ask for DNS names alone.
- A worker's DNS name is its `--name`. `decode-*` stands for all names that begin with `decode-`, so
  that replicas share a certificate. It needs the DNS name `decode` beside it, which routers demand
  where they connect, because TLS knows no such wildcards.

The address of a connection plays no part, so certificates need no addresses of routers or workers.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

import grpc
import grpc.aio

from baton.addresses import host_of, is_loopback
from baton.tls import TlsFiles
from serving.net.refusals import Refusals
from serving.net.tls import (
    Certificate,
    Rotating,
    TlsError,
    read_member,
    server_credentials,
)

ROUTER_URI: Final = "baton://router"
ROUTER_NAME: Final = "baton-router"
ROUTERS_SCHEME: Final = "grpcs://"
"""Scheme of an address for spans that is a router's internal port."""
Options = Sequence[tuple[str, Any]]


class Admission(NamedTuple):
    """Whether a worker may have the name that it announced."""

    refusal: str = ""
    """Why not; "" if it may."""
    server_name: str = ""
    """The DNS name that its own port must show; "" in clear."""


class InternalNet(Protocol):
    """How a process reaches the routers and workers of its cluster, and is reached by them."""

    @property
    def version(self) -> int:
        """Grows when channels should be opened anew, because a certificate was replaced."""
        ...

    refusals: Refusals
    """Peers that were refused."""

    async def watch(self) -> None:
        """Watches the certificate and those who connect, until cancelled."""
        ...

    def bind(self, server: grpc.Server | grpc.aio.Server, address: str) -> str:
        """Binds a server; returns the bound address. Raises RuntimeError."""
        ...

    def open_aio(self, address: str, server_name: str, options: Options = ()) -> grpc.aio.Channel:
        """Opens a channel of the running event loop to a server that shows that name."""
        ...

    def open(self, address: str, server_name: str, options: Options = ()) -> grpc.Channel:
        """Opens a channel for threads."""
        ...

    def admit(self, context: Any, name: str) -> Admission:
        """Whether the caller may call itself a worker of that name."""
        ...

    def not_a_router(self, context: Any) -> str:
        """The reason why the caller is no router; "" if it is one."""
        ...

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of a channel, as the certificate is now; None in clear."""
        ...

    def hello(self) -> bytes:
        """Bytes that make a living server answer; b"" if it speaks first."""
        ...


class ClearNet:
    """Trusts everybody who reaches the process."""

    version = 0

    def __init__(self, refusals: Refusals | None = None) -> None:
        self.refusals = refusals or Refusals()

    async def watch(self) -> None:
        """See `InternalNet`."""

    def bind(self, server: grpc.Server | grpc.aio.Server, address: str) -> str:
        """See `InternalNet`."""
        return _bound(address, server.add_insecure_port(address))

    def open_aio(self, address: str, server_name: str, options: Options = ()) -> grpc.aio.Channel:
        """See `InternalNet`."""
        return grpc.aio.insecure_channel(address, options)

    def open(self, address: str, server_name: str, options: Options = ()) -> grpc.Channel:
        """See `InternalNet`."""
        return grpc.insecure_channel(address, options)

    def admit(self, context: Any, name: str) -> Admission:
        """See `InternalNet`."""
        return Admission()

    def not_a_router(self, context: Any) -> str:
        """See `InternalNet`."""
        return ""

    def credentials(self) -> grpc.ChannelCredentials | None:
        """See `InternalNet`."""
        return None

    def hello(self) -> bytes:
        """See `InternalNet`."""
        return b""


class TlsNet:
    """Trusts the holders of certificates of one authority, each as its names say.

    Args:
        files: this process's certificate.
        refusals: counts those who are refused.
        lacks: what a certificate lacks to be this process's; "" if nothing. Also one that takes
            the place of another is asked.

    Raises:
        TlsError: the certificate is not valid, or not this process's.
    """

    def __init__(
        self,
        files: TlsFiles,
        refusals: Refusals,
        lacks: Callable[[Certificate], str] = lambda _: "",
    ) -> None:
        def read(files: TlsFiles) -> Certificate:
            found = read_member(files)
            if lacking := lacks(found):
                raise TlsError(f"{files.cert} {lacking}")
            return found

        self.rotating = Rotating(files, read, Certificate.for_grpc)
        self.refusals = refusals

    async def watch(self) -> None:
        """See `InternalNet`."""
        await asyncio.gather(self.rotating.watch(), self.refusals.watch())

    @property
    def version(self) -> int:
        """See `InternalNet`."""
        self.rotating.now()
        return self.rotating.version

    def bind(self, server: grpc.Server | grpc.aio.Server, address: str) -> str:
        """See `InternalNet`."""
        credentials = server_credentials(
            self.rotating.now, needs_client=True, began=self.refusals.began
        )
        self.refusals.port = server.add_secure_port(address, credentials)
        return _bound(address, self.refusals.port)

    def open_aio(self, address: str, server_name: str, options: Options = ()) -> grpc.aio.Channel:
        """See `InternalNet`."""
        return grpc.aio.secure_channel(
            address, self.credentials(), [*options, ("grpc.ssl_target_name_override", server_name)]
        )

    def open(self, address: str, server_name: str, options: Options = ()) -> grpc.Channel:
        """See `InternalNet`."""
        return grpc.secure_channel(
            address, self.credentials(), [*options, ("grpc.ssl_target_name_override", server_name)]
        )

    def admit(self, context: Any, name: str) -> Admission:
        """See `InternalNet`."""
        server_name = server_name_of(_auth_values(context, "peer_dns"), name)
        if not server_name:
            return Admission(f"its certificate is not of that name, but of {_shown(context)}")
        return Admission("", server_name)

    def not_a_router(self, context: Any) -> str:
        """See `InternalNet`."""
        if ROUTER_URI in _auth_values(context, "peer_uri"):
            return ""
        return f"its certificate lacks {ROUTER_URI}: it is of {_shown(context)}"

    def hello(self) -> bytes:
        """See `InternalNet`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols(["h2"])
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        with suppress(ssl.SSLWantReadError):
            context.wrap_bio(incoming, outgoing, server_hostname=ROUTER_NAME).do_handshake()
        return outgoing.read()

    def credentials(self) -> grpc.ChannelCredentials:
        """See `InternalNet`."""
        self.rotating.now()
        return self.rotating.certificate.for_channel()


UNTRUSTED: Final = ("handshake failed", "verification check failed")
"""gRPC's texts for a server whose certificate is not valid, or not of the name that is wanted."""


def is_untrusted(details: str | None) -> bool:
    """Whether a connection broke because the server's certificate was not as it should be, by the
    details of gRPC's error."""
    return any(text in (details or "").lower() for text in UNTRUSTED)


def server_name_of(names: frozenset[str], name: str) -> str:
    """The DNS name that a worker's port must show, by the names in its certificate.

    Returns:
        The name itself if it is one of them; of `decode-*` the part before, if that is one of them,
        too; else "".
    """
    if name in names:
        return name
    stems = (one.removesuffix("-*") for one in names if one.endswith("-*"))
    return next((stem for stem in stems if stem in names and name.startswith(f"{stem}-")), "")


def agent_name(worker: str, epoch: int) -> str:
    """The name of a worker's transfer agent, which is new at every start."""
    return f"{worker}-{epoch:016x}"


def routers_net(files: TlsFiles) -> InternalNet:
    """The net of a router; in clear without files.

    Raises:
        TlsError: its certificate is not valid, or not a router's.
    """
    if not any(files):
        return ClearNet()

    def lacks(found: Certificate) -> str:
        if ROUTER_URI in found.uris and ROUTER_NAME in found.names:
            return ""
        return f"is no router's: it needs the URI {ROUTER_URI} and the DNS name {ROUTER_NAME}"

    return TlsNet(files, Refusals(), lacks)


def workers_net(files: TlsFiles, name: str) -> InternalNet:
    """The net of a worker of that name; in clear without files.

    Raises:
        TlsError: its certificate is not valid, or of another name.
    """
    if not any(files):
        return ClearNet()

    def lacks(found: Certificate) -> str:
        if server_name_of(found.names, name):
            return ""
        known = ", ".join(sorted(found.names)) or "no name"
        return (
            f"is not of {name}, but of {known}: it needs the DNS name {name}, or a pattern such as"
            " decode-* with decode beside it"
        )

    return TlsNet(files, Refusals(), lacks)


def check_exposure(setting: str, address: str, files: TlsFiles, *, insecure: bool) -> None:
    """Checks that other machines do not reach an internal port in clear.

    Args:
        setting: the setting that holds the address.
        address: where the process listens.
        files: its TLS files; either all are set or none.
        insecure: whether the operator wants it all the same.

    Raises:
        ValueError: they would, or files are missing.
    """
    if any(files) and not all(files[:3]):
        raise ValueError("set tls_dir, or debug.tls_cert, tls_key and tls_ca together")
    if not (all(files[:3]) or insecure or is_loopback(host_of(address))):
        raise ValueError(
            f"{setting} {address} is open to other machines, and anybody there could join: set"
            " tls_dir (`baton certs` makes one), or insecure if everybody"
            " there is trusted"
        )


def check_receiver(endpoint: str, files: TlsFiles) -> None:
    """Checks that spans can be sent to a router's internal port. Raises ValueError."""
    if endpoint.startswith(ROUTERS_SCHEME) and not all(files[:3]):
        raise ValueError(f"otlp_endpoint {endpoint} needs tls_dir")


def _bound(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


def _auth_values(context: Any, key: str) -> frozenset[str]:
    """Names in the caller's certificate, which gRPC has checked."""
    return frozenset(name.decode() for name in context.auth_context().get(key, ()))


def _shown(context: Any) -> str:
    return ", ".join(sorted(_auth_values(context, "x509_subject_alternative_name"))) or "nobody"
