"""Requests whose prompt is a conversation: its turns, and their form as one text."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, JsonValue, PlainValidator
from pydantic_core import PydanticCustomError

from baton.inference.v1 import inference_pb2 as api
from router.doors.http.parsing import ModelRequest
from router.doors.http.values import ApiObject, UInt32, Unless
from router.doors.openai.forms import Call, ToolChoice, Tools, tool_fields
from router.doors.openai.schema import GenerationRequest
from router.errors import Violation
from router.requests.bounds import MAX_CONTENT_PARTS, MAX_TEMPLATE_VALUES, MAX_TURNS
from router.structure.fields import MAX_TOOLS

_ROLES: Final = {
    "system": api.ROLE_SYSTEM,
    "developer": api.ROLE_SYSTEM,
    "user": api.ROLE_USER,
    "assistant": api.ROLE_ASSISTANT,
    "tool": api.ROLE_TOOL,
}
_TEXT_PARTS: Final = (
    ("text", "text"),
    ("input_text", "text"),
    ("output_text", "text"),
    ("refusal", "refusal"),
)
"""Types of parts that hold text, with its field. Those in the middle are of /v1/responses; vLLM's
server takes them in chats, too."""
_VERBOSITY: Final = "verbosity"
MAX_DEPTH: Final = 16
"""Deepest nesting of `chat_template_kwargs`."""
MAX_INTEGER: Final = 1 << 53
"""Largest integer in `chat_template_kwargs`. The gRPC API carries numbers as doubles, which are not
exact beyond it."""


def _content(value: object) -> str | list[str] | None:
    """The text of a turn: a string, or the texts of a list's parts."""
    if isinstance(value, str | None):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a text or a list of text parts")
    if len(value) > MAX_CONTENT_PARTS:
        rule = "must have at most {most} parts"
        raise PydanticCustomError("content", rule, {"most": MAX_CONTENT_PARTS})
    texts: list[str] = []
    for part in value:
        text: object = part
        if isinstance(part, dict):
            kind = part.get("type") or "text"
            field = next((field for name, field in _TEXT_PARTS if name == kind), None)
            text = part.get(field)
        if not isinstance(text, str):
            raise PydanticCustomError("content", "only parts of type 'text' are supported")
        texts.append(text)
    return texts


def _fit(value: JsonValue) -> JsonValue:
    """Checks the depth. Messages of the gRPC API nest a few times as deep as the JSON in them, and
    their depth is bounded."""
    level, room = [value], MAX_TEMPLATE_VALUES
    for _ in range(MAX_DEPTH):
        level = list(islice(chain.from_iterable(map(_inside, level)), room + 1))
        if (room := room - len(level)) < 0:
            rule = "must hold at most {most} values"
            raise PydanticCustomError("count", rule, {"most": MAX_TEMPLATE_VALUES})
        if any(isinstance(one, int) and abs(one) > MAX_INTEGER for one in level):
            raise PydanticCustomError("integer", "must hold no integer beyond 2^53")
    if level:
        raise PydanticCustomError("depth", "must nest at most {most} deep", {"most": MAX_DEPTH})
    return value


def _inside(value: JsonValue) -> Iterable[JsonValue]:
    match value:
        case dict():
            return value.values()
        case list():
            return value
        case _:
            return ()


