"""The certificate of a serving process: read, checked, and read again when its files change.

Life of a certificate:

1. Read at the start. A process does not start with one that is not valid.
2. Watched. Its files are looked at once a second at most.
3. Replaced, when the files have changed and stand still. New connections use the new certificate,
   and those that stand go on.
4. A replacement that is not valid is named in the log, and the old certificate stays.

A certificate is checked as its peers will check it: by a handshake in memory.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import grpc

from baton.tls import TlsFiles, present, reason_of, trust

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Shortest time between two looks at the files."""
DAY_S: Final = 86_400.0
WARNED_S: Final = 7 * DAY_S
"""Time before its end at which a certificate that stays is logged."""
HTTP_ALPN: Final = ("http/1.1",)
HTTP2_ALPN: Final = ("h2",)


class TlsError(Exception):
    """A certificate cannot be used. The message names the file and says why."""


class Certificate(NamedTuple):
    """A certificate that was read and checked."""

    files: TlsFiles
    cert: bytes
    key: bytes
    ca: bytes
    """The authorities by which peers are checked; b"" if peers need no certificate."""
    names: frozenset[str] = frozenset()
    """Its DNS names; empty if it was not checked against an authority."""
    uris: frozenset[str] = frozenset()
    ends_s: float = math.inf
    """When it expires, Unix time; unknown for doors."""

    def for_grpc(self) -> grpc.ServerCertificateConfiguration:
        """What gRPC's servers take."""
        pair = [(self.key, self.cert)]
        return grpc.ssl_server_certificate_configuration(pair, self.ca or None)

    def for_channel(self) -> grpc.ChannelCredentials:
        """What gRPC's channels take."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def for_http(self, alpn: Sequence[str] = HTTP_ALPN) -> ssl.SSLContext:
        """What HTTP servers take. Resumed sessions would skip the check of a client's certificate,
        so there are none where clients need one. `alpn`: names of what they speak."""
        context = server_context(self.files)
        context.set_alpn_protocols([*alpn])
        if self.files.ca:
            trust(context, self.files.ca)
            context.verify_mode = ssl.CERT_REQUIRED
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        return context


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """A context that presents a certificate. Raises ValueError, OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    present(context, files.cert, files.key)
    return context


def read_member(files: TlsFiles) -> Certificate:
    """Reads the certificate of a router or worker, checked by the authority of its peers.

    Raises:
        TlsError: it is not valid there.
    """
    peer = _checked(files)
    kinds: dict[str, set[str]] = {"DNS": set(), "URI": set()}
    for kind, name in peer.get("subjectAltName", ()):
        kinds.setdefault(kind, set()).add(name)
    return _read(files)._replace(
        names=frozenset(kinds["DNS"]),
        uris=frozenset(kinds["URI"]),
        ends_s=ssl.cert_time_to_seconds(peer["notAfter"]),
    )


def read_door(files: TlsFiles) -> Certificate:
    """Reads the certificate of a door. Clients trust authorities that this process cannot know.

    Raises:
        TlsError: the files cannot be used.
    """
    try:
        server_context(files)
        if files.ca:
            trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files.ca)
    except ValueError as error:
        raise TlsError(str(error)) from None
    except OSError as error:
        raise TlsError(_unread(error)) from None
    return _read(files)


def _read(files: TlsFiles) -> Certificate:
    try:
        cert, key = (Path(path).read_bytes() for path in (files.cert, files.key))
        ca = Path(files.ca).read_bytes() if files.ca else b""
    except OSError as error:
        raise TlsError(_unread(error)) from None
    return Certificate(files, cert, key, ca)


def _checked(files: TlsFiles) -> dict[str, Any]:
    """What a peer sees of a certificate, if its authority vouches for it."""
    try:
        server, client = server_context(files), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        present(client, files.cert, files.key)
        for side in (server, client):
            trust(side, files.ca)
            side.verify_mode = ssl.CERT_REQUIRED
        return _seen_by(server, client)
    except ssl.SSLError as error:
        raise TlsError(f"{files.cert} is not valid by {files.ca}: {reason_of(error)}") from None
    except ValueError as error:
        raise TlsError(str(error)) from None
    except OSError as error:
        raise TlsError(_unread(error)) from None


