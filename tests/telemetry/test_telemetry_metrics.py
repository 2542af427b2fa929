"""Metrics as Prometheus would scrape them."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from engine.loads import AdapterLoad, GroupLoad, SpeculationLoad, TierLoad
from engine.ranks.stats import RankLoad
from engine.types import EngineLoad
from kv_transfer.events import TransferCounters
from router.workers.holdings import PagesLoad
from telemetry.export import ExportCounts
from telemetry.metrics.adapters import KEPT_S, MOST_NAMES, AdapterCounts
from telemetry.metrics.endpoint import KV_SIZE, KV_USE, RUNNING, WAITING, EndpointLoad
from telemetry.metrics.gpu import GpuLoad, gpu_reader
from telemetry.metrics.loop_lag import EventLoopLag
from telemetry.metrics.process import ProcessMetrics
from telemetry.metrics.router import LEFT_SHOWN_S, RouterLoad, RouterMetrics, WorkerUp
from telemetry.metrics.table import DECLARED, OVERLOADED, OWN_FAULTS
from telemetry.metrics.worker import PeerPath, WorkerMetrics
from telemetry.names import Metric
from worker_base.overdue import Overdue

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

ADAPTERS = AdapterLoad((b"1" * 32, b"2" * 32), 4, 3, 6, 4, 2, 2.5, 1.25)


def scrape(metrics: ProcessMetrics) -> Samples:
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_worker_is_read_when_it_is_asked() -> None:
    load = EngineLoad()
    counters = TransferCounters()
    metrics = WorkerMetrics(lambda: load, lambda: counters)
    assert scrape(metrics)[Metric.STEPS + "_total", ()] == 0
    load = EngineLoad(
        total_pages=100,
        free_pages=40,
        evictable_pages=20,
        granted_pages=10,
        quarantined_pages=5,
        steps=7,
        step_ms=3.5,
        prompt_tokens_computed=900,
        prompt_tokens_cached=100,
    )
    counters.bytes_sent = 1 << 40
    counters.transfers_sent = 3
    counters.stale_notifications = 2
    samples = scrape(metrics)
    pages = {
        labels[0][1]: value for (name, labels), value in samples.items() if name == Metric.KV_PAGES
    }
    assert pages == {"free": 40, "cached": 20, "granted": 10, "quarantined": 5, "used": 25}
    assert sum(pages.values()) == samples[Metric.KV_PAGES_TOTAL, ()]
    assert samples[Metric.STEPS + "_total", ()] == 7
    assert samples[Metric.LAST_STEP_SECONDS, ()] == pytest.approx(0.0035)
    assert samples[Metric.PREFILL_TOKENS + "_total", (("source", "cached"),)] == 100
    assert samples[Metric.TRANSFER_BYTES + "_total", ()] == 1 << 40
    assert samples[Metric.TRANSFERS + "_total", (("outcome", "sent"),)] == 3
    assert samples[Metric.STALE_NOTIFICATIONS + "_total", ()] == 2


def test_every_attribute_that_is_read_exists() -> None:
    scrape(WorkerMetrics(EngineLoad, TransferCounters))
    scrape(RouterMetrics(RouterLoad))


def test_what_happens_to_a_transfer_and_a_step() -> None:
    metrics = WorkerMetrics(EngineLoad)
    metrics.sent("nixl/shm", 0.0065, -0.001)
    metrics.transfer_failed("peer_lost")
    metrics.stepped(0.0042, 17)
    metrics.stepped(0.2, 0)
    samples = scrape(metrics)
    bucket = Metric.TRANSFER_SECONDS + "_bucket"
    assert samples[bucket, (("le", "0.006"), ("transport", "nixl/shm"))] == 0
    assert samples[bucket, (("le", "0.007"), ("transport", "nixl/shm"))] == 1
    assert samples[Metric.TRANSFER_EXPOSED + "_sum", (("transport", "nixl/shm"),)] == 0
    assert samples[Metric.TRANSFER_FAILURES + "_total", (("cause", "peer_lost"),)] == 1
    assert samples[Metric.STEP_SECONDS + "_count", ()] == 2
    assert samples[Metric.BATCH_SIZE + "_count", ()] == 1


def test_a_request_from_its_first_token_to_its_end() -> None:
    metrics = RouterMetrics(RouterLoad)
    metrics.waited(0.003)
    metrics.first_token("m", 0.0625, prompt_tokens=33, trace_id="ab" * 16)
    metrics.tokens("m", 1, None)
    metrics.tokens("m", 2, 0.0045)
    metrics.ended("m", "OK", 0.0725, per_token_s=0.005, trace_id="ab" * 16)
    metrics.ended("m", "WORKER_LOST", 1.0)
    metrics.rejected("QUEUE_FULL")
    metrics.retried("worker_lost")
    metrics.failed_over("worker_lost")
    samples = scrape(metrics)
    model = ("gen_ai_request_model", "m")
    assert samples[Metric.TIME_TO_FIRST_TOKEN + "_sum", (model,)] == 0.0625
    assert samples[Metric.TIME_PER_OUTPUT_TOKEN + "_sum", (model,)] == pytest.approx(0.005)
    assert samples[Metric.REQUEST_DURATION + "_count", (("error_type", ""), model)] == 1
    failed = (("error_type", "WORKER_LOST"), model)
    assert samples[Metric.REQUEST_DURATION + "_count", failed] == 1
    assert samples[Metric.REQUESTS + "_total", (("model", "m"), ("outcome", "OK"))] == 1
    assert samples[Metric.OUTPUT_TOKENS + "_total", (("model", "m"),)] == 3
    assert samples[Metric.INTER_TOKEN + "_count", (("model", "m"),)] == 1
    assert samples[Metric.REJECTIONS + "_total", (("reason", "QUEUE_FULL"),)] == 1
    openmetrics = generate_openmetrics(metrics.registry).decode()
    assert f'trace_id="{"ab" * 16}"' in openmetrics


def test_a_worker_that_left_is_shown_as_down() -> None:
    now_s = 50.0
    workers = [WorkerUp("prefill-0", "prefill", "m"), WorkerUp("decode-0", "decode", "m")]
    metrics = RouterMetrics(lambda: RouterLoad(2, 1, 77, workers), lambda: now_s)
    assert scrape(metrics)[Metric.QUEUE_TOKENS, ()] == 77
    workers.pop()
    assert shown_up(metrics) == {"prefill-0": 1, "decode-0": 0}
    now_s += LEFT_SHOWN_S - 1
    assert shown_up(metrics) == {"prefill-0": 1, "decode-0": 0}
    now_s += 1
    assert shown_up(metrics) == {"prefill-0": 1}, "names of workers do not pile up"
    workers[:] = [WorkerUp("prefill-0", "decode", "m")]
    assert shown_up(metrics) == {"prefill-0": 1}, "in another role it has not left"
    workers.append(WorkerUp("decode-1", "decode", "m"))
    metrics.worker_attached("decode", "m")
    workers.pop()
    now_s += LEFT_SHOWN_S
    assert shown_up(metrics) == {"prefill-0": 1, "decode-1": 0}, "though nobody looked meanwhile"


def shown_up(metrics: RouterMetrics) -> dict[str, float]:
    samples = scrape(metrics).items()
    return {
        dict(labels)["worker"]: up for (name, labels), up in samples if name == Metric.WORKER_UP
    }


def test_what_alerts_wait_for_is_there_before_it_happens() -> None:
    """The first increment of a series that was not there is no increase to Prometheus."""
    metrics = RouterMetrics(RouterLoad)
    metrics.worker_attached("decode", "m")
    samples = scrape(metrics)
    for outcome in OWN_FAULTS:
        assert samples[Metric.REQUESTS + "_total", (("model", "m"), ("outcome", outcome))] == 0
    for reason in OVERLOADED:
        assert samples[Metric.REJECTIONS + "_total", (("reason", reason),)] == 0
    frozen = (("cause", "frozen"), ("role", "decode"))
    assert samples[Metric.WORKERS_LOST + "_total", frozen] == 0
    metrics.worker_lost("decode", "frozen")
    assert scrape(metrics)[Metric.WORKERS_LOST + "_total", frozen] == 1


def test_a_drain_is_timed_from_its_beginning() -> None:
    metrics = RouterMetrics(RouterLoad)
    assert scrape(metrics)[Metric.DRAIN_SECONDS, ()] == 0
    metrics.draining()
    time.sleep(0.02)
    metrics.draining()
    assert 0.02 <= scrape(metrics)[Metric.DRAIN_SECONDS, ()] < 10


class Nvml:
    """As much of `pynvml` as is used."""

    NVMLError = RuntimeError

    def __init__(self) -> None:
        self.lost = False

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise self.NVMLError("no such device")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        if self.lost:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(used=3 << 30, total=80 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=75)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 412_500


def test_the_gpu_of_each_rank_is_shown_while_it_can_be_read() -> None:
    gpus = Nvml(), Nvml()
    metrics = WorkerMetrics(EngineLoad)
    metrics.watch_gpus([gpu_reader("GPU-1", nvml) for nvml in gpus])
    samples = scrape(metrics)
    for rank in "01":
        own = (("rank", rank),)
        assert samples[Metric.GPU_UTILIZATION, own] == 0.75
        assert samples[Metric.GPU_MEMORY_USED, own] == 3 << 30
        assert samples[Metric.GPU_MEMORY_TOTAL, own] == 80 << 30
        assert samples[Metric.GPU_POWER, own] == 412.5
    gpus[0].lost = True
    samples = scrape(metrics)
    assert (Metric.GPU_POWER, (("rank", "0"),)) not in samples
    assert (Metric.GPU_POWER, (("rank", "1"),)) in samples
    gpus[1].lost = True
    assert not [name for name, _ in scrape(metrics) if name == Metric.GPU_POWER]


def test_no_such_gpu_is_no_figure_and_no_error() -> None:
    for read in (gpu_reader("GPU-2", Nvml()), gpu_reader("GPU-no-such-device")):
        metrics = WorkerMetrics(EngineLoad)
        metrics.watch_gpus([read])
        samples = scrape(metrics)
        assert not [name for name, _ in samples if name == Metric.GPU_POWER]
        assert (Metric.STEPS + "_total", ()) in samples


def test_paths_to_peers_are_shown_by_name() -> None:
    metrics = WorkerMetrics(EngineLoad)
    paths = [
        PeerPath("d0", "nixl/tcp", 0.5, 90.0, "slow"),
        PeerPath("d1", "nixl/shm", 2.0, 9.0, ""),
    ]
    metrics.watch_peers(lambda: paths)
    found = scrape(metrics)
    assert found[Metric.PEER_HEALTHY, (("cause", "slow"), ("peer", "d0"))] == 0
    assert found[Metric.PEER_HEALTHY, (("cause", ""), ("peer", "d1"))] == 1
    assert found[Metric.PEER_BANDWIDTH, (("peer", "d0"), ("transport", "nixl/tcp"))] == 5e8
    assert found[Metric.PEER_LATENCY, (("peer", "d1"), ("transport", "nixl/shm"))] == 9e-6


PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_tells_of_every_metric_as_it_is_declared() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line[:3] == "| `"]
    told = {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in rows}
    assert len(told) == len(rows)
    suffixes = {"counter": "_total"}
    assert told == {
        name + suffixes.get(declared.kind, ""): [
            declared.kind,
            unit_of(name),
            ", ".join(f"`{label}`" for label in declared.labels),
            declared.help,
        ]
        for name, declared in DECLARED.items()
    }


def unit_of(name: str) -> str:
    """By OpenMetrics' rule: the name's end."""
    units = ("seconds", "bytes", "ratio", "watts", "tokens_per_second", "bytes_per_second")
    return next((unit.replace("_", " ") for unit in units if name.endswith(unit)), "")


def test_the_pages_queries_name_metrics_and_labels_that_there_are() -> None:
    queries = "\n".join(PAGE.read_text().split("```promql")[1:])
    named = set(re.findall(r"\b(?:baton|gen_ai)_\w+", queries))
    labels = {label for declared in DECLARED.values() for label in declared.labels}
    known = {
        name + suffix
        for name, declared in DECLARED.items()
        for suffix in {"counter": ("_total",), "gauge": ("",)}.get(
            declared.kind, ("_sum", "_count", "_bucket")
        )
    }
    assert len(named) >= 8
    assert named <= known | labels


def test_the_table_declares_every_name_and_nothing_else() -> None:
    names = {value for key, value in vars(Metric).items() if key.isupper()}
    assert set(DECLARED) == names
    for name, declared in DECLARED.items():
        assert bool(declared.buckets) == (declared.kind == "histogram"), name
        assert list(declared.buckets) == sorted(set(declared.buckets)), name
        assert declared.help.endswith("."), name
    used = RouterMetrics(RouterLoad), WorkerMetrics(EngineLoad, TransferCounters)
    used[0].watch_spans(lambda: ExportCounts(0, 0, 0, 0))
    used[0].watch_refusals(lambda: {"handshake": 1})
    used[0].watch_pages(lambda: PagesLoad({"w": 1}, {("w", "pool"): 2}, {}, {}, 0))
    used[0].watch_fast_door(SimpleNamespace(connections=1, calls=2, closed_by={"idle": 3}))
    used[0].watch_balance(lambda: {("m", "prefill"): 0.5})
    used[1].watch_gpus([lambda: GpuLoad(0.5, 1, 2, 3.0)])
    used[1].watch_overdue(lambda: Overdue(1, 7.0, 0, 0.0))
    used[1].watch_tiers(lambda: EngineLoad(tiers=TierLoad()))
    used[1].watch_groups(EngineLoad)
    used[1].watch_hooks(lambda: EngineLoad(hook_failures={("quest", "step_began"): 1}))
    used[1].watch_drafts(lambda: EngineLoad(speculation=SpeculationLoad((1,), (1,), {2: 1})))
    used[1].watch_adapters(lambda: EngineLoad(adapters=ADAPTERS))
    used[0].adapter_ended("law", True)
    used[0].adapter_tokens("law", "output", 3)
    used[1].watch_ranks(
        SimpleNamespace(loads=lambda: [RankLoad(0, 3, 0.5, 0.1, 0, 7)], skew_s=0.25)
    )
    used[1].watch_peers(lambda: [PeerPath("decode-0", "nixl/tcp", 0.5, 90.0, "slow_tcp_only")])
    shown = {family.name for metrics in used for family in metrics.registry.collect()}
    assert names <= shown


def test_what_nobody_knows_of_ranks_has_no_sample() -> None:
    """GPUs whose sums go by NCCL."""
    metrics = WorkerMetrics(EngineLoad)
    loads = [RankLoad(rank, 3, None, None) for rank in range(2)]
    ranks = SimpleNamespace(loads=lambda: loads, skew_s=None)
    metrics.watch_ranks(ranks)
    page = generate_latest(metrics.registry).decode()
    names = Metric.RANK_BUSY, Metric.RANK_WAITED, Metric.RANK_SKEW, Metric.RANK_PAIRS
    assert not [line for line in page.splitlines() if line.startswith(names)]
    ranks.skew_s, loads[1] = 0.25, RankLoad(1, 4, None, 0.5, 2, 9)
    page = generate_latest(metrics.registry).decode()
    assert [line for line in page.splitlines() if line.startswith(names)] == [
        f'{Metric.RANK_WAITED}_total{{rank="1",stage="2"}} 0.5',
        f'{Metric.RANK_PAIRS}_total{{rank="1",stage="2"}} 9.0',
        f"{Metric.RANK_SKEW}_total 0.25",
    ]


def test_drafts_are_told_by_place_and_steps_by_width() -> None:
    metrics = WorkerMetrics(EngineLoad)
    told = SpeculationLoad((5, 3), (4, 1), {1: 7, 4: 2})
    metrics.watch_drafts(lambda: EngineLoad(speculation=told))
    page = generate_latest(metrics.registry).decode()
    names = ("baton_speculation_drafted", "baton_speculation_accepted", "baton_speculation_steps")
    assert [line for line in page.splitlines() if line.startswith(names)] == [
        f'{Metric.SPECULATION_DRAFTED}_total{{position="0"}} 5.0',
        f'{Metric.SPECULATION_DRAFTED}_total{{position="1"}} 3.0',
        f'{Metric.SPECULATION_ACCEPTED}_total{{position="0"}} 4.0',
        f'{Metric.SPECULATION_ACCEPTED}_total{{position="1"}} 1.0',
        f'{Metric.SPECULATION_STEPS}_total{{width="1"}} 7.0',
        f'{Metric.SPECULATION_STEPS}_total{{width="4"}} 2.0',
    ]


def test_slots_are_told_by_state() -> None:
    metrics = WorkerMetrics(EngineLoad)
    metrics.watch_adapters(lambda: EngineLoad(adapters=ADAPTERS))
    page = generate_latest(metrics.registry).decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in page if line.startswith("baton_adapter_"))
    states = {state: found[f'{Metric.ADAPTER_SLOTS}{{state="{state}"}}'] for state in
              ("used", "idle", "empty")}  # fmt: skip
    assert states == {"used": "1.0", "idle": "1.0", "empty": "2.0"}
    assert found[f"{Metric.ADAPTER_EVICTIONS}_total"] == "4.0"
    assert found[f"{Metric.ADAPTER_WAIT_SECONDS}_total"] == "2.5"


def test_adapters_have_sixteen_names_and_an_old_one_makes_room() -> None:
    now = [0.0]
    counts = AdapterCounts(lambda: now[0])
    for number in range(20):
        counts.ended(f"a{number}", number % 2 == 0)
    counts.ended("other", True)
    names = {name for name, _ in counts.by_outcome()}
    assert names == {f"a{number}" for number in range(MOST_NAMES)} | {"other"}
    assert counts.by_outcome()["other", "ok"] == 3
    now[0] = KEPT_S - 1
    for number in range(1, MOST_NAMES):
        counts.tokens(f"a{number}", "output", 5)
    now[0] += 2
    counts.tokens("new", "output", 7)
    assert counts.by_kind()["new", "output"] == 7
    assert ("a0", "ok") not in counts.by_outcome()
    counts.tokens("newer", "output", 1)
    assert counts.by_kind()["other", "output"] == 1
    assert len({name for name, _ in counts.by_outcome()}) <= MOST_NAMES + 1


async def test_a_loop_that_is_held_up_is_noticed() -> None:
    seen: list[float] = []
    late = asyncio.Event()

    def observe(seconds: float) -> None:
        seen.append(seconds)
        if seconds > 0.1:
            late.set()

    async with EventLoopLag(observe, interval_s=0.01):
        await asyncio.sleep(0)
        time.sleep(0.15)  # noqa: ASYNC251 - what is to be noticed
        await asyncio.wait_for(late.wait(), 5)
    count: Any = len(seen)
    await asyncio.sleep(0.03)
    assert len(seen) == count


def test_pages_by_group_and_what_windows_lost() -> None:
    groups = GroupLoad("full", 100, 40, 20), GroupLoad("window-128", 30, 10, 5)
    load = EngineLoad(groups=groups, prompt_tokens_unresumable=64)
    metrics = WorkerMetrics(lambda: load, TransferCounters)
    metrics.watch_groups(lambda: load)
    samples = scrape(metrics)
    pages = {
        tuple(value for _, value in labels): count
        for (name, labels), count in samples.items()
        if name == Metric.KV_GROUP_PAGES
    }
    assert pages == {
        ("full", "free"): 40, ("full", "cached"): 20, ("full", "used"): 40,
        ("window-128", "free"): 10, ("window-128", "cached"): 5, ("window-128", "used"): 15,
    }  # fmt: skip
    assert samples[Metric.UNRESUMABLE_TOKENS + "_total", ()] == 64


@pytest.mark.parametrize(
    ("load", "values", "size"),
    [
        (EndpointLoad(3, 7, 30, 120, 16), [3, 7, 0.25], {"block_size": "16"}),
        (EndpointLoad(1, 0, 0, 0, 0), [1, 0, 0], None),
    ],
)
def test_an_endpoint_picker_reads_its_names(load, values, size) -> None:
    metrics = RouterMetrics(RouterLoad)
    metrics.watch_endpoint(lambda: load)
    page = generate_latest(metrics.registry).decode()
    found = {family.name: family.samples for family in text_string_to_metric_families(page)}
    assert [found[name][0].value for name in (WAITING, RUNNING, KV_USE)] == values
    if size is None:
        assert found[KV_SIZE] == []
    else:
        assert found[KV_SIZE][0].labels == size | {"num_gpu_blocks": "120"}
