"""What a worker does to get pages of a prompt from another worker.

The states of a fetch:

1. WANTED: the engine holds pages for it (`engine.tiers.peers`), and its request waits.
2. ASKED: the transfer thread expects the pages. The router passes the fetch on to the holder, which
   may write from then on.
3. LANDED: the holder's last notification is here. It may end before the last page: the holder had
   no more. Nothing can land any more.
4. GIVEN UP: time is up, the holder refused, or the path to it broke. The pages that have landed
   count, and the engine computes the rest. A write may still land in the others.
5. FREED: nothing can land any more, as for a hand-off (`kv_transfer.receiving`).

Time is up after twice the estimate. Expiry is no fence: the pages that did not land stay where they
are until the holder has quiesced, or is proven dead.

Invariants: the transfer thread expects a transfer before anyone hears of it. The engine hears
`fetched` once for each fetch, and `freed` once after it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from baton.worker.v1 import worker_pb2
from engine.averages import averaged
from engine.tiers.lanes import LATE
from engine.tiers.peers import FetchWanted
from faults import failpoints
from fetch_service.outcomes import (
    FETCHED,
    INTERNAL,
    NO_PATH,
    NOBODY_WAITS,
    SHORT,
    TIMED_OUT,
    outcome_of,
)
from fetch_service.ranges import ranges_of
from fetch_service.spans import write_span_of
from kv_transfer.events import (
    Delivered,
    PeerFailed,
    ReceiveAborted,
    ReceiveExpired,
    ReceiveFreed,
    TransferEvent,
)
from kv_transfer.specs import Range, ReceiveSpec
from serving.wire import pack_ids
from telemetry.metrics.worker import WorkerMetrics
from worker_base.legs import WorkerLeg
from worker_base.outbox import CallOnLoop
from worker_base.overdue import Unended
from worker_base.page_layout import PageLayout

if TYPE_CHECKING:
    from engine.loop.fetch_port import FetchPort
    from kv_transfer.thread import TransferThread

logger = logging.getLogger(__name__)

LEAST_S: Final = 0.5
"""No fetch is late before, seconds: two event loops and a router stand between."""
FRESH_S: Final = 30.0
"""A latency older than this many seconds counts as unknown. Otherwise a worker with one slow fetch
would be given no others, and could never show a better one."""
UNMEASURED_BYTES_PER_S: Final = 1e9
"""Rate of a path that was not measured yet: that of a common network."""


class Paths(Protocol):
    """What `worker.peers.PeerPaths` knows of the ways to other workers."""

    def is_usable(self, agent_name: str) -> bool:
        """Whether a transfer with that agent can be begun."""
        ...

    def path_to(self, agent_name: str) -> str:
        """The transport really in use."""
        ...

    def bytes_per_s(self, agent_name: str) -> float:
        """As measured when they met; 0 while unknown."""
        ...


@dataclass(slots=True, eq=False)
class OpenFetch:
    """One fetch, from ASKED on."""

    wanted: FetchWanted
    traceparent: str
    began_ns: int = field(default_factory=time.time_ns)
    """Unix nanoseconds; the other times are by `time.monotonic`."""
    began_s: float = field(default_factory=time.monotonic)
    cause: str = TIMED_OUT
    """Why it is given up, if it is."""
    over_s: float = 0.0
    """When the engine was notified; 0 before."""

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The pages of each group, counted as if the prompt began with the first that is missing of
        any group."""
        return ranges_of([len(part.keys) for part in self.wanted.parts])

    def landed(self, end: int) -> int:
        """Pages of group 0 that came, where they are there up to `end` in such ranges."""
        return max(0, end - self.ranges[0].first)


