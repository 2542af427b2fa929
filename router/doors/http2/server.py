"""The fast door: a server of gRPC's methods that writes tokens straight to its connections.

It takes the handlers that gRPC's own server takes, so methods, statuses, spans and limits are those
of the ordinary port. It serves methods with one request. `start` binds the port. `stop` asks
clients for another connection and gives calls under way some time.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from baton import grpc_options
from router.doors.http.bodies import Bodies
from router.doors.http.connections import Connection, Connections
from router.doors.http2.connection import Http2Connection
from serving.listening import bind
from telemetry.rpc import ServerSpans

if TYPE_CHECKING:
    import ssl

    import grpc

    from router.doors.http2.call import Details
    from router.requests.bounds import BodyShape

_AGE_SPREAD: Final = 0.1
"""Connections that began together do not end together; gRPC's own servers spread as much."""


class FastDoor:
    """Serves gRPC. Belongs to the event loop that started it.

    Args:
        listen: HOST:PORT; port 0 takes a free one.
        shape: checks the bytes of requests.
        most: the most connections at once.
        longest_call_s: within which any call ends.
        reuse_port: whether to share the port with other processes that set this.
        tls: encrypts connections; None: they are in clear.
    """

    def __init__(
        self,
        listen: str,
        shape: BodyShape,
        most: int,
        longest_call_s: float,
        *,
        reuse_port: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listen = listen
        self._reuse_port = reuse_port
        self._connections = Connections(most, tls)
        self.address = ""
        """HOST:PORT, set by `start`."""
        self.bodies = Bodies(shape)
        self.idle_s = grpc_options.PUBLIC_IDLE_MS / 1e3
        self.grace_s = longest_call_s
        self.closed_by = Counter[str]()
        """Connections that this door ended, by cause."""
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._spans = ServerSpans()
        self._open: set[Http2Connection] = set()
        self._all_gone = asyncio.Event()
        self._is_stopping = False
        self._listening: asyncio.Server | None = None

    @property
    def age_s(self) -> float:
        """Age at which a connection leaves."""
        spread = random.uniform(1 - _AGE_SPREAD, 1 + _AGE_SPREAD)
        return spread * grpc_options.PUBLIC_AGE_MS / 1e3

    @property
    def connections(self) -> int:
        """Connections that speak HTTP/2 now."""
        return len(self._open)

    @property
    def calls(self) -> int:
        """Calls under way."""
        return sum(len(one.calls) for one in self._open)

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Any) -> None:
        """Serves the methods of these handlers."""
        self._handlers += cast("Sequence[grpc.GenericRpcHandler]", generic_rpc_handlers)

    async def start(self) -> None:
        """Binds and serves.

        Raises:
            OSError: the address cannot be bound.
        """
        bound, self.address = bind(self._listen, reuse_port=self._reuse_port)
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._accept, sock=bound)

    async def stop(self, grace_s: float) -> None:
        """Stops listening, and ends within some seconds. Calls under way may end until then."""
        self._is_stopping = True
        if self._listening is not None:
            self._listening.close()
        for one in [*self._open]:
            one.leave()
        if self._open:
            self._all_gone.clear()
            try:
                await asyncio.wait_for(self._all_gone.wait(), grace_s)
            except TimeoutError:
                for one in [*self._open]:
                    one.abort()

    # What its connections use.

    async def handler(self, details: Details) -> grpc.RpcMethodHandler[Any, Any] | None:
        """What answers a call; None if there is no such method here."""
        return await self._spans.intercept_service(self._find, cast("Any", details))

    def unknown(self) -> str:
        """What to say of a method that is not here."""
        return (
            "this port serves the methods of baton.inference.v1.InferenceService alone; "
            "others, such as health and reflection, are at the router's gRPC port (listen)"
        )

    def opened(self, connection: Http2Connection) -> None:
        """A connection is there. It may have been on its way when the door stopped."""
        self._open.add(connection)
        if self._is_stopping:
            connection.leave()

    def closed(self, connection: Http2Connection) -> None:
        """It is gone."""
        self._open.discard(connection)
        if not self._open:
            self._all_gone.set()

    def ended(self, why: str) -> None:
        """The door ended a connection."""
        self.closed_by[why] += 1

    def _accept(self) -> asyncio.Protocol:
        connection = Connection(self._connections)
        connection.inner = Http2Connection(connection, self)
        return connection

    async def _find(
        self, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        for one in self._handlers:
            if (found := one.service(details)) is not None:
                return found
        return None
