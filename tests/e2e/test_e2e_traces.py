"""One request is one trace across three processes, and content is nowhere in it."""

from __future__ import annotations

import secrets

import grpc
import pytest
from cluster import running
from otlp_receiver import otlp_receiver
from tiny_models import write_tiny_model

from baton.inference.v1 import inference_pb2 as pb
from baton.inference.v1 import inference_pb2_grpc as pb_grpc
from telemetry.names import Attr

SECRET = "the quick brown zebra"
PARENTS = {
    "router.admit": "text_completion",
    "router.tokenize": "text_completion",
    "router.queue": "text_completion",
    "router.route": "text_completion",
    "prefill": "text_completion",
    "decode": "text_completion",
    "prefill.queue": "prefill",
    "prefill.compute": "prefill",
    "kv.send": "prefill",
    "kv.grant": "decode",
    "kv.receive": "decode",
    "decode.generate": "decode",
}
REQUESTS = 4
SERVICES = {"router": "baton-router", "prefill": "baton-prefill", "decode": "baton-decode"}


@pytest.fixture(scope="module")
def receiver_and_address():
    with otlp_receiver() as both:
        yield both


@pytest.fixture(scope="module")
def receiver(receiver_and_address):
    return receiver_and_address[0]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, receiver_and_address):
    address = receiver_and_address[1]
    folder = tmp_path_factory.mktemp("traces")
    model = write_tiny_model(folder / "model")
    with running(model, folder / "logs", otlp_endpoint=f"http://{address}") as cluster:
        yield cluster


def stream(cluster, text: str, traceparent: str):
    with grpc.insecure_channel(cluster.plan.router_address) as channel:
        request = pb.StreamGenerateRequest(
            input=pb.GenerationInput(
                text=text,
                sampling=pb.SamplingOptions(temperature=0.0),
                stop=pb.StopOptions(max_tokens=12, ignore_eos=True),
            )
        )
        call = pb_grpc.InferenceServiceStub(channel).StreamGenerate(
            request, metadata=[("traceparent", traceparent)], timeout=30
        )
        return list(call)


def test_every_span_is_there_under_the_callers_trace(cluster, receiver):
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    events = stream(cluster, SECRET, f"00-{trace_id}-{caller}-01")
    assert events[0].started.generation_id == trace_id
    rpc = "baton.inference.v1.InferenceService/StreamGenerate"
    request = f"text_completion {events[0].started.model}"
    found = receiver.wait_for(trace_id, [*PARENTS, rpc, request])
    spans = {name: span for name, (_, span) in found.items()}
    assert spans[rpc].parent_span_id.hex() == caller
    assert spans[request].parent_span_id == spans[rpc].span_id
    for name, parent in PARENTS.items():
        parent = request if parent == "text_completion" else parent
        assert spans[name].parent_span_id == spans[parent].span_id, name
        assert spans[name].end_time_unix_nano >= spans[name].start_time_unix_nano > 0
    assert [link.span_id for link in spans["kv.receive"].links] == [spans["kv.send"].span_id]
    for name, owner in (("kv.send", "prefill"), ("kv.grant", "decode"), ("prefill", "router")):
        assert found[name][0] == SERVICES[owner]


def test_content_is_nowhere_in_the_export_or_the_logs(cluster, receiver):
    trace_id = secrets.token_hex(16)
    events = stream(cluster, SECRET, f"00-{trace_id}-{secrets.token_hex(8)}-01")
    receiver.wait_for(trace_id, list(PARENTS))
    output = "".join(event.delta.text for event in events)
    assert len(output) >= 8
    exported = b"".join(one.SerializeToString() for one in receiver.requests)
    for content in (SECRET, output):
        assert content.encode() not in exported
        assert content not in cluster.logged()


def test_usage_and_timings_agree_with_the_spans(cluster, receiver):
    """To the millisecond, though three processes wrote them: each phase in one request of a few at
    least, for a process may lose the processor between its two looks at a clock."""
    missed = [missed_by_ns(cluster, receiver) for _ in range(REQUESTS)]
    for phase in missed[0]:
        assert min(one[phase] for one in missed) < 1e6, phase


def missed_by_ns(cluster, receiver) -> dict[str, float]:
    """How far what a request was told is from what its spans say, by phase; checks the rest."""
    trace_id = secrets.token_hex(16)
    events = stream(cluster, SECRET, f"00-{trace_id}-{secrets.token_hex(8)}-01")
    request = f"text_completion {events[0].started.model}"
    found = receiver.wait_for(trace_id, [*PARENTS, request])
    spans = {name: span for name, (_, span) in found.items()}
    timings, usage = events[-1].finished.timings, events[-1].finished.usage

    def attribute(name: str, key: str) -> float:
        value = next(one.value for one in spans[name].attributes if one.key == key)
        return value.double_value or value.int_value

    def ended(name: str) -> int:
        return spans[name].end_time_unix_nano

    def began(name: str) -> int:
        return spans[name].start_time_unix_nano

    def lasted(name: str) -> int:
        return ended(name) - began(name)

    expected_ns = {
        "queue": began("router.route") - began(request) + lasted("prefill.queue"),
        "prefill": lasted("prefill.compute"),
        "kv_transfer": ended("kv.send") - ended("prefill.compute"),
        "decode_queue": attribute("decode.generate", Attr.DECODE_JOIN_WAIT_MS) * 1e6,
        "decode": lasted("decode.generate"),
        "time_to_first_token": attribute(request, Attr.RESPONSE_FIRST_TOKEN_S) * 1e9,
    }
    assert timings.prefill.ToNanoseconds() > 0
    assert timings.decode.ToNanoseconds() > 0
    assert usage.prompt_tokens == attribute(request, Attr.INPUT_TOKENS)
    assert usage.output_tokens == attribute(request, Attr.OUTPUT_TOKENS) == 12
    assert usage.prompt_tokens == sum(
        attribute("prefill.compute", key)
        for key in (Attr.PREFILL_TOKENS, Attr.PREFILL_CACHED_TOKENS)
    )
    assert attribute("decode.generate", Attr.DECODE_TOKENS) == 11
    # From the first token, known when the prompt is computed, into the batch's first step.
    gap_ns = attribute("decode.generate", Attr.DECODE_SECOND_TOKEN_GAP_MS) * 1e6
    assert began("decode.generate") < ended("prefill.compute") + gap_ns < ended("decode.generate")
    return {
        phase: abs(getattr(timings, phase).ToNanoseconds() - duration_ns)
        for phase, duration_ns in expected_ns.items()
    }
