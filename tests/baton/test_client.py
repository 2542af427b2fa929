"""The clients against a scripted router."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from typer.testing import CliRunner
from waiting import until

from baton.client.clients import AsyncClient, AsyncGenerationStream, Client
from baton.client.generation import FinishReason
from baton.client.options import Options
from baton.client.other_names import OTHER_NAMES
from baton.client.pooling import embed_request, score_request
from baton.errors import (
    BatonError,
    BrokenOffError,
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    ProtocolError,
    UnreachableError,
)
from baton.grpc_options import server_options
from baton.inference.v1 import inference_pb2 as pb
from baton.inference.v1 import inference_pb2_grpc as pb_grpc
from console.cli import app

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
FUNCTION = {
    "name": "f",
    "description": "finds",
    "parameters": {"type": "object", "properties": {}},
    "strict": True,
}
"""A tool."""
Script = Callable[[pb.GenerationInput, grpc.ServicerContext], Iterator[pb.StreamGenerateResponse]]


def started(**fields: object) -> pb.StreamGenerateResponse:
    known = {"generation_id": TRACE_ID, "model": "tiny", "model_revision": "r1", "prompt_tokens": 3}
    return pb.StreamGenerateResponse(started=pb.GenerationStarted(**(known | fields)))


def delta(text: str, ids: list[int], first: int, choice: int = 0) -> pb.StreamGenerateResponse:
    return pb.StreamGenerateResponse(
        delta=pb.TokenDelta(text=text, token_ids=ids, first_token_index=first, choice_index=choice)
    )


def finished(choice: int = 0, *, last: bool = True) -> pb.StreamGenerateResponse:
    end = pb.GenerationFinished(
        choice_index=choice, finish_reason=pb.FINISH_REASON_STOP, stop_sequence="\n"
    )
    if last:
        end.usage.CopyFrom(pb.Usage(prompt_tokens=3, cached_prompt_tokens=1, output_tokens=2))
        end.timings.prefill.CopyFrom(Duration(nanos=250_000_000))
    return pb.StreamGenerateResponse(finished=end)


def paris(
    request: pb.GenerationInput, context: grpc.ServicerContext
) -> Iterator[pb.StreamGenerateResponse]:
    yield started()
    yield delta("Pa", [7], 0)
    yield delta("ris", [8], 1)
    yield finished()


def breaks_off(
    request: pb.GenerationInput, context: grpc.ServicerContext
) -> Iterator[pb.StreamGenerateResponse]:
    yield started()
    yield delta("Pa", [7], 0)
    context.abort(grpc.StatusCode.ABORTED, "worker lost")


class ScriptedRouter(pb_grpc.InferenceServiceServicer):
    """Answers with `script` and keeps what it was asked."""

    def __init__(self) -> None:
        self.script: Script = paris
        self.inputs: list[pb.GenerationInput] = []
        self.metadata: dict[str, str | bytes] = {}
        self.left_s: list[float] = []
        """Until each call's deadline, as it came."""
        self.cancelled = threading.Event()
        """Of the latest stream: it is over, by whoever's hand."""

    def StreamGenerate(
        self, request: pb.StreamGenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StreamGenerateResponse]:
        self.cancelled = threading.Event()
        context.add_callback(self.cancelled.set)
        self._note(request.input, context)
        return self.script(request.input, context)

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> pb.GenerateResponse:
        self._note(request.input, context)
        choices = [
            pb.Choice(
                index=index,
                output=pb.TokenDelta(choice_index=index, token_ids=[7, 8], text="Paris"),
                finish_reason=pb.FINISH_REASON_LENGTH,
            )
            for index in range(request.input.choices or 1)
        ]
        return pb.GenerateResponse(started=started().started, choices=choices)

    def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.ServicerContext
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(name="tiny", max_context_tokens=64)])

    def Tokenize(
        self, request: pb.TokenizeRequest, context: grpc.ServicerContext
    ) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=range(len(request.text)))

    def _note(self, request: pb.GenerationInput, context: grpc.ServicerContext) -> None:
        self.inputs.append(request)
        self.left_s.append(context.time_remaining() or math.inf)
        self.metadata = dict(context.invocation_metadata())


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ScriptedRouter, str]]:
    router = ScriptedRouter()
    server = grpc.server(futures.ThreadPoolExecutor(4), options=server_options())
    pb_grpc.add_InferenceServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield router, f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def router(served: tuple[ScriptedRouter, str]) -> ScriptedRouter:
    router = served[0]
    router.script = paris
    router.inputs.clear()
    router.left_s.clear()
    return router


