"""A prompt goes where its first token is soonest, given who holds what of it.

A worker may come by the leading pages of a prompt in several ways: it has them in its pool, loads
them from host memory, or fetches them from a peer. Only pages count behind which it can go on. For
each way,

    seconds = queue + load or fetch + uncached tokens / rate(context) + delay of its streams
              + the adapter's way into a slot, if the prompt has one

The delay is what the prompt costs others: decode rows x the delay of a step with a chunk of a
prompt, as the workers of that role have measured it on average (`placing.usual_chunk`). A worker's
way is its fastest. Among workers the fastest wins, and on a tie the first.

Among decode workers that are to receive a prompt, the one under the least pressure is taken
(`placing.pressure`). One that holds the prompt already may have `SLACK` more, and one that holds a
part of it that part of `SLACK`. So conversations stay where their KV is, if the load is about
equal. One with the prompt's adapter in a slot has `SLACK` more, too, and one whose slots are all in
use by others is under full pressure.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from prefixes.index import Held
from router.placement.adapters import finds_slot, is_in_slot, slot_s
from router.placement.just_routed import JustRouted
from router.placement.placing import (
    LocalReason,
    MixedChunk,
    delay_s,
    finish_s,
    pressure,
    rate_of_unmeasured,
    rest_s,
    takeover_tokens,
    usual_chunk,
)
from router.placement.ways import Way
from router.workers.between import fetches, is_reachable, path_rate
from router.workers.holdings import NO_HOLDINGS, Holdings
from router.workers.registry import PREFILLS

if TYPE_CHECKING:
    from router.jobs import Demand
    from router.settings import LocalPrefill
    from router.workers.link import WorkerLink
    from router.workers.load_estimate import Capacity

_NOTHING: Final = Held.all(0, 0)
_SECONDS: Final = attrgetter("seconds")
HOLDERS: Final = 4
"""So many holders of a prompt are looked at where there are many workers."""
TRIED: Final = 4
"""Unreachable sources that are tried before it is checked that any path was measured. Mostly the
first one is reachable. To try every pair of workers and sources takes milliseconds."""
SLACK: Final = 0.0625
"""A decode worker that holds the whole prompt is taken up to this much more pressure."""
FETCHED_SHARE: Final = 8
"""A fetch takes at most this part of the pool, an eighth. The worker bounds it, too."""


class Usual(NamedTuple):
    """Averages over workers, used where a worker's own measurement is missing or too noisy."""

    rate: float
    """Prompt tokens per second of a worker that has not reported a rate lately."""
    chunks: Mapping[int, MixedChunk]
    """By role: length of a prompt's chunk, and by how much it slows a decode step."""

    def chunk(self, worker: WorkerLink) -> MixedChunk:
        """The chunk of a prompt at a worker."""
        return self.chunks.get(worker.identity.role, MixedChunk())


