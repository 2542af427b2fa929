"""Pages moved by NCCL: gathered into a staging buffer, sent, scattered. Opt-in.

The wire's full rate whatever the size of a page, paid for with staging memory
(2 * slots * piece_bytes a peer) and with processors of both GPUs while pages move. Notifications,
metadata and the rendezvous go over NIXL; pools without a GPU use Gloo, so that the same protocol
is tested without one.

Life of a push: QUEUED in the lane to its peer, which the first push forms -> its pages are
announced and sent in order -> LANDED: the receiver has scattered the last one and says so -> DONE.

What NCCL cannot do: it has no notion of a peer that is gone. A send or receive whose other end died
waits on the device for ever, and holds some of its processors, until somebody tears the
communicator down. Here that is `close`, which the exchange calls on proof of death, or when it
gives a lost peer up; pushes in progress then end in ERROR. While a peer is frozen, its lane is, and
a push behind it. Lanes of other peers go on.
"""

from __future__ import annotations

import enum
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kv_transfer.lanes import (
    FORM_S,
    RECEIVER,
    SENDER,
    USUAL,
    Batch,
    LaneOptions,
    ReceiveLane,
    SendLane,
    form_group,
)
from kv_transfer.nixl import NixlTransport
from kv_transfer.pool import PoolMemory, check_payload, check_same_kind
from kv_transfer.types import (
    MAX_NOTIFICATION_BYTES,
    Endpoint,
    Notification,
    PageIds,
    PushState,
    TransportError,
)

logger = logging.getLogger(__name__)

_MAGIC: Final = b"BTL2"
_HEADER: Final = struct.Struct("<4sBQ?Q")
"""Magic, kind, number, whether it is a push's last batch, the push's handle."""
MOST_PAGES: Final = (MAX_NOTIFICATION_BYTES - 64) // 4
"""In one batch: its ids have to fit a notification."""
MOST_EARLY: Final = 4096


class _Kind(enum.IntEnum):
    """What a control notification says."""

    FORM = 1
    """Sender: a lane begins; where its rendezvous is."""
    PAYLOAD = 2
    """Sender: what to show when the push has landed."""
    BATCH = 3
    """Sender: these target pages come next; numbered, for notifications may overtake each other."""
    LANDED = 4
    """Receiver: every page of the push is where it belongs."""


@dataclass(slots=True, eq=False)
class _Peer:
    endpoint: Endpoint
    out: SendLane | None = None
    store: TCPStore | None = None
    batches_sent: int = 0
    into: ReceiveLane | None = None
    batches_due: int = 0
    early: dict[int, Batch] = field(default_factory=dict)
    payloads: dict[int, bytes] = field(default_factory=dict)
    pushes: set[int] = field(default_factory=set)
    """In progress towards it."""