@pytest.fixture
def client(served: tuple[ScriptedRouter, str], router: ScriptedRouter) -> Iterator[Client]:
    with Client(served[1], retries=False) as client:
        yield client


@pytest.fixture
async def async_client(
    served: tuple[ScriptedRouter, str], router: ScriptedRouter
) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(served[1], retries=False) as client:
        yield client


def test_a_stream_gives_deltas_and_then_the_whole(client: Client) -> None:
    with client.stream("The capital of France is") as stream:
        assert [d.text for d in stream] == ["Pa", "ris"]
    whole = stream.result
    assert (whole.text, whole.token_ids) == ("Paris", (7, 8))
    assert whole.finish_reason is FinishReason.STOP
    assert whole.choices[0].stop_sequence == "\n"
    assert whole.trace_id == stream.trace_id == TRACE_ID
    assert whole.usage.cached_prompt_tokens == 1
    assert whole.timings.prefill_s == 0.25


async def test_the_async_stream_is_the_same(async_client: AsyncClient) -> None:
    async with async_client.stream("The capital of France is") as stream:
        assert [d.text async for d in stream] == ["Pa", "ris"]
    assert stream.result.text == "Paris"


async def test_unary_calls(client: Client, async_client: AsyncClient) -> None:
    assert client.generate("x", choices=2).choices[1].text == "Paris"
    assert (await async_client.generate("x")).finish_reason is FinishReason.LENGTH
    assert client.models()[0].name == (await async_client.models())[0].name == "tiny"
    assert client.tokenize("abc") == await async_client.tokenize("abc") == (0, 1, 2)


def test_options_reach_the_router_and_only_those_given(
    client: Client, router: ScriptedRouter
) -> None:
    client.generate(
        messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        temperature=0,
        stop=["\n"],
        stop_token_ids=[5],
        logit_bias={3: -1.5},
        max_tokens=9,
        top_logprobs=2,
        template_variables={"enable_thinking": False},
        continue_last=True,
    )
    sent = router.inputs[-1]
    assert [m.role for m in sent.chat.messages] == [pb.ROLE_SYSTEM, pb.ROLE_USER]
    assert dict(sent.chat.template_variables) == {"enable_thinking": False}
    assert sent.chat.continue_last
    assert sent.sampling.HasField("temperature")
    assert sent.sampling.temperature == 0
    assert not sent.sampling.HasField("top_p")
    assert not sent.HasField("choices")
    assert list(sent.stop.sequences) == ["\n"]
    assert list(sent.stop.token_ids) == [5]
    assert dict(sent.sampling.logit_bias) == {3: -1.5}
    assert (sent.stop.max_tokens, sent.output.top_logprobs) == (9, 2)


def test_one_stop_text_is_no_list_of_letters(client: Client, router: ScriptedRouter) -> None:
    client.generate("x", stop="Paris")
    client.generate("x", stop=["a", "b"])
    assert [list(one.stop.sequences) for one in router.inputs] == [["Paris"], ["a", "b"]]


