"""What a worker does to give pages to another worker.

The states of a hold:

1. RECEIVED: a fetch came. The engine looks for its leading keys, and loads those that are in host
   slots into the pool.
2. HELD: it holds those that are in the pool now. The transfer thread pushes them, behind the
   pages of hand-offs. Its last notification says how many they were.
3. LET GO: every push has ended, and the pages go their ways.
4. REFUSED: there is nothing to give. The router is notified once no write can follow, which is
   when the transfer thread has set its tombstone.

A push that could not be posted ends the hold. The router is notified once the pushes before it have
ended. A push that ended in an error keeps its pages held until the other side is proven dead, as in
a hand-off.

Invariants: an id is held once. Its pages are let go once, after `Sent` or `SendQuiesced`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.worker.v1 import worker_pb2
from engine.tiers.peers import GroupFetch
from engine.types import PageIds
from faults import failpoints
from fetch_service.fetching import Paths
from fetch_service.outcomes import MALFORMED, MISSING, NO_PATH
from fetch_service.ranges import ranges_of
from fetch_service.spans import write_give_span
from kv_transfer.events import SendFailed, SendQuiesced, SendStats, Sent, TransferEvent
from kv_transfer.specs import TRANSFER_ID_BYTES, SendSpec, Source, Target
from telemetry.metrics.worker import WorkerMetrics
from worker_base.messages import MalformedMessage, unpack_ids
from worker_base.outbox import CallOnLoop, Outbox
from worker_base.overdue import Unended
from worker_base.page_layout import PageLayout

if TYPE_CHECKING:
    from engine.loop.fetch_port import FetchPort
    from kv_transfer.thread import TransferThread

logger = logging.getLogger(__name__)

KEY_BYTES: Final = 32
"""Bytes of a whole key, SHA-256: a page is given by its whole key alone."""


@dataclass(slots=True, eq=False)
class _Hold:
    fetch: worker_pb2.Fetch
    stream: Outbox
    parts: Sequence[GroupFetch]
    """By group, keys and the other side's pages."""
    since_s: float = field(default_factory=time.monotonic)
    refused: str = ""
    received_ns: int = field(default_factory=time.time_ns)
    """Unix nanoseconds, as below."""
    held_ns: int = 0
    """The engine held the pages."""
    loaded_pages: int = 0
    """Pages that were in host memory before."""


