"""Computes figures from two scrapes: the present state, and the changes between them.

If a process has no earlier scrape, or has restarted since, percentiles cover the time since its
start, and rates are unknown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final

from console.top.scrape import NOTHING, Bucket, Known, Scrape, Scraped
from telemetry.metrics.table import CALLERS_FAULTS
from telemetry.names import Metric

LATENCIES: Final = (
    ("TTFT", Metric.TIME_TO_FIRST_TOKEN),
    ("TPOT", Metric.TIME_PER_OUTPUT_TOKEN),
    ("ITL", Metric.INTER_TOKEN),
    ("E2E", Metric.REQUEST_DURATION),
    ("queue", Metric.QUEUE_WAIT),
)
"""The router's histograms, with the names shown."""
HAND_OFF: Final = (
    ("second-token gap", Metric.SECOND_TOKEN_GAP),
    ("hand-off, exposed", Metric.TRANSFER_EXPOSED),
    ("hand-off, pushes", Metric.TRANSFER_SECONDS),
)
"""The workers' histograms of the hand-off, with the names shown."""
PAGE_STATES: Final = ("used", "granted", "quarantined", "cached", "free")


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Percentiles of a histogram, milliseconds; None if nothing was counted."""

    count: int
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerView:
    """Figures of one worker. Rates are a second; None: unknown."""

    name: str
    role: str
    state: str
    """"up", "gone", or "unreachable" if its admin port does not answer."""
    admin: str
    running: int = 0
    max_running: int = 0
    waiting: int = 0
    queued_prompt_tokens: int = 0
    prompt_token_rate: float | None = None
    """Computed prompt tokens, without those from prefix caches."""
    output_token_rate: float | None = None
    step: Quantiles = field(default_factory=lambda: Quantiles(0))
    pages: dict[str, int] = field(default_factory=dict)
    """Number of KV pages by state."""
    groups: dict[str, float] = field(default_factory=dict)
    """By group of layers, where there are several, the share of its pages that is in use."""
    sent_byte_rate: float | None = None
    found: dict[str, float] = field(default_factory=dict)
    """Prompt tokens that were not computed, by source, since the earlier scrape."""
    computed: float = 0.0
    """Prompt tokens computed since then."""
    fetched_byte_rate: float | None = None
    """From peers."""
    transfers: dict[str, int] = field(default_factory=dict)
    """Number of transfers since its start, by outcome."""
    exposed: Quantiles = field(default_factory=lambda: Quantiles(0))
    preemptions: int = 0
    overdue: dict[str, int] = field(default_factory=dict)
    """Number of transfers that do not end, by kind: "quarantines" and "sends"."""
    gpu_share: float | None = None
    """Share of time in which its GPU ran some kernel: the mean of those of its ranks."""
    rank_skew_ms: float | None = None
    """How long a step's fastest rank waited for the slowest, on average since the earlier scrape;
    None with one rank, and without a step."""
    fullest_experts: float | None = None
    """What the rank that computes most for experts has, of the mean of all ranks, since the earlier
    scrape; None: they hold none whole. In an expert group: what this worker has, of the mean of
    its group."""
    stage_shares: tuple[float, ...] = ()
    """Share of time in which the ranks of each stage computed, the first stage first; empty with
    one stage, and where nobody knows."""
    adapter_slots: tuple[int, int] | None = None
    """Slots for adapters that requests use, and all; None: it takes none."""
    tokens_a_verify: float | None = None
    """Tokens that a row yields in a step that verifies drafts of it, on average since the earlier
    scrape; None without drafts."""


@dataclass(frozen=True, slots=True)
class View:
    """Figures of a router and its workers. Rates are a second; None: unknown."""

    window_s: float | None
    """Time that percentiles cover, seconds; None: since the processes' start."""
    inflight: int
    queued_requests: int
    queued_tokens: int
    request_rate: float | None
    error_rate: float | None
    prompt_token_rate: float | None
    output_token_rate: float | None
    retries: int
    failovers: int
    bad_requests: int
    """Refused for the caller's own fault."""
    rejections: int
    """Refused for another reason."""
    events_behind: int
    """Events of pages that the router has not heard."""
    latencies: dict[str, Quantiles]
    workers: list[WorkerView]
    method_rates: dict[str, float] = field(default_factory=dict)
    """Requests a second by the method called, of those that were called."""
    adapter_rates: dict[str, float] = field(default_factory=dict)
    """Output tokens a second by adapter, of those that were asked for."""
    routers: int = 1
    """Number of routers whose requests are counted."""
    most_routers: int = 1
    """Largest number of routers that a worker is attached to. Requests of others are not seen."""
    balance: str = ""
    """How busy the pools are, in the words of the router that balances their roles."""
    silent_s: float = 0.0
    """Seconds since the router's last answer. All other figures are from then."""