@pytest.mark.parametrize(
    ("options", "kind", "complaint"),
    [
        ({"max_token": 3}, TypeError, "there is no option 'max_token' .did you mean 'max_tokens'"),
        ({"zzz": 3}, TypeError, "there is no option 'zzz'$"),
        ({"n": 3}, TypeError, "there is no option 'n'; here: choices"),
        ({"logprobs": 5}, TypeError, "logprobs: .* not 5; top_logprobs says how many"),
        ({"ignore_eos": "no"}, TypeError, "ignore_eos: "),
        ({"stop": 5}, TypeError, "stop: "),
        ({"json_schema": object}, TypeError, "json_schema: "),
        ({"top_k": -1}, ValueError, "top_k: must be from 0 to .*, and not -1; 0 takes all"),
        ({"beams": -1}, ValueError, "width: must be from 0"),
        ({"stop_token_ids": [-1]}, ValueError, "stop_token_ids: "),
        ({"allowed_token_ids": 5}, TypeError, "allowed_token_ids: "),
        ({"bad_words": "word"}, TypeError, "bad_words: must be several"),
        ({"logit_bias": {"a": 1}}, TypeError, "logit_bias: "),
        ({"cache_salt": "\udcff"}, ValueError, "cache_salt: "),
        ({"choice": "yes"}, TypeError, "choice: must be several"),
        ({"temperature": "hot"}, TypeError, "temperature: "),
        ({"seed": 1 << 64}, ValueError, "seed: must be from 0 to 2.64 - 1"),
        ({"choices": -1}, ValueError, "choices: "),
    ],
)
def test_a_wrong_option_is_named(
    client: Client, options: dict[str, Any], kind: type[Exception], complaint: str
) -> None:
    with pytest.raises(kind, match=complaint):
        client.generate("x", **options)


def test_none_is_an_option_left_out(client: Client, router: ScriptedRouter) -> None:
    nothing: Any = dict.fromkeys(Options.__annotations__)
    client.generate("x")
    client.generate("x", **nothing)
    assert router.inputs[-1] == router.inputs[-2]


@pytest.mark.parametrize(
    ("options", "kind", "complaint"),
    [
        ({"poolin": "last"}, TypeError, "no option 'poolin' .did you mean 'pooling'"),
        ({"truncate_prompt_tokens": -1}, ValueError, "truncate_prompt_tokens: must be from 0"),
        ({"priority": "high"}, TypeError, "priority: "),
    ],
)
def test_wrong_options_of_embed_and_score_are_named(
    options: dict[str, Any], kind: type[Exception], complaint: str
) -> None:
    with pytest.raises(kind, match=complaint):
        embed_request("x", "", options)  # type: ignore[arg-type]
    with pytest.raises(kind, match=complaint.partition(" .did")[0]):
        score_request("x", "y", "", options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "kind", "complaint"),
    [
        ({"tools": ["f"]}, TypeError, "a tool is a mapping"),
        ({"tools": [{}]}, ValueError, "has a name"),
        ({"tools": [{"type": "web_search"}]}, ValueError, "a tool is a function"),
        ({"tools": [{"name": 5}]}, TypeError, "tools: "),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, ValueError, "has a name"),
        ({"tools": [FUNCTION], "tool_choice": 5}, TypeError, "tool_choice: "),
        ({"template_variables": {"a": object()}}, ValueError, "template_variables: "),
    ],
)
def test_wrong_options_of_a_chat_are_named(
    client: Client, options: dict[str, Any], kind: type[Exception], complaint: str
) -> None:
    with pytest.raises(kind, match=complaint):
        client.generate(messages=[{"role": "user", "content": "x"}], **options)


@pytest.mark.parametrize("tool", [FUNCTION, {"type": "function", "function": FUNCTION}])
def test_tools_may_be_as_openai_has_them(
    client: Client, router: ScriptedRouter, tool: dict[str, Any]
) -> None:
    asked = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    client.generate(messages=[{"role": "user", "content": "x"}], **asked)
    (sent,) = router.inputs[-1].chat.tools
    assert (sent.name, sent.description, sent.strict) == ("f", "finds", True)
    assert json.loads(sent.parameters) == FUNCTION["parameters"]
    assert router.inputs[-1].chat.tool_choice.name == "f"


