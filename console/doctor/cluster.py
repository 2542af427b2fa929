"""Checks a running cluster: its workers, the speed of paths between them, transfers that hang.

It reads the metrics that the processes serve.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from console.doctor.finding import Finding, error, ok, warning
from console.top.scrape import Scrape, TopError, scrape
from telemetry.names import Metric

ADVICE: Final[Mapping[str, str]] = {
    "slow_tcp_only": "UCX_TLS=tcp is set for the worker: unset it",
    "slow_network": "the workers see no common memory: same host without a shared IPC namespace "
    "(docker run --ipc), or hosts without RDMA",
    "slow": "compare with the self-test above; GPUs without peer access, or a busy machine",
    "fingerprint": "model, weights, precision of weights or KV, or page size differ: start both "
    "with the same settings",
    "share_full": "its pages in quarantine fill its share of the pool: wake that worker or kill it",
    "quarantine_overdue": "it does not say what it may still write: wake that worker or kill it",
    "sends_stuck": "writes to it do not end: is it frozen, is the path cut?",
    "unreachable": "the path cannot be opened: is a firewall between, is the worker restarting?",
}
USUAL_ADVICE: Final = "the worker's log says more; routers use other pairs meanwhile"


class Path(NamedTuple):
    """The path from one worker to another, as the first one measured it."""

    source: str
    target: str
    transport: str
    gigabytes_per_s: float
    latency_us: float
    cause: str


class Cluster(NamedTuple):
    """The result of checking a cluster."""

    paths: list[Path]
    findings: list[Finding]


def check_cluster(admin: str, *, expected: bool) -> Cluster:
    """Checks the cluster behind a router's admin port.

    Args:
        admin: HOST:PORT.
        expected: whether the user named a router: then it is an error if none answers.
    """
    try:
        seen = scrape(admin, adapters=True)
    except TopError as failed:
        advice = "start one with `baton up`, or name its admin port: --admin HOST:PORT"
        return Cluster([], [(error if expected else warning)("router", str(failed), advice)])
    paths = [path for name in seen.samples for path in _paths(seen, name)]
    findings = [
        *_router(seen),
        *_workers(seen),
        *_kinds(seen),
        *_path_findings(paths),
        *_stuck(seen),
        *_drafts(seen),
        *_adapters(seen),
    ]
    return Cluster(paths, findings)


def _router(seen: Scrape) -> Iterator[Finding]:
    roles = [worker.role for worker in seen.workers if worker.attached]
    found = f"{len(roles)} worker{'s' * (len(roles) > 1)} attached"
    if not roles:
        yield error("router", "no worker is attached", "start workers with --routers naming it")
    elif "both" in roles or "decode" in roles:
        yield ok("router", found)
    else:
        yield error("router", f"{found}, and none decodes", "start a decode worker")


def _workers(seen: Scrape) -> Iterator[Finding]:
    for worker in seen.workers:
        if not worker.attached:
            advice = "it left or died: its log says why; `baton up` starts it again by itself"
            yield warning(worker.name, "was attached and is gone", advice)
        elif worker.name not in seen.samples:
            advice = "its admin port must be reached from here (--admin, --advertise)"
            yield warning(worker.name, "attached, but its metrics do not answer", advice)
        elif damaged := seen.samples[worker.name].total(f"{Metric.KV_DAMAGED_PAGES}_total"):
            advice = "somebody writes KV pages that are not theirs: report it with all logs"
            yield error(worker.name, f"{damaged:.0f} free pages were written", advice)
        elif (attached := seen.routers_of(worker.name)) not in (None, seen.routers):
            found = f"routers that it is attached to: {attached}, that were asked: {seen.routers}"
            advice = "start it with all of them in --routers, and name all with --admin A,B"
            yield warning(worker.name, found, advice)


def _kinds(seen: Scrape) -> Iterator[Finding]:
    """Workers of one model that exchange nothing with each other: then decode workers compute
    prompts themselves, and nothing else says so."""
    by_model: dict[str, dict[str, list[str]]] = {}
    for worker in seen.workers:
        if worker.kind:
            by_kind = by_model.setdefault(worker.model, {})
            by_kind.setdefault(worker.kind, []).append(worker.name)
    for model, by_kind in sorted(by_model.items()):
        if len(by_kind) > 1:
            groups = " | ".join(", ".join(names) for names in sorted(by_kind.values(), key=len))
            yield warning(f"model {model}", f"its workers differ: {groups}", _DIFFER)


def _paths(seen: Scrape, source: str) -> Iterator[Path]:
    samples = seen.samples[source]
    metrics: dict[str, dict[str, float]] = {}
    transports: dict[str, str] = {}
    for metric in (Metric.PEER_BANDWIDTH, Metric.PEER_LATENCY):
        for labels, value in samples.values.get(metric, {}).items():
            have = dict(labels)
            transports[have["peer"]] = have["transport"]
            metrics.setdefault(have["peer"], {})[metric] = value
    causes = {
        dict(labels)["peer"]: dict(labels).get("cause", "")
        for labels in samples.values.get(Metric.PEER_HEALTHY, {})
    }
    for target, found in sorted(metrics.items()):
        yield Path(
            source,
            target,
            transports[target],
            found.get(Metric.PEER_BANDWIDTH, 0) / 1e9,
            found.get(Metric.PEER_LATENCY, 0) * 1e6,
            causes.get(target, ""),
        )


def _path_findings(paths: list[Path]) -> Iterator[Finding]:
    for path in paths:
        if path.cause:
            found = f"to {path.target}: {path.cause}"
            yield error(path.source, found, ADVICE.get(path.cause, USUAL_ADVICE))
    if paths and not any(path.cause for path in paths):
        yield ok("paths", f"{len(paths)}, all healthy")


def _stuck(seen: Scrape) -> Iterator[Finding]:
    for name, samples in seen.samples.items():
        for metric, oldest, what, advice in _OVERDUE:
            if count := samples.total(metric):
                found = f"{count:.0f} {what}, the oldest for {samples.total(oldest):.0f} s"
                yield warning(name, found, advice)


def _drafts(seen: Scrape) -> Iterator[Finding]:
    """Decode workers whose prompts come without what their draft heads keep."""
    for name, samples in seen.samples.items():
        counts = samples.values.get(f"{Metric.SPECULATION_DEGRADED}_total", {})
        for labels, count in sorted(counts.items()):
            cause = dict(labels)["cause"]
            if count:
                found = f"{count:.0f} prompts came without its draft head's KV: {cause}"
                yield warning(name, found, _DRAFTS[cause])


def _adapters(seen: Scrape) -> Iterator[Finding]:
    """Adapters that not all workers of their model have alike, and slots that are waited for."""
    up = seen.router.values.get(Metric.WORKER_UP, {})
    workers = [dict(labels) for labels, is_up in up.items() if is_up]
    for one in seen.adapters:
        every = {worker["worker"] for worker in workers if worker["model"] == one.model}
        lacking, subject = sorted(every - one.digests.keys()), f"adapter {one.name}"
        if len(set(one.digests.values())) > 1:
            found = "its content is another one on " + ", ".join(_fewest(one.digests))
            yield warning(subject, found, "load it anew: `baton adapters load ... --replace`")
        elif lacking:
            advice = "nothing for it goes there: `baton adapters load`, or start them alike"
            yield warning(subject, f"not on {', '.join(lacking)}", advice)
    for name, samples in seen.samples.items():
        if count := samples.total(f"{Metric.ADAPTER_WAITS}_total"):
            mean_s = samples.total(f"{Metric.ADAPTER_WAIT_SECONDS}_total") / count
            found = f"{count:.0f} requests waited for a slot of their adapter, {mean_s:.1f} s each"
            advice = "more are asked for at once than it has slots: raise debug.max_adapters"
            yield warning(name, found, advice)


def _fewest(digests: Mapping[str, str]) -> list[str]:
    """Workers with other contents than most have."""
    usual = Counter(digests.values()).most_common(1)[0][0]
    return sorted(name for name, digest in digests.items() if digest != usual)


_DIFFER: Final = (
    "these exchange no KV: weights, their precision or that of KV, or page size differ; in an"
    " upgrade that passes, else start all alike"
)
_DRAFTS: Final[Mapping[str, str]] = {
    "peer_without": "prefill workers compute it with the same --speculation; else fewer drafts are"
    " right",
    "peer_differs": "the prefill worker has another revision of the head, or keeps it in another"
    " way: start both with the same --speculation",
    "pages_without": "the prefill worker had pages of them from host memory, a store or a fetch,"
    " which carry none: fewer drafts are right",
}
_OVERDUE: Final = (
    (
        Metric.QUARANTINES_OVERDUE,
        Metric.QUARANTINE_OLDEST,
        "transfers in quarantine for over 5 s",
        "their prefill worker is frozen or cut off: wake it or kill it; nothing else frees them",
    ),
    (
        Metric.SENDS_STUCK,
        Metric.SEND_OLDEST,
        "sends that do not end for over 5 s",
        "the decode worker or the path to it hangs: see its health",
    ),
)