class NcclTransport:
    """See the module."""

    name = "nccl"
    can_revoke = False

    def __init__(self, agent_name: str, pool: PoolMemory, lanes: LaneOptions = USUAL) -> None:
        # A receive that nobody sends to must not take the process down: `close` ends it.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        self._pool = pool
        self._lanes = lanes
        self._control = NixlTransport(agent_name, pool)
        self._endpoint = replace(self._control.endpoint, transport=self.name)
        self._peers: dict[str, _Peer] = {}
        self._ended: list[tuple[int, PushState]] = []
        self._inbox: deque[Notification] = deque()
        self._from_strangers: deque[Notification] = deque(maxlen=MOST_EARLY)
        """Control notifications of peers that met us before we met them."""
        self._next_handle = 1

    @property
    def endpoint(self) -> Endpoint:
        """See `KvTransport`."""
        return self._endpoint

    def open(self, peer: Endpoint) -> None:
        """See `KvTransport`. Lanes are formed by the first push."""
        check_same_kind(self._endpoint, peer)
        self._control.open(replace(peer, transport=self._control.name))
        if peer.agent_name not in self._peers:
            self._peers[peer.agent_name] = known = _Peer(peer)
            strangers, self._from_strangers = self._from_strangers, deque(maxlen=MOST_EARLY)
            for notification in strangers:
                if notification.from_agent == peer.agent_name:
                    self._obey(known, notification.payload)
                else:
                    self._from_strangers.append(notification)

    def path(self, agent_name: str) -> str:
        """See `KvTransport`."""
        return "nccl/gpu" if self._pool.memory == "VRAM" else "nccl/gloo"

    def push(self, agent_name: str, source: PageIds, target: PageIds, payload: bytes) -> int:
        """See `KvTransport`."""
        check_payload(payload, MAX_NOTIFICATION_BYTES - _HEADER.size)
        peer = self._peers.get(agent_name)
        if peer is None:
            raise TransportError("disconnected", "the peer is not open")
        _check_pages(source, self._pool.num_pages)
        _check_pages(target, peer.endpoint.num_pages)
        lane = self._lane_to(peer)
        handle = self._next_handle
        self._next_handle += 1
        self._tell(peer, _Kind.PAYLOAD, payload, push=handle)
        peer.pushes.add(handle)
        for start in range(0, len(source), MOST_PAGES):
            part, is_last = slice(start, start + MOST_PAGES), start + MOST_PAGES >= len(source)
            ids = target[part].astype("<i4").tobytes()
            self._tell(peer, _Kind.BATCH, ids, peer.batches_sent, is_last, handle)
            peer.batches_sent += 1
            lane.put(Batch(handle, source[part].astype(np.int32), is_last))
        return handle

    def notify(self, agent_name: str, payload: bytes) -> None:
        """See `KvTransport`."""
        self._control.notify(agent_name, payload)

    def poll_pushes(self) -> list[tuple[int, PushState]]:
        """See `KvTransport`."""
        self._read_control()
        for peer in self._peers.values():
            self._take_landed(peer)
            if peer.out is not None and peer.out.failed:
                self._give_up(peer)
        ended, self._ended = self._ended, []
        return ended

    def poll_notifications(self) -> list[Notification]:
        """See `KvTransport`."""
        self._read_control()
        for peer in self._peers.values():
            self._take_landed(peer)
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

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

    # -- the sending end ------------------------------------------------------------------------

    def _lane_to(self, peer: _Peer) -> SendLane:
        if peer.out is None:
            host = _own_address()
            peer.store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=FORM_S)
            self._tell(peer, _Kind.FORM, f"{host}:{peer.store.port}".encode())
            form = partial(form_group, peer.store, SENDER, self._pool.pages.device)
            name = f"to-{peer.endpoint.agent_name}"
            peer.out = SendLane(name, self._pool, form, self._lanes)
        return peer.out

    def _give_up(self, peer: _Peer) -> None:
        self._ended += [(handle, PushState.ERROR) for handle in sorted(peer.pushes)]
        peer.pushes.clear()
        if peer.out is not None:
            peer.out.close()
        peer.out, peer.store, peer.batches_sent = None, None, 0

    def _tell(
        self,
        peer: _Peer,
        kind: _Kind,
        body: bytes,
        number: int = 0,
        is_last: bool = False,
        push: int = 0,
    ) -> None:
        header = _HEADER.pack(_MAGIC, kind, number, is_last, push)
        self._control.notify(peer.endpoint.agent_name, header + body)

    # -- the receiving end ----------------------------------------------------------------------

    def _read_control(self) -> None:
        for notification in self._control.poll_notifications():
            if not notification.payload.startswith(_MAGIC):
                self._inbox.append(notification)
            elif (peer := self._peers.get(notification.from_agent)) is not None:
                self._obey(peer, notification.payload)
            else:
                self._from_strangers.append(notification)

    def _obey(self, peer: _Peer, message: bytes) -> None:
        _, kind, number, is_last, push = _HEADER.unpack_from(message)
        body = message[_HEADER.size :]
        match kind:
            case _Kind.FORM:
                self._lane_from(peer, body.decode())
            case _Kind.PAYLOAD:
                peer.payloads[push] = body
            case _Kind.BATCH:
                peer.early[number] = Batch(push, np.frombuffer(body, "<i4").copy(), is_last)
            case _Kind.LANDED if push in peer.pushes:
                peer.pushes.remove(push)
                self._ended.append((push, PushState.DONE))
        while peer.into is not None and peer.batches_due in peer.early:
            peer.into.put(peer.early.pop(peer.batches_due))
            peer.batches_due += 1

    def _lane_from(self, peer: _Peer, rendezvous: str) -> None:
        """A new lane from this peer; one that it had before has failed at its end."""
        if peer.into is not None:
            peer.into.close()
        peer.batches_due = 0
        host, _, port = rendezvous.rpartition(":")
        device = self._pool.pages.device
        form: Callable[[], object] = lambda: form_group(  # noqa: E731
            TCPStore(host, int(port), is_master=False, timeout=FORM_S), RECEIVER, device
        )
        name = f"from-{peer.endpoint.agent_name}"
        peer.into = ReceiveLane(name, self._pool, form, self._lanes)

    def _take_landed(self, peer: _Peer) -> None:
        if peer.into is None:
            return
        for push in peer.into.landed():
            payload = peer.payloads.pop(push, b"")
            self._inbox.append(Notification(peer.endpoint.agent_name, payload))
            try:
                self._tell(peer, _Kind.LANDED, b"", push=push)
            except TransportError as error:
                logger.warning("a peer cannot be told of its push: %s", error.cause)


def _check_pages(pages: PageIds, num_pages: int) -> None:
    if not len(pages) or pages.min() < 0 or pages.max() >= num_pages:
        raise TransportError("bad_pages", "page ids outside of the pool")


def _own_address() -> str:
    """Where the peer finds this host: its name's address, which is its own on a single host."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