class HoldService:
    """The holds of one worker. It runs on the event loop."""

    def __init__(
        self,
        engine: FetchPort,
        transfer: TransferThread,
        call_on_loop: CallOnLoop,
        metrics: WorkerMetrics,
        paths: Paths,
        *,
        layout: PageLayout,
        why_not: str = "",
    ) -> None:
        """Begins without holds. `layout` is that of this worker's pages. `why_not` says why it
        cannot give any; empty if it can."""
        self._engine = engine
        self._transfer = transfer
        self._call_on_loop = call_on_loop
        self._metrics = metrics
        self._paths = paths
        self._layout = layout
        self._why_not = why_not
        self._holds: dict[bytes, _Hold] = {}

    @property
    def active(self) -> int:
        """Holds that have not ended."""
        return len(self._holds)

    def unended_sends(self) -> list[Unended]:
        """Every hold: nothing is left to compute."""
        now_s = time.monotonic()
        return [
            Unended(hold.fetch.fetcher_agent_name, now_s - hold.since_s)
            for hold in self._holds.values()
        ]

    def asked(self, fetch: worker_pb2.Fetch, stream: Outbox) -> None:
        """Takes a fetch that another worker wants."""
        if fetch.transfer_id in self._holds or len(fetch.transfer_id) != TRANSFER_ID_BYTES:
            return
        failpoints.hit("fetch.received")
        parts = _parts_of(fetch, len(self._layout.groups))
        hold = self._holds[fetch.transfer_id] = _Hold(fetch, stream, parts)
        if why := self._why_not_now(hold):
            self._refuse(hold, why)
            return
        keys = [part.keys for part in parts]
        self._engine.hold(fetch.transfer_id, keys, partial(self._send_held, hold))

    def on_transfer(self, event: TransferEvent) -> None:
        """Takes an event of the transfer thread, and ignores those of other owners."""
        if not isinstance(event, Sent | SendQuiesced | SendFailed):
            return
        hold = self._holds.get(event.transfer_id)
        if hold is None:
            return
        if isinstance(event, SendFailed):
            hold.refused = NO_PATH
            self._metrics.transfer_failed(event.cause)
            return
        if isinstance(event, Sent):
            failpoints.hit("fetch.sent")
            self._metrics.gave(event.stats.pages, event.stats.bytes)
            self._write_span(hold, event.stats)
        del self._holds[event.transfer_id]
        self._engine.let_go(event.transfer_id)
        if hold.refused:
            self._send_refused(hold)

    def _why_not_now(self, hold: _Hold) -> str:
        if not hold.parts:
            return MALFORMED
        if self._why_not:
            return self._why_not
        return "" if self._paths.is_usable(hold.fetch.fetcher_agent_name) else NO_PATH

    def _write_span(self, hold: _Hold, stats: SendStats) -> None:
        write_give_span(
            hold.fetch,
            stats,
            received_ns=hold.received_ns,
            held_ns=hold.held_ns,
            loaded_pages=hold.loaded_pages,
            transport=self._paths.path_to(hold.fetch.fetcher_agent_name),
        )

    def _send_held(self, hold: _Hold, sources: Sequence[PageIds], loaded_pages: int) -> None:
        """On the step thread."""
        hold.held_ns, hold.loaded_pages = time.time_ns(), loaded_pages
        self._call_on_loop(partial(self._held, hold, sources))

    def _held(self, hold: _Hold, sources: Sequence[PageIds]) -> None:
        """RECEIVED -> HELD."""
        counts = [len(pages) for pages in sources]
        if not any(counts):
            self._refuse(hold, MISSING)
            return
        failpoints.hit("fetch.held")
        fetch, ranges, size = hold.fetch, ranges_of(counts), self._layout.page_size_tokens
        num_tokens = ranges[0].end * size
        # All pages of group 0 from the first on have a place; those before its range have no page.
        before = np.zeros(ranges[0].first, np.int32)
        targets = [Target(np.concatenate([before, hold.parts[0].pages[: counts[0]]]), len(before))]
        targets += [
            Target(part.pages, first_page=own.first)
            for part, own in zip(hold.parts[1:], ranges[1:], strict=True)
        ]
        self._transfer.begin_send(
            SendSpec(
                transfer_id=fetch.transfer_id,
                peer=fetch.fetcher_agent_name,
                decode_epoch=fetch.fetcher_epoch,
                targets=targets,
                num_tokens=num_tokens,
                page_size_tokens=size,
                yields=True,
            )
        )
        own_pages = zip(sources, ranges, strict=True)
        there = [Source(pages, own.first) for pages, own in own_pages]
        self._transfer.chunk_computed(fetch.transfer_id, num_tokens, b"", there)

    def _refuse(self, hold: _Hold, why: str) -> None:
        """-> REFUSED. `SendQuiesced` follows."""
        hold.refused = why
        self._transfer.abort_send(hold.fetch.transfer_id)

    @staticmethod
    def _send_refused(hold: _Hold) -> None:
        fetch = hold.fetch
        refused = worker_pb2.FetchRefused(
            transfer_id=fetch.transfer_id,
            fetcher_epoch=fetch.fetcher_epoch,
            fetcher_agent_name=fetch.fetcher_agent_name,
            holder_agent_name=fetch.holder_agent_name,
            cause=hold.refused,
        )
        hold.stream.send(worker_pb2.WorkResponse(fetch_refused=refused))


def _parts_of(fetch: worker_pb2.Fetch, groups: int) -> Sequence[GroupFetch]:
    """The pages that are wanted of so many groups; empty if the message is malformed."""
    parts = []
    wanted: list[worker_pb2.Fetch | worker_pb2.GroupFetch] = [fetch, *fetch.groups]
    for group in wanted:
        packed = group.keys
        keys = [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
        try:
            pages = unpack_ids(group.page_ids)
        except MalformedMessage:
            return ()
        if len(packed) != KEY_BYTES * len(pages):
            return ()
        parts.append(GroupFetch(keys, pages))
    is_sound = len(parts) == groups and any(part.keys for part in parts)
    return parts if is_sound else ()
