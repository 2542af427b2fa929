"""The front door's spans and its line in the log."""

from __future__ import annotations

from pathlib import Path

import pytest
from frontdoor_kit import ScriptedDispatcher, fails, hangs, plays, served_model, write_tokenizer
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from baton.inference.v1 import inference_pb2 as api
from router import errors
from router.call import AccessRecord, Call
from router.doors.frontdoor import InferenceService
from router.requests.tokenization import Tokenizers
from telemetry.names import Attr, undeclared
from telemetry.tracing import (
    Tracing,
    context_of,
    end_span,
    start_span,
    trace_id_of,
    traceparent_of,
)

pytestmark = pytest.mark.usefixtures("tracing")
PROMPT = "secret größe"
CALLER = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


@pytest.fixture
def dispatcher(tmp_path: Path) -> ScriptedDispatcher:
    write_tokenizer(tmp_path)
    return ScriptedDispatcher([served_model(tmp_path)], plays([70, 71], [72]))


def request() -> api.StreamGenerateRequest:
    options = api.GenerationInput(text=PROMPT, choices=2)
    options.sampling.temperature = 0.5
    return api.StreamGenerateRequest(input=options, client_tag="tag")


async def serve(
    dispatcher: ScriptedDispatcher, messages: int | None = None, time_left_s: float | None = None
) -> AccessRecord:
    """One streamed call under a SERVER span, left after so many messages."""
    tokenizers = Tokenizers()
    await tokenizers.get(dispatcher.served[0].path)  # Before the call's time begins.
    server = start_span("server", CALLER)
    call = Call(trace_id_of(server), time_left_s=time_left_s, context=context_of(server))
    stream = InferenceService(dispatcher, tokenizers).stream_generate(request(), call)
    try:
        while messages is None or messages > 0:
            await anext(stream)
            messages = messages and messages - 1
    except StopAsyncIteration:
        pass
    finally:
        await stream.aclose()
        end_span(server)
    return call.record


def spans(tracing: Tracing, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    tracing.flush()
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_the_tree(
    dispatcher: ScriptedDispatcher,
    tracing: Tracing,
    exporter: InMemorySpanExporter,
) -> None:
    record = await serve(dispatcher)
    found = spans(tracing, exporter)
    generation = found["text_completion tiny"]
    assert all(span.context.trace_id == int("ab" * 16, 16) for span in found.values())
    assert generation.parent is not None
    assert generation.parent.span_id == found["server"].context.span_id
    for name in ("router.admit", "router.tokenize"):
        parent = found[name].parent
        assert parent is not None
        assert parent.span_id == generation.context.span_id
    job = dispatcher.jobs[0]
    assert job.id == "ab" * 16
    assert traceparent_of(job.context).split("-")[2] == f"{generation.context.span_id:016x}"
    assert generation.start_time == job.arrived_ns
    attributes = dict(generation.attributes or {})
    first_token_s = attributes.pop(Attr.RESPONSE_FIRST_TOKEN_S)
    assert isinstance(first_token_s, float)
    assert 0 < first_token_s < 5
    assert attributes == {
        Attr.OPERATION_NAME: "text_completion",
        Attr.PROVIDER_NAME: "baton",
        Attr.REQUEST_STREAM: True,
        Attr.RESPONSE_ID: job.id,
        Attr.REQUEST_MODEL: "tiny",
        Attr.RESPONSE_MODEL: "tiny",
        Attr.REQUEST_CHOICES: 2,
        Attr.REQUEST_MAX_TOKENS: job.stopping.max_tokens,
        Attr.REQUEST_TEMPERATURE: 0.5,
        Attr.REQUEST_TOP_P: 1.0,
        Attr.REQUEST_TOP_K: 0,
        Attr.REQUEST_FREQUENCY_PENALTY: 0.0,
        Attr.REQUEST_PRESENCE_PENALTY: 0.0,
        Attr.INPUT_TOKENS: job.prompt_tokens,
        Attr.CACHED_INPUT_TOKENS: 1,
        Attr.OUTPUT_TOKENS: 3,
        Attr.RESPONSE_FINISH_REASONS: ("length", "length"),
    }
    assert not undeclared(attributes)
    assert (record.model, record.client_tag) == ("tiny", "tag")
    assert (record.prompt_tokens, record.output_tokens) == (job.prompt_tokens, 3)
    everything = f"{[span.to_json() for span in found.values()]}{record}"
    assert "secret" not in everything


async def test_tracing_off_gives_a_random_id(
    dispatcher: ScriptedDispatcher, tracing: Tracing
) -> None:
    tracing.shutdown()
    for _ in range(2):
        service = InferenceService(dispatcher, Tokenizers())
        whole = await service.generate(api.GenerateRequest(input=request().input), Call())
        assert whole.started.generation_id == dispatcher.jobs[-1].id
        assert len(bytes.fromhex(whole.started.generation_id)) == 16
    assert dispatcher.jobs[0].id != dispatcher.jobs[1].id


@pytest.mark.parametrize(
    ("case", "outcome"),
    [
        ("refused", "INVALID_FIELD"),
        ("failed", "QUEUE_FULL"),
        ("bug", "INTERNAL"),
        ("left", "CANCELLED"),
        ("late", "DEADLINE_EXCEEDED"),
    ],
)
async def test_how_it_ended(
    dispatcher: ScriptedDispatcher,
    tracing: Tracing,
    exporter: InMemorySpanExporter,
    case: str,
    outcome: str,
) -> None:
    scripts = {"failed": fails(errors.queue_full(1, 1.0)), "bug": fails(ValueError(PROMPT))}
    dispatcher.script = scripts.get(case, hangs)
    if case == "refused":
        (Path(dispatcher.served[0].path) / "tokenizer.json").unlink()
    try:
        messages = 2 if case == "left" else None
        await serve(dispatcher, messages, time_left_s=1.0 if case == "late" else None)
    except (errors.RouterError, ValueError):
        assert case != "left"
    found = spans(tracing, exporter)
    generation = next(span for name, span in found.items() if name.startswith("text_completion"))
    assert generation.status.status_code is StatusCode.ERROR
    assert (generation.attributes or {})[Attr.ERROR_TYPE] == outcome
    assert ("router.tokenize" in found) == (case != "refused")
    assert "secret" not in f"{[span.to_json() for span in found.values()]}"