def test_a_schema_of_any_arguments_and_switches_of_numpy_are_taken(
    client: Client, router: ScriptedRouter
) -> None:
    tools: Any = [{"name": "f", "parameters": {}}, {"name": "g", "parameters": None}]
    wanted: Any = np.bool_(True)
    asked = {"tools": tools, "ignore_eos": wanted}
    client.generate(messages=[{"role": "user", "content": "x"}], **asked)
    assert [tool.parameters for tool in router.inputs[-1].chat.tools] == ["{}", ""]
    assert router.inputs[-1].stop.ignore_eos


def test_what_stands_for_names_of_others_is_there() -> None:
    stands_for = {name for ours in OTHER_NAMES.values() for name in re.findall(r"`(\w+)", ours)}
    assert stands_for - {"False", "LLM", "adapters", "token_ids"} <= set(Options.__annotations__)
    assert OTHER_NAMES.keys().isdisjoint(Options.__annotations__)


def test_an_empty_list_of_token_ids_is_still_a_prompt(
    client: Client, router: ScriptedRouter
) -> None:
    client.generate(token_ids=[])
    assert router.inputs[-1].WhichOneof("prompt") == "token_ids"


def test_the_prompt_has_exactly_one_form(client: Client) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        client.generate("x", token_ids=[1])
    with pytest.raises(ValueError, match="exactly one"):
        client.stream()
    with pytest.raises(ValueError, match="role"):
        client.generate(messages=[{"role": "robot", "content": "x"}])
    with pytest.raises(ValueError, match="a role and a content"):
        client.generate(messages=[{"role": "user"}])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ({"role": "user", "content": "x"}, "several turns"),
        ("x", "several turns"),
        (["x"], "a message is a mapping, and not of type str"),
        ([{"role": "user", "content": 7}], "a text, or several parts of text"),
        ([{"role": "user", "content": {"text": "x"}}], "a text, or several parts of text"),
        ([{"role": "user", "content": [{"type": "image_url", "text": "x"}]}], "parts of text"),
        ([{"role": "assistant", "tool_calls": [{"id": "c", "function": {}}]}], "a call has an id"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], "a call has an id"),
    ],
)
def test_what_is_no_conversation_is_said_so(client: Client, messages: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        client.generate(messages=messages)


def test_conversations_may_be_as_openais_api_has_them(
    client: Client, router: ScriptedRouter
) -> None:
    function = {"name": "f", "arguments": {"a": 1}}
    parts: list[Any] = ["a", {"type": "text", "text": "b"}]
    called: Any = {"id": "c", "type": "function", "function": function}
    client.generate(
        messages=[
            {"role": "developer", "content": "x"},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "content": "", "tool_call_id": "c"},
        ]
    )
    system, user, assistant, tool = router.inputs[-1].chat.messages
    assert (system.role, system.content) == (pb.ROLE_SYSTEM, "x")
    assert (list(user.content_parts), user.HasField("content")) == (["a", "b"], False)
    assert list(assistant.tool_calls) == [pb.ToolCall(id="c", name="f", arguments='{"a": 1}')]
    assert not assistant.HasField("content")
    assert tool.HasField("content")


def test_closing_a_stream_cancels_on_the_server(client: Client, router: ScriptedRouter) -> None:
    def endless(request: pb.GenerationInput, context: grpc.ServicerContext):
        yield started()
        for index in range(1_000_000):
            if not context.is_active():
                return
            yield delta("a", [1], index)

    router.script = endless
    with client.stream("x") as stream:
        assert next(stream).text == "a"
    assert router.cancelled.wait(30)
    with pytest.raises(CancelledError):
        list(stream)


@pytest.fixture
def stuck(router: ScriptedRouter) -> Iterator[None]:
    """Streams say a little and then nothing for longer than any test here waits."""
    over = threading.Event()

    def script(
        request: pb.GenerationInput, context: grpc.ServicerContext
    ) -> Iterator[pb.StreamGenerateResponse]:
        yield started()
        yield delta("a", [1], 0)
        over.wait(120)

    router.script = script
    yield
    over.set()


