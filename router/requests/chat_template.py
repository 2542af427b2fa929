"""Conversations in the form in which transformers gives them to a model's chat template.

Turns and tools are dictionaries, as the client sent them. Arguments of calls are objects for
templates that look into them, and texts for those that print them. A content of several parts is a
list for templates that go through one, and else one text.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from pydantic_core import from_json

from baton.inference.v1 import inference_pb2 as api
from router.answers.forms import EFFORT, THINKING_SWITCHES
from router.folders.templates import Template, TemplateRefusalError, Templates

_ROLES: Final[Mapping[int, str]] = {
    api.ROLE_SYSTEM: "system",
    api.ROLE_USER: "user",
    api.ROLE_ASSISTANT: "assistant",
    api.ROLE_TOOL: "tool",
    api.ROLE_QUERY: "query",
    api.ROLE_DOCUMENT: "document",
}
_MAX_WORDS_CHARS: Final = 512
"""A template's own words are cut at this length."""


class ChatTemplateError(Exception):
    """The model has no chat template, or a conversation cannot be rendered."""

    def __init__(self, rule: str, field: str = "") -> None:
        super().__init__(rule)
        self.rule = rule
        """Which rule is broken. It may hold words of the template, which are for the client
        alone."""
        self.field = field
        """Path of the field within the conversation, if one field is to blame."""


class Arguments(dict[str, Any]):
    """The arguments of a call: an object that is printed as the text that was sent. Most templates
    look into it or use `tojson`. DeepSeek-R1's adds it to other texts."""

    __slots__ = ("_sent",)

    def __init__(self, found: Mapping[str, Any], sent: str) -> None:
        super().__init__(found)
        self._sent = sent

    def __str__(self) -> str:
        return self._sent

    def __add__(self, other: str) -> str:
        return self._sent + other

    def __radd__(self, other: str) -> str:
        return other + self._sent


def render(templates: Templates, special: Mapping[str, str], chat: api.ChatPrompt) -> str:
    """Text of a conversation, up to the point at which the assistant begins or goes on.

    Args:
        templates: the model's.
        special: texts of special tokens by name.
        chat: the conversation.

    Raises:
        ChatTemplateError: there is no template, or it refuses these turns.
    """
    template = templates.of(tools=has_tools(chat))
    if template is None:
        none = "several chat templates and no default" if templates.sources else "no chat template"
        raise ChatTemplateError(f"the model has {none}")
    if chat.tools and "tools" not in templates.names:
        raise ChatTemplateError("the model's chat template takes none", "tools")
    # The space shows whether the template trims what it gets, as in transformers.
    end = f"{secrets.token_hex(16)} " if chat.continue_last else ""
    refused = "the chat template refused the turns"
    try:
        text = _rendered(template, {**special, **variables_of(chat, end, template)})
        return _begun(text, end) if end else text
    except ChatTemplateError:
        raise
    except TemplateRefusalError as error:
        raise ChatTemplateError(f"{refused}: {_words(str(error))}") from None
    except MemoryError:
        raise
    except Exception as error:  # A template is a program and may raise anything.
        raise ChatTemplateError(refused) from error


def _rendered(template: Template, given: dict[str, Any]) -> str:
    try:
        return template.render(**given)
    except TemplateRefusalError:
        raise
    except Exception:  # It may have looked into arguments that are no object.
        turns = given["messages"]
        calls = [call["function"] for turn in turns for call in turn.get("tool_calls", ())]
        if not (texts := [one for one in calls if isinstance(one["arguments"], str)]):
            raise
        for one in texts:
            one["arguments"] = Arguments({}, one["arguments"])
        return template.render(**given)


def variables_of(chat: api.ChatPrompt, end: str, template: Template) -> dict[str, Any]:
    """The variables of a template for one conversation. JSON's numbers come as floats; whole ones
    become integers, since templates print them.

    Args:
        chat: the conversation.
        end: goes after the last content, so that text which the template adds after it can be cut.
        template: the template.

    Raises:
        ChatTemplateError: a tool is no JSON object, or the last turn has nothing to go on from.
        Exception: a number is infinite or NaN.
    """
    names: dict[str, str] = {}
    for message in chat.messages:
        for call in message.tool_calls:
            names.setdefault(call.id, call.name)
    turns = [_turn(chat, index, template, names) for index in range(len(chat.messages))]
    if end:
        _mark_end(turns, end)
    given = MessageToDict(chat.template_variables)
    return {
        **_effort(chat.reasoning_effort, template.names),
        **{name: _plain(value) for name, value in given.items()},
        "messages": turns,
        "tools": tools_of(chat) or None,
        "documents": None,
        "add_generation_prompt": not end,
    }


