"""The public gRPC API, `baton.inference.v1.InferenceService`.

Each method has a few lines. `router.requests.generation` runs generations. `router.doors.grpc_edge`
handles statuses and malformed bytes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio

from baton.inference.v1 import inference_pb2 as api
from router.answers.calls import CallDelta, joined_calls
from router.call import Call
from router.doors.auth import OPEN, Gate
from router.doors.grpc_edge import Edge
from router.doors.grpc_messages import Messages
from router.events import NO_EVENTS, RouterEvents
from router.pooling.pooling import Poolings
from router.requests.bounds import BodyShape
from router.requests.generation import GenerationRequest, Generations
from router.requests.validation import Limits
from router.visible import Visible

if TYPE_CHECKING:
    from router.jobs import Dispatcher, ServedModel
    from router.requests.tokenization import Tokenizers

SERVICE_NAME = api.DESCRIPTOR.services_by_name["InferenceService"].full_name


class TakesHandlers(Protocol):
    """The part of a server that is used here."""

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Any) -> None:
        """Serves the methods of these handlers."""
        ...


class InferenceService:
    """The methods, free of gRPC."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizers: Tokenizers,
        limits: Limits | None = None,
        events: RouterEvents = NO_EVENTS,
        gate: Gate = OPEN,
    ) -> None:
        self._limits = limits or Limits()
        longest_s = self._limits.max_request_duration_s
        self._edge = Edge(BodyShape(dispatcher.models), longest_s, gate, events)
        self._dispatcher = dispatcher
        self._tokenizers = tokenizers
        self._generations = Generations(dispatcher, tokenizers, self._limits, events)
        self._poolings = Poolings(dispatcher, tokenizers, self._limits, events)

    def add_to_server(self, server: TakesHandlers) -> None:
        """Registers the service with gRPC's server, or the fast door (`router.doors.http2`)."""
        edge, path = self._edge, f"{SERVICE_NAME}/"
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": edge.unary(path + "Generate", api.GenerateRequest, self.generate),
            "StreamGenerate": edge.stream(
                path + "StreamGenerate", api.StreamGenerateRequest, self.stream_generate
            ),
            "Embed": edge.unary(path + "Embed", api.EmbedRequest, self.embed),
            "Score": edge.unary(path + "Score", api.ScoreRequest, self.score),
            "Tokenize": edge.unary(path + "Tokenize", api.TokenizeRequest, self.tokenize),
            "ListModels": edge.unary(path + "ListModels", api.ListModelsRequest, self.list_models),
        }
        server.add_generic_rpc_handlers((edge.service(SERVICE_NAME, handlers),))

    async def stream_generate(
        self, request: GenerationRequest, call: Call
    ) -> AsyncGenerator[api.StreamGenerateResponse, None]:
        """StreamGenerate."""
        messages = Messages(call.way)
        stream = self._generations.stream(request, call, messages.short_way)
        async with aclosing(stream) as outputs:
            async for output in outputs:
                yield await messages.of(output)

    async def generate(self, request: api.GenerateRequest, call: Call) -> api.GenerateResponse:
        """Generate: collects the stream into one message."""
        whole = _Whole()
        async with aclosing(self.stream_generate(request, call)) as messages:
            async for message in messages:
                whole.add(message)
        return whole.response()

    async def embed(self, request: api.EmbedRequest, call: Call) -> api.EmbedResponse:
        """Embed."""
        return await self._poolings.embed(request, call)

    async def score(self, request: api.ScoreRequest, call: Call) -> api.ScoreResponse:
        """Score."""
        return await self._poolings.score(request, call)

    async def tokenize(self, request: api.TokenizeRequest, call: Call) -> api.TokenizeResponse:
        """Tokenize."""
        async with self._generations.deadline(call):
            return await self._generations.tokenize(request, call)

    async def list_models(
        self, request: api.ListModelsRequest, call: Call
    ) -> api.ListModelsResponse:
        """ListModels."""
        listed = self._limits.split_names.listed(Visible(self._dispatcher, call).models())
        models = [await self._describe(model) for model in listed]
        return api.ListModelsResponse(models=models)

    async def _describe(self, model: ServedModel) -> api.Model:
        longest = min(model.max_context_tokens - 1, self._limits.max_output_tokens)
        return api.Model(
            name=model.called,
            parent=model.name if model.adapter else "",
            digest=model.digest.hex(),
            revision=model.revision,
            max_context_tokens=model.max_context_tokens,
            max_output_tokens=longest,
            has_tokenizer=await self._has_tokenizer(model.path),
        )

    async def _has_tokenizer(self, folder: str) -> bool:
        try:
            return await self._tokenizers.get(folder) is not None
        except Exception:  # A request for this model gets the error; the list has the others.
            return False


class _Whole:
    """Collects the messages of a stream into one."""

    def __init__(self) -> None:
        self._response = api.GenerateResponse()
        self._choices: dict[int, api.Choice] = {}
        self._texts: dict[int, list[str]] = {}
        self._messages: dict[int, _WholeMessage] = {}

    def add(self, message: api.StreamGenerateResponse) -> None:
        """Adds the next message."""
        match message.WhichOneof("event"):
            case "started":
                self._response.started.CopyFrom(message.started)
            case "delta":
                delta = message.delta
                output = self._choice(delta.choice_index).output
                output.token_ids.extend(delta.token_ids)
                output.logprobs.extend(delta.logprobs)
                self._texts[delta.choice_index].append(delta.text)
                if delta.HasField("message"):
                    self._extend(delta.choice_index, delta.message)
            case "finished":
                self._finish(message.finished)

    def response(self) -> api.GenerateResponse:
        """The whole response, choices by index. Texts are joined here, once."""
        for index, choice in sorted(self._choices.items()):
            choice.output.text = "".join(self._texts[index])
            if (message := self._messages.get(index)) is not None:
                choice.message.CopyFrom(message.whole())
            self._response.choices.append(choice)
        return self._response

    def _extend(self, index: int, delta: api.MessageDelta) -> None:
        self._messages.setdefault(index, _WholeMessage()).add(delta)

    def _finish(self, finished: api.GenerationFinished) -> None:
        choice = self._choice(finished.choice_index)
        choice.finish_reason = finished.finish_reason
        choice.stop_sequence = finished.stop_sequence
        if finished.HasField("score"):
            choice.score = finished.score
        if finished.HasField("usage"):
            self._response.usage.CopyFrom(finished.usage)
            self._response.timings.CopyFrom(finished.timings)

    def _choice(self, index: int) -> api.Choice:
        if index not in self._choices:
            self._choices[index] = api.Choice(
                index=index, output=api.TokenDelta(choice_index=index)
            )
            self._texts[index] = []
        return self._choices[index]


class _WholeMessage:
    """Collects the deltas of one choice's message."""

    def __init__(self) -> None:
        self._contents: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallDelta] = []

    def add(self, delta: api.MessageDelta) -> None:
        """Adds the next delta."""
        self._contents.append(delta.content)
        self._reasoning.append(delta.reasoning)
        self._calls += [
            CallDelta(call.index, call.id, call.name, call.arguments) for call in delta.tool_calls
        ]

    def whole(self) -> api.ChatMessage:
        """The message."""
        return api.ChatMessage(
            role=api.ROLE_ASSISTANT,
            content="".join(self._contents),
            reasoning="".join(self._reasoning),
            tool_calls=[
                api.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
                for call in joined_calls(self._calls)
            ],
        )
