"""What a router counts, by the metrics that it shows."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
from frontdoor_kit import ScriptedDispatcher, fails, hangs, plays, served_model, write_tokenizer
from scripted_worker import PREFILL, Cluster, job, until

from baton.inference.v1 import inference_pb2 as api
from router import errors
from router.call import Call
from router.doors.frontdoor import InferenceService
from router.errors import RouterError
from router.events import NO_EVENTS, RouterEvents
from router.requests.tokenization import Tokenizers
from router.workers.link import Loss
from telemetry.metrics.router import RouterLoad, RouterMetrics
from telemetry.metrics.table import LOSS_CAUSES
from telemetry.names import Metric

MODEL = {"model": "tiny"}
LOST = Metric.WORKERS_LOST + "_total"
GEN_AI_MODEL = {"gen_ai_request_model": "tiny"}


class Counted(RouterMetrics):
    """The real ones, read back."""

    def __init__(self) -> None:
        super().__init__(RouterLoad)

    def of(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def outcomes(self) -> dict[tuple[str, str], float]:
        """Requests ended, by model and outcome."""
        return {
            (sample.labels["model"], sample.labels["outcome"]): sample.value
            for family in self.registry.collect()
            if family.name == Metric.REQUESTS
            for sample in family.samples
            if sample.name.endswith("_total")
        }


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture
def dispatcher(tmp_path: Path) -> ScriptedDispatcher:
    write_tokenizer(tmp_path)
    return ScriptedDispatcher([served_model(tmp_path)], plays([70, 71, 72], [73]))


async def serve(
    dispatcher: ScriptedDispatcher, events: RouterEvents, model: str = "tiny", messages: int = 99
) -> None:
    """One streamed request of two choices, left after so many messages."""
    service = InferenceService(dispatcher, Tokenizers(), events=events)
    prompt = api.GenerationInput(model=model, token_ids=api.TokenIds(ids=range(5)), choices=2)
    stream = service.stream_generate(api.StreamGenerateRequest(input=prompt), Call())
    async with aclosing(stream) as answers:
        async for _ in answers:
            if (messages := messages - 1) == 0:
                break


async def test_a_request_that_ends_well(dispatcher: ScriptedDispatcher, counted: Counted) -> None:
    await serve(dispatcher, counted)
    assert counted.outcomes() == {("tiny", "OK"): 1}
    assert counted.of(Metric.TIME_TO_FIRST_TOKEN + "_count", **GEN_AI_MODEL) == 1
    assert counted.of(Metric.TIME_PER_OUTPUT_TOKEN + "_count", **GEN_AI_MODEL) == 1
    assert counted.of(Metric.REQUEST_DURATION + "_count", error_type="", **GEN_AI_MODEL) == 1
    assert counted.of(Metric.PROMPT_TOKENS + "_total", **MODEL) == 5
    assert counted.of(Metric.OUTPUT_TOKENS + "_total", **MODEL) == 4
    # Between messages of one choice: what another choice says is no token of this one. Messages
    # may hold several tokens, where the reader was slower than the writer.
    assert counted.of(Metric.INTER_TOKEN + "_count", **MODEL) <= 2


async def test_how_requests_end(dispatcher: ScriptedDispatcher, counted: Counted) -> None:
    dispatcher.script = fails(errors.worker_lost(1))
    with pytest.raises(RouterError):
        await serve(dispatcher, counted)
    dispatcher.script = hangs
    await serve(dispatcher, counted, messages=2)
    assert counted.outcomes() == {("tiny", "WORKER_LOST"): 1, ("tiny", "CANCELLED"): 1}
    assert counted.of(Metric.TIME_TO_FIRST_TOKEN + "_count", **GEN_AI_MODEL) == 1
    assert counted.of(Metric.TIME_PER_OUTPUT_TOKEN + "_count", **GEN_AI_MODEL) == 0
    assert counted.of(Metric.REJECTIONS + "_total", reason="WORKER_LOST") == 0


async def test_whoever_asks_chooses_no_label(
    dispatcher: ScriptedDispatcher, counted: Counted
) -> None:
    for name in ("one", "another"):
        with pytest.raises(RouterError):
            await serve(dispatcher, counted, model=name)
    assert counted.outcomes() == {("", "MODEL_NOT_FOUND"): 2}
    assert counted.of(Metric.REJECTIONS + "_total", reason="MODEL_NOT_FOUND") == 2


async def test_a_prompt_that_the_context_cannot_hold_is_a_rejection(
    dispatcher: ScriptedDispatcher, counted: Counted, tmp_path: Path
) -> None:
    dispatcher.served = [served_model(tmp_path, max_context_tokens=5)]
    with pytest.raises(RouterError):
        await serve(dispatcher, counted)
    assert counted.of(Metric.REJECTIONS + "_total", reason="CONTEXT_LENGTH_EXCEEDED") == 1


async def test_no_events_are_welcome(dispatcher: ScriptedDispatcher) -> None:
    await serve(dispatcher, NO_EVENTS)
    NO_EVENTS.waited(1.0)
    NO_EVENTS.retried("worker_lost")
    NO_EVENTS.rejected("QUEUE_FULL")


async def test_an_attempt_that_begins_again(counted: Counted) -> None:
    cluster = Cluster(counted)
    try:
        prefill, decode = await cluster.pair()
        other = await cluster.add("p1", PREFILL)
        reader = cluster.read(job(max_tokens=2))
        first = (await prefill.heard("submit")).attempt_id
        await prefill.stop()
        await decode.heard("abort")
        decode.aborted(first, already_ready=False)
        await other.heard("submit")
        assert counted.of(Metric.RETRIES + "_total", cause="worker_lost") == 1
        assert counted.of(Metric.QUEUE_WAIT + "_count") == 2
        await reader.leave()
    finally:
        await cluster.close()


async def test_the_queue_refuses_and_keeps_waiting(counted: Counted) -> None:
    cluster = Cluster(counted, max_queued_requests=1)
    try:
        prefill, _ = await cluster.pair()
        prefill.report(prefill_credit_tokens=0)
        await until(lambda: not cluster.registry.members[0].capacity().prefill_credit_tokens)
        waits = cluster.read(job())
        await until(lambda: cluster.dispatcher.queued_jobs)
        with pytest.raises(RouterError):
            await cluster.read(job()).end()
        assert counted.of(Metric.REJECTIONS + "_total", reason="QUEUE_FULL") == 1
        assert cluster.dispatcher.queued_tokens == waits.job.prompt_tokens
        assert counted.of(Metric.QUEUE_WAIT + "_count") == 0
        await asyncio.sleep(0.02)
        prefill.report(prefill_credit_tokens=64)
        await prefill.heard("submit")
        assert counted.of(Metric.QUEUE_WAIT + "_count") == 1
        assert counted.of(Metric.QUEUE_WAIT + "_sum") >= 0.02
        assert cluster.dispatcher.queued_tokens == 0
        await waits.leave()
    finally:
        await cluster.close()


async def test_a_worker_that_is_lost_counts_and_one_that_drained_does_not(counted: Counted) -> None:
    cluster = Cluster(counted)
    try:
        prefill, decode = await cluster.pair()
        decode.report(draining=True)
        await until(lambda: cluster.link(decode).draining)
        for worker, left in ((decode, 1), (prefill, 0)):
            await worker.stop()
            await until(lambda: len(cluster.registry.members) == left)
        assert sum(counted.of(LOST, role="decode", cause=cause) for cause in LOSS_CAUSES) == 0
        assert sum(counted.of(LOST, role="prefill", cause=cause) for cause in LOSS_CAUSES) == 1
    finally:
        await cluster.close()


def test_every_cause_of_a_loss_is_shown_before_it_happens() -> None:
    """Those of a worker that never was attached, and of the router's own end, are no losses."""
    assert {*LOSS_CAUSES, "closed", "refused", "untrusted"} == {loss.name.lower() for loss in Loss}
