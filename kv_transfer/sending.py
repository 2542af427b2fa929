"""Prefill side of the hand-off: what has been pushed, and when its source pages may be reused.

1. COMPUTING  chunks are still to come; pages that became final are pushed while they do.
2. SENDING    all of the prompt is final; the last push carries the owner's payload.
3. DELIVERED  every push is DONE: Sent.
4. QUIESCING  aborted by either side, or failed: nothing more is posted, pushes in progress
              run to their end, because a posted write cannot be taken back.
5. QUIESCED   no push is in progress: SendQuiesced. The id stays behind as a tombstone that
              refuses a later grant of the same transfer.
6. FAILED     a push ended in ERROR: unknown how much of it landed or still will. Pinned until
              the peer is proven dead; until then nobody is told QUIESCED.

Invariants, per transfer of n pages of which h are held:
- [h, next_page) is posted, each page once; [next_page, n) is not;
- a page is posted only when every token in it is final;
- DELIVERED and QUIESCED imply that no handle is in progress.

A grant may come before, between or after the chunks, and the peer may still be opening.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from kv_transfer.events import (
    SendFailed,
    SendQuiesced,
    SendStats,
    Sent,
    TransferCounters,
    TransferEvent,
)
from kv_transfer.peers import Peers
from kv_transfer.specs import SendSpec
from kv_transfer.tables import BoundedMemory, Clock, Timers
from kv_transfer.trouble import describe
from kv_transfer.types import KvTransport, PageIds, PushState, TransportError
from kv_transfer.wire import Chunk, Quiesce, Quiesced, encode

logger = logging.getLogger(__name__)

MAX_TOMBSTONES = 1 << 18
TOMBSTONE_AGE_S = 3600.0
"""Far above the longest life of a request: no grant of its transfer can still be under way."""
PEER_WAIT_S = 5.0
MAX_PUSH_BYTES = 32 << 20
"""A post may run its whole copy inside the call: this bounds one turn of the thread."""


class SendState(enum.IntEnum):
    """State of a transfer at the prefill side; failure is the smallest."""

    FAILED = 0
    """Unknown what landed; pinned until the peer is proven dead."""
    QUIESCING = 1
    """Given up, with pushes in progress."""
    QUIESCED = 2
    """Given up, and nothing of it can land any more."""
    COMPUTING = 3
    """Chunks are still to come."""
    SENDING = 4
    """Everything is final, not everything is over there."""
    DELIVERED = 5
    """Everything is over there."""


@dataclass(slots=True, eq=False)
class _Send:
    transfer_id: bytes
    spec: SendSpec | None = None
    """None before the grant."""
    state: SendState = SendState.COMPUTING
    end_token: int = 0
    payload: bytes | None = None
    next_page: int = 0
    last_posted: bool = False
    is_queued: bool = False
    failure_told: bool = False
    handles: set[int] = field(default_factory=set)
    pages: int = 0
    pushes: int = 0
    descriptors: int = 0
    started_ns: int = 0
    last_posted_ns: int = 0
    posting_s: float = 0.0


class Sender:
    """Every transfer this process sends. Not thread-safe: the transfer thread's."""

    def __init__(
        self,
        transport: KvTransport,
        peers: Peers,
        emit: Callable[[TransferEvent], None],
        counters: TransferCounters,
        clock: Clock = time.monotonic,
        max_push_bytes: int = MAX_PUSH_BYTES,
    ) -> None:
        self._transport = transport
        self._peers = peers
        self._emit = emit
        self._counters = counters
        self._page_bytes = transport.endpoint.page_bytes
        self._max_push_pages = max(1, max_push_bytes // self._page_bytes)
        self._sends: dict[bytes, _Send] = {}
        self._by_handle: dict[int, _Send] = {}
        self._ready: deque[_Send] = deque()
        self._tombstones: BoundedMemory[bytes, SendState] = BoundedMemory(
            MAX_TOMBSTONES, TOMBSTONE_AGE_S, clock
        )
        self._timers = Timers(clock)

    @property
    def in_progress(self) -> int:
        """Pushes that have not ended."""
        return len(self._by_handle)

    @property
    def has_work(self) -> bool:
        """Whether `pump` may have something to post."""
        return bool(self._ready)

    def state(self, transfer_id: bytes) -> SendState | None:
        """State of a transfer, or None where it is unknown."""
        send = self._sends.get(transfer_id)
        return send.state if send is not None else self._tombstones.get(transfer_id)

    def uses(self, agent_name: str) -> bool:
        """Whether a transfer to this peer is unfinished."""
        return any(True for _ in self._sends_to(agent_name))

    def next_after_s(self) -> float | None:
        """Seconds until `tick` has something to do, or None."""
        return self._timers.next_after_s()

    def begin(self, spec: SendSpec) -> None:
        """A grant arrived. Refused with `SendQuiesced` where the transfer is over already."""
        if spec.transfer_id in self._tombstones:
            self._emit(SendQuiesced(spec.transfer_id))
            return
        send = self._sends.setdefault(spec.transfer_id, _Send(spec.transfer_id))
        if send.spec is not None:
            return
        send.spec, send.next_page = spec, spec.held_pages
        if not spec.is_sound():
            self._fail(send, "bad_grant")
        elif self._peers.is_dead(spec.peer):
            self._fail(send, "peer_dead")
        else:
            if not self._peers.is_open(spec.peer):
                self._timers.set(spec.transfer_id, PEER_WAIT_S)
            self._advance(send)

    def chunk_computed(self, transfer_id: bytes, end_token: int, payload: bytes | None) -> None:
        """KV of [0, end_token) is final; `payload` comes with the end of the prompt."""
        if transfer_id in self._tombstones:
            return
        send = self._sends.setdefault(transfer_id, _Send(transfer_id))
        if send.payload is None:
            send.end_token = max(send.end_token, end_token)
            send.payload = payload
        self._advance(send)

    def abort(self, transfer_id: bytes) -> None:
        """Sends nothing more. `SendQuiesced` follows, at once where nothing is in progress."""
        send = self._sends.get(transfer_id)
        if send is not None:
            self._quiesce(send)
            return
        if transfer_id not in self._tombstones:
            self._tombstones.add(transfer_id, SendState.QUIESCED)
        self._emit(SendQuiesced(transfer_id))

    def on_quiesce(self, from_agent: str, message: Quiesce) -> None:
        """The decode side gave up. Tombstone first, then the answer."""
        transfer_id = message.transfer_id
        send = self._sends.get(transfer_id)
        if send is None:
            if transfer_id not in self._tombstones:
                self._tombstones.add(transfer_id, SendState.QUIESCED)
            self._peers.notify(from_agent, Quiesced(transfer_id, message.decode_epoch))
        elif send.spec is None:
            self._quiesce(send)
            self._peers.notify(from_agent, Quiesced(transfer_id, message.decode_epoch))
        elif send.spec.peer == from_agent and send.spec.decode_epoch == message.decode_epoch:
            self._quiesce(send)
        else:
            self._counters.stale_notifications += 1

    def on_push(self, handle: int, state: PushState) -> None:
        """A push left IN_PROGRESS."""
        send = self._by_handle.pop(handle, None)
        if send is None:
            return
        self._counters.sends_in_progress = len(self._by_handle)
        send.handles.discard(handle)
        if state is PushState.DONE:
            self._settle(send)
        else:
            self._pin(send, "push_error")
            if send.spec is not None:
                self._peers.lost(send.spec.peer, "push_error")

    def peer_opened(self, agent_name: str) -> None:
        """Transfers that waited for this peer go on."""
        for send in list(self._sends_to(agent_name)):
            self._advance(send)

    def peer_lost(self, agent_name: str, cause: str = "peer_lost") -> None:
        """The path to a peer broke: its transfers fail; what was posted is waited for."""
        for send in list(self._sends_to(agent_name)):
            if send.state >= SendState.COMPUTING:
                self._fail(send, cause)

    def peer_dead(self, agent_name: str) -> None:
        """The process of a peer is proven gone: nothing can land there any more."""
        self.peer_lost(agent_name, "peer_dead")
        for send in list(self._sends_to(agent_name)):
            for handle in send.handles:
                del self._by_handle[handle]
            send.handles.clear()
            self._counters.sends_in_progress = len(self._by_handle)
            self._retire(send, SendState.QUIESCED)

    def tick(self) -> None:
        """Fails transfers whose peer did not open in time."""
        for transfer_id in self._timers.pop_due():
            send = self._sends.get(transfer_id)
            if send is None or send.spec is None or send.state < SendState.COMPUTING:
                continue
            if not self._peers.is_open(send.spec.peer):
                self._fail(send, "peer_not_open")

    def pump(self) -> None:
        """Posts one push, of the transfer that waited longest."""
        while self._ready:
            send = self._ready.popleft()
            send.is_queued = False
            if (pages := self._next_pages(send)) is not None:
                self._post(send, *pages)
                self._advance(send)
                return

    def check_invariants(self) -> None:
        """Raises AssertionError where the state contradicts this module's invariants."""
        assert self._counters.sends_in_progress == len(self._by_handle)
        for transfer_id, send in self._sends.items():
            assert transfer_id not in self._tombstones
            assert send.state not in (SendState.QUIESCED, SendState.DELIVERED)
            assert send.handles or send.state is not SendState.QUIESCING
            assert all(self._by_handle[handle] is send for handle in send.handles)
            if send.spec is not None:
                assert send.next_page == send.spec.held_pages + send.pages
                final = send.end_token // send.spec.page_size_tokens
                assert not send.pages or send.last_posted or send.next_page <= final

    def _sends_to(self, agent_name: str) -> Iterable[_Send]:
        return (s for s in self._sends.values() if s.spec is not None and s.spec.peer == agent_name)

    def _next_pages(self, send: _Send) -> tuple[int, int, bool] | None:
        """First page, end page and whether it is the last push; None: nothing to post now."""
        spec = send.spec
        if spec is None or send.state < SendState.COMPUTING or not self._peers.is_open(spec.peer):
            return None
        is_final = send.payload is not None
        final = spec.num_pages if is_final else send.end_token // spec.page_size_tokens
        end = min(final, send.next_page + self._max_push_pages)
        is_last = is_final and not send.last_posted and end == spec.num_pages
        return (send.next_page, end, is_last) if end > send.next_page or is_last else None

    def _advance(self, send: _Send) -> None:
        """Queues a transfer for `pump` where it has pages to post."""
        spec = send.spec
        if spec is None or send.state < SendState.COMPUTING:
            return
        is_past_end = send.end_token > spec.num_tokens
        if is_past_end or (send.payload is not None and send.end_token != spec.num_tokens):
            self._fail(send, "bad_chunk")
            return
        if send.payload is not None:
            send.state = SendState.SENDING
        if not send.is_queued and self._next_pages(send) is not None:
            send.is_queued = True
            self._ready.append(send)

    def _post(self, send: _Send, first: int, end: int, is_last: bool) -> None:
        spec = send.spec
        assert spec is not None
        source, target = spec.source_pages[first:end], spec.target_pages[first:end]
        began_s = time.perf_counter()
        try:
            payload = encode(self._chunk(send, spec, first, end, is_last))
            self._post_pages(send, spec.peer, source, target, payload)
        except TransportError as error:
            self._fail(send, error.cause)
            self._peers.failed(spec.peer, error.cause)
            return
        except Exception as error:
            logger.error("a push failed in an unknown way: %s", describe(error))
            self._pin(send, "internal")
            return
        send.posting_s += time.perf_counter() - began_s
        send.last_posted_ns = time.time_ns()
        send.started_ns = send.started_ns or send.last_posted_ns
        send.next_page, send.last_posted = end, is_last
        send.pages += end - first
        self._settle(send)

    def _post_pages(
        self, send: _Send, peer: str, source: PageIds, target: PageIds, payload: bytes
    ) -> None:
        if not len(source):
            self._transport.notify(peer, payload)
            return
        handle = self._transport.push(peer, source, target, payload)
        send.handles.add(handle)
        self._by_handle[handle] = send
        runs = count_runs(source, target)
        send.pushes += 1
        send.descriptors += runs
        self._counters.descriptors_posted += runs
        self._counters.sends_in_progress = len(self._by_handle)

    def _chunk(self, send: _Send, spec: SendSpec, first: int, end: int, is_last: bool) -> Chunk:
        return Chunk(
            spec.transfer_id,
            spec.decode_epoch,
            first,
            end,
            spec.num_tokens if is_last else end * spec.page_size_tokens,
            is_last,
            (send.payload or b"") if is_last else b"",
            spec.span_id if is_last else b"",
        )

    def _quiesce(self, send: _Send) -> None:
        if send.state >= SendState.COMPUTING:
            self._counters.transfers_aborted += 1
            send.state = SendState.QUIESCING
            self._settle(send)

    def _fail(self, send: _Send, cause: str) -> None:
        """The transfer cannot complete; what is in progress runs to its end."""
        send.state = SendState.QUIESCING
        self._tell_failure(send, cause)
        self._settle(send)

    def _pin(self, send: _Send, cause: str) -> None:
        """A push may or may not have landed, or may still."""
        send.state = SendState.FAILED
        self._tell_failure(send, cause)

    def _tell_failure(self, send: _Send, cause: str) -> None:
        if not send.failure_told:
            send.failure_told = True
            self._counters.transfers_failed += 1
            self._emit(SendFailed(send.transfer_id, cause))

    def _settle(self, send: _Send) -> None:
        """Ends a transfer whose last push in progress has ended."""
        if send.handles:
            return
        if send.state is SendState.QUIESCING:
            self._retire(send, SendState.QUIESCED)
        elif send.state is SendState.SENDING and send.last_posted:
            self._retire(send, SendState.DELIVERED)

    def _retire(self, send: _Send, state: SendState) -> None:
        send.state = state
        del self._sends[send.transfer_id]
        self._tombstones.add(send.transfer_id, state)
        if state is SendState.DELIVERED:
            self._counters.transfers_sent += 1
            self._counters.bytes_sent += send.pages * self._page_bytes
            self._emit(Sent(send.transfer_id, self._stats(send)))
            return
        self._emit(SendQuiesced(send.transfer_id))
        if send.spec is not None:
            self._peers.notify(send.spec.peer, Quiesced(send.transfer_id, send.spec.decode_epoch))

    def _stats(self, send: _Send) -> SendStats:
        return SendStats(
            send.pages,
            send.pages * self._page_bytes,
            send.pushes,
            send.descriptors,
            send.started_ns,
            send.last_posted_ns,
            time.time_ns(),
            send.posting_s,
        )


def count_runs(source: PageIds, target: PageIds) -> int:
    """Descriptors left when pages adjacent on both sides are merged."""
    if not len(source):
        return 0
    breaks = (np.diff(source) != 1) | (np.diff(target) != 1)
    return 1 + int(np.count_nonzero(breaks))