def has_tools(chat: api.ChatPrompt) -> bool:
    """Whether the model sees tools."""
    return bool(chat.tools) and chat.tool_choice.mode != api.TOOL_MODE_NONE


def tools_of(chat: api.ChatPrompt) -> list[dict[str, Any]]:
    """The tools as templates get them. None if no tool may be called.

    Raises:
        ChatTemplateError: a tool or its schema is no JSON object.
    """
    if not has_tools(chat):
        return []
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(chat.tools)]


def _tool(tool: api.Tool, field: str) -> dict[str, Any]:
    if tool.definition:
        return _object(tool.definition, f"{field}.definition")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = _object(tool.parameters, f"{field}.parameters")
    return {"type": "function", "function": function}


def _turn(
    chat: api.ChatPrompt, index: int, template: Template, names: Mapping[str, str]
) -> dict[str, Any]:
    """A turn as templates get it. `names` has the functions by the ids of their calls."""
    given = chat.messages[index]
    turn: dict[str, Any] = {"role": _ROLES[given.role]}
    if given.content_parts:
        texts = list(given.content_parts)
        parts = [{"type": "text", "text": text} for text in texts]
        turn["content"] = parts if template.takes_parts else "\n".join(texts)
    elif given.HasField("content") or not given.tool_calls:
        turn["content"] = given.content
    if given.reasoning:  # Templates differ in the name.
        turn["thinking"] = turn["reasoning_content"] = given.reasoning
    if given.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _arguments(call.arguments),
                },
            }
            for call in given.tool_calls
        ]
    name = given.name
    if given.role == api.ROLE_TOOL:
        turn["tool_call_id"] = given.tool_call_id
        name = name or names.get(given.tool_call_id, "")
    if name or given.role == api.ROLE_TOOL:
        turn["name"] = name
    return turn


def _arguments(text: str) -> Arguments | str:
    """The arguments of an earlier call: an object, or the text as the model wrote it. A model does
    not always write JSON, and what it wrote may have been cut."""
    if text.strip() in ("", "null"):
        return Arguments({}, text)
    try:
        found = from_json(text)
    except ValueError:
        return text
    return Arguments(found, text) if isinstance(found, dict) else text


def _object(text: str, field: str) -> dict[str, Any]:
    """The object that a text holds; "" is an empty one."""
    try:
        found = from_json(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ChatTemplateError("must be a JSON object", field)
    return found


def _mark_end(turns: list[dict[str, Any]], end: str) -> None:
    """Puts `end` after the last text of the last turn."""
    last = turns[-1]
    if isinstance(content := last.get("content"), str):
        last["content"] = content + end
    elif content:
        content[-1]["text"] += end
    else:
        raise ChatTemplateError("has no content to go on from", f"messages[{len(turns) - 1}]")


def _begun(text: str, end: str) -> str:
    """The text before the mark. A template that trims what it gets has cut the mark's space, and
    the text before the mark is trimmed as well.

    Raises:
        ValueError: the template has dropped the mark.
    """
    at = text.rindex(end.strip())
    return text[:at] if text.startswith(end, at) else text[:at].rstrip()


def _words(text: str) -> str:
    """A template's words as one line that any message can hold."""
    shown = "".join(one if one.isprintable() else " " for one in text[: 2 * _MAX_WORDS_CHARS])
    return " ".join(shown.split())[:_MAX_WORDS_CHARS]


def _effort(effort: str, known: frozenset[str]) -> dict[str, Any]:
    """The variables that tell a template how much to think."""
    if not effort:
        return {}
    switches: dict[str, Any] = {
        name: effort != "none" for name in THINKING_SWITCHES if name in known
    }
    return switches if effort == "none" else {**switches, EFFORT: effort}


def _plain(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {name: _plain(one) for name, one in value.items()}
        case list():
            return [_plain(one) for one in value]
        case _:
            return value
