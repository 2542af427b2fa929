"""/v1/chat/completions: turns in, the assistant's next one out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.inference.v1 import inference_pb2 as api
from router.answers.calls import CallDelta, joined_calls
from router.doors.http.parsing import parse
from router.doors.openai.logprobs import chat_logprobs
from router.doors.openai.reply import Reply, ReplyDelta, ReplyOrder
from router.doors.openai.schema import StreamOptions
from router.doors.openai.turns import ChatRequest
from router.visible import Visible

if TYPE_CHECKING:
    from router.call import Call
    from router.doors.http.statuses import JSON
    from router.jobs import Dispatcher
    from router.requests.generation import Generations
    from router.requests.tokenization import Tokenizers


class ChatForm:
    """Writes chat completions."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, delta: ReplyDelta) -> JSON:
        """A whole choice."""
        calls = joined_calls(delta.calls)
        content = None if calls and not delta.text else delta.text
        message: JSON = {"role": "assistant", "content": content, "refusal": None}
        message |= _reasoning(delta)
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return self._with("message", message, delta)

    def delta(self, delta: ReplyDelta) -> JSON:
        """What is new of a choice. The role comes with the first text, because load generators
        would time an extra chunk as a token."""
        said: JSON = {"role": "assistant"} if delta.first else {}
        if delta.finish_reason is None:
            said |= _reasoning(delta)
            if delta.calls:
                said["tool_calls"] = [
                    {"index": call.index, **_call(call)} for call in joined_calls(delta.calls)
                ]
            if delta.text or len(said) == delta.first:
                said["content"] = delta.text
        return self._with("delta", said, delta)

    def _with(self, name: str, content: JSON, delta: ReplyDelta) -> JSON:
        return {
            "index": delta.choice,
            name: content,
            "logprobs": delta.scored,
            "finish_reason": delta.finish_reason,
            **({} if delta.token_ids is None else {"token_ids": delta.token_ids}),
        }

    scores = staticmethod(chat_logprobs)

    def prompt_ids(self, token_ids: list[int]) -> tuple[JSON, JSON]:
        """The prompt's ids stand in the answer itself."""
        return {"prompt_token_ids": token_ids}, {}


def _reasoning(delta: ReplyDelta) -> JSON:
    """What the model thought, under both names that clients know."""
    if not delta.reasoning:
        return {}
    text = "".join(delta.reasoning)
    return {"reasoning_content": text, "reasoning": text}


def _call(call: CallDelta) -> JSON:
    """A call, or a delta of one. Only the first delta has id and name."""
    if not call.is_first:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


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
        tokenizer, generation = None, _generation(request)
        generation.model = self._generations.model_for(generation, call)
        if request.logprobs:
            model = Visible(self._dispatcher, call).model(generation.model)
            tokenizer = await self._tokenizers.get(model.path)
        kind = api.StreamGenerateRequest if request.stream else api.GenerateRequest
        order = ReplyOrder(
            [kind(input=generation, client_tag=client_tag)],
            ChatForm(),
            request.stream_options or StreamOptions(),
            [None],
            tokenizer,
            bool(request.return_tokens_as_token_ids),
            token_ids=bool(request.return_token_ids),
            service_tier=request.service_tier,
            ignored=request.ignored(),
            name_of=request.name_of,
        )
        return Reply(self._generations, order, call)


def _generation(request: ChatRequest) -> api.GenerationInput:
    max_tokens = request.max_completion_tokens
    generation = request.input(
        request.max_tokens if max_tokens is None else max_tokens,
        (request.top_logprobs or 0) if request.logprobs else None,
        chat=request.chat(),
    )
    generation.output.message = True
    generation.output.omit_reasoning = request.include_reasoning is False
    return generation