async def has_ended(router: ScriptedRouter) -> bool:
    """Whether the stream that was begun ends on the server, too."""
    await until(lambda: router.inputs)
    return await asyncio.to_thread(router.cancelled.wait, 30)


async def read_all(stream: AsyncGenerationStream) -> None:
    async for _ in stream:
        pass


@pytest.mark.usefixtures("stuck")
async def test_cancelling_the_task_cancels_on_the_server(
    async_client: AsyncClient, router: ScriptedRouter
) -> None:
    stream = async_client.stream("x")
    await anext(stream)
    task = asyncio.create_task(read_all(stream))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await has_ended(router)


@pytest.mark.usefixtures("stuck")
async def test_so_does_cancelling_a_task_that_is_about_to_read(
    async_client: AsyncClient, router: ScriptedRouter
) -> None:
    """The request has left, and the reader, who waited for that, has not run since: gRPC ends the
    reader there and not the call."""
    stream = async_client.stream("x")
    has_left: asyncio.Task[None] = stream._cancel.__self__._preparation
    has_left.add_done_callback(lambda _: task.cancel())
    task = asyncio.create_task(read_all(stream))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not has_left.cancelled()
    assert await has_ended(router)


@pytest.mark.usefixtures("stuck")
@pytest.mark.parametrize("reads", [0, 1])
async def test_a_stream_that_is_dropped_is_cancelled_on_the_server(
    async_client: AsyncClient, router: ScriptedRouter, reads: int
) -> None:
    gc.disable()
    try:
        stream = async_client.stream("x")
        for _ in range(reads):
            await anext(stream)
        await until(lambda: router.inputs)
        del stream
        assert await has_ended(router)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([delta("a", [1], 0)], "did not begin"),
        ([started(), started()], "twice"),
        ([started(), delta("a", [1], 0), delta("b", [2], 2)], "went on at token 2, not at 1"),
        ([started(), delta("a", [1], 0), delta("a", [1], 0)], "went on at token 0, not at 1"),
        ([started(), delta("a", [1], 0, choice=1)], "unknown"),
        ([started(), finished(), delta("a", [1], 0)], "has ended"),
        ([started(), delta("a", [1], 0)], "before every choice"),
        ([started(), pb.StreamGenerateResponse()], "empty"),
    ],
)
def test_a_stream_that_breaks_the_grammar_is_refused(
    client: Client,
    router: ScriptedRouter,
    events: list[pb.StreamGenerateResponse],
    complaint: str,
) -> None:
    router.script = lambda request, context: iter(events)
    with pytest.raises(ProtocolError, match=complaint):
        list(client.stream("x"))


def test_choices_are_gathered_apart(client: Client, router: ScriptedRouter) -> None:
    events = [
        started(),
        delta("a", [1], 0, choice=1),
        delta("b", [2], 0, choice=0),
        finished(1, last=False),
        delta("c", [3], 1, choice=0),
        finished(0),
    ]
    router.script = lambda request, context: iter(events)
    stream = client.stream("x", choices=2)
    assert [d.choice for d in stream] == [1, 0, 0]
    assert [c.text for c in stream.result.choices] == ["bc", "a"]


def failing(code: grpc.StatusCode, *details: object) -> Script:
    def script(request: pb.GenerationInput, context: grpc.ServicerContext):
        packed = []
        for detail in details:
            packed.append(any_pb2.Any())
            packed[-1].Pack(detail)
        status = status_pb2.Status(code=code.value[0], message="too busy", details=packed)
        context.abort_with_status(rpc_status.to_status(status))
        yield

    return script


