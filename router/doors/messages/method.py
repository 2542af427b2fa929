"""/v1/messages, and the count of a prompt's tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from baton.inference.v1 import inference_pb2 as api
from router.answers.forms import THINKING_SWITCHES
from router.doors.http.block_reply import BlockReply, renamed
from router.doors.http.parsing import parse
from router.doors.http.said import Said
from router.doors.http.statuses import name_by
from router.doors.messages.schema import CountRequest, MessageRequest
from router.doors.messages.writer import MessageWriter

if TYPE_CHECKING:
    from router.call import Call
    from router.requests.generation import Generations

_NAMES: Final = (
    ("chat.reasoning_effort", "output_config.effort"),
    ("chat.thinking_token_budget", "thinking.budget_tokens"),
    ("chat.tool_choice.mode", "tool_choice"),
    *((f"chat.template_variables.{name}", "thinking") for name in THINKING_SWITCHES),
    ("chat.", ""),
    ("chat", "messages"),
    ("structure.json_schema", "output_config.format"),
    ("structure", "output_config.format"),
    ("sampling.", ""),
    ("stop.sequences", "stop_sequences"),
    ("stop.", ""),
)
"""Beginnings of paths in `inference.proto`, and their names in this API."""


class Messages:
    """Both methods. They raise RouterError if a request cannot be understood."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    async def create(self, body: bytes, call: Call, client_tag: str) -> BlockReply:
        """The model's message. Nothing runs before the answer is read."""
        request = parse(MessageRequest, body)
        chat, paths = request.chat()
        kind = api.StreamGenerateRequest if request.stream else api.GenerateRequest
        asked = kind(input=request.generation(chat), client_tag=client_tag)
        writer = MessageWriter(call, request.max_tokens)
        return BlockReply(
            self._generations,
            asked,
            writer,
            call,
            lambda path: _name(paths, path),
            request.ignored(),
        )

    async def count_tokens(self, body: bytes, call: Call, client_tag: str) -> Said:
        """The number of tokens of the prompt that a message would run."""
        request = parse(CountRequest, body)
        chat, paths = request.chat()
        asked = api.TokenizeRequest(model=request.model, chat=chat)
        with renamed(lambda path: _name(paths, path)):
            async with self._generations.deadline(call):
                counted = await self._generations.tokenize(asked, call)
        return Said({"input_tokens": len(counted.token_ids)}, request.ignored())


def _name(paths: list[str], path: str) -> str:
    """The name of a field in the request."""
    path = path.removeprefix("input.")
    if (turn := re.match(r"chat\.messages\[(\d+)\]", path)) is not None:
        return paths[int(turn[1])]
    return name_by(_NAMES, path).replace(".parameters", ".input_schema")
