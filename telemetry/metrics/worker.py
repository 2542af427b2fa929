"""The metrics of a worker process: its engine, its KV transfers, its GPUs, its peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple

from telemetry.metrics.collectors import Row, Samples, Snapshots
from telemetry.metrics.gpu import GpuLoad
from telemetry.metrics.process import ProcessMetrics
from telemetry.names import Metric


class PeerPath(NamedTuple):
    """The path to another worker."""

    peer: str
    transport: str
    gigabytes_per_s: float
    latency_us: float
    cause: str
    """Reason to avoid it; empty: it is healthy."""


class WorkerMetrics(ProcessMetrics):
    """The metrics of a worker process. Its methods count events.

    Args:
        load: returns the latest snapshot, with the attributes of `engine.types.EngineLoad`.
        transfer: returns counts, with the attributes of `kv_transfer.events.TransferCounters`;
            None for a worker that hands nothing off.
        streams: returns the number of attached routers.
    """

    def __init__(
        self,
        load: Callable[[], object],
        transfer: Callable[[], object] | None = None,
        streams: Callable[[], int] = int,
    ) -> None:
        super().__init__()
        self._step = self._histogram(Metric.STEP_SECONDS)
        self._batch = self._histogram(Metric.BATCH_SIZE)
        self._second_token = self._histogram(Metric.SECOND_TOKEN_GAP)
        self._second_token_part = self._histogram(Metric.SECOND_TOKEN_PART)
        self._transfer_s = self._histogram(Metric.TRANSFER_SECONDS)
        self._exposed_s = self._histogram(Metric.TRANSFER_EXPOSED)
        self._transfer_failures = self._counter(Metric.TRANSFER_FAILURES)
        self._drafts_degraded = self._counter(Metric.SPECULATION_DEGRADED)
        self._fetches = self._counter(Metric.FETCHES)
        self._fetch_pages = self._counter(Metric.FETCH_PAGES)
        self._fetch_bytes = self._counter(Metric.FETCH_BYTES)
        self._fetch_s = self._histogram(Metric.FETCH_SECONDS)
        self._watch(load, _ENGINE_ROWS)
        self.registry.register(Samples(Metric.FOUND_TOKENS, partial(_found, load)))
        if transfer is not None:
            self._watch(transfer, _TRANSFER_ROWS)
        self._watch(streams, (Row(Metric.WORK_STREAMS, float),))

    def watch_peers(self, peers: Callable[[], Sequence[PeerPath]]) -> None:
        """Shows the paths to the worker's peers."""
        for metric, labels, value in _PEER_SAMPLES:
            self.registry.register(Samples(metric, partial(_of_paths, peers, labels, value)))

    def watch_tiers(self, load: Callable[[], Any]) -> None:
        """Shows the tiers below the pool; `load` is as for the constructor."""
        for metric, read in _TIER_SAMPLES:
            self.registry.register(Samples(metric, partial(_of_tiers, load, read)))

    def watch_groups(self, load: Callable[[], Any]) -> None:
        """Shows the pages of each group of layers; `load` is as for the constructor."""
        self.registry.register(Samples(Metric.KV_GROUP_PAGES, partial(_of_groups, load)))
        self._watch(
            load, (Row(Metric.UNRESUMABLE_TOKENS, attrgetter("prompt_tokens_unresumable")),)
        )

    def watch_hooks(self, load: Callable[[], Any]) -> None:
        """Shows failures of hooks; `load` is as for the constructor."""
        self.registry.register(Samples(Metric.HOOK_FAILURES, lambda: load().hook_failures))

    def watch_adapters(self, load: Callable[[], Any]) -> None:
        """Shows the slots for adapters; `load` is as for the constructor."""
        self._watch(lambda: load().adapters, _ADAPTER_ROWS)

    def watch_drafts(self, load: Callable[[], Any]) -> None:
        """Shows what became of drafts; `load` is as for the constructor."""
        for metric, read in _DRAFT_SAMPLES:
            self.registry.register(Samples(metric, partial(_of_drafts, load, read)))

    def watch_ranks(self, ranks: Any) -> None:
        """Shows a worker's ranks; `ranks` is as `engine.ranks.leader.Ranks`. A figure that nobody
        knows has no sample."""
        for metric, read in _RANK_SAMPLES:
            self.registry.register(Samples(metric, partial(_of_ranks, ranks, read)))
        self.registry.register(Samples(Metric.RANK_SKEW, partial(_skew_of, ranks)))

    def watch_overdue(self, take: Callable[[], object]) -> None:
        """Shows transfers that do not end; see `worker_base.overdue.Overdue`."""
        self._watch(take, _OVERDUE_ROWS)

    def watch_gpus(self, reads: Sequence[Callable[[], GpuLoad | None]]) -> None:
        """Shows the load of the GPU of each rank. There is one reader a rank, in their order."""
        self.registry.register(Snapshots(partial(_of_gpus, reads), _GPU_ROWS))

    def second_token(self, gap_s: float, parts_ms: Mapping[str, float]) -> None:
        """A request ended. Its second token came `gap_s` after its first, with these parts if it
        came by a hand-off."""
        self._second_token.observe(gap_s)
        for part, part_ms in parts_ms.items():
            self._second_token_part.labels(part).observe(part_ms / 1e3)

    def stepped(self, seconds: float, decoded_sequences: int) -> None:
        """A step has settled. `decoded_sequences` is 0 for a step with prompts only."""
        self._step.observe(seconds)
        if decoded_sequences:
            self._batch.observe(decoded_sequences)

    def sent(self, transport: str, seconds: float, exposed_s: float) -> None:
        """A transfer has arrived completely."""
        self._transfer_s.labels(transport).observe(seconds)
        self._exposed_s.labels(transport).observe(max(0.0, exposed_s))

    def transfer_failed(self, cause: str) -> None:
        """A transfer cannot complete; `cause` is a short stable word."""
        self._transfer_failures.labels(cause).inc()

    def drafts_degraded(self, cause: str) -> None:
        """A prompt comes without what the draft head keeps; `cause` is a short stable word."""
        self._drafts_degraded.labels(cause).inc()

    def fetch_ended(self, outcome: str, pages: int, size: int, seconds: float) -> None:
        """A fetch from another worker ended: `pages` of `size` bytes came after `seconds`."""
        self._fetches.labels(outcome).inc()
        if pages:
            self._fetch_pages.labels("got").inc(pages)
            self._fetch_bytes.labels("got").inc(size)
            self._fetch_s.observe(seconds)

    def gave(self, pages: int, size: int) -> None:
        """Another worker has got `pages` pages of `size` bytes from this one."""
        self._fetch_pages.labels("given").inc(pages)
        self._fetch_bytes.labels("given").inc(size)


