"""Chat templates: the programs that turn a model's conversations into one text.

A conversation reaches them in the form that transformers gives it: turns and tools as dictionaries,
the arguments of calls as objects.

They come with a checkpoint, from any source, so they run in a sandbox. The sandbox has the
variables and helpers that chat templates expect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import jinja2
import jinja2.nodes
import jinja2.parser
from google.protobuf.json_format import MessageToDict
from jinja2 import meta
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.inference.v1 import inference_pb2 as api

_ROLES: Final[Mapping[int, str]] = {
    api.ROLE_SYSTEM: "system",
    api.ROLE_USER: "user",
    api.ROLE_ASSISTANT: "assistant",
    api.ROLE_TOOL: "tool",
}
DEFAULT: Final = "default"
TOOLS: Final = "tool_use"
"""Names of templates."""
EFFORT: Final = "reasoning_effort"
THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables by which templates turn thinking on and off."""


class ChatTemplateError(Exception):
    """The model has no chat template, or a conversation cannot be rendered."""

    def __init__(self, rule: str, field: str = "") -> None:
        super().__init__(rule)
        self.rule = rule
        """Which rule is broken."""
        self.field = field
        """Path of the field within the conversation, if one field is to blame."""


class TemplateFileError(Exception):
    """A file with a chat template cannot be used; the message says why."""


class Template(Protocol):
    """A compiled chat template."""

    def render(self, **variables: object) -> str:
        """Text of a conversation."""
        ...


def template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a folder by name, as transformers finds them. Files of their own come
    before an entry of the config. One for requests with tools is named `tool_use`."""
    found: dict[str, str] = {}
    if (file := folder / "chat_template.jinja").is_file():
        found[DEFAULT] = file.read_text(encoding="utf-8")
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if found:
        return found
    stated = config.get("chat_template")
    if isinstance(stated, list):
        stated = {entry["name"]: entry["template"] for entry in stated}
    if isinstance(stated, str):
        stated = {DEFAULT: stated}
    return dict(stated) if isinstance(stated, dict) else {}


class ChatTemplates:
    """The compiled chat templates of a model."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        used = {name: self.sources[name] for name in (DEFAULT, TOOLS) if name in self.sources}
        self._compiled = {name: compile_template(source) for name, source in used.items()}
        self._names = {name: names_in(source) for name, source in used.items()}
        self.text = "\n".join(used.values())
        """Their sources."""
        self.names = frozenset[str]().union(*self._names.values())
        """Variables that they read."""

    def of(self, *, tools: bool) -> tuple[Template, frozenset[str]]:
        """The template of a conversation with tools or without, and the variables that it reads.

        Raises:
            ChatTemplateError: there is none.
        """
        name = TOOLS if tools and TOOLS in self._compiled else DEFAULT
        if name not in self._compiled:
            several = (
                "several chat templates and no default" if self.sources else "no chat template"
            )
            raise ChatTemplateError(f"the model has {several}")
        return self._compiled[name], self._names[name]


def read_template(path: str) -> str | None:
    """The source in a file that replaces the models' own templates; None for "".

    Raises:
        TemplateFileError: it cannot be read, or is no template.
    """
    if not path:
        return None
    try:
        source = Path(path).read_text(encoding="utf-8")
        compile_template(source)
    except OSError as error:
        raise TemplateFileError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TemplateFileError(f"{path} is no text in UTF-8") from None
    except jinja2.TemplateSyntaxError as error:
        raise TemplateFileError(f"{path}, line {error.lineno}: {error.message}") from None
    return source


def names_in(source: str) -> frozenset[str]:
    """The variables that a template reads."""
    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


def variables_of(chat: api.ChatPrompt, end: str, known: frozenset[str]) -> dict[str, Any]:
    """The variables of a template for one conversation. JSON's numbers come as floats; whole ones
    become integers, since templates print them.

    Args:
        chat: the conversation.
        end: goes after the last content, so that text which the template adds after it can be cut.
        known: the variables that the template reads.

    Raises:
        ChatTemplateError: a tool's schema or a call's arguments are no JSON object.
        Exception: a number is infinite or NaN.
    """
    turns = [_turn(chat, index) for index in range(len(chat.messages))]
    if end:
        turns[-1]["content"] += end
    given = MessageToDict(chat.template_variables)
    return {
        **_effort(chat.reasoning_effort, known),
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
        ChatTemplateError: a tool's schema is no JSON object.
    """
    if not has_tools(chat):
        return []
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": _object(tool.parameters, f"tools[{index}].parameters"),
            },
        }
        for index, tool in enumerate(chat.tools)
    ]


def _turn(chat: api.ChatPrompt, index: int) -> dict[str, Any]:
    given = chat.messages[index]
    turn: dict[str, Any] = {"role": _ROLES[given.role], "content": given.content}
    if given.reasoning:
        turn["reasoning_content"] = given.reasoning
    if given.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _object(
                        call.arguments, f"messages[{index}].tool_calls[{number}].arguments"
                    ),
                },
            }
            for number, call in enumerate(given.tool_calls)
        ]
    if given.role == api.ROLE_TOOL:
        turn["tool_call_id"] = given.tool_call_id
        turn["name"] = given.name or _name_of(chat, given.tool_call_id)
    return turn


def _name_of(chat: api.ChatPrompt, call_id: str) -> str:
    calls = (call for turn in chat.messages for call in turn.tool_calls)
    return next((call.name for call in calls if call.id == call_id), "")


def _object(text: str, field: str) -> dict[str, Any]:
    """The object that a text holds; "" is an empty one."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ChatTemplateError("must be a JSON object", field)
    return found


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


def compile_template(source: str) -> Template:
    """A template that can be rendered."""
    environment = _environment()
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )


class _GenerationBlock(Extension):
    """Renders `{% generation %}` as its body. The block marks the assistant's words for
    training."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it like this

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Returns the statements inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes for HTML, and no model was trained on that.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
