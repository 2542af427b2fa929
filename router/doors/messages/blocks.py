"""Blocks of a message's content, and the turns of a chat that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError, to_json

from baton.inference.v1 import inference_pb2 as api
from router.doors.http.parsing import said
from router.doors.http.values import ApiObject
from router.errors import Violation
from router.requests.bounds import MAX_CONTENT_PARTS

_NEEDED: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "user": {"text": ("text",), "tool_result": ("tool_use_id",)},
    "assistant": {
        "text": ("text",),
        "thinking": ("thinking",),
        "redacted_thinking": (),
        "tool_use": ("id", "name", "input"),
    },
    "system": {"text": ("text",)},
}
"""The kinds of blocks in a message of each role, and their fields that must be set."""

_COMBINED: Final = (api.ROLE_USER, api.ROLE_ASSISTANT)


def _blocks(value: object) -> object:
    """A text is a list of one block."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _arguments(value: object) -> object:
    """An object as JSON, since models write and read it so."""
    if not isinstance(value, dict | None):
        raise PydanticCustomError("input", "must be an object")
    return None if value is None else to_json(value).decode()


class TextBlock(ApiObject):
    """A block of a system prompt or of a tool's result."""

    type: str = "text"
    text: str | None = None


Texts = Annotated[list[TextBlock], Field(max_length=MAX_CONTENT_PARTS), BeforeValidator(_blocks)]


class Block(TextBlock):
    """A block of a message, of any kind."""

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Annotated[str | None, BeforeValidator(_arguments)] = None
    tool_use_id: str | None = None
    content: Texts | None = None


class Message(ApiObject):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], Field(max_length=MAX_CONTENT_PARTS), BeforeValidator(_blocks)]

    def refused(self, path: str) -> Iterator[Violation]:
        """Violations: kinds of blocks that are not supported, and missing fields."""
        kinds = _NEEDED[self.role]
        for index, block in enumerate(self.content):
            where = f"{path}.content[{index}]"
            if block.type not in kinds:
                known = ", ".join(kinds)
                yield Violation(f"{where}.type", f"is not supported here: there are {known}")
                continue
            for name in kinds[block.type]:
                if getattr(block, name) is None:
                    yield Violation(f"{where}.{name}", "must be set")
            yield from refused_texts(block.content or [], f"{where}.content")


def refused_texts(blocks: list[TextBlock], path: str) -> Iterator[Violation]:
    """Violations: blocks that are no text."""
    for index, block in enumerate(blocks):
        if block.type != "text" or block.text is None:
            yield Violation(f"{path}[{index}].type", "only blocks of text are supported")


def texts_in(blocks: Sequence[TextBlock]) -> list[str]:
    """The texts of blocks."""
    return [block.text or "" for block in blocks]


def turns_of(message: Message) -> Iterator[api.ChatMessage]:
    """The turns of a chat that a message stands for. Results of tools are turns of their own."""
    if message.role == "assistant":
        yield _assistants(message.content)
        return
    texts: list[TextBlock] = []
    role = api.ROLE_USER if message.role == "user" else api.ROLE_SYSTEM
    for block in message.content:
        if block.type != "tool_result":
            texts.append(block)
            continue
        if texts:
            yield api.ChatMessage(role=role, **said(texts_in(texts)))
            texts = []
        yield api.ChatMessage(
            role=api.ROLE_TOOL,
            tool_call_id=block.tool_use_id or "",
            **said(texts_in(block.content or [])),
        )
    if texts or not message.content:
        yield api.ChatMessage(role=role, **said(texts_in(texts)))


def belongs(turn: api.ChatMessage, last: api.ChatMessage) -> bool:
    """Whether a turn and the one before it are one: this API combines consecutive turns of the
    user's, and of the assistant's, and some chat templates take no others. What follows a call is a
    turn of its own."""
    return turn.role == last.role and turn.role in _COMBINED and not last.tool_calls


def combined(turns: Sequence[api.ChatMessage]) -> api.ChatMessage:
    """Makes one of turns that belong together. They may be thousands: each text is copied once."""
    if len(turns) == 1:
        return turns[0]
    if turns[0].role != api.ROLE_ASSISTANT:
        texts = [text for one in turns for text in one.content_parts or [one.content]]
        return api.ChatMessage(role=turns[0].role, **said(texts))
    has_content = any(one.HasField("content") for one in turns)
    return api.ChatMessage(
        role=api.ROLE_ASSISTANT,
        content="".join(one.content for one in turns) if has_content else None,
        reasoning="".join(one.reasoning for one in turns),
        tool_calls=turns[-1].tool_calls,
    )


def _assistants(blocks: list[Block]) -> api.ChatMessage:
    texts = [block for block in blocks if block.type == "text"]
    calls = [block for block in blocks if block.type == "tool_use"]
    return api.ChatMessage(
        role=api.ROLE_ASSISTANT,
        content="".join(texts_in(texts)) if texts or not calls else None,
        reasoning="".join(block.thinking or "" for block in blocks if block.type == "thinking"),
        tool_calls=[
            api.ToolCall(id=call.id or "", name=call.name or "", arguments=call.input or "")
            for call in calls
        ],
    )