class FetchService:
    """The fetches of one worker. It runs on the event loop, except `want`."""

    def __init__(
        self,
        engine: FetchPort,
        transfer: TransferThread,
        call_on_loop: CallOnLoop,
        metrics: WorkerMetrics,
        paths: Paths,
        *,
        epoch: int,
        agent_name: str,
        layout: PageLayout,
        leg_of: Callable[[bytes], WorkerLeg | None],
        why_not: str = "",
        least_s: float = LEAST_S,
    ) -> None:
        """Begins without fetches.

        Args:
            engine: waits for the pages.
            transfer: receives them.
            call_on_loop: brings the engine's wishes here.
            metrics: count the outcomes.
            paths: to the other workers.
            epoch: of this worker.
            agent_name: of this worker.
            layout: of this worker's pages.
            leg_of: the leg of an attempt under way.
            why_not: why this worker cannot fetch; empty if it can.
            least_s: no fetch is late before, seconds.
        """
        self._engine = engine
        self._transfer = transfer
        self._call_on_loop = call_on_loop
        self._metrics = metrics
        self._paths = paths
        self._epoch = epoch
        self._agent_name = agent_name
        self._layout = layout
        self._leg_of = leg_of
        self._why_not = why_not
        self._least_s = least_s
        self._fetches: dict[bytes, OpenFetch] = {}
        self._latency_s = 0.0
        self._noted_s = 0.0
        """When a fetch was last added to that."""
        engine.fetch_by(self.want)

    def want(self, wanted: FetchWanted) -> None:
        """Takes a wish of the engine, on the step thread."""
        self._call_on_loop(partial(self._begin, wanted))

    @property
    def latency_s(self) -> float:
        """What recent fetches took beyond the time for their bytes, a moving average; 0 while that
        is unknown. A late fetch counts with the time until it was given up."""
        return self._latency_s if time.monotonic() - self._noted_s < FRESH_S else 0.0

    def quarantines(self) -> list[Unended]:
        """Every fetch that was given up, whose pages a write may still hit."""
        now_s = time.monotonic()
        return [
            Unended(fetch.wanted.peer, now_s - fetch.over_s)
            for fetch in self._fetches.values()
            if fetch.over_s
        ]

    @property
    def active(self) -> int:
        """Fetches that have not ended, those in quarantine included."""
        return len(self._fetches)

    # Messages of the router.

    def refused(self, refused: worker_pb2.FetchRefused) -> None:
        """Takes the word of the holder, or of the router, that nothing more will be written."""
        fetch = self._fetches.get(refused.transfer_id)
        if fetch is None or refused.fetcher_epoch != self._epoch:
            return
        if refused.holder_agent_name != fetch.wanted.peer:
            return
        fetch.cause = outcome_of(refused.cause)
        self._transfer.quiesced(refused.transfer_id, fetch.wanted.peer, self._epoch)
        self._transfer.abort_receive(refused.transfer_id)

    # Events of the transfer thread.

    def on_transfer(self, event: TransferEvent) -> None:
        """Takes an event of the transfer thread, and ignores those of other owners."""
        match event:
            case PeerFailed():
                self._path_broke(event.agent_name)
            case Delivered() if fetch := self._fetches.get(event.transfer_id):
                is_whole = event.num_pages == fetch.ranges[0].end
                landed = fetch.landed(event.num_pages)
                self._end(fetch, landed, FETCHED if is_whole else SHORT, others=True)
                self._free(fetch)
            case ReceiveAborted() | ReceiveExpired() if fetch := self._fetches.get(
                event.transfer_id
            ):
                if not (isinstance(event, ReceiveAborted) and event.already_ready):
                    self._end(fetch, fetch.landed(event.landed_pages), fetch.cause)
            case ReceiveFreed() if fetch := self._fetches.get(event.transfer_id):
                self._free(fetch)

    # Life.

    def _begin(self, wanted: FetchWanted) -> None:
        leg = self._leg_of(wanted.request_id)
        cause = self._why_not_now(wanted, leg)
        fetch = OpenFetch(wanted, leg.traceparent if leg else "")
        if cause or leg is None:
            self._end(fetch, 0, cause)
            self._free(fetch)
            return
        try:
            self._ask(fetch, leg)
        except Exception:
            logger.exception("a fetch could not be begun")
            fetch.cause = INTERNAL
            self._transfer.abort_receive(wanted.id)

    def _why_not_now(self, wanted: FetchWanted, leg: WorkerLeg | None) -> str:
        if self._why_not:
            return self._why_not
        if leg is None:
            return NOBODY_WAITS
        return "" if self._paths.is_usable(wanted.peer) else NO_PATH

    def _ask(self, fetch: OpenFetch, leg: WorkerLeg) -> None:
        """WANTED -> ASKED."""
        wanted = fetch.wanted
        self._fetches[wanted.id] = fetch
        failpoints.hit("fetch.wanted")
        self._transfer.expect(
            ReceiveSpec(
                transfer_id=wanted.id,
                peer=wanted.peer,
                ranges=fetch.ranges,
                num_tokens=fetch.ranges[0].end * self._layout.page_size_tokens,
                timeout_s=self._limit_s(wanted.peer, self._layout.bytes_of(fetch.ranges)),
                may_be_short=True,
            )
        )
        first, *others = wanted.parts
        message = worker_pb2.Fetch(
            transfer_id=wanted.id,
            fetcher_epoch=self._epoch,
            fetcher_agent_name=self._agent_name,
            holder_agent_name=wanted.peer,
            keys=b"".join(first.keys),
            page_ids=pack_ids(first.pages),
            traceparent=fetch.traceparent,
            groups=[
                worker_pb2.GroupFetch(keys=b"".join(part.keys), page_ids=pack_ids(part.pages))
                for part in others
            ],
        )
        leg.stream.send(worker_pb2.WorkResponse(fetch=message))
        failpoints.hit("fetch.asked")

    def _limit_s(self, peer: str, size: int) -> float:
        rate = self._paths.bytes_per_s(peer) or UNMEASURED_BYTES_PER_S
        usual_s = max(self._least_s, LATE * size / rate)
        return failpoints.wait_s("fetch.timeout", usual_s)

    def _path_broke(self, agent_name: str) -> None:
        for fetch in self._fetches.values():
            if fetch.wanted.peer == agent_name and not fetch.over_s:
                fetch.cause = NO_PATH
                self._transfer.abort_receive(fetch.wanted.id)

    def _end(self, fetch: OpenFetch, landed: int, outcome: str, *, others: bool = False) -> None:
        """-> LANDED or GIVEN UP, with so many pages of group 0 and all of the `others` or none."""
        if fetch.over_s:
            return
        failpoints.hit("fetch.landed")
        fetch.over_s = time.monotonic()
        self._engine.fetched(fetch.wanted.id, landed, others=others)
        came = [len(part.keys) * others for part in fetch.wanted.parts]
        came[0], seconds = landed, fetch.over_s - fetch.began_s
        size = self._layout.bytes_of([Range(0, count) for count in came])
        self._metrics.fetch_ended(outcome, sum(came), size, seconds)
        if outcome in (FETCHED, TIMED_OUT):
            self._note_latency(fetch.wanted.peer, size, seconds)
        write_span_of(
            fetch.wanted,
            fetch.traceparent,
            fetch.began_ns,
            sum(came),
            size,
            transport=self._paths.path_to(fetch.wanted.peer),
            outcome=outcome,
        )

    def _note_latency(self, peer: str, size: int, seconds: float) -> None:
        rate = self._paths.bytes_per_s(peer) or UNMEASURED_BYTES_PER_S
        self._latency_s = averaged(self.latency_s, max(0.0, seconds - size / rate))
        self._noted_s = time.monotonic()

    def _free(self, fetch: OpenFetch) -> None:
        """-> FREED."""
        self._fetches.pop(fetch.wanted.id, None)
        self._engine.freed(fetch.wanted.id)
