"""Prefill side of the hand-off: what has been pushed, and when its source pages may be reused.

1. COMPUTING  chunks are still to come; pages that became final are pushed while they do.
2. SENDING    all of the prompt is final; the last push carries the owner's payload.
3. DELIVERED  every push is DONE: Sent.
4. QUIESCING  aborted by either side, or failed: nothing more is posted, pushes in progress
              run to their end, because a posted write cannot be taken back.
5. QUIESCED   no push is in progress: SendQuiesced. The id stays behind as a tombstone that
              refuses a later grant of the same transfer.
6. FAILED     a push ended in ERROR: unknown how much of it landed or still will. Pinned until
              the peer is proven dead; until then QUIESCED is sent to nobody.

Invariants, per transfer, in each group of which [begin, end) is to be sent:
- [begin, next) is posted, each page once; [next, end) is not;
- a page is posted only when every token in it is final;
- the last push, with the payload, is one of group 0, and all else is posted before it;
- DELIVERED and QUIESCED imply that no handle is in progress.

A grant may come before, between or after the chunks, and the peer may still be opening.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from faults import failpoints
from kv_transfer.events import SendFailed, SendQuiesced, Sent, TransferCounters, TransferEvent
from kv_transfer.outgoing import Outgoing, PageRange, SendState, count_runs
from kv_transfer.peers import Peers
from kv_transfer.specs import SendSpec, Source
from kv_transfer.tables import BoundedMemory, Clock, Timers
from kv_transfer.types import KvTransport, PushState, TransportError
from kv_transfer.wire import Quiesce, Quiesced, encode
from telemetry.trouble import describe

logger = logging.getLogger(__name__)

MAX_TOMBSTONES = 1 << 18
TOMBSTONE_AGE_S = 3600.0
"""Far above the longest life of a request: no grant of its transfer can still be under way."""
PEER_WAIT_S = 5.0
MAX_PUSH_BYTES = {"DRAM": 16 << 20, "VRAM": 256 << 20}
"""Between host memories a post runs its whole copy inside the call: this bounds a turn."""


class Sender:
    """Every transfer this process sends. Not thread-safe: the transfer thread's."""

    def __init__(
        self,
        transport: KvTransport,
        peers: Peers,
        emit: Callable[[TransferEvent], None],
        counters: TransferCounters,
        clock: Clock = time.monotonic,
    ) -> None:
        self._transport = transport
        self._peers = peers
        self._emit = emit
        self._counters = counters
        endpoint = transport.endpoint
        self._groups = endpoint.groups
        whole = len(endpoint.groups)
        self._counts = whole, sum(not group.digest for group in endpoint.groups)
        """Groups of a transfer: all, or those that every worker has."""
        most = MAX_PUSH_BYTES[endpoint.memory]
        self._max_push_pages = [max(1, most // group.page_bytes) for group in endpoint.groups]
        self._sends: dict[bytes, Outgoing] = {}
        self._by_handle: dict[int, Outgoing] = {}
        self._ready: deque[Outgoing] = deque()
        self._yielding: deque[Outgoing] = deque()
        """Fetches with pages to post. Hand-offs go first."""
        self._tombstones: BoundedMemory[bytes, SendState] = BoundedMemory(
            MAX_TOMBSTONES, TOMBSTONE_AGE_S, clock
        )
        self._timers = Timers(clock)
        self._clock = clock
        self._posted_s = clock()

    @property
    def in_progress(self) -> int:
        """Pushes that have not ended."""
        return len(self._by_handle)

    @property
    def has_work(self) -> bool:
        """Whether `pump` may have something to post."""
        return bool(self._ready or self._yielding)

    def posted_ago_s(self) -> float:
        """Seconds since the last push was posted."""
        return self._clock() - self._posted_s

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
        send = self._sends.setdefault(spec.transfer_id, Outgoing(spec.transfer_id))
        if send.spec is not None:
            return
        send.begin(spec)
        if not spec.is_sound() or len(spec.targets) not in self._counts:
            self._fail(send, "bad_grant")
        elif self._peers.is_dead(spec.peer):
            self._fail(send, "peer_dead")
        else:
            if not self._peers.is_open(spec.peer):
                self._timers.set(spec.transfer_id, PEER_WAIT_S)
            self._advance(send)

    def chunk_computed(
        self,
        transfer_id: bytes,
        end_token: int,
        payload: bytes | None,
        sources: Sequence[Source],
    ) -> None:
        """KV of [0, end_token) is final, and in the pages of `sources`, by group; `payload` comes
        with the end of the prompt."""
        if transfer_id in self._tombstones:
            return
        send = self._sends.setdefault(transfer_id, Outgoing(transfer_id))
        if send.payload is None:
            send.end_token = max(send.end_token, end_token)
            send.payload, send.sources = payload, sources
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
        send = self._sends.get(message.transfer_id)
        if self.give_up(from_agent, message) and (send is None or send.spec is None):
            failpoints.hit("transfer.before_quiesced")
            self._peers.notify(from_agent, Quiesced(message.transfer_id, message.decode_epoch))

    def give_up(self, decode_agent: str, message: Quiesce) -> bool:
        """Nothing more is posted of what that peer granted; a grant under way will be refused.

        Returns whether nothing can land any more. Whoever granted a send hears that as well, as
        soon as it is true.
        """
        transfer_id = message.transfer_id
        send = self._sends.get(transfer_id)
        if send is None:
            if transfer_id not in self._tombstones:
                self._tombstones.add(transfer_id, SendState.QUIESCED)
        elif send.spec is None or (send.spec.peer, send.spec.decode_epoch) == (
            decode_agent,
            message.decode_epoch,
        ):
            self._quiesce(send)
        else:
            self._counters.stale_notifications += 1
        return transfer_id in self._tombstones

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
            if send.is_live:
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
            if send is None or send.spec is None or not send.is_live:
                continue
            if not self._peers.is_open(send.spec.peer):
                self._fail(send, "peer_not_open")

    def pump(self) -> None:
        """Posts one push, of the hand-off that waited longest, or else of such a fetch."""
        while waiting := self._ready or self._yielding:
            send = waiting.popleft()
            send.is_queued = False
            if (pages := self._next_range(send)) is not None:
                self._post(send, pages)
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
                send.check_invariants(send.spec)

    def _sends_to(self, agent_name: str) -> Iterable[Outgoing]:
        return (s for s in self._sends.values() if s.spec is not None and s.spec.peer == agent_name)

    def _advance(self, send: Outgoing) -> None:
        """Queues a transfer for `pump` where it has pages to post."""
        if send.spec is None or not send.is_live:
            return
        if not send.is_consistent:
            self._fail(send, "bad_chunk")
            return
        if send.payload is not None:
            send.state = SendState.SENDING
        if not send.is_queued and self._next_range(send) is not None:
            send.is_queued = True
            (self._yielding if send.spec.yields else self._ready).append(send)

    def _next_range(self, send: Outgoing) -> PageRange | None:
        if send.spec is None or not self._peers.is_open(send.spec.peer):
            return None
        return send.next_range(self._max_push_pages)

    def _post(self, send: Outgoing, pages: PageRange) -> None:
        spec = send.spec
        assert spec is not None
        began_ns = time.time_ns()
        try:
            self._post_pages(send, spec, pages)
        except TransportError as error:
            self._fail(send, error.cause)
            self._peers.failed(spec.peer, error.cause)
        except Exception as error:
            logger.error("a push failed in an unknown way: %s", describe(error))
            self._pin(send, "internal")
        else:
            self._posted_s = self._clock()
            send.mark_posted(pages, began_ns)
            failpoints.hit("transfer.last_pushed" if send.last_posted else "transfer.pushed")
            self._settle(send)

    def _post_pages(self, send: Outgoing, spec: SendSpec, pages: PageRange) -> None:
        chunk = send.chunk(spec, pages)
        self._peers.before_use(spec.peer)
        failpoints.hit("transfer.before_push", error=_path_broken)
        if chunk.last:
            failpoints.hit("transfer.before_last_push", error=_path_broken)
        payload = encode(chunk)
        source = pages.source
        if not len(source):
            self._transport.notify(spec.peer, payload)
            return
        to = spec.targets[pages.group]
        target = to.pages[pages.first - to.first_page : pages.end - to.first_page]
        handle = self._transport.push(spec.peer, source, target, payload, pages.group)
        send.handles.add(handle)
        self._by_handle[handle] = send
        runs = count_runs(source, target)
        send.pushes += 1
        send.descriptors += runs
        self._counters.descriptors_posted += runs
        self._counters.sends_in_progress = len(self._by_handle)

    def _quiesce(self, send: Outgoing) -> None:
        if send.is_live:
            self._counters.transfers_aborted += 1
            send.state = SendState.QUIESCING
            self._settle(send)

    def _fail(self, send: Outgoing, cause: str) -> None:
        """The transfer cannot complete; what is in progress runs to its end."""
        send.state = SendState.QUIESCING
        self._report_failure(send, cause)
        self._settle(send)

    def _pin(self, send: Outgoing, cause: str) -> None:
        """A push may or may not have landed, or may still."""
        send.state = SendState.FAILED
        self._report_failure(send, cause)

    def _report_failure(self, send: Outgoing, cause: str) -> None:
        if not send.failure_reported:
            send.failure_reported = True
            self._counters.transfers_failed += 1
            self._emit(SendFailed(send.transfer_id, cause))

    def _settle(self, send: Outgoing) -> None:
        """Ends a transfer whose last push in progress has ended."""
        if send.handles:
            return
        if send.state is SendState.QUIESCING:
            self._retire(send, SendState.QUIESCED)
        elif send.state is SendState.SENDING and send.last_posted:
            self._retire(send, SendState.DELIVERED)

    def _retire(self, send: Outgoing, state: SendState) -> None:
        send.state = state
        del self._sends[send.transfer_id]
        self._tombstones.add(send.transfer_id, state)
        if state is SendState.DELIVERED:
            failpoints.hit("transfer.done")
            self._counters.transfers_sent += 1
            stats = send.stats(self._groups)
            self._counters.bytes_sent += stats.bytes
            self._emit(Sent(send.transfer_id, stats))
            return
        self._emit(SendQuiesced(send.transfer_id))
        if send.spec is not None:
            failpoints.hit("transfer.before_quiesced")
            self._peers.notify(send.spec.peer, Quiesced(send.transfer_id, send.spec.decode_epoch))


def _path_broken(failpoint: str) -> TransportError:
    return TransportError("failpoint", failpoint)
