"""What `baton top` makes of scrapes: quantiles, rates, restarts, and what does not answer."""

from __future__ import annotations

import io
import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from http_server import Asked, Reply, http_server
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from rich.console import Console
from typer.testing import CliRunner

from console.cli import FAILED, app
from console.commands.top import _looks
from console.top.scrape import Known, Scrape, Scraped, TopError, scrape
from console.top.screen import WIDTH, _bytes_a_second, draw, milliseconds, rate, short
from console.top.view import View, quantile, view
from telemetry.names import FAILURE_UNIT, Metric

BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class Pages:
    """A router, or a worker, that is nothing but its pages."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.discovery = "[]"
        self.adapters = ""
        self.address = ""

    def attach(self, name: str) -> None:
        """A worker is up, whose pages are these, too."""
        up = Gauge(Metric.WORKER_UP, "", ("worker", "role"), registry=self.registry)
        up.labels(name, name.partition("-")[0]).set(1)
        self.discovery = f'[{{"targets": ["{self.address}"], "labels": {{"worker": "{name}"}}}}]'

    def __call__(self, asked: Asked) -> Reply:
        known = {
            "/metrics": lambda: generate_latest(self.registry),
            "/discovery": lambda: self.discovery.encode(),
            "/adapters": lambda: self.adapters.encode(),
        }
        return Reply(known[asked.path]()) if asked.path in known else Reply(status=404)


def screen(found: View, pages: Pages) -> str:
    """The screen."""
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    console.print(draw(found, pages.address))
    return console.export_text()


@contextmanager
def served() -> Iterator[Pages]:
    made = Pages()
    with http_server(made) as made.address:
        yield made


@pytest.fixture
def pages() -> Iterator[Pages]:
    with served() as made:
        yield made


def test_quantiles_are_those_of_the_values_within_a_bucket() -> None:
    values = np.random.default_rng(4).gamma(2.0, 0.05, 5000)
    buckets = [(bound, float((values <= bound).sum())) for bound in BOUNDS]
    buckets.append((float("inf"), float(len(values))))
    for share in (0.01, 0.5, 0.9, 0.99):
        true = float(np.quantile(values, share))
        widths = np.diff((0.0, *BOUNDS))
        bucket = int(np.searchsorted(BOUNDS, true))
        assert abs(quantile(buckets, share) - true) <= widths[bucket]
    assert quantile([(1.0, 0.0), (2.0, 10.0), (float("inf"), 10.0)], 0.5) == pytest.approx(1.5)
    assert quantile([(1.0, 1.0), (float("inf"), 10.0)], 0.9) == 1.0


def test_rates_and_percentiles_are_of_what_happened_between(pages: Pages) -> None:
    started = Gauge("process_start_time_seconds", "", registry=pages.registry)
    started.set(5)
    ended = Counter(Metric.REQUESTS, "", ("model", "outcome"), registry=pages.registry)
    first = Histogram(
        Metric.TIME_TO_FIRST_TOKEN, "", ("model",), buckets=BOUNDS, registry=pages.registry
    )
    for _ in range(100):
        first.labels("m").observe(0.9)
    ended.labels("m", "OK").inc(100)
    before = scrape(pages.address)
    for _ in range(50):
        first.labels("m").observe(0.015)
    by_method = Counter(Metric.REQUESTS_BY_METHOD, "", ("method",), registry=pages.registry)
    by_method.labels("POST /v1/responses").inc(30)
    by_method.labels("baton.inference.v1.InferenceService/Generate").inc(20)
    ended.labels("m", "OK").inc(30)
    ended.labels("m", "QUEUE_FULL").inc(20)
    after = scrape(pages.address)
    took_s = after.router.at_s - before.router.at_s
    found = view(after, before)
    assert found.request_rate == pytest.approx(50 / took_s)
    assert [*found.method_rates.values()] == pytest.approx([30 / took_s, 20 / took_s])
    shown = Console(width=120, record=True, file=io.StringIO())
    shown.print(draw(found, "here"))
    assert re.search(r"  responses +\d[\s\S]*  Generate +\d", shown.export_text())
    assert found.error_rate == pytest.approx(20 / took_s)
    ttft = found.latencies["TTFT"]
    assert ttft.count == 50
    assert ttft.p50_ms is not None
    assert 10 <= ttft.p50_ms <= 20
    whole = view(after)
    assert (whole.request_rate, whole.window_s) == (None, None)
    assert whole.latencies["TTFT"].count == 150
    assert whole.latencies["TTFT"].p90_ms == pytest.approx(925)  # 85 of 100 into 0.5-1 s
    started.set(6)  # The same page from a new process: nothing before it counts.
    anew = view(scrape(pages.address), before)
    assert anew.request_rate is None
    assert anew.latencies["TTFT"].count == 150


def test_what_several_routers_counted_is_added_up() -> None:
    workers = ("decode-0", "decode-1")
    with served() as one, served() as other:
        for pages, name in zip((one, other), workers, strict=True):
            Gauge(Metric.INFLIGHT, "", registry=pages.registry).set(3)
            first = Histogram(
                Metric.TIME_TO_FIRST_TOKEN, "", buckets=BOUNDS, registry=pages.registry
            )
            first.observe(0.015)
            up = Gauge(Metric.WORKER_UP, "", ("worker", "role"), registry=pages.registry)
            for known in workers:
                up.labels(known, "decode").set(known == name)
        one.discovery = f'[{{"targets": ["{one.address}"], "labels": {{"worker": "decode-0"}}}}]'
        found = view(scrape(f"{one.address},{other.address}"))
        assert found.inflight == 6
        assert found.latencies["TTFT"].count == 2
        assert [worker.state for worker in found.workers] == ["up", "unreachable"]
        assert found.routers == 2
    with pytest.raises(TopError, match="does not answer"):
        scrape("127.0.0.1:1,127.0.0.1:1")


def test_workers_that_do_not_answer_or_are_gone_are_shown(pages: Pages) -> None:
    up = Gauge(Metric.WORKER_UP, "", ("worker", "role"), registry=pages.registry)
    up.labels("decode-0", "decode").set(1)
    up.labels("decode-1", "decode").set(0)
    with socket.create_server(("127.0.0.1", 0)) as held:
        nobody = f"127.0.0.1:{held.getsockname()[1]}"
    pages.discovery = f'[{{"targets": ["{nobody}"], "labels": {{"worker": "decode-0"}}}}]'
    found = view(scrape(pages.address))
    assert [(one.name, one.state) for one in found.workers] == [
        ("decode-0", "unreachable"),
        ("decode-1", "gone"),
    ]
    shown = screen(found, pages)
    assert f"metrics at {nobody} do not answer from here" in " ".join(shown.split())
    assert re.search(r"decode-1 .* gone", shown)


def test_the_gpus_of_all_ranks_are_one_figure(pages: Pages) -> None:
    pages.attach("decode-0")
    assert view(scrape(pages.address)).workers[0].gpu_share is None
    gpus = Gauge(Metric.GPU_UTILIZATION, "", ("rank",), registry=pages.registry)
    for rank, share in enumerate((0.5, 0.9)):
        gpus.labels(str(rank)).set(share)
    assert view(scrape(pages.address)).workers[0].gpu_share == pytest.approx(0.7)


def test_the_wait_for_the_slowest_rank_is_shown_by_step(pages: Pages) -> None:
    pages.attach("decode-0")
    steps = Counter(Metric.STEPS, "", registry=pages.registry)
    steps.inc(10)
    (alone,) = view(scrape(pages.address)).workers
    assert alone.rank_skew_ms is None, "it has one rank"
    skew = Counter(Metric.RANK_SKEW, "", registry=pages.registry)
    skew.inc(3.0)
    before = scrape(pages.address)
    assert view(before, before).workers[0].rank_skew_ms is None, "no step since"
    steps.inc(4)
    skew.inc(0.006)
    found = view(scrape(pages.address), before)
    assert found.workers[0].rank_skew_ms == pytest.approx(1.5)
    assert "wait for the slowest rank, a step  decode-0 1.50 ms" in screen(found, pages)


@pytest.mark.parametrize("is_group", [True, False])
def test_the_fullest_experts_are_shown(pages: Pages, is_group: bool) -> None:
    """Of the ranks of a worker, and of the workers of an expert group, each of which has one."""
    pages.attach("decode-0")
    labels = {"worker": "decode-0", "model": "m", FAILURE_UNIT: "a"}
    pages.discovery = json.dumps([{"targets": [pages.address], "labels": labels}])
    pairs = Counter(Metric.RANK_PAIRS, "", ("rank", "stage"), registry=pages.registry)
    for rank in "0" if is_group else "01":
        pairs.labels(rank, "0").inc(900)
    before = scrape(pages.address)
    assert view(before, before).workers[0].fullest_experts is None, "no step since"
    pairs.labels("0", "0").inc(30)
    now = scrape(pages.address)
    if is_group:
        other = now.workers[0]._replace(name="decode-1")
        pairs.labels("0", "0").inc(60)
        more = scrape(pages.address).samples["decode-0"]
        now = replace(now, workers=[*now.workers, other], samples={**now.samples, "decode-1": more})
        before = replace(before, samples={**before.samples, "decode-1": before.samples["decode-0"]})
        found = view(now, before)
        assert [one.fullest_experts for one in found.workers] == pytest.approx([0.5, 1.5])
        for beside in ({"unit": "b"}, {"model": "n"}, {"role": "prefill"}):
            apart = replace(now, workers=[now.workers[0], other._replace(**beside)])
            shown = [one.fullest_experts for one in view(apart, before).workers]
            assert shown == [None, None], beside
    else:
        found = view(now, before)
        assert found.workers[0].fullest_experts == pytest.approx(2.0)
    told = "decode-0 0.50, decode-1 1.50" if is_group else "decode-0 2.00"
    assert f"rows of the fullest rank's experts, of the mean  {told}" in screen(found, pages)


def test_the_time_of_each_stage_is_shown(pages: Pages) -> None:
    pages.attach("decode-0")
    busy = Counter(Metric.RANK_BUSY, "", ("rank", "stage"), registry=pages.registry)
    busy.labels("3", "0").inc(1)
    before = scrape(pages.address)
    assert view(before).workers[0].stage_shares == ()
    for rank, stage in enumerate("1100"):
        busy.labels(str(rank), stage).inc(0.0)
    before = scrape(pages.address)
    for rank, stage in enumerate("1100"):
        busy.labels(str(rank), stage).inc(0.1 if stage == "1" else 0.2)
    found = view(now := scrape(pages.address), before)
    (first, last) = found.workers[0].stage_shares
    seconds = now.samples["decode-0"].at_s - before.samples["decode-0"].at_s
    assert (first, last) == pytest.approx((0.2 / seconds, 0.1 / seconds))
    assert f"first to last  decode-0 {first:.0%} / {last:.0%}" in screen(found, pages)


def test_what_verified_drafts_yield_is_shown_by_row_and_step(pages: Pages) -> None:
    pages.attach("decode-0")
    names = Metric.SPECULATION_DRAFTED, Metric.SPECULATION_ACCEPTED
    drafted, accepted = (Counter(n, "", ("position",), registry=pages.registry) for n in names)
    drafted.labels("0").inc(5)
    before = scrape(pages.address)
    assert view(before, before).workers[0].tokens_a_verify is None, "no draft since"
    for position, verified, right in (("0", 20, 10), ("1", 10, 6)):
        drafted.labels(position).inc(verified)
        accepted.labels(position).inc(right)
    found = view(scrape(pages.address), before)
    assert found.workers[0].tokens_a_verify == pytest.approx(1 + 16 / 20)
    assert "tokens a row and verified step  decode-0 1.8" in screen(found, pages)


def test_adapters_are_shown_by_rate_and_slots(pages: Pages) -> None:
    pages.attach("both-0")
    pages.adapters = '{"adapters": [{"name": "law", "model": "m", "workers": {"both-0": "aa"}}]}'
    tokens = Counter(Metric.ADAPTER_TOKENS, "", ("adapter", "kind"), registry=pages.registry)
    for name in ("law", "poems"):
        tokens.labels(name, "output").inc(7)
    before = scrape(pages.address)
    assert not before.adapters, "nobody asked"
    assert view(before, before).workers[0].adapter_slots is None, "it takes none"
    slots = Gauge(Metric.ADAPTER_SLOTS, "", ("state",), registry=pages.registry)
    for state, count in (("used", 3), ("idle", 4), ("empty", 1)):
        slots.labels(state).set(count)
    tokens.labels("law", "output").inc(50)
    tokens.labels("law", "prompt").inc(5000)
    now = scrape(pages.address, adapters=True)
    assert [(one.name, one.digests) for one in now.adapters] == [("law", {"both-0": "aa"})]
    found = view(now, before)
    seconds = now.router.at_s - before.router.at_s
    assert found.adapter_rates == pytest.approx({"law": 50 / seconds})
    assert found.workers[0].adapter_slots == (3, 8)
    shown = screen(found, pages)
    assert "adapters in use, of slots  both-0 3/8" in shown
    assert "output tokens/s by adapter  law " in shown


def test_transfers_that_do_not_end_are_pointed_at(pages: Pages) -> None:
    pages.attach("decode-0")
    Gauge(Metric.QUARANTINES_OVERDUE, "", registry=pages.registry).set(3)
    assert "decode-0: 3 quarantines overdue" in screen(view(scrape(pages.address)), pages)


def test_a_router_that_goes_away_is_waited_for(pages: Pages) -> None:
    """Its restart must not cost the one who watches it the screen."""
    Gauge(Metric.INFLIGHT, "", registry=pages.registry).set(7)
    looks = _looks(pages.address, 0.01, 30.0)
    assert next(looks).silent_s == 0
    pages.discovery = "{"
    gone = [next(looks) for _ in range(3)]
    assert 0 < gone[0].silent_s < gone[1].silent_s < gone[2].silent_s
    assert gone[2].inflight == 7, "what was known last"
    said = f"the router has not answered for {gone[2].silent_s:.0f} s"
    assert said in " ".join(screen(gone[2], pages).split())
    pages.discovery = "[]"
    assert next(looks).silent_s == 0


def test_what_is_no_router_is_one_line(pages: Pages) -> None:
    pages.discovery = "{"
    for address, words in (("127.0.0.1:1", "does not answer"), ("a b:1", "does not answer")):
        result = CliRunner().invoke(app, ["top", "--once", "--admin", address])
        assert result.exit_code == FAILED
        assert words in " ".join(result.stderr.split())
        assert "Traceback" not in result.output
    with pytest.raises(TopError, match="no router's admin port"):
        scrape(pages.address)


@pytest.mark.parametrize("value", [0, 0.04, 9.99, 99.96, 100, 12_345, 999_999, 7.6e6, 8.8e9])
def test_figures_fit_their_columns(value: float) -> None:
    assert len(rate(value)) <= 6
    assert len(short(value)) <= 6
    assert len(_bytes_a_second(value)) <= 9
    if value < 100_000:
        assert len(milliseconds(value)) <= 6


def test_bad_requests_are_no_refusals(pages: Pages) -> None:
    refused = Counter(
        Metric.REJECTIONS.removesuffix("_total"), "", ["reason"], registry=pages.registry
    )
    for reason, count in (("INVALID_FIELD", 3), ("UNAUTHENTICATED", 2), ("QUEUE_FULL", 4)):
        refused.labels(reason).inc(count)
    ended = Counter(
        Metric.REQUESTS.removesuffix("_total"), "", ["outcome"], registry=pages.registry
    )
    for outcome in ("OK", "INVALID_FIELD", "INTERNAL"):
        ended.labels(outcome).inc(0)
    before = scrape(pages.address)
    ended.labels("OK").inc(2)
    ended.labels("INVALID_FIELD").inc(7)
    ended.labels("INTERNAL").inc(1)
    now = scrape(pages.address)
    seen = view(now, before)
    assert (seen.bad_requests, seen.rejections) == (5, 4)
    assert seen.error_rate is not None
    assert seen.request_rate == pytest.approx(10 * seen.error_rate), "one of ten is an error"


def test_the_screen_says_where_prompts_came_from() -> None:
    """400 of 1,000 tokens were in pools, 100 at peers, over two workers."""

    def worker(at_s: float, times: float) -> Scraped:
        found, computed = f"{Metric.FOUND_TOKENS}_total", f"{Metric.PREFILL_TOKENS}_total"
        values = {
            found: {
                frozenset({("source", "pool")}): 200 * times,
                frozenset({("source", "peer")}): 50 * times,
            },
            computed: {frozenset({("source", "computed")}): 250 * times},
            f"{Metric.FETCH_BYTES}_total": {frozenset({("direction", "got")}): 3e9 * times},
        }
        return Scraped(at_s, values)

    known = [Known(name, "prefill", "", True) for name in ("prefill-0", "prefill-1")]
    scrapes = [
        Scrape(at_s, Scraped(at_s, {}), known, {one.name: worker(at_s, times) for one in known})
        for at_s, times in ((1.0, 1.0), (3.0, 2.0))
    ]
    stream = io.StringIO()
    Console(file=stream, width=WIDTH).print(draw(view(scrapes[1], scrapes[0]), "here"))
    line = next(line for line in stream.getvalue().splitlines() if "prompt tokens  " in line)
    assert line.split("prompt tokens  ")[1].strip() == (
        "pool 40%, peer 10%, the rest computed  fetched 3.0 GB/s"
    )


def test_pages_of_several_groups_are_shown(pages: Pages) -> None:
    pages.attach("decode-0")
    assert view(scrape(pages.address)).workers[0].groups == {}
    counted = Gauge(Metric.KV_GROUP_PAGES, "", ("group", "state"), registry=pages.registry)
    for group, used, free in (("full", 30, 70), ("window-128", 9, 1)):
        counted.labels(group, "used").set(used)
        counted.labels(group, "free").set(free)
    found = view(scrape(pages.address))
    assert found.workers[0].groups == pytest.approx({"full": 0.3, "window-128": 0.9})
    shown = " ".join(screen(found, pages).split())
    assert "full 30%" in shown
    assert "win-128 90%" in shown