def view(now: Scrape, earlier: Scrape | None = None, rates: Scrape | None = None) -> View:
    """Computes the figures of a scrape.

    Args:
        now: the scrape.
        earlier: percentiles cover the time since this scrape; None: since the processes' start.
        rates: rates cover the time since this scrape; None: since `earlier`.
    """
    before = earlier or Scrape(now.at_s, NOTHING)
    since = rates or before
    router, then = now.router, _same_process(now.router, since.router)
    workers = [_worker(one, now, before, since) for one in now.workers]
    workers = _with_experts(workers, now, before)
    latencies = {
        label: _quantiles([(router, _same_process(router, before.router))], metric)
        for label, metric in LATENCIES
    }
    pairs = [
        (found, _same_process(found, before.samples.get(name, NOTHING)))
        for name, found in now.samples.items()
    ]
    latencies |= {label: _quantiles(pairs, metric) for label, metric in HAND_OFF}
    requests = f"{Metric.REQUESTS}_total"
    ended = _rate(router, then, requests)
    served = _rate(router, then, requests, outcome="OK")
    bad = sum(_rate(router, then, requests, outcome=reason) or 0.0 for reason in CALLERS_FAULTS)
    refused = f"{Metric.REJECTIONS}_total"
    bad_requests = int(sum(router.total(refused, reason=reason) for reason in CALLERS_FAULTS))
    return View(
        window_s=None if earlier is None else now.at_s - earlier.at_s,
        inflight=int(router.total(Metric.INFLIGHT)),
        queued_requests=int(router.total(Metric.QUEUE_DEPTH)),
        queued_tokens=int(router.total(Metric.QUEUE_TOKENS)),
        request_rate=ended,
        error_rate=None if ended is None or served is None else max(0.0, ended - served - bad),
        prompt_token_rate=_rate(router, then, f"{Metric.PROMPT_TOKENS}_total"),
        output_token_rate=_rate(router, then, f"{Metric.OUTPUT_TOKENS}_total"),
        retries=int(router.total(f"{Metric.RETRIES}_total")),
        failovers=int(router.total(f"{Metric.FAILOVERS}_total")),
        bad_requests=bad_requests,
        rejections=int(router.total(refused)) - bad_requests,
        events_behind=int(router.total(Metric.PAGE_EVENTS_BEHIND)),
        latencies=latencies,
        workers=workers,
        method_rates=_method_rates(router, then),
        adapter_rates=_adapter_rates(router, then),
        routers=now.routers,
        balance=now.balance,
        most_routers=max((now.routers_of(name) or 0 for name in now.samples), default=0),
    )


def _method_rates(now: Scraped, then: Scraped) -> dict[str, float]:
    requests = f"{Metric.REQUESTS_BY_METHOD}_total"
    called = now.by_label(requests, "method")
    rates = {name: _rate(now, then, requests, method=name) for name in called}
    return {name: rate for name, rate in sorted(rates.items()) if rate}


def _adapter_rates(now: Scraped, then: Scraped) -> dict[str, float]:
    tokens = f"{Metric.ADAPTER_TOKENS}_total"
    names = now.by_label(tokens, "adapter")
    rates = {name: _rate(now, then, tokens, adapter=name, kind="output") for name in names}
    return {name: rate for name, rate in sorted(rates.items()) if rate}


