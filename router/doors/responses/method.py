"""/v1/responses: items in, the model's items out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.inference.v1 import inference_pb2 as api
from router.doors.http.block_reply import BlockReply, renamed
from router.doors.http.parsing import parse
from router.doors.http.said import Said
from router.doors.http.statuses import name_by
from router.doors.responses.conversation import Conversations
from router.doors.responses.items import Turns
from router.doors.responses.schema import ResponseRequest
from router.doors.responses.writer import ResponseWriter

if TYPE_CHECKING:
    from router.call import Call
    from router.doors.responses.store import ResponseStore
    from router.requests.bounds import BodyShape
    from router.requests.generation import Generations

_NAMES: Final = (
    ("input.chat.messages", "input"),
    ("input.chat.template_variables.verbosity", "text.verbosity"),
    ("input.chat.template_variables", "chat_template_kwargs"),
    ("input.chat.reasoning_effort", "reasoning.effort"),
    ("input.chat.tool_choice.mode", "tool_choice"),
    ("input.chat.", ""),
    ("input.chat", "input"),
    ("input.structure.json_schema", "text.format"),
    ("input.structure", "text.format"),
    ("input.sampling.", ""),
    ("input.stop.max_tokens", "max_output_tokens"),
    ("input.stop.sequences", "stop"),
    ("input.stop.", ""),
    ("input.output.", ""),
    ("input.", ""),
)
"""Beginnings of paths in `inference.proto`, and their names in this API."""


class Responses:
    """Both methods. They raise RouterError if a request cannot be understood.

    Args:
        generations: runs the requests.
        shape: bounds what is read for one of them.
        store: keeps responses; None: none are kept.
    """

    def __init__(
        self, generations: Generations, shape: BodyShape, store: ResponseStore | None
    ) -> None:
        self._generations = generations
        self._shape = shape
        self._conversations = Conversations(store)

    async def create(self, body: bytes, call: Call, client_tag: str) -> BlockReply:
        """The model's response. Nothing runs before the answer is read."""
        request, turns = await self._read(body, call)
        kind = api.StreamGenerateRequest if request.stream else api.GenerateRequest
        asked = kind(input=request.generation(turns.messages), client_tag=client_tag)
        writer = ResponseWriter(request, call, self._conversations.keep(request, call.tenant))
        return BlockReply(
            self._generations,
            asked,
            writer,
            call,
            lambda path: _name(turns, path),
            request.ignored(),
        )

    async def count_tokens(self, body: bytes, call: Call, client_tag: str) -> Said:
        """The number of tokens of the prompt that a response would run."""
        request, turns = await self._read(body, call)
        chat = request.generation(turns.messages).chat
        with renamed(lambda path: _name(turns, f"input.{path}")):
            async with self._generations.deadline(call):
                counted = await self._generations.tokenize(
                    api.TokenizeRequest(model=request.model, chat=chat), call
                )
        content = {"object": "response.input_tokens", "input_tokens": len(counted.token_ids)}
        return Said(content, request.ignored())

    async def _read(self, body: bytes, call: Call) -> tuple[ResponseRequest, Turns]:
        request, most_bytes = parse(ResponseRequest, body), self._shape.most_bytes()
        return request, await self._conversations.turns(request, call.tenant, most_bytes)


def _name(turns: Turns, path: str) -> str:
    return turns.name_of(path) or name_by(_NAMES, path)
