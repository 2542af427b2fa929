"""What the dispatcher leaves in a trace: every span ends, and says how."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from scripted_worker import PREFILL, Cluster, job

from telemetry.names import Service, undeclared
from telemetry.tracing import setup_tracing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


class Recorder:
    """The spans of this process."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        tracing = setup_tracing(Service.ROUTER, exporter=self._exporter)
        assert tracing is not None
        self.tracing = tracing

    def spans(self, name: str) -> list[ReadableSpan]:
        self.tracing.flush()
        found = [span for span in self._exporter.get_finished_spans() if span.name == name]
        assert not undeclared(key for span in found for key in span.attributes or ())
        return found


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.tracing.shutdown()


@pytest.fixture
async def cluster(recorder: Recorder) -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.close()


async def test_a_killed_worker_is_evident(cluster: Cluster, recorder: Recorder) -> None:
    """Its own spans are lost with it: ours say which worker, which attempt and what happened."""
    prefill, decode = await cluster.pair()
    other = await cluster.add("p1", PREFILL)
    reader = cluster.read(job(max_tokens=2))
    first = (await prefill.heard("submit")).attempt_id
    await prefill.stop()
    await decode.heard("abort")
    decode.aborted(first, already_ready=False)
    submit = await other.heard("submit")
    second = submit.attempt_id
    other.first_token(second, 10)
    other.prefill_done(second)
    decode.delivered(second)
    decode.tokens(second, 0, 10, 11)
    decode.finished(second, 2)
    await reader.end()

    lost, done = recorder.spans("prefill")
    assert lost.attributes is not None
    assert done.attributes is not None
    assert lost.attributes["baton.worker.id"] == "p0"
    assert lost.attributes["baton.attempt.id"] == first.hex()
    assert lost.attributes["error.type"] == "worker_lost"
    assert lost.status.status_code is trace.StatusCode.ERROR
    assert done.attributes["baton.worker.id"] == "p1"
    assert done.status.status_code is not trace.StatusCode.ERROR
    assert {span.kind for span in (lost, done)} == {trace.SpanKind.CLIENT}
    assert len(recorder.spans("decode")) == 2
    assert len(recorder.spans("router.queue")) == len(recorder.spans("router.route")) == 2
    route = recorder.spans("router.route")[1].attributes
    assert route is not None
    assert (route["baton.route.prefill"], route["baton.route.decode"]) == ("p1", "d0")
    # The worker's spans go under the attempt's.
    assert submit.traceparent.split("-")[2] == f"{done.context.span_id:016x}"


async def test_a_job_that_is_left_ends_its_spans(cluster: Cluster, recorder: Recorder) -> None:
    prefill, _ = await cluster.pair()
    reader = cluster.read(job())
    await prefill.heard("submit")
    await reader.leave()
    ended = recorder.spans("prefill") + recorder.spans("decode")
    assert [span.status.description for span in ended] == ["cancelled"] * 2
    assert len(recorder.spans("router.queue")) == 1
