"""/v1/chat/completions: turns in, the assistant's next one out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.inference.v1 import inference_pb2 as api
from router.doors.openai.logprobs import chat_logprobs
from router.doors.openai.reply import Reply, ReplyOrder, ReplyPart
from router.doors.openai.schema import StreamOptions, parse
from router.doors.openai.turns import ChatRequest

if TYPE_CHECKING:
    from router.doors.grpc_edge import Call
    from router.doors.http.statuses import JSON
    from router.jobs import Dispatcher
    from router.requests.generation import Generations
    from router.requests.tokenization import Tokenizers


class ChatForm:
    """Writes chat completions."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, piece: ReplyPart) -> JSON:
        """A whole choice."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._with("message", message, piece)

    def delta(self, piece: ReplyPart) -> JSON:
        """A piece of a choice. The role comes with the first text, because load generators would
        time an extra chunk as a token."""
        delta: JSON = {"role": "assistant"} if piece.first else {}
        if piece.finish_reason is None:
            delta["content"] = piece.text
        return self._with("delta", delta, piece)

    def _with(self, name: str, content: JSON, piece: ReplyPart) -> JSON:
        return {
            "index": piece.choice,
            name: content,
            "logprobs": None if piece.scored is None else chat_logprobs(piece.scored),
            "finish_reason": piece.finish_reason,
        }


class ChatCompletions:
    """The method."""

    def __init__(
        self, generations: Generations, dispatcher: Dispatcher, tokenizers: Tokenizers
    ) -> None:
        self._generations = generations
        self._dispatcher = dispatcher
        self._tokenizers = tokenizers

    async def __call__(self, body: bytes, call: Call, client_tag: str) -> Reply:
        """Reads a request. Nothing runs before the reply is read.

        Raises:
            RouterError: the request cannot be understood.
        """
        request = parse(ChatRequest, body)
        tokenizer = None
        if request.logprobs:
            model = self._dispatcher.model(request.model)
            tokenizer = await self._tokenizers.get(model.path)
        kind = api.StreamGenerateRequest if request.stream else api.GenerateRequest
        order = ReplyOrder(
            [kind(input=_generation(request), client_tag=client_tag)],
            ChatForm(),
            request.stream_options or StreamOptions(),
            [None],
            tokenizer,
            bool(request.return_tokens_as_token_ids),
        )
        return Reply(self._generations, order, call)


def _generation(request: ChatRequest) -> api.GenerationInput:
    max_tokens = request.max_completion_tokens
    return request.input(
        request.max_tokens if max_tokens is None else max_tokens,
        (request.top_logprobs or 0) if request.logprobs else None,
        chat=request.chat(),
    )