_LabelsOfPath = Callable[[PeerPath], tuple[str, str]]
_OfPath = Callable[[PeerPath], float]


def _of_paths(
    peers: Callable[[], Sequence[PeerPath]], labels: _LabelsOfPath, value: _OfPath
) -> dict[tuple[str, ...], float]:
    return {labels(peer): value(peer) for peer in peers()}


def _found(load: Callable[[], Any]) -> dict[tuple[str, ...], float]:
    now = load()
    loaded = now.prompt_tokens_loaded
    found = {"pool": now.prompt_tokens_cached - sum(loaded.values()), **loaded}
    return {(source,): float(tokens) for source, tokens in found.items()}


def _of_tiers(
    load: Callable[[], Any], read: Callable[[Any], Mapping[str, float]]
) -> dict[tuple[str, ...], float]:
    return {(label,): float(value) for label, value in read(load().tiers).items()}


def _of_drafts(
    load: Callable[[], Any], read: Callable[[Any], Mapping[int, float]]
) -> dict[tuple[str, ...], float]:
    return {(str(label),): float(value) for label, value in read(load().speculation).items()}


def _of_ranks(ranks: Any, read: Callable[[Any], float | None]) -> dict[tuple[str, ...], float]:
    found = {(str(one.rank), str(one.stage)): read(one) for one in ranks.loads()}
    return {labels: value for labels, value in found.items() if value is not None}


