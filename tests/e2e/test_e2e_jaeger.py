"""The same trace, read back from a real Jaeger: set JAEGER_URL, such as http://127.0.0.1:16686.

Spans go to port 4317 of the same host unless JAEGER_OTLP_ENDPOINT says otherwise.
"""

from __future__ import annotations

import os
import urllib.parse

import pytest
from cluster import running
from tiny_models import write_tiny_model

from console.tracing.traces import JAEGER_URL, fetch, missing_spans
from telemetry.names import SpanName

pytestmark = pytest.mark.skipif(
    not os.environ.get(JAEGER_URL), reason="needs a Jaeger: set JAEGER_URL"
)
ARRIVED_S = 20.0


def otlp_endpoint() -> str:
    host = urllib.parse.urlsplit(os.environ[JAEGER_URL]).hostname
    return os.environ.get("JAEGER_OTLP_ENDPOINT", f"http://{host}:4317")


def test_jaeger_has_the_whole_trace(tmp_path):
    with running(
        write_tiny_model(tmp_path / "model"), tmp_path / "logs", otlp_endpoint=otlp_endpoint()
    ) as cluster:
        with cluster.client() as client:
            result = client.generate("Hello", max_tokens=12, temperature=0.0, ignore_eos=True)
        trace = fetch("", result.trace_id, patience_s=ARRIVED_S)
        latest = fetch("", None, patience_s=ARRIVED_S)
    assert missing_spans(trace) == []
    assert latest.id == trace.id == result.trace_id
    assert {span.instance for span in trace.spans} == {"router", "prefill-0", "decode-0"}
    (sent,), (received,) = trace.named(SpanName.KV_SEND), trace.named(SpanName.KV_RECEIVE)
    assert received.links == (sent.id,)
    for name, parent in ((SpanName.KV_SEND, SpanName.PREFILL), (SpanName.KV_GRANT, "decode")):
        (span,), (above,) = trace.named(name), trace.named(parent)
        assert span.parent_id == above.id
