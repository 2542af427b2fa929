"""Spans are an offer: a receiver that hangs, is gone or comes back changes no request."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from cluster import Cluster, running
from otlp_receiver import OtlpReceiver, otlp_receiver
from prometheus_client.parser import text_string_to_metric_families
from tiny_models import write_tiny_model
from waiting import wait_until

from telemetry.names import SpanName

REQUESTS = 12
EXPORT_TIMEOUT_S = 5.0


@dataclass
class Seat:
    """Where the receiver sits: one address, whoever is there."""

    address: str = "127.0.0.1:0"
    receiver: OtlpReceiver = field(default_factory=OtlpReceiver)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def sit_down(self) -> None:
        ready = threading.Event()
        self._stop = threading.Event()

        def serve() -> None:
            with otlp_receiver(self.address) as (self.receiver, self.address):
                ready.set()
                self._stop.wait()

        self._thread = threading.Thread(target=serve)
        self._thread.start()
        assert ready.wait(10)

    def leave(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10)


@pytest.fixture(scope="module")
def seat() -> Iterator[Seat]:
    seat = Seat()
    seat.sit_down()
    yield seat
    seat.leave()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, seat: Seat) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("exporter")
    model = write_tiny_model(folder / "model")
    with running(
        model, folder / "logs", otlp_endpoint=f"http://{seat.address}", resume_grace_s=1
    ) as cluster:
        yield cluster


def latencies_s(cluster: Cluster) -> list[float]:
    """Of requests one after the other, each answered in full."""
    found = []
    with cluster.client() as client:
        for number in range(REQUESTS):
            began = time.perf_counter()
            result = client.generate(
                f"Request {number}", max_tokens=8, temperature=0.0, ignore_eos=True
            )
            found.append(time.perf_counter() - began)
            assert result.usage.output_tokens == 8
    return found


def spans(cluster: Cluster, outcome: str) -> float:
    """Spans of the router by what became of them."""
    url = f"http://{cluster.plan.admin_address}/metrics"
    with urllib.request.urlopen(url, timeout=5) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                if sample.name == "baton_spans_total" and sample.labels["outcome"] == outcome:
                    return float(sample.value)
    raise AssertionError("no baton_spans_total")


def wait_for_more(cluster: Cluster, outcome: str, than: float) -> None:
    wait_until(lambda: spans(cluster, outcome) > than)


def test_a_receiver_that_hangs_or_is_gone_costs_no_request_any_time(
    cluster: Cluster, seat: Seat
) -> None:
    latencies_s(cluster)  # warm
    healthy = latencies_s(cluster)
    wait_for_more(cluster, "exported", REQUESTS)
    lost = spans(cluster, "failed") + spans(cluster, "dropped")
    assert lost == 0

    seat.receiver.free.clear()  # takes calls and answers none
    hung = latencies_s(cluster)
    wait_for_more(cluster, "failed", lost)

    seat.leave()
    failed = spans(cluster, "failed")
    gone = latencies_s(cluster)
    wait_for_more(cluster, "failed", failed)

    seat.sit_down()
    exported = spans(cluster, "exported")
    back = latencies_s(cluster)
    wait_for_more(cluster, "exported", exported)
    # Each process has a back-off of its own after the outage.
    wait_until(lambda: SpanName.DECODE_GENERATE in seat.receiver.spans)

    for phase in (hung, gone, back):
        # Had one request waited for one export, it would have taken the timeout.
        assert max(phase) < EXPORT_TIMEOUT_S / 2
        # The machine is shared: what others take of it lengthens many, but hardly every one.
        assert min(phase) < 2 * min(healthy) + 0.05
    said = (cluster.logs / "router.log").read_text()
    assert said.count("spans are not taken by their receiver") == 1
    assert said.count("spans are taken by their receiver again") == 1