class ChatTurn(ApiObject):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[str] | None, PlainValidator(_content)] = None
    """The text. Only a turn of the assistant may have none."""
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Another name of `reasoning`."""
    refusal: str | None = None
    """What the assistant said instead of a content."""
    tool_call_id: str | None = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_TOOLS)] | None = None

    audio: Annotated[bool, Unless()] = False
    function_call: Annotated[bool, Unless()] = False

    def message(self) -> api.ChatMessage:
        """The turn as a message of the gRPC API."""
        said = self.content or self.refusal or self.content
        return api.ChatMessage(
            role=_ROLES[self.role],
            content=said if isinstance(said, str) else None,
            content_parts=said if isinstance(said, list) else (),
            reasoning=self.reasoning_content or self.reasoning or "",
            tool_calls=[
                api.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
                for call in self.tool_calls or ()
            ],
            tool_call_id=self.tool_call_id or "",
            name=self.name or "",
        )

    def refused(self, path: str) -> list[Violation]:
        """Violations: fields that are set and not supported, and a missing content."""
        found = self.refusals(path)
        if self.content is None and self.role != "assistant":
            found.append(Violation(path + "content", "must be a text or a list of text parts"))
        return found


class TurnsRequest(ModelRequest):
    """The fields that make a prompt from turns."""

    messages: Annotated[list[ChatTurn], Field(max_length=MAX_TURNS)]
    chat_template_kwargs: Annotated[dict[str, JsonValue] | None, AfterValidator(_fit)] = None
    """Variables for the chat template."""
    continue_final_message: bool | None = None
    """Whether the answer continues the last turn."""
    add_generation_prompt: bool | None = None
    """The opposite of `continue_final_message`. Clients that continue a turn set both."""

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: UInt32 | None = None

    chat_template: Annotated[bool, Unless()] = False

    def refused(self) -> list[Violation]:
        """Fields that are set and cannot be honoured."""
        found = super().refused()
        for index, turn in enumerate(self.messages):
            found += turn.refused(f"messages[{index}].")
        if self.add_generation_prompt not in (None, not self.continue_final_message):
            found.append(
                Violation("add_generation_prompt", "must be the opposite of continue_final_message")
            )
        return found

    def ignored(self, path: str = "") -> list[str]:
        """The fields that are set and have no effect; their names follow the path."""
        turns = enumerate(self.messages)
        of_turns = [name for index, turn in turns for name in turn.ignored(f"messages[{index}].")]
        return super().ignored(path) + of_turns

    def chat(self) -> api.ChatPrompt:
        """The turns as a message of the gRPC API."""
        chat = api.ChatPrompt(
            messages=[turn.message() for turn in self.messages],
            continue_last=bool(self.continue_final_message),
            parallel_tool_calls=self.parallel_tool_calls if self.tools else None,
            reasoning_effort=self.reasoning_effort or "",
            thinking_token_budget=self.thinking_token_budget,
            **tool_fields(self.tools, self.tool_choice),
        )
        if self.chat_template_kwargs:
            chat.template_variables.update(self.chat_template_kwargs)
        return chat


class ChatRequest(TurnsRequest, GenerationRequest):
    """A request of /v1/chat/completions."""

    max_completion_tokens: UInt32 | None = None
    max_tokens: UInt32 | None = None
    """The older name of `max_completion_tokens`."""
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    include_reasoning: bool | None = None

    audio: Annotated[bool, Unless()] = False
    best_of: Annotated[bool, Unless(1)] = False
    documents: Annotated[bool, Unless([])] = False
    echo: Annotated[bool, Unless(False)] = False
    function_call: Annotated[bool, Unless("none")] = False
    functions: Annotated[bool, Unless([])] = False
    modalities: Annotated[bool, Unless(["text"])] = False
    prompt: Annotated[bool, Unless()] = False
    prompt_embeds: Annotated[bool, Unless()] = False
    suffix: Annotated[bool, Unless("")] = False
    verbosity: Literal["low", "medium", "high"] | None = None
    """A variable of the chat template, if that reads it."""
    web_search_options: Annotated[bool, Unless()] = False

    def refused(self) -> list[Violation]:
        """Fields that are set and cannot be honoured."""
        found = super().refused()
        if self.top_logprobs and not self.logprobs:
            found.append(Violation("top_logprobs", "needs logprobs"))
        return found

    def chat(self) -> api.ChatPrompt:
        """The turns as a message of the gRPC API."""
        chat = super().chat()
        if self.verbosity is not None and _VERBOSITY not in chat.template_variables:
            chat.template_variables[_VERBOSITY] = self.verbosity
        return chat

    def name_of(self, path: str) -> str:
        """The name that this request has for a field of `inference.proto`."""
        if path == "input.stop.max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        name = super().name_of(path)
        is_own = name == f"chat_template_kwargs.{_VERBOSITY}" and self.verbosity is not None
        return _VERBOSITY if is_own else name


class TokenizeRequest(TurnsRequest):
    """A request of /tokenize: a text or turns."""

    prompt: str | None = None
    messages: Annotated[list[ChatTurn], Field(default_factory=list, max_length=MAX_TURNS)]
    add_special_tokens: bool | None = None
    """If it is left out, a text gets special tokens and turns do not, as in a generation."""
    return_token_strs: bool | None = None

    def refused(self) -> list[Violation]:
        """Fields that are set and cannot be honoured."""
        found = super().refused()
        if self.prompt is not None and self.messages:
            found.append(Violation("prompt", "must not stand beside messages"))
        return found
