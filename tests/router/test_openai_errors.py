"""Errors of the OpenAI-compatible API, callers that leave, and what is recorded of both."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest
from frontdoor_kit import Script, access_lines, fails, hangs
from openai import AsyncStream
from openai_kit import Port, answers, open_port, prompt_of, says
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from waiting import until

from router import errors
from router.doors.auth import TokenGate
from router.jobs import Job, JobEvent, JobStarted
from telemetry.names import Attr, undeclared
from telemetry.tracing import Tracing

MODEL = "tiny"
CALLER = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
GONE_S = 10.0
TYPE = {"content-type": "application/json"}
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


STATUSES = [
    (errors.model_not_found("x"), openai.NotFoundError, 404, "invalid_request_error", False),
    (errors.unauthenticated(), openai.AuthenticationError, 401, "authentication_error", False),
    (errors.permission_denied(), openai.PermissionDeniedError, 403, "permission_error", False),
    (errors.queue_full(3, 2.25), openai.RateLimitError, 429, "rate_limit_error", True),
    (
        errors.quota_exceeded("tokens", 0, 4, 3),
        openai.RateLimitError,
        429,
        "rate_limit_error",
        False,
    ),
    (errors.no_workers("", 2.25), openai.InternalServerError, 503, "server_error", True),
    (errors.deadline_exceeded(3), openai.InternalServerError, 504, "server_error", False),
    (errors.structure_too_complex(3), openai.BadRequestError, 400, "invalid_request_error", False),
]
"""Each kind of exception; `test_router_errors.py` has every row."""


@pytest.mark.parametrize("stream", [False, True])
async def test_statuses_are_the_clients_own_exceptions(tmp_path: Path, stream: bool) -> None:
    """Before the first token, in a stream too."""
    async with open_port(tmp_path, hangs) as port:
        for error, kind, status, type_, retry in STATUSES:
            port.dispatcher.script = fails(error)
            with pytest.raises(kind) as caught:
                await port.client.completions.create(model=MODEL, prompt="a", stream=stream)
            raised = caught.value
            assert (raised.status_code, raised.type) == (status, type_)
            assert raised.code == error.reason.lower()
            assert error.message in raised.message
            assert (port.job.id in raised.message) == (status >= 500)
            headers = raised.response.headers
            assert headers["x-request-id"] == port.job.id
            assert headers["x-should-retry"] == str(retry).lower()
            assert headers.get("retry-after") == ("3" if retry else None)
            assert headers.get("retry-after-ms") == ("2250" if retry else None)


async def read(stream: AsyncStream[Any]) -> None:
    """To the end."""
    async for _ in stream:
        pass


async def test_the_client_tries_again_by_itself(tmp_path: Path) -> None:
    async with open_port(tmp_path, answers(lambda *_: [70]), max_retries=1) as port:
        later = port.dispatcher.script

        def once(job: Job) -> AsyncGenerator[JobEvent, None]:
            port.dispatcher.script = later
            return fails(errors.queue_full(1, 0.01))(job)

        port.dispatcher.script = once
        got = await port.client.completions.create(model=MODEL, prompt="a")
        assert got.choices[0].text == port.tokenizer.decode([70])
        assert len(port.dispatcher.jobs) == 2


@pytest.mark.parametrize("chat", [False, True])
async def test_an_error_behind_the_first_token_is_the_streams_last_event(
    tmp_path: Path, chat: bool
) -> None:
    error = errors.worker_lost_mid_stream(2)
    async with open_port(tmp_path, fails(error, after=[70, 71])) as port:
        if chat:
            messages = [{"role": "user", "content": "a"}]
            stream = await port.client.chat.completions.create(
                model=MODEL, messages=messages, stream=True
            )
        else:
            stream = await port.client.completions.create(model=MODEL, prompt="a", stream=True)
        assert await anext(aiter(stream))
        with pytest.raises(openai.APIError) as caught:
            await read(stream)
        assert (caught.value.code, caught.value.type) == ("worker_lost_mid_stream", "server_error")


async def test_a_bug_shows_its_trace_and_no_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_port(tmp_path, fails(ValueError("SECRET"))) as port:
        with caplog.at_level(logging.INFO), pytest.raises(openai.InternalServerError) as caught:
            await port.client.completions.create(model=MODEL, prompt="SECRET")
        assert caught.value.status_code == 500
        assert port.job.id in caught.value.message
        assert caught.value.code == "internal"
        records = "".join(str(vars(record)) for record in caplog.records)
        assert "SECRET" not in f"{caught.value.body}{records}"


BAD: list[tuple[dict[str, object], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 2**32 - 1}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"max_tokens": 300}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"best_of": 0}, "best_of"),
    ({"suffix": "SECRET"}, "suffix"),
    ({"stop": ["a", "SECRET" * 99]}, "stop[1]"),
    ({"stop": {"SECRET": 1}}, "stop"),
    ({"stop_token_ids": [5, 512]}, "stop_token_ids[1]"),
    ({"logit_bias": {"600": 1}}, "logit_bias[600]"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"priority": 101}, "priority"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a"] * 257}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [5, "SECRET"]}, "prompt"),
    ({"prompt": [5, -1]}, "prompt"),
    ({"prompt": [5, 2**32]}, "prompt"),
    ({"prompt": [5, 512]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt"),
    ({"max_tokens": False}, "max_tokens"),
    ({"temperature": True}, "temperature"),
    ({"logprobs": False}, "logprobs"),
    ({"seed": True}, "seed"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"logit_bias": {"5": False}}, "logit_bias.5"),
    ({"prompt": {"SECRET": 1}}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [7] * 256}, "prompt"),
    ({"prompt": ["a"] * 17, "n": 16}, "n"),
]


async def test_bad_requests_name_the_field(tmp_path: Path) -> None:
    async with open_port(tmp_path, says("a")) as port:
        for body, param in BAD:
            with pytest.raises(openai.BadRequestError) as caught:
                await port.client.post(
                    "/completions", body={"model": MODEL, "prompt": "a", **body}, cast_to=object
                )
            assert caught.value.param == param, body
            assert caught.value.type == "invalid_request_error"
            assert "SECRET" not in str(caught.value.body)
        assert not port.dispatcher.jobs


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([[70, 9999]], "prompt[1]"),
        ([[70], [70, 9999]], "prompt[1][1]"),
        (["a", ""], "prompt[1]"),
        (["a", "a " * 999], "prompt[1]"),
    ],
)
async def test_an_error_says_which_prompt_it_is(tmp_path: Path, prompt: object, param: str) -> None:
    async with open_port(tmp_path, says("a")) as port:
        with pytest.raises(openai.BadRequestError) as caught:
            await port.client.completions.create(
                model=MODEL, prompt="", extra_body={"prompt": prompt}
            )
        assert caught.value.param == param


async def test_all_violations_at_once(tmp_path: Path) -> None:
    async with open_port(tmp_path, says("a")) as port:
        with pytest.raises(openai.BadRequestError) as caught:
            await port.client.completions.create(
                model=MODEL, prompt="a", temperature=-1, top_p=5, n=99
            )
        assert caught.value.message.endswith(
            "temperature: must be finite and at least 0; top_p: must be in (0, 1]; "
            "n: must be in [1, 16]"
        )


async def test_context_length_has_the_apis_own_code(tmp_path: Path) -> None:
    async with open_port(tmp_path, says("a")) as port:
        with pytest.raises(openai.BadRequestError) as caught:
            await port.client.completions.create(model=MODEL, prompt=[7] * 250, max_tokens=7)
        assert caught.value.code == "context_length_exceeded"


NO_OUTPUT_ASKED: list[dict[str, Any]] = [{"echo": True, "max_tokens": 0}, {"max_tokens": None}]


@pytest.mark.parametrize("asked", NO_OUTPUT_ASKED)
async def test_a_prompt_that_leaves_one_token_of_the_context_is_run(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    async with open_port(tmp_path, says("a")) as port:
        got = await port.client.completions.create(model=MODEL, prompt=[7] * 255, **asked)
    assert got.choices


@pytest.mark.parametrize("asked", [*NO_OUTPUT_ASKED, {"max_tokens": 9}])
@pytest.mark.parametrize("prompt_tokens", [256, 300])
async def test_a_prompt_that_leaves_none_is_told_so(
    tmp_path: Path, prompt_tokens: int, asked: dict[str, Any]
) -> None:
    """And nothing of a max_tokens that the client may not even have sent."""
    async with open_port(tmp_path, says("a")) as port:
        create = port.client.completions.create
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model=MODEL, prompt=[7] * prompt_tokens, **asked)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    limit = "This model's maximum context length is 256 tokens: "
    assert f"{limit}{prompt_tokens} prompt tokens leave none" in caught.value.message
    assert "max_tokens" not in caught.value.message


async def test_a_conversation_that_leaves_none_names_its_messages(tmp_path: Path) -> None:
    turns: list[Any] = [{"role": "user", "content": "a b c d " * 100}]
    async with open_port(tmp_path, says("a")) as port:
        with pytest.raises(openai.BadRequestError) as caught:
            await port.client.chat.completions.create(model=MODEL, messages=turns)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


async def test_every_error_has_an_id(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('"sk-good" = "acme"\n')
    cases = [
        ("GET", "/v1/models", 401),
        ("POST", "/v1/completions", 401),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
    ]
    async with open_port(tmp_path, says("a"), gate=TokenGate(tokens)) as port:
        url, client = f"http://{port.server.address}", port.client._client
        for method, path, status in cases:
            traced = await client.request(method, url + path, headers={"traceparent": CALLER})
            assert (traced.status_code, traced.headers["x-request-id"]) == (status, "ab" * 16)
            answer = await client.request(method, url + path)
            assert len(answer.headers["x-request-id"]) == 32


async def test_what_is_no_request(tmp_path: Path) -> None:
    cases = [
        ("POST", "/v1/completions", b"{SECRET", 400, "malformed_request"),
        ("POST", "/v1/completions", b"", 400, "malformed_request"),
        ("POST", "/v1/completions", b"[]", 400, "invalid_field"),
        ("POST", "/v1/completions", b"\xff\xfe", 400, "malformed_request"),
        ("GET", "/v1/completions", b"", 405, "method_not_allowed"),
        ("POST", "/v1/images/generations", b"{}", 404, "not_found"),
    ]
    async with open_port(tmp_path, says("a")) as port:
        for method, path, body, status, code in cases:
            url = f"http://{port.server.address}{path}"
            answer = await port.client._client.request(method, url, content=body, headers=TYPE)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert "SECRET" not in answer.text


async def test_a_wrong_path_or_method_says_what_is_right(tmp_path: Path) -> None:
    async with open_port(tmp_path, says("a")) as port:
        url, client = f"http://{port.server.address}", port.client._client
        missing = await client.post(f"{url}/chat/completions", json={})
        assert missing.json()["error"]["message"] == "no such path: it is /v1/chat/completions"
        unknown = await client.post(f"{url}/nothing", json={})
        assert "/v1/chat/completions, " in unknown.json()["error"]["message"]
        ollama = await client.post(f"{url}/api/chat", json={})
        assert "/v1/chat/completions here" in ollama.json()["error"]["message"]
        for path, instead in (
            ("audio/speech", "text"),
            ("images/generations", "text"),
            ("fine_tuning/jobs", "trained elsewhere"),
            ("assistants", "/v1/responses"),
            ("threads/thread_a/runs", "/v1/responses"),
        ):
            missing = await client.post(f"{url}/v1/{path}", json={})
            assert (missing.status_code, instead in missing.text) == (404, True)
        for path, allowed in (
            ("completions", "POST"),
            ("models", "GET, HEAD"),
            ("files", "GET, HEAD, POST"),
            ("files/file-a", "DELETE, GET, HEAD"),
            ("batches", "GET, HEAD, POST"),
            ("responses/resp_a", "DELETE, GET, HEAD"),
        ):
            put = await client.put(f"{url}/v1/{path}")
            assert put.json()["error"]["message"] == f"this path takes {allowed}"
            assert put.headers["allow"] == allowed
        listed = await client.get(f"{url}/v1/models/")
        assert [model["id"] for model in listed.json()["data"]] == [MODEL]


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost:1/v1/models", "nobody.example", 200),
        ("HTTP://localhost/v1/models?x=1", "localhost", 200),
        ("http://nobody.example/v1/models", "localhost", 403),
        ("/v1/models/", "localhost", 200),
        ("/ping", "localhost", 200),
        ("/healthz", "localhost", 200),
    ],
)
async def test_targets(tmp_path: Path, target: str, host: str, status: int) -> None:
    """Also whole URLs, whose host counts in place of the header's."""
    async with open_port(tmp_path, says("a")) as port:
        reader, writer = await asyncio.open_connection(*port.address)
        writer.write(f"GET {target} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.readline(), GONE_S)
        writer.close()
    assert answer.split()[1] == str(status).encode()


async def test_a_compressed_body_is_not_taken(tmp_path: Path) -> None:
    async with open_port(tmp_path, says("a")) as port:
        url, client = f"http://{port.server.address}/v1/completions", port.client._client
        for coding, status in (("gzip", 415), ("identity, BR", 415), ("identity", 200)):
            headers = {**TYPE, "content-encoding": coding}
            answer = await client.post(url, content=b'{"prompt": "a"}', headers=headers)
            assert answer.status_code == status
            assert (answer.headers.get("accept-encoding") == "identity") == (status == 415)


async def test_the_api_describes_itself(tmp_path: Path) -> None:
    async with open_port(tmp_path, says("a")) as port:
        url = f"http://{port.server.address}/openapi.json"
        document = (await port.client._client.get(url)).json()
        routes = port.server.application.routes
    served = {(route.path, method) for route in routes for method in route.methods - {"HEAD"}}
    described = {
        (path.replace("{name}", "{name:path}"), method.upper())
        for path, methods in document["paths"].items()
        for method in methods
    }
    assert described == served
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "tools", "guided_json"} <= chat.keys()
    assert "functions" not in chat, "it is refused"