async def test_errors_carry_what_the_server_said(
    client: Client, async_client: AsyncClient, router: ScriptedRouter
) -> None:
    router.script = failing(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        error_details_pb2.ErrorInfo(reason="QUEUE_FULL", metadata={"queued": "12"}),
        error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000)),
    )
    with pytest.raises(OverloadedError) as caught:
        list(client.stream("x"))
    with pytest.raises(OverloadedError) as caught_async:
        await anext(async_client.stream("x"))
    for error in (caught.value, caught_async.value):
        assert (error.reason, error.message) == ("QUEUE_FULL", "too busy")
        assert error.metadata == {"queued": "12"}
        assert error.retry_after_s == 1.5
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_violations_are_listed(client: Client, router: ScriptedRouter) -> None:
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field="input.sampling.top_p", description="must be in (0, 1]")
    router.script = failing(grpc.StatusCode.INVALID_ARGUMENT, bad)
    with pytest.raises(InvalidRequestError) as caught:
        list(client.stream("x"))
    assert caught.value.violations[0].field == "input.sampling.top_p"
    assert caught.value.retry_after_s is None


def test_an_error_after_tokens_is_a_generation_broken_off(
    client: Client, router: ScriptedRouter
) -> None:
    router.script = breaks_off
    stream = client.stream("x")
    assert next(stream).text == "Pa"
    with pytest.raises(BrokenOffError):
        next(stream)


def test_deadline(client: Client, router: ScriptedRouter) -> None:
    release = threading.Event()

    def script(request: pb.GenerationInput, context: grpc.ServicerContext):
        release.wait(30)
        yield started()

    router.script = script
    with pytest.raises(DeadlineError, match="the time set for the call has passed"):
        list(client.stream("x", timeout_s=0.05))
    release.set()


def test_the_command_lines_error_has_a_line_of_its_own(
    served: tuple[ScriptedRouter, str], router: ScriptedRouter
) -> None:
    router.script = breaks_off
    result = CliRunner().invoke(app, ["generate", "x", "--router", served[1]])
    assert (result.exit_code, result.stdout) == (1, "Pa\n")
    assert result.stderr.startswith("error ")


async def test_the_clients_bound_holds_where_a_call_names_none(
    served: tuple[ScriptedRouter, str], router: ScriptedRouter
) -> None:
    with Client(served[1], timeout_s=50) as client:
        client.generate("x")
        list(client.stream("x"))
        client.generate("x", timeout_s=500)
    async with AsyncClient(served[1], timeout_s=50) as async_client:
        await async_client.generate("x")
        assert [delta async for delta in async_client.stream("x")]
        await async_client.generate("x", timeout_s=500)
    assert [left < 51 for left in router.left_s] == [True, True, False] * 2


@pytest.mark.parametrize("timeout_s", [1e12, math.inf])
def test_a_bound_that_no_clock_can_hold_is_none(
    served: tuple[ScriptedRouter, str], timeout_s: float
) -> None:
    """gRPC takes such a deadline for one that has passed."""
    with Client(served[1], timeout_s=timeout_s) as client:
        assert client.generate("x").choices
        assert client.models(timeout_s=timeout_s)


def test_a_token_that_no_header_can_hold() -> None:
    for token in ("\u00fc", "two\nlines"):
        with pytest.raises(ValueError, match="ASCII"):
            Client("127.0.0.1:1", token=token)


def test_nobody_there() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(UnreachableError) as caught:
        client.models()
    assert isinstance(caught.value, BatonError)


def test_the_callers_trace_is_carried_along(client: Client, router: ScriptedRouter) -> None:
    from opentelemetry import context, trace
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

    span = NonRecordingSpan(
        SpanContext(int(TRACE_ID, 16), 0xB7AD6B7169203331, False, TraceFlags(1))
    )
    token = context.attach(trace.set_span_in_context(span))
    try:
        list(client.stream("x"))
    finally:
        context.detach(token)
    assert router.metadata["traceparent"] == f"00-{TRACE_ID}-b7ad6b7169203331-01"


def test_the_client_needs_neither_torch_nor_opentelemetry() -> None:
    code = """
import sys
class Refuse:
    def find_spec(self, name, *_):
        if name.split('.')[0] in {'torch', 'opentelemetry', 'transformers', 'numpy', 'engine'}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from baton.client.clients import AsyncClient, AsyncGenerationStream, Client
with Client('127.0.0.1:1') as client:
    try:
        client.generate('x')
    except Exception as error:
        print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "UnreachableError"
