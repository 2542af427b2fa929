"""Items of a conversation, and the turns of a chat that they stand for.

The model's answer to one request is one turn of the assistant, and comes as several items:
thinking, text, calls. `Turns` joins them again, so that the prompt is that of a chat.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from baton.inference.v1 import inference_pb2 as api
from router.doors.http.parsing import said
from router.doors.http.values import ApiObject, name_of
from router.errors import Violation
from router.requests.bounds import MAX_CONTENT_PARTS

_OWN: Final = {".tool_call_id": ".call_id", ".id": ".call_id"}
"""Fields of turns that have another name in items."""
TEXTS: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
"""Types of parts that hold text."""
_ROLES: Final = {
    "system": api.ROLE_SYSTEM,
    "developer": api.ROLE_SYSTEM,
    "user": api.ROLE_USER,
    "assistant": api.ROLE_ASSISTANT,
}
_NEEDED: Final = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""Kinds of items, and their fields that must be set."""
REFERENCE: Final = "item_reference"
"""An item that stands for one of a stored response."""


class ContentPart(ApiObject):
    """A part of a content."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None


def _parts(value: object) -> object:
    """A text is a list of one part."""
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Content = Annotated[
    list[ContentPart] | None, Field(max_length=MAX_CONTENT_PARTS), BeforeValidator(_parts)
]


class Item(ApiObject):
    """One item, of any kind."""

    type: Annotated[str, BeforeValidator(name_of)] = ""
    """Left out, a message's, or a reference's where there is nothing but an id."""
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content = None
    """Content of a message or of thinking."""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content = None
    summary: Content = None
    """Summary of thinking, where the thinking itself is not given."""

    @model_validator(mode="after")
    def _find_type(self) -> Self:
        is_reference = self.id is not None and self.role is None and self.content is None
        self.type = self.type or (REFERENCE if is_reference else "message")
        return self

    def refused(self, path: str) -> Iterator[Violation]:
        """Violations: a kind that is not supported, missing fields, parts without text."""
        if self.type == REFERENCE:
            return
        if self.type not in _NEEDED:
            known = ", ".join(_NEEDED)
            yield Violation(f"{path}.type", f"is not supported: there are {known}")
            return
        for name in _NEEDED[self.type]:
            if getattr(self, name) is None:
                yield Violation(f"{path}.{name}", "must be set")
        for name in ("content", "output", "summary"):
            for index, part in enumerate(getattr(self, name) or ()):
                where = f"{path}.{name}[{index}]"
                if part.type not in TEXTS:
                    yield Violation(f"{where}.type", "only parts with text are supported")
                elif part.text is None and part.refusal is None:
                    yield Violation(f"{where}.text", "must be set")


def texts_in(parts: Sequence[ContentPart] | None) -> list[str]:
    """The texts of a content."""
    return [part.text or part.refusal or "" for part in parts or ()]


def _text_of(parts: Sequence[ContentPart] | None) -> str:
    return "\n".join(texts_in(parts))


class Turns:
    """The turns that items stand for, in order, and where each came from."""

    def __init__(self) -> None:
        self._messages: list[api.ChatMessage] = []
        self._paths: list[str] = []
        self._call_paths: dict[tuple[int, int], str] = {}
        self._is_open = False
        """Whether the last turn is the assistant's and may have further items."""
        self._called_last = False
        self._thought: list[str] = []
        self._said: list[str] = []
        """What the open turn holds. Its items may be thousands, so they are joined at its end."""

    @property
    def messages(self) -> list[api.ChatMessage]:
        """The turns so far."""
        self._join()
        return self._messages

    def add(self, item: Item, path: str) -> None:
        """Adds the next item."""
        match item.type:
            case "function_call":
                self._call(item, path)
            case "function_call_output":
                message = self._begin(api.ROLE_TOOL, path, **said(texts_in(item.output)))
                message.tool_call_id = item.call_id or ""
            case "reasoning":
                self._think(item, path)
            case _ if item.role == "assistant":
                self._say(item, path)
            case _:
                role = _ROLES[item.role or "user"]
                self._begin(role, path, **said(texts_in(item.content)))

    def name_of(self, path: str) -> str | None:
        """The path of an item for a path below `input.chat.messages`; None for another one."""
        found = re.fullmatch(
            r"input\.chat\.messages\[(\d+)\](?:\.tool_calls\[(\d+)\])?(.*)", path, re.DOTALL
        )
        if found is None:
            return None
        turn, call = int(found[1]), found[2]
        where = self._paths[turn] if call is None else self._call_paths[turn, int(call)]
        return f"{where}{_OWN.get(found[3], found[3])}" if "[" in where else where

    def _begin(self, role: api.Role.ValueType, path: str, **content: Any) -> api.ChatMessage:
        self._join()
        self._thought, self._said = [], []
        self._messages.append(api.ChatMessage(role=role, **content))
        self._paths.append(path)
        self._is_open, self._called_last = role == api.ROLE_ASSISTANT, False
        return self._messages[-1]

    def _join(self) -> None:
        if self._thought:
            self._messages[-1].reasoning = "".join(self._thought)
        if self._said:
            self._messages[-1].content = "".join(self._said)

    def _assistants(self, path: str, *, joins: bool) -> api.ChatMessage:
        """The open turn of the assistant, if this item belongs to it."""
        if self._is_open and joins:
            return self._messages[-1]
        return self._begin(api.ROLE_ASSISTANT, path)

    def _call(self, item: Item, path: str) -> None:
        turn = self._assistants(path, joins=True)
        self._call_paths[len(self._messages) - 1, len(turn.tool_calls)] = path
        turn.tool_calls.add(
            id=item.call_id or "", name=item.name or "", arguments=item.arguments or ""
        )
        self._called_last = True

    def _think(self, item: Item, path: str) -> None:
        has_called = self._is_open and bool(self._messages[-1].tool_calls)
        self._assistants(path, joins=not (has_called or any(self._said)))
        self._thought.append(_text_of(item.content or item.summary))

    def _say(self, item: Item, path: str) -> None:
        self._assistants(path, joins=self._called_last or not any(self._said))
        self._said.append(_text_of(item.content))
        self._called_last = False