def _worker(known: Known, now: Scrape, before: Scrape, since: Scrape) -> WorkerView:
    found = now.samples.get(known.name)
    if found is None:
        state = "unreachable" if known.attached else "gone"
        return WorkerView(known.name, known.role, state, known.admin)
    old = _same_process(found, before.samples.get(known.name, NOTHING))
    then = _same_process(found, since.samples.get(known.name, NOTHING))
    pages = found.by_label(Metric.KV_PAGES, "state")
    gpus = found.by_label(Metric.GPU_UTILIZATION, "rank").values()
    return WorkerView(
        name=known.name,
        role=known.role,
        state="up",
        admin=known.admin,
        running=int(found.total(Metric.RUNNING_SEQUENCES)),
        max_running=int(found.total(Metric.MAX_SEQUENCES)),
        waiting=int(found.total(Metric.WAITING_REQUESTS)),
        queued_prompt_tokens=int(found.total(Metric.QUEUED_PREFILL_TOKENS)),
        prompt_token_rate=_rate(found, then, f"{Metric.PREFILL_TOKENS}_total", source="computed"),
        output_token_rate=_rate(found, then, f"{Metric.SAMPLED_TOKENS}_total"),
        step=_quantiles([(found, old)], Metric.STEP_SECONDS),
        pages={state: int(pages.get(state, 0)) for state in PAGE_STATES},
        groups=_shares_in_use(found),
        sent_byte_rate=_rate(found, then, f"{Metric.TRANSFER_BYTES}_total"),
        found=_grown(found, old, f"{Metric.FOUND_TOKENS}_total"),
        computed=_grown(found, old, f"{Metric.PREFILL_TOKENS}_total").get("computed", 0.0),
        fetched_byte_rate=_rate(found, then, f"{Metric.FETCH_BYTES}_total", direction="got"),
        transfers={
            outcome: int(count)
            for outcome, count in found.by_label(f"{Metric.TRANSFERS}_total", "outcome").items()
        },
        exposed=_quantiles([(found, old)], Metric.TRANSFER_EXPOSED),
        preemptions=int(found.total(f"{Metric.PREEMPTIONS}_total")),
        overdue={
            "quarantines": int(found.total(Metric.QUARANTINES_OVERDUE)),
            "sends": int(found.total(Metric.SENDS_STUCK)),
        },
        gpu_share=fmean(gpus) if gpus else None,
        rank_skew_ms=_rank_skew_ms(found, old),
        stage_shares=_stage_shares(found, then),
        adapter_slots=_adapter_slots(found),
        tokens_a_verify=_tokens_a_verify(found, old),
    )


def _shares_in_use(found: Scraped) -> dict[str, float]:
    pages = found.by_label(Metric.KV_GROUP_PAGES, "group")
    return {
        group: found.total(Metric.KV_GROUP_PAGES, group=group, state="used") / max(1.0, total)
        for group, total in pages.items()
    }


def _adapter_slots(found: Scraped) -> tuple[int, int] | None:
    if not found.has(Metric.ADAPTER_SLOTS):
        return None
    used = found.total(Metric.ADAPTER_SLOTS, state="used")
    return int(used), int(found.total(Metric.ADAPTER_SLOTS))


def _tokens_a_verify(now: Scraped, earlier: Scraped) -> float | None:
    drafted = f"{Metric.SPECULATION_DRAFTED}_total"
    accepted = f"{Metric.SPECULATION_ACCEPTED}_total"
    rows = now.by_label(drafted, "position").get("0", 0.0)
    rows -= earlier.by_label(drafted, "position").get("0", 0.0)
    return 1 + (now.total(accepted) - earlier.total(accepted)) / rows if rows > 0 else None


def _rank_skew_ms(now: Scraped, earlier: Scraped) -> float | None:
    skew, steps = (
        now.total(f"{name}_total") - earlier.total(f"{name}_total")
        for name in (Metric.RANK_SKEW, Metric.STEPS)
    )
    has_ranks = now.has(f"{Metric.RANK_SKEW}_total")
    return 1e3 * skew / steps if has_ranks and steps > 0 else None