def _seen_by(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """The server's certificate. Raises ssl.SSLError if one side finds fault with the other's."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = server.wrap_bio(to_server, to_client, server_side=True)
    other = client.wrap_bio(to_client, to_server)
    for side in (other, one, other, one):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return other.getpeercert() or {}


def _unread(error: OSError) -> str:
    return f"{error.filename} cannot be read: {error.strerror}{_of_others(Path(error.filename))}"


def _of_others(file: Path) -> str:
    """What to say where the folder is that of all holders, as `baton certs` makes it."""
    holders = sorted(each.parent.name for each in file.parent.glob(f"*/{file.name}"))
    if not holders or file.exists():
        return ""
    return f". {file.parent} has folders of {', '.join(holders)}: tls_dir names one of these"


Stamp = tuple[tuple[int, ...], ...]
Made = TypeVar("Made")


class Rotating(Generic[Made]):
    """A certificate, and what is made of it, as the files are now. Threads may share it.

    Args:
        files: its files.
        read: reads and checks them; raises TlsError.
        make: makes what is needed of a certificate, once for each.
        clock: for the time between two looks.

    Raises:
        TlsError: it is not valid.
    """

    def __init__(
        self,
        files: TlsFiles,
        read: Callable[[TlsFiles], Certificate],
        make: Callable[[Certificate], Made],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._read = read
        self._make = make
        self._clock = clock
        self._lock = threading.Lock()
        self._tried = self._last = self._stamp()
        """The files when they were read last, and when they were looked at last."""
        self._look_at_s = clock() + LOOK_S
        self.certificate = read(files)
        self.version = 0
        """Grows with each replacement."""
        self._made = make(self.certificate)

    def now(self) -> Made:
        """What is made of the present certificate."""
        with self._lock:
            if self._clock() >= self._look_at_s:
                self._look_at_s = self._clock() + LOOK_S
                self._look()
            return self._made

    async def watch(self) -> None:
        """Looks again and again, so that a bad replacement, or none, is logged at once. Ends when
        cancelled."""
        warned = -1
        while True:
            self.now()
            left_s = self.certificate.ends_s - time.time()
            if left_s < WARNED_S and warned != self.version:
                warned = self.version
                details = {"certificate": self._files.cert, "days": f"{left_s / DAY_S:.1f}"}
                logger.warning("certificate expires and is not replaced", extra=details)
            await asyncio.sleep(LOOK_S)

    def _look(self) -> None:
        stamp, last = self._stamp(), self._last
        self._last = stamp
        if stamp == self._tried or stamp != last:  # It is known, or still being written.
            return
        self._tried = stamp
        try:
            certificate = self._read(self._files)
            made = self._make(certificate)
        except (TlsError, ValueError, OSError) as error:
            details = {"certificate": self._files.cert, "cause": str(error)}
            logger.error("new certificate refused, the old one stays", extra=details)
            return
        self.certificate, self._made = certificate, made
        self.version += 1
        logger.info("certificate replaced", extra={"certificate": self._files.cert})

    def _stamp(self) -> Stamp:
        return tuple(_stamp_of(path) for path in self._files[:3] if path)


def _stamp_of(path: str) -> tuple[int, ...]:
    """Changes whenever the file is written or replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def server_credentials(
    now: Callable[[], grpc.ServerCertificateConfiguration],
    *,
    needs_client: bool,
    began: Callable[[], None] = lambda: None,
) -> grpc.ServerCredentials:
    """Credentials of a gRPC server that follow the files.

    Args:
        now: returns the present certificate.
        needs_client: whether clients must show one, too.
        began: is called at the begin of each handshake, on a thread of gRPC's.
    """
    given = [now()]

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        began()
        if (present_one := now()) is given[0]:
            return None
        given[0] = present_one
        return present_one

    return grpc.dynamic_ssl_server_credentials(
        given[0],
        fetch,  # type: ignore[arg-type]  # None is allowed: nothing has changed
        needs_client,
    )


def http_context(now: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """A context for an HTTP server that follows the files: each handshake takes the present one."""
    outer = now()

    def greeted(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = now()

    outer.sni_callback = greeted
    return outer


class DoorCertificate:
    """The certificate that clients see, for each kind of server.

    Raises:
        TlsError: the files cannot be used.
    """

    def __init__(self, files: TlsFiles) -> None:
        now = Rotating(
            files,
            read_door,
            lambda one: (one.for_grpc(), one.for_http(), one.for_http(HTTP2_ALPN)),
        )
        self.now = now
        self.grpc = server_credentials(lambda: now.now()[0], needs_client=bool(files.ca))
        self.http = http_context(lambda: now.now()[1])
        self.http2 = http_context(lambda: now.now()[2])