async def test_one_failing_prompt_ends_the_others(tmp_path: Path) -> None:
    closed: list[list[int]] = []

    def script(job: Job) -> AsyncGenerator[JobEvent, None]:
        if prompt_of(job) == [9]:
            return fails(errors.numerical_error())(job)
        return waits(job)

    async def waits(job: Job) -> AsyncGenerator[JobEvent, None]:
        try:
            await asyncio.Event().wait()
            yield JobStarted()
        finally:
            closed.append(prompt_of(job))

    async with open_port(tmp_path, script) as port:
        with pytest.raises(openai.InternalServerError):
            await port.client.completions.create(model=MODEL, prompt=[[7], [8], [9]])
        assert sorted(closed) == [[7], [8]]


async def send(port: Port, **body: object) -> asyncio.StreamWriter:
    """Sends a request over a plain socket; what comes back is left unread."""
    content = json.dumps({"model": MODEL, "prompt": "a", **body}).encode()
    _, writer = await asyncio.open_connection(*port.address)
    head = f"{HEAD}content-length: {len(content)}\r\n"
    writer.write(f"{head}traceparent: {CALLER}\r\n\r\n".encode() + content)
    await writer.drain()
    return writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [hangs, None])
async def test_a_caller_that_leaves_cancels(
    tmp_path: Path, stream: bool, script: Script | None, caplog: pytest.LogCaptureFixture
) -> None:
    """While tokens come, and while it still waits for the first."""

    async def queued(job: Job) -> AsyncGenerator[JobEvent, None]:
        await asyncio.Event().wait()
        yield JobStarted()

    async with open_port(tmp_path, script or queued) as port:
        with caplog.at_level(logging.INFO):
            writer = await send(port, stream=stream)
            await until(lambda: port.dispatcher.jobs)
            writer.close()
            await asyncio.wait_for(port.dispatcher.closed.wait(), GONE_S)
            line = (await until(lambda: access_lines(caplog)))[0]
        assert (line["status"], line["reason"]) == (499, "CANCELLED")
        assert line["trace_id"] == "ab" * 16