def _with_experts(workers: list[WorkerView], now: Scrape, before: Scrape) -> list[WorkerView]:
    """Workers with what their experts compute."""
    alone: dict[str, float] = {}
    """Pairs of workers that have one rank, by name."""
    found: dict[str, float | None] = {}
    for worker in workers:
        samples = now.samples.get(worker.name, NOTHING)
        pairs = _pairs_by_stage(
            samples, _same_process(samples, before.samples.get(worker.name, NOTHING))
        )
        fullest = [max(each) / fmean(each) for each in pairs if len(each) > 1 and any(each)]
        found[worker.name] = max(fullest, default=None)
        if sum(map(len, pairs)) == 1:
            alone[worker.name] = pairs[0][0]
    groups: dict[tuple[str, ...], list[str]] = {}
    for known in now.workers:
        if known.name in alone:
            groups.setdefault((known.role, known.model, known.unit), []).append(known.name)
    for names in groups.values():
        mean = fmean(alone[name] for name in names)
        if len(names) > 1 and mean:
            found |= {name: alone[name] / mean for name in names}
    return [replace(worker, fullest_experts=found[worker.name]) for worker in workers]


def _pairs_by_stage(now: Scraped, earlier: Scraped) -> list[list[float]]:
    """Pairs of a token and an expert that the ranks of each stage have computed meanwhile."""
    name, stages = f"{Metric.RANK_PAIRS}_total", dict[str, list[float]]()
    before = earlier.values.get(name, {})
    for labels, value in now.values.get(name, {}).items():
        grown = value - before.get(labels, 0.0)
        stages.setdefault(dict(labels).get("stage", ""), []).append(grown)
    return list(stages.values())


def _stage_shares(now: Scraped, earlier: Scraped) -> tuple[float, ...]:
    name, ranks = f"{Metric.RANK_BUSY}_total", Counter[str]()
    for labels in now.values.get(name, {}):
        ranks[dict(labels).get("stage", "")] += 1
    if len(ranks) < 2:
        return ()
    rates = (_rate(now, earlier, name, stage=stage) for stage in sorted(ranks, key=int))
    found = zip(rates, (ranks[stage] for stage in sorted(ranks, key=int)), strict=True)
    return tuple((rate or 0.0) / count for rate, count in found)


def _same_process(now: Scraped, earlier: Scraped) -> Scraped:
    """Returns the earlier samples, or `NOTHING` if the process has restarted since."""
    started = "process_start_time_seconds"
    return earlier if now.total(started) == earlier.total(started) else NOTHING


def _grown(now: Scraped, earlier: Scraped, name: str) -> dict[str, float]:
    """Increase of a counter by the label `source`."""
    before = earlier.by_label(name, "source")
    grown = {
        source: value - before.get(source, 0.0)
        for source, value in now.by_label(name, "source").items()
    }
    return {source: value for source, value in grown.items() if value > 0}


def _rate(now: Scraped, earlier: Scraped, name: str, **labels: str) -> float | None:
    """Increase of a counter a second; None: unknown."""
    if earlier is NOTHING or now.at_s <= earlier.at_s:
        return None
    grown = now.total(name, **labels) - earlier.total(name, **labels)
    return max(0.0, grown) / (now.at_s - earlier.at_s)


def _quantiles(pairs: Sequence[tuple[Scraped, Scraped]], name: str) -> Quantiles:
    """Percentiles of the values counted between two scrapes of each process, ms."""
    sums: dict[float, float] = {}
    for now, earlier in pairs:
        before = dict(earlier.buckets(name))
        for bound, count in now.buckets(name):
            sums[bound] = sums.get(bound, 0.0) + count - before.get(bound, 0.0)
    buckets = sorted(sums.items())
    count = int(buckets[-1][1]) if buckets else 0
    if count <= 0:
        return Quantiles(0)
    at = [1e3 * quantile(buckets, share) for share in (0.5, 0.9, 0.99)]
    return Quantiles(count, *at)


def quantile(buckets: Sequence[Bucket], share: float) -> float:
    """Interpolates a quantile within its bucket. Above all finite bounds it is the largest one.

    Args:
        buckets: cumulative counts by bound, the last bound infinite; at least one value counted.
        share: the quantile, in [0, 1].
    """
    wanted = share * buckets[-1][1]
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted and count > below:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low
