"""Who was refused between routers and workers: named in the log, and counted.

A peer whose certificate is valid says who it is, and the caller of `refuse` knows why it may not do
what it wants. A peer without a valid certificate gets no further than the TLS handshake, of which
gRPC reports only the begin. So a connection counts as refused if no call came on it for a while.
gRPC's own log has the reason of each where GRPC_VERBOSITY is `info`.
"""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import logging
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

logger = logging.getLogger(__name__)

FIRST_CALL_S: Final = 5.0
"""A peer calls at once when its handshake is over. A busy machine may delay that."""
LOOK_SHARE: Final = 0.1
"""Most of the time that looks at the kernel's table of connections may take. Of connections that
end between two looks some are not counted."""
MOST_KEPT: Final = 4096
"""Most peers that are remembered."""
_ESTABLISHED: Final = "01"
Peer = tuple[str, int]
"""Host and port."""
Handler = Any
"""gRPC's handler of a method."""


class Cause(StrEnum):
    """Why a peer was refused."""

    HANDSHAKE = "handshake"
    """It connected and showed no valid certificate."""
    NAME = "name"
    """It announced a worker's name that its certificate does not have."""
    ROLE = "role"
    """It announced a worker of a role that is unknown here."""
    NOT_A_ROUTER = "not_a_router"
    """It asked for a router's rights, and its certificate is not a router's."""
    CERTIFICATE = "certificate"
    """We connected to it, and it showed no valid certificate of the name that was wanted."""


class Refusals:
    """The refusals of one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: dict[str, int] = {cause.value: 0 for cause in Cause}
        """Refused peers by cause, since the start."""
        self._clock = clock
        self._lock = threading.Lock()
        self._callers: OrderedDict[Peer, None] = OrderedDict()
        self._silent: OrderedDict[Peer, float] = OrderedDict()
        """Peers that have not called, and the times at which they were seen first."""
        self._look_at_s = 0.0
        self._reported: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self.port = 0
        """The port whose handshakes are counted; set by the owner once it is bound."""

    def refuse(self, cause: Cause, why: str, **details: str) -> None:
        """Counts a refused peer, and logs it once for the same details.

        Args:
            cause: the kind of refusal.
            why: the reason, for people.
            details: who it is.
        """
        self.counts[cause] += 1
        if _is_new(self._reported, (cause, why, *details.values())):
            logger.warning("peer refused", extra={**details, "cause": why})

    def began(self) -> None:
        """A handshake begins. Called on threads of gRPC's."""
        with self._lock:
            now_s = self._clock()
            if now_s < self._look_at_s:
                return
            began_s = time.perf_counter()
            for peer in connections(self.port):
                if peer not in self._callers and len(self._silent) < MOST_KEPT:
                    self._silent.setdefault(peer, now_s)
            self._look_at_s = now_s + (time.perf_counter() - began_s) / LOOK_SHARE

    def called(self, peer: str) -> None:
        """A call came from a peer, in gRPC's words: `ipv4:HOST:PORT`."""
        with self._lock:
            if (where := _address(peer)) is not None:
                _is_new(self._callers, where)
                self._silent.pop(where, None)

    async def watch(self) -> None:
        """Reports handshakes after which no call came. Ends when cancelled."""
        while True:
            self.look()
            await asyncio.sleep(1.0)

    def look(self) -> None:
        """Counts and names the peers that should have called by now."""
        with self._lock:
            until_s = self._clock() - FIRST_CALL_S
            refused = [peer for peer, seen_s in self._silent.items() if seen_s < until_s]
            for peer in refused:
                del self._silent[peer]
        if refused:
            self.counts[Cause.HANDSHAKE] += len(refused)
            hosts = ", ".join(sorted({host for host, _ in refused}))
            details = {"connections": len(refused), "hosts": hosts}
            logger.warning("connections refused: no valid certificate was shown", extra=details)


class Callers(grpc.aio.ServerInterceptor):
    """Distinguishes refusals from the callers of a server: their handshakes succeeded."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Puts a look at the caller before the call's handler."""
        handler = await continuation(handler_call_details)
        return None if handler is None else _noting(handler, self._refusals)


_KINDS: Final[dict[str, Callable[..., Handler]]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


def _noting(handler: Handler, refusals: Refusals) -> Handler:
    kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
    behavior = getattr(handler, kind)

    async def call(request: Any, context: Any) -> Any:
        refusals.called(context.peer())
        return await behavior(request, context)

    async def stream(request: Any, context: Any) -> Any:
        refusals.called(context.peer())
        async for answer in behavior(request, context):
            yield answer

    noting = stream if inspect.isasyncgenfunction(behavior) else call
    return _KINDS[kind](noting, handler.request_deserializer, handler.response_serializer)


def connections(port: int) -> Iterator[Peer]:
    """Hosts and ports of those who are connected to a local port, by the kernel's tables."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        yield from _connected(lines, port)


def _connected(lines: Iterable[str], port: int) -> Iterator[Peer]:
    for line in lines:
        _, local, remote, state, *_ = line.split()
        if state == _ESTABLISHED and int(local.rpartition(":")[2], 16) == port:
            host, _, remote_port = remote.partition(":")
            yield _host(host), int(remote_port, 16)


def _host(words: str) -> str:
    """An address of the kernel's table: words of 32 bits in the machine's order."""
    packed = b"".join(
        struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8)
    )
    return _plain(socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed))


def _address(peer: str) -> Peer | None:
    """Host and port of `ipv4:HOST:PORT` or `ipv6:[HOST]:PORT`, which gRPC may have quoted."""
    rest = peer.partition(":")[2].replace("%5B", "[").replace("%5D", "]")
    host, _, port = rest.rpartition(":")
    try:
        return _plain(host.strip("[]")), int(port)
    except ValueError:
        return None


def _plain(host: str) -> str:
    """The V4 address in a V6 one."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _is_new(known: OrderedDict[Any, None], one: Any) -> bool:
    """Remembers one thing, and as many others as fit. Returns whether it was unknown."""
    if one in known:
        known.move_to_end(one)
        return False
    known[one] = None
    if len(known) > MOST_KEPT:
        known.popitem(last=False)
    return True