class Cost:
    """See the module. It belongs to the event loop's thread.

    Args:
        holdings: what workers have reported.
        just_routed: what they compute or have got since.
    """

    def __init__(
        self, holdings: Holdings | None = None, just_routed: JustRouted | None = None
    ) -> None:
        self._holdings = holdings or NO_HOLDINGS
        self._just_routed = just_routed or JustRouted()
        self._demand: Demand | None = None
        self._held: Mapping[str, Held] = {}
        self._owned: dict[str, Held] = {}
        """What workers hold or are about to, by name, as far as it was asked."""
        self._chunks: Mapping[int, MixedChunk] | None = None
        """See `Usual`; None: not asked yet."""
        self._holders: Sequence[WorkerLink] | None = None
        """Workers that hold pages of the prompt, with the most first; None: not looked for yet."""
        self._measured: tuple[Set[str], Set[str]] | None = None
        """Agent names of the holders, and of all to which one of them has measured its path; None:
        not needed yet."""

    def look(self, demand: Demand) -> None:
        """Looks up who holds what of a prompt, for the calls that follow."""
        self._demand, self._holders, self._measured = demand, None, None
        self._owned, self._chunks = {}, None
        self._held = self._holdings.held(demand) if len(demand.keys) else {}

    def holders(self, demand: Demand) -> Sequence[str]:
        """Names of those that hold most, and of those to which its first page was just routed."""
        if not len(demand.keys):
            return ()
        held = self._held.items()
        most = heapq.nlargest(HOLDERS, held, key=lambda item: item[1].host_resume)
        return [*(name for name, _ in most), *self._just_routed.holders(demand.keys)[:HOLDERS]]

    def routed(self, demand: Demand, worker: WorkerLink) -> None:
        """The worker computes the prompt, or has got it. Its pages count as held from now on."""
        self._owned.clear()
        self._just_routed.add(worker.worker_id, demand)

    def failed(self, demand: Demand, workers: Iterable[WorkerLink]) -> None:
        """The attempt failed, so they may never have its pages: only pages that they reported, or
        compute for another request, count from now on."""
        self._owned.clear()
        for worker in workers:
            self._just_routed.forget(worker.worker_id, demand)

    def held_elsewhere(self, demand: Demand, others: Sequence[WorkerLink], granted: int) -> int:
        """The most leading pages of a prompt that others have reported by now, or that its decode
        worker said it held when it granted the rest."""
        self.look(demand)
        return max(granted, *(self._reported(one).host_resume for one in others), 0)

    # -- choices ------------------------------------------------------------------------------

    def prefill(
        self, demand: Demand, candidates: Sequence[WorkerLink], everyone: Sequence[WorkerLink]
    ) -> int:
        """Index of the worker whose first token is soonest."""
        seconds = [way.seconds for way in self._ways(demand, candidates, everyone)]
        return seconds.index(min(seconds))

    def decode(self, demand: Demand, candidates: Sequence[WorkerLink]) -> int:
        """Index of the worker with the least pressure, where what it holds of the prompt counts for
        it."""
        most, digest = max(1, len(demand.keys)), demand.model.digest
        found = []
        for worker in candidates:
            used, running = pressure(worker.capacity())
            share = self._own(demand, worker).host_pages / most
            if digest:
                used = used if finds_slot(worker, digest) else 1.0
                share += is_in_slot(worker, digest)
            found.append((used - SLACK * share, running))
        return found.index(min(found))

    def local(
        self,
        demand: Demand,
        candidates: Sequence[WorkerLink],
        rivals: Sequence[WorkerLink],
        everyone: Sequence[WorkerLink],
        mode: LocalPrefill,
    ) -> tuple[int, LocalReason] | None:
        """A decode worker whose first token is sooner than that of any rival. Where `mode` is
        `cached`, it must hold the larger part of the prompt."""
        size = demand.model.page_size_tokens
        held = [self._own(demand, worker).host_resume * size for worker in candidates]
        holds_most = [2 * tokens >= demand.prompt_tokens for tokens in held]
        allowed = [i for i, most in enumerate(holds_most) if most or mode == "auto"]
        if not allowed or demand.prompt_logprobs:
            return None
        usual = self._usual(demand, rivals, everyone)
        ways = [self._fastest(demand, candidates[i], everyone, usual) for i in allowed]
        seconds = [way.seconds for way in ways]
        others = [self._fastest(demand, one, everyone, usual) for one in rivals]
        rival_s = min(way.seconds for way in others)
        if min(seconds) >= rival_s:
            return None
        chosen = allowed[seconds.index(min(seconds))]
        reason = LocalReason.CACHED if holds_most[chosen] else LocalReason.FASTER
        return chosen, reason

    def takeover_tokens(
        self,
        demand: Demand,
        way: Way,
        prefill: WorkerLink,
        decode: WorkerLink,
        everyone: Sequence[WorkerLink],
    ) -> int:
        """The most tokens that the decode worker may compute and still be first."""
        usual = self._usual_beside(demand, prefill, everyone)
        capacity, chunk = decode.capacity(), usual.chunk(decode)
        return takeover_tokens(capacity, chunk, way.seconds, demand.prompt_tokens, usual.rate)

    # -- ways ---------------------------------------------------------------------------------

    def way(self, demand: Demand, worker: WorkerLink, everyone: Sequence[WorkerLink]) -> Way:
        """The way of the worker that was chosen, with what it computes again and why."""
        usual = self._usual_beside(demand, worker, everyone)
        way = self._fastest(demand, worker, everyone, usual)
        return way._replace(again=self._again(demand, worker, way, everyone))

    def _ways(
        self, demand: Demand, workers: Sequence[WorkerLink], everyone: Sequence[WorkerLink]
    ) -> list[Way]:
        usual = self._usual(demand, workers, everyone)
        return [self._fastest(demand, worker, everyone, usual) for worker in workers]

    def _fastest(
        self, demand: Demand, worker: WorkerLink, everyone: Sequence[WorkerLink], usual: Usual
    ) -> Way:
        """The fastest of three ways to the prompt's first pages:

        1. The worker uses what is in its pool.
        2. It loads more from its host memory, if more is there and its load rate is known.
        3. It fetches still more from a peer, after that load if there is one.

        On a tie the earlier way wins; it moves fewer bytes.
        """
        own, digest = self._own(demand, worker), demand.model.digest
        load_s = slot_s(worker, digest) if digest else 0.0
        best = self._way(demand, worker, usual, own.pool_resume, load_s)
        capacity, here = worker.capacity(), _here(worker, own)
        if here > own.pool_resume:
            load_s += _bytes(worker, here - own.pool_pages) / capacity.load_bytes_per_s
            loads = self._way(demand, worker, usual, here, load_s)
            best = min(best, loads, key=_SECONDS)
        peer = self._source(worker, own, everyone)
        if peer is not None and (pages := self._fetchable(worker, peer, own)) > here:
            fetch_s = load_s + capacity.fetch_latency_s
            fetch_s += _bytes(worker, pages - max(here, own.pool_pages)) / path_rate(worker, peer)
            way = self._way(demand, worker, usual, pages, fetch_s)
            best = min(best, way._replace(holder=peer, fetched_pages=pages), key=_SECONDS)
        if own.pool_resume > self._reported(worker).pool_resume:
            return best._replace(just_routed=True)
        return best

    def _way(
        self, demand: Demand, worker: WorkerLink, usual: Usual, pages: int, moved_s: float
    ) -> Way:
        """Estimates the time to first token if `pages` leading pages, and the adapter, are ready
        after `moved_s`."""
        capacity, tokens = worker.capacity(), demand.prompt_tokens
        cached = min(pages * demand.model.page_size_tokens, tokens - 1)
        seconds = finish_s(capacity, 0, usual.rate) + moved_s
        seconds += rest_s(capacity, cached, tokens, usual.rate)
        seconds += delay_s(capacity, usual.chunk(worker), tokens - cached)
        return Way(seconds, cached)

    def _usual(
        self, demand: Demand, workers: Sequence[WorkerLink], everyone: Sequence[WorkerLink]
    ) -> Usual:
        """What is assumed where these workers are compared."""
        if demand is not self._demand:
            self.look(demand)
        if self._chunks is None:
            by_role: dict[int, list[Capacity]] = {}
            for one in everyone:
                by_role.setdefault(one.identity.role, []).append(one.capacity())
            self._chunks = {role: usual_chunk(alike) for role, alike in by_role.items()}
        rate = rate_of_unmeasured([worker.capacity() for worker in workers])
        return Usual(rate, self._chunks)

    def _usual_beside(
        self, demand: Demand, worker: WorkerLink, everyone: Sequence[WorkerLink]
    ) -> Usual:
        """Fallback rates for one worker: those of the fastest worker that computes prompts."""
        prefills = [one for one in everyone if one.identity.role in PREFILLS]
        return self._usual(demand, [worker, *prefills], everyone)

    # -- who holds what -----------------------------------------------------------------------

    def _reported(self, worker: WorkerLink) -> Held:
        return self._held.get(worker.worker_id, _NOTHING)

    def _source(
        self, worker: WorkerLink, own: Held, everyone: Sequence[WorkerLink]
    ) -> WorkerLink | None:
        """The peer to fetch from: the one with the most pages of the prompt to which `worker` has a
        measured path. None: no reachable peer has more than `worker` itself."""
        if self._holders is None:
            holders = [one for one in everyone if self._reported(one).host_resume and fetches(one)]
            holders.sort(key=lambda one: self._reported(one).host_resume, reverse=True)
            self._holders = holders
        for tried, peer in enumerate(self._holders):
            if self._reported(peer).host_resume <= own.host_resume:
                return None
            if is_reachable(worker, peer):
                return peer
            if tried == TRIED and not self._has_path(worker):
                return None
        return None

    def _has_path(self, worker: WorkerLink) -> bool:
        """Whether the path between the worker and any holder was measured."""
        if self._measured is None:
            holders = self._holders or ()
            by_holders: set[str] = set().union(*(one.measured for one in holders))
            self._measured = {one.agent_name for one in holders}, by_holders
        holding, measured = self._measured
        return worker.agent_name in measured or not holding.isdisjoint(worker.measured)

    def _own(self, demand: Demand, worker: WorkerLink) -> Held:
        """What a worker holds or is about to hold."""
        if not len(demand.keys):
            return _NOTHING
        if demand is not self._demand:
            self.look(demand)
        if (own := self._owned.get(worker.worker_id)) is None:
            own = self._reported(worker)
            if pages := self._just_routed.pages(worker.worker_id, demand.keys):
                own = Held(*map(max, own, repeat(pages)))
            self._owned[worker.worker_id] = own
        return own

    def _fetchable(self, worker: WorkerLink, peer: WorkerLink, own: Held) -> int:
        """How many leading pages the worker would have after a fetch from `peer`, which brings at
        most an eighth of its pool. Models with several groups of layers fetch a whole resume point;
        if that exceeds the eighth, nothing is fetched: what it can use without a fetch."""
        here = _here(worker, own)
        most = max(here, own.pool_pages) + worker.capacity().total_pages // FETCHED_SHARE
        wanted = self._reported(peer).host_resume
        if wanted > most and worker.identity.model.resume_pages:
            return here
        return min(wanted, most)

    def _again(
        self, demand: Demand, worker: WorkerLink, way: Way, everyone: Sequence[WorkerLink]
    ) -> Mapping[str, int]:
        """Counts pages that the worker computes although another worker holds them or is about to
        get them, by reason.

        All numbers are of leading pages behind which the prompt can be resumed:

        - `have`: those that the chosen way uses;
        - `within`: those usable after a fetch of bounded size; at least `have`;
        - `reachable`: those of the best reachable peer; the worker's own if there is none;
        - `held`: the most that another worker has reported;
        - `coming`: the most that another worker has reported or is about to have.

        The reasons, none of them below 0:

        - `sooner` = `within` - `have`: to compute them is faster than to bring them;
        - `bound` = min(`held`, `reachable`) - `within`: a fetch would be too large;
        - `unreachable` = `held` - max(`within`, `reachable`): no usable path leads to their holder;
        - `in_flight` = `coming` - max(`held`, `have`): nobody has reported them yet.
        """
        if not len(demand.keys):
            return {}
        others = [one for one in everyone if one is not worker]
        have = way.cached_tokens // demand.model.page_size_tokens
        held = max((self._reported(one).host_resume for one in others), default=0)
        coming = max((self._own(demand, one).host_resume for one in others), default=0)
        if coming <= have:
            return {}
        own = self._own(demand, worker)
        peer = self._source(worker, own, everyone)
        reachable = own.host_resume if peer is None else self._reported(peer).host_resume
        fetchable = own.host_resume if peer is None else self._fetchable(worker, peer, own)
        within = max(have, min(held, fetchable))
        again = Counter({"sooner": within - have})
        again["bound"] += max(0, min(held, reachable) - within)
        again["unreachable"] += max(0, held - max(within, reachable))
        again["in_flight"] += max(0, coming - max(held, have))
        return +again


def _here(worker: WorkerLink, own: Held) -> int:
    """The leading pages that a worker can use without a fetch: those in host memory only where it
    has measured how fast it loads them."""
    return own.host_resume if worker.capacity().load_bytes_per_s > 0 else own.pool_resume


def _bytes(worker: WorkerLink, pages: int) -> int:
    """Bytes of so many pages of group 0, and of what a resume point has beside them."""
    return max(0, pages) * worker.page_bytes + worker.resume_bytes
