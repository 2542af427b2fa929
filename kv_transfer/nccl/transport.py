"""Pages moved by NCCL: gathered into a staging buffer, sent, scattered. Opt-in.

The wire runs at its full rate whatever the size of a page. The price is staging memory
(2 * slots * segment_bytes a peer) and processors of both GPUs while pages move. Notifications,
metadata and where to meet go over NIXL. Pools without a GPU use Gloo, so that the same protocol is
tested without one.

Life of a push: QUEUED in the channel to its peer, which the first push forms -> announced, and its
pages sent in order -> LANDED: the receiver has scattered the last one and says so -> DONE.

NCCL has no notion of a peer that is gone. A send or receive whose other end died waits on the
device for ever, and holds some of its processors, until the communicator is torn down. Two things
tear it down: the channel's socket breaks, or the exchange calls `close`, on proof of death or when
it gives a lost peer up. Pushes in progress then end in ERROR. If the peer lives they do so once it
has let go of their pages. While a peer is frozen, so are its channel and the pushes in it. Channels
of other peers go on. Forming a communicator does not end either if the other end died. The channel
is given up all the same, and a thread stays behind (`kv_transfer.nccl.groups`).
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

from kv_transfer.nccl.channels import ReceiveChannel, SendChannel
from kv_transfer.nccl.staging import ChannelOptions
from kv_transfer.nccl.wire import Push
from kv_transfer.transports.nixl import NixlTransport
from kv_transfer.transports.pool import PoolMemory, check_pages, check_payload, check_same_kind
from kv_transfer.types import (
    MAX_NOTIFICATION_BYTES,
    Endpoint,
    Notification,
    PageIds,
    PushState,
    TransportError,
)

_FORM: Final = b"BTL8"
"""Begins the notification of a sender that has formed a channel. Where to meet it follows. It
changes with the way to cut a push, which is the same at both ends."""
MOST_EARLY: Final = 4096
"""Notifications from peers that are not open yet; the oldest go."""


@dataclass(slots=True, eq=False)
class _Peer:
    endpoint: Endpoint
    out: SendChannel | None = None
    into: ReceiveChannel | None = None
    pushes: set[int] = field(default_factory=set)
    """In progress towards it."""


class NcclTransport:
    """See the module."""

    name = "nccl"

    def __init__(
        self, agent_name: str, pool: PoolMemory, options: ChannelOptions | None = None
    ) -> None:
        # A receive that nobody sends to must not take the process down: `close` ends it.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        # And nobody reads a record of each send, with the Python stack that it came from.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
        self._pool = pool
        self._options = options or ChannelOptions()
        self._control = NixlTransport(agent_name, pool)
        self._endpoint = replace(self._control.endpoint, transport=self.name)
        self._peers: dict[str, _Peer] = {}
        self._ended: list[tuple[int, PushState]] = []
        self._from_strangers: deque[Notification] = deque(maxlen=MOST_EARLY)
        """What peers say that met us before we met them."""
        self._next_handle = 1

    @property
    def endpoint(self) -> Endpoint:
        """See `KvTransport`."""
        return self._endpoint

    def open(self, peer: Endpoint) -> None:
        """See `KvTransport`. Channels are formed by the first push."""
        check_same_kind(self._endpoint, peer)
        self._control.open(replace(peer, transport=self._control.name))
        if peer.agent_name not in self._peers:
            self._peers[peer.agent_name] = known = _Peer(peer)
            strangers, self._from_strangers = self._from_strangers, deque(maxlen=MOST_EARLY)
            for notification in strangers:
                if notification.from_agent == peer.agent_name:
                    self._channel_from(known, notification.payload)
                else:
                    self._from_strangers.append(notification)

    def path(self, agent_name: str) -> str:
        """See `KvTransport`."""
        return "nccl/gpu" if self._pool.memory == "VRAM" else "nccl/gloo"

    def push(
        self, agent_name: str, source: PageIds, target: PageIds, payload: bytes, group: int = 0
    ) -> int:
        """See `KvTransport`."""
        check_payload(payload, MAX_NOTIFICATION_BYTES)
        peer = self._peers.get(agent_name)
        if peer is None:
            raise TransportError("disconnected", "the peer is not open")
        theirs = peer.endpoint.groups[group].num_pages
        check_pages(source, self._pool.groups[group].num_pages, target, theirs)
        handle = self._next_handle
        self._channel_to(peer).put(source, Push(handle, target, payload, group))
        self._next_handle += 1
        peer.pushes.add(handle)
        return handle

    def notify(self, agent_name: str, payload: bytes) -> None:
        """See `KvTransport`."""
        self._control.notify(agent_name, payload)

    def poll_pushes(self) -> list[tuple[int, PushState]]:
        """See `KvTransport`."""
        for peer in self._peers.values():
            if peer.out is not None:
                landed = peer.pushes.intersection(peer.out.landed())
                peer.pushes -= landed
                self._ended += [(handle, PushState.DONE) for handle in sorted(landed)]
                if peer.out.is_over:
                    self._give_up(peer)
        ended, self._ended = self._ended, []
        return ended

    def poll_notifications(self) -> list[Notification]:
        """See `KvTransport`."""
        # A sender that heard what landed may speak of that, or form another channel: whatever it
        # said so far is behind what the channels show only now.
        said = self._control.poll_notifications()
        found = []
        for name, known in self._peers.items():
            if known.into is not None:
                found += [Notification(name, payload) for payload in known.into.landed()]
        for notification in said:
            if not notification.payload.startswith(_FORM):
                found.append(notification)
            elif (peer := self._peers.get(notification.from_agent)) is not None:
                self._channel_from(peer, notification.payload)
            else:
                self._from_strangers.append(notification)
        return found

    def close(self, agent_name: str) -> None:
        """See `KvTransport`. Pushes in progress end in ERROR: how much landed is unknown."""
        peer = self._peers.pop(agent_name, None)
        if peer is not None:
            self._give_up(peer)
            if peer.into is not None:
                peer.into.close()
        self._control.close(agent_name)

    def shutdown(self) -> None:
        """See `KvTransport`."""
        for agent_name in list(self._peers):
            self.close(agent_name)
        self._control.shutdown()

    def _channel_to(self, peer: _Peer) -> SendChannel:
        if peer.out is None:
            name = peer.endpoint.agent_name
            channel = SendChannel(f"to-{name}", self._pool, self._options)
            try:
                self._control.notify(name, _FORM + channel.address.encode())
            except TransportError:
                channel.close()  # Nobody will come to it.
                raise
            peer.out = channel
        return peer.out

    def _give_up(self, peer: _Peer) -> None:
        self._ended += [(handle, PushState.ERROR) for handle in sorted(peer.pushes)]
        peer.pushes.clear()
        if peer.out is not None:
            peer.out.close()
        peer.out = None

    def _channel_from(self, peer: _Peer, message: bytes) -> None:
        """A new channel from this peer; one that it had before has failed at its end."""
        if peer.into is not None:
            peer.into.close()
        name, address = f"from-{peer.endpoint.agent_name}", message[len(_FORM) :].decode()
        peer.into = ReceiveChannel(name, self._pool, address, self._options)