async def test_a_body_that_does_not_come_to_its_end_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.requests.bounds.BODY_GRACE_S", 0.1)
    async with open_port(tmp_path, hangs) as port:
        with caplog.at_level(logging.INFO):
            reader, writer = await asyncio.open_connection(*port.address)
            writer.write(f"{HEAD}content-length: 99\r\n\r\n{{".encode())
            answer = await asyncio.wait_for(reader.readline(), GONE_S)
        assert answer.startswith(b"HTTP/1.1 504 ")
        assert (await until(lambda: access_lines(caplog)))[0]["reason"] == "DEADLINE_EXCEEDED"
        writer.close()


async def test_closing_the_clients_stream_cancels_a_batch(tmp_path: Path) -> None:
    async with open_port(tmp_path, hangs) as port:
        stream = await port.client.completions.create(model=MODEL, prompt=["a", "b"], stream=True)
        await anext(aiter(stream))
        await stream.close()
        await asyncio.wait_for(port.dispatcher.closed.wait(), GONE_S)


def spans(tracing: Tracing, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    tracing.flush()
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_the_span_of_a_call(
    tmp_path: Path, tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    async with open_port(tmp_path, says("SECRET")) as port:
        got = await port.client.completions.create(
            model=MODEL,
            prompt="SECRET",
            extra_headers={"traceparent": CALLER, "x-request-id": "tag" * 99},
        )
        assert got._request_id == "ab" * 16
    found = spans(tracing, exporter)
    server = found["POST /v1/completions"]
    assert server.kind is SpanKind.SERVER
    assert server.context.trace_id == int("ab" * 16, 16)
    assert server.parent is not None
    assert server.parent.span_id == int("cd" * 8, 16)
    assert dict(server.attributes or {}) == {
        Attr.HTTP_REQUEST_METHOD: "POST",
        Attr.HTTP_ROUTE: "/v1/completions",
        Attr.HTTP_RESPONSE_STATUS_CODE: 200,
    }
    assert not undeclared(server.attributes or ())
    assert server.status.status_code is StatusCode.UNSET
    generation = found["text_completion tiny"].parent
    assert generation is not None
    assert generation.span_id == server.context.span_id
    assert "SECRET" not in f"{[span.to_json() for span in found.values()]}"


@pytest.mark.parametrize(
    ("script", "stream", "status", "error"),
    [
        (fails(errors.queue_full(1, 1.0)), False, 429, None),
        (fails(errors.no_workers()), False, 503, "NO_WORKERS"),
        (fails(ValueError("SECRET")), True, 500, "INTERNAL"),
        (fails(errors.worker_lost_mid_stream(1), after=[70]), True, 200, "WORKER_LOST_MID_STREAM"),
        (fails(errors.worker_lost_mid_stream(1), after=[70]), False, 503, "WORKER_LOST_MID_STREAM"),
    ],
)
async def test_the_span_of_a_call_that_fails(
    tmp_path: Path,
    tracing: Tracing,
    exporter: InMemorySpanExporter,
    script: Script,
    stream: bool,
    status: int,
    error: str | None,
) -> None:
    async with open_port(tmp_path, script) as port:
        with pytest.raises(openai.APIError):
            await read(await port.client.completions.create(model=MODEL, prompt="a", stream=stream))
    server = spans(tracing, exporter)["POST /v1/completions"]
    attributes = dict(server.attributes or {})
    assert attributes[Attr.HTTP_RESPONSE_STATUS_CODE] == status
    assert attributes.get(Attr.ERROR_TYPE) == error
    assert (server.status.status_code is StatusCode.ERROR) == (error is not None)
    assert "SECRET" not in server.to_json()