def _skew_of(ranks: Any) -> dict[tuple[str, ...], float]:
    return {} if ranks.skew_s is None else {(): ranks.skew_s}


def _of_gpus(reads: Sequence[Callable[[], GpuLoad | None]]) -> dict[tuple[str, ...], GpuLoad]:
    loads = ((rank, read()) for rank, read in enumerate(reads))
    return {(str(rank),): load for rank, load in loads if load is not None}


def _of_groups(load: Callable[[], Any]) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for group in load().groups:
        free, cached = group.free_pages, group.evictable_pages
        states = {"free": free, "cached": cached, "used": group.total_pages - free - cached}
        found |= {(group.name, state): float(pages) for state, pages in states.items()}
    return found


def _tier_slots(tiers: Any) -> dict[str, float]:
    free = tiers.slots - tiers.cached_slots - tiers.held_slots
    return {"cached": tiers.cached_slots, "held": tiers.held_slots, "free": free}


def _used_pages(load: Any) -> float:
    unused = load.free_pages, load.evictable_pages, load.granted_pages, load.quarantined_pages
    return max(0.0, float(load.total_pages - sum(unused)))


_PEER_SAMPLES: Final[Sequence[tuple[str, _LabelsOfPath, _OfPath]]] = (
    (Metric.PEER_HEALTHY, attrgetter("peer", "cause"), lambda path: float(not path.cause)),
    (
        Metric.PEER_BANDWIDTH,
        attrgetter("peer", "transport"),
        lambda path: 1e9 * path.gigabytes_per_s,
    ),
    (Metric.PEER_LATENCY, attrgetter("peer", "transport"), lambda path: path.latency_us / 1e6),
)
_DRAFT_SAMPLES: Final[Sequence[tuple[str, Callable[[Any], Mapping[int, float]]]]] = (
    (Metric.SPECULATION_DRAFTED, lambda drafts: dict(enumerate(drafts.drafted_by_position))),
    (Metric.SPECULATION_ACCEPTED, lambda drafts: dict(enumerate(drafts.accepted_by_position))),
    (Metric.SPECULATION_STEPS, lambda drafts: drafts.steps_by_width),
)
_TIER_SAMPLES: Final[Sequence[tuple[str, Callable[[Any], Mapping[str, float]]]]] = (
    (Metric.TIER_LOADED_TOKENS, attrgetter("loaded_tokens")),
    (Metric.TIER_DECISIONS, attrgetter("decisions")),
    (Metric.TIER_BYTES, attrgetter("bytes_moved")),
    (Metric.TIER_BANDWIDTH, attrgetter("bytes_per_s")),
    (Metric.TIER_FAILURES, attrgetter("late")),
    (Metric.TIER_SLOTS, _tier_slots),
)
_ADAPTER_ROWS: Final = (
    Row(Metric.ADAPTER_SLOTS, lambda load: load.slots - load.idle_slots, ("used",)),
    Row(
        Metric.ADAPTER_SLOTS,
        lambda load: len(load.resident) - load.slots + load.idle_slots,
        ("idle",),
    ),
    Row(Metric.ADAPTER_SLOTS, lambda load: load.slots - len(load.resident), ("empty",)),
    Row(Metric.ADAPTER_LOADS, attrgetter("loads")),
    Row(Metric.ADAPTER_EVICTIONS, attrgetter("evictions")),
    Row(Metric.ADAPTER_WAITS, attrgetter("waits")),
    Row(Metric.ADAPTER_WAIT_SECONDS, attrgetter("waited_s")),
)
_RANK_SAMPLES: Final[Sequence[tuple[str, Callable[[Any], float | None]]]] = (
    (Metric.RANK_BUSY, attrgetter("busy_s")),
    (Metric.RANK_WAITED, attrgetter("waited_s")),
    (Metric.RANK_PAIRS, attrgetter("pairs")),
)
_ENGINE_ROWS: Final = (
    Row(Metric.PROGRESS, attrgetter("progress")),
    Row(Metric.STEPS, attrgetter("steps")),
    Row(Metric.LAST_STEP_SECONDS, lambda load: load.step_ms / 1e3),
    Row(Metric.RUNNING_SEQUENCES, attrgetter("running_sequences")),
    Row(Metric.MAX_SEQUENCES, attrgetter("max_sequences")),
    Row(Metric.WAITING_REQUESTS, attrgetter("waiting_requests")),
    Row(Metric.QUEUED_PREFILL_TOKENS, attrgetter("queued_prefill_tokens")),
    Row(Metric.PREFILL_TOKENS, attrgetter("prompt_tokens_computed"), ("computed",)),
    Row(Metric.PREFILL_TOKENS, attrgetter("prompt_tokens_cached"), ("cached",)),
    Row(Metric.PREFILL_RATE, attrgetter("prefill_tokens_per_s")),
    Row(Metric.SAMPLED_TOKENS, attrgetter("tokens_sampled")),
    Row(Metric.PREEMPTIONS, attrgetter("preemptions")),
    Row(Metric.BEAM_SEARCHES, attrgetter("beam_searches")),
    Row(Metric.BEAM_FORKS, attrgetter("beam_forks")),
    Row(Metric.KV_DAMAGED_PAGES, attrgetter("damaged_pages")),
    Row(Metric.KV_PAGES_TOTAL, attrgetter("total_pages")),
    Row(Metric.KV_PAGES, attrgetter("free_pages"), ("free",)),
    Row(Metric.KV_PAGES, attrgetter("evictable_pages"), ("cached",)),
    Row(Metric.KV_PAGES, attrgetter("granted_pages"), ("granted",)),
    Row(Metric.KV_PAGES, attrgetter("quarantined_pages"), ("quarantined",)),
    Row(Metric.KV_PAGES, _used_pages, ("used",)),
)
_TRANSFER_ROWS: Final = (
    Row(Metric.TRANSFERS, attrgetter("transfers_sent"), ("sent",)),
    Row(Metric.TRANSFERS, attrgetter("transfers_received"), ("received",)),
    Row(Metric.TRANSFERS, attrgetter("transfers_aborted"), ("aborted",)),
    Row(Metric.TRANSFERS, attrgetter("transfers_failed"), ("failed",)),
    Row(Metric.TRANSFER_BYTES, attrgetter("bytes_sent")),
    Row(Metric.TRANSFER_DESCRIPTORS, attrgetter("descriptors_posted")),
    Row(Metric.TRANSFERS_QUARANTINED, attrgetter("quarantined_transfers")),
    Row(Metric.SENDS_IN_PROGRESS, attrgetter("sends_in_progress")),
    Row(Metric.EXPIRED_GRANTS, attrgetter("expired_grants")),
    Row(Metric.STALE_NOTIFICATIONS, attrgetter("stale_notifications")),
)
_OVERDUE_ROWS: Final = (
    Row(Metric.QUARANTINES_OVERDUE, attrgetter("quarantines")),
    Row(Metric.QUARANTINE_OLDEST, attrgetter("oldest_quarantine_s")),
    Row(Metric.SENDS_STUCK, attrgetter("sends")),
    Row(Metric.SEND_OLDEST, attrgetter("oldest_send_s")),
)
_GPU_ROWS: Final = (
    Row(Metric.GPU_UTILIZATION, attrgetter("utilization")),
    Row(Metric.GPU_MEMORY_USED, attrgetter("memory_used_bytes")),
    Row(Metric.GPU_MEMORY_TOTAL, attrgetter("memory_total_bytes")),
    Row(Metric.GPU_POWER, attrgetter("power_watts")),
)
