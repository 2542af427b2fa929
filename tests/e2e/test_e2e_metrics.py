"""What the processes show of themselves agrees with what was run, process by process."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from cluster import running
from scraping import Figures, read, scrape, scrape_until
from tiny_models import write_tiny_model

from baton.client.generation import Generation
from baton.errors import BatonError
from telemetry.metrics.table import OWN_FAULTS
from telemetry.names import Metric

PAGE_TOKENS = 16
PAGE_BYTES = 2 * 2 * 2 * 16 * PAGE_TOKENS * 4
"""Two layers, keys and values, two heads of 16, in float32."""
PROMPTS = (1, 15, 16, 17, 300)
MAX_TOKENS = 12
STEP_TOKENS = 128
SLOW_DECODE = {"decode-0": {"failpoints": "engine.step=sleep:0.02"}}
"""What else a request waits for on a shared machine is little beside its tokens."""
MUST_STAY_ZERO = (
    Metric.STALE_NOTIFICATIONS + "_total",
    Metric.EXPIRED_GRANTS + "_total",
    Metric.TRANSFERS_QUARANTINED,
    Metric.SENDS_IN_PROGRESS,
    Metric.PREEMPTIONS + "_total",
    Metric.RUNNING_SEQUENCES,
    Metric.WAITING_REQUESTS,
    Metric.QUEUED_PREFILL_TOKENS,
)


def all_steps_counted(figures: Figures) -> bool:
    steps = figures.of(Metric.STEPS + "_total")
    return steps > 0 and figures.of(Metric.STEP_SECONDS + "_count") == steps


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics")
    model = write_tiny_model(folder / "model")
    with running(
        model,
        folder / "logs",
        trace=True,
        max_step_tokens=STEP_TOKENS,
        own=SLOW_DECODE,
        ends_well=True,
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def results(cluster) -> list[Generation]:
    """Prompts that share nothing, one answer each; and three requests that are refused."""
    rng = np.random.default_rng(5)
    found = []
    with cluster.client() as client:
        for length in PROMPTS:
            prompt = rng.integers(5, 260, length).tolist()
            found.append(
                client.generate(
                    token_ids=prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True
                )
            )
        with pytest.raises(BatonError, match="nobody"):
            client.generate("Hello", model="nobody")
        with pytest.raises(BatonError):
            client.generate("Hello", temperature=-1.0)
        generate = client._channel.unary_unary("/baton.inference.v1.InferenceService/Generate")
        with pytest.raises(grpc.RpcError):
            generate(b"\xff" * 20)
    cluster.check_baseline()
    # What a request was is counted behind its last word to the client.
    scrape_until(
        cluster,
        "router",
        lambda now: (
            now.total("baton_rejections_total") == 3
            and now.total("baton_requests_total") == len(PROMPTS) + 2
            and now.of("baton_requests_inflight") == 0
        ),
    )
    return found


def test_the_router_counts_requests_and_tokens(cluster, results):
    figures = scrape(cluster, "router")
    model = results[0].model
    ended = {tuple(sorted(labels)): n for labels, n in figures.all("baton_requests_total").items()}
    assert {labels: n for labels, n in ended.items() if n} == {
        (("model", model), ("outcome", "OK")): len(PROMPTS),
        (("model", ""), ("outcome", "MODEL_NOT_FOUND")): 1,
        (("model", ""), ("outcome", "INVALID_FIELD")): 1,
    }
    for outcome in OWN_FAULTS:
        assert ended[("model", model), ("outcome", outcome)] == 0
    assert figures.of("baton_rejections_total", reason="MALFORMED_REQUEST") == 1
    assert figures.of("baton_rejections_total", reason="MODEL_NOT_FOUND") == 1
    assert figures.of("baton_rejections_total", reason="INVALID_FIELD") == 1
    assert figures.of("baton_prompt_tokens_total", model=model) == sum(PROMPTS)
    assert figures.of("baton_output_tokens_total", model=model) == len(PROMPTS) * MAX_TOKENS

    by_model = {"gen_ai_request_model": model}
    first = figures.of(Metric.TIME_TO_FIRST_TOKEN + "_sum", **by_model)
    whole = figures.of(Metric.REQUEST_DURATION + "_sum", error_type="", **by_model)
    assert figures.of(Metric.TIME_TO_FIRST_TOKEN + "_count", **by_model) == len(PROMPTS)
    assert figures.of(Metric.TIME_PER_OUTPUT_TOKEN + "_count", **by_model) == len(PROMPTS)
    assert 0 < first < whole
    told = sum(one.timings.time_to_first_token_s for one in results)
    assert first == pytest.approx(told, abs=0.05)
    per_token = figures.of(Metric.TIME_PER_OUTPUT_TOKEN + "_sum", **by_model)
    # To the last token: a request's duration counts what follows it, too.
    assert 0.5 * (whole - first) < per_token * (MAX_TOKENS - 1) <= whole - first
    assert figures.of("baton_queue_wait_seconds_count") == len(PROMPTS)


def test_the_router_at_rest(cluster, results):
    figures = scrape(cluster, "router")
    for name in ("baton_requests_inflight", "baton_queue_depth", "baton_queue_tokens"):
        assert figures.of(name) == 0
    assert figures.total("baton_retries_total") == figures.total("baton_failovers_total") == 0
    model = results[0].model
    for role in ("prefill", "decode"):
        worker = f"{role}-0"
        assert figures.of("baton_worker_up", worker=worker, role=role, model=model) == 1
        assert figures.of("baton_workers_lost_total", role=role, cause="socket_closed") == 0
    public = Figures(read(f"http://{cluster.plan.http_address}/metrics"))
    for labels, count in figures.all("baton_requests_total").items():
        assert public.of("baton_requests_total", **dict(labels)) == count


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_pages_add_up_and_nothing_is_left(cluster, results, name):
    figures = scrape_until(cluster, name, all_steps_counted)
    pages = figures.all(Metric.KV_PAGES)
    assert len(pages) == 5
    assert sum(pages.values()) == figures.of(Metric.KV_PAGES_TOTAL) == 399
    for state in ("used", "granted", "quarantined"):
        assert figures.of(Metric.KV_PAGES, state=state) == 0
    assert figures.of(Metric.KV_PAGES, state="cached") > 0
    for metric in MUST_STAY_ZERO:
        assert figures.of(metric) == 0, metric
    for outcome in ("aborted", "failed"):
        assert figures.of("baton_kv_transfers_total", outcome=outcome) == 0
    assert figures.total("baton_kv_transfer_failures_total") == 0


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_the_router_knows_the_pages_that_a_worker_keeps(cluster, results, name):
    kept = scrape_until(cluster, name, all_steps_counted).of(Metric.KV_PAGES, state="cached")

    def knows_them(now: Figures) -> bool:
        return now.of(Metric.KNOWN_PAGES, worker=name, tier="pool") == kept

    known = scrape_until(cluster, "router", knows_them)
    assert known.of(Metric.KNOWN_PAGES, worker=name, tier="host") == 0
    assert known.of(Metric.PAGE_EVENTS_BEHIND, worker=name) == 0
    assert known.total(Metric.PAGE_MESSAGES_DROPPED + "_total") == 0
    assert known.total(Metric.PAGES_ASKED_AGAIN + "_total") == 0


def test_every_prompt_is_computed_once_and_sent(cluster, results):
    figures = scrape_until(cluster, "prefill-0", all_steps_counted)
    pages = sum(-(-length // PAGE_TOKENS) for length in PROMPTS)
    assert figures.of("baton_prefill_tokens_total", source="computed") == sum(PROMPTS)
    assert figures.of("baton_prefill_tokens_total", source="cached") == 0
    assert figures.of("baton_sampled_tokens_total") == len(PROMPTS)
    assert figures.of("baton_engine_steps_total") >= len(PROMPTS) + 300 // STEP_TOKENS
    assert figures.of("baton_decode_batch_size_count") == 0
    assert figures.of("baton_kv_transfers_total", outcome="sent") == len(PROMPTS)
    assert figures.of("baton_kv_transfer_sent_bytes_total") == pages * PAGE_BYTES
    assert len(PROMPTS) <= figures.of("baton_kv_transfer_descriptors_total") <= pages
    assert figures.total(Metric.TRANSFER_SECONDS + "_count") == len(PROMPTS)
    assert figures.total(Metric.TRANSFER_EXPOSED + "_count") == len(PROMPTS)
    (transport,) = [
        dict(labels)["transport"] for labels in figures.all(Metric.TRANSFER_SECONDS + "_sum")
    ]
    assert transport


def test_every_other_token_is_decoded(cluster, results):
    figures = scrape_until(cluster, "decode-0", all_steps_counted)
    decoded = len(PROMPTS) * (MAX_TOKENS - 1)
    assert figures.of("baton_kv_transfers_total", outcome="received") == len(PROMPTS)
    assert figures.of("baton_kv_transfer_sent_bytes_total") == 0
    assert figures.of("baton_prefill_tokens_total", source="computed") == 0
    # A step that is in flight when a sequence ends decodes a token that is nobody's.
    assert decoded <= figures.of("baton_decode_batch_size_sum") <= decoded + len(PROMPTS)
    assert decoded <= figures.of("baton_sampled_tokens_total") <= decoded + len(PROMPTS)
    assert figures.of("baton_engine_step_seconds_sum") > 0
    assert figures.of(Metric.SECOND_TOKEN_GAP + "_count") == len(PROMPTS)
    assert 0 < figures.of(Metric.SECOND_TOKEN_GAP + "_sum") < 10 * len(PROMPTS)


@pytest.mark.parametrize("name", ["router", "prefill-0", "decode-0"])
def test_every_process_shows_itself(cluster, results, name):
    def spans_left(figures: Figures) -> bool:
        return figures.of("baton_spans_total", outcome="exported") >= len(PROMPTS)

    figures = scrape_until(cluster, name, spans_left)
    assert figures.of("baton_spans_total", outcome="dropped") == 0
    assert figures.of("baton_spans_total", outcome="failed") == 0
    assert figures.of("baton_event_loop_lag_seconds_count") > 0
    assert figures.of(Metric.DRAIN_SECONDS) == 0
    assert not figures.all(Metric.GPU_POWER), "no process of this cluster has a GPU"
    assert figures.of("process_resident_memory_bytes") > 0
    for probe in ("live", "ready"):
        assert read(f"http://{cluster.admin_addresses[name]}/health/{probe}") == "ok\n"
