"""Requests of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from baton.inference.v1 import inference_pb2 as api
from router.answers.forms import THINKING_SWITCHES
from router.doors.http.parsing import ModelRequest, said
from router.doors.http.values import (
    ApiObject,
    AtMost,
    Float,
    Int,
    JsonText,
    UInt32,
    Unless,
    texts_of,
)
from router.doors.messages.blocks import (
    Message,
    Texts,
    belongs,
    combined,
    refused_texts,
    texts_in,
    turns_of,
)
from router.errors import Violation
from router.requests.bounds import MAX_TURNS
from router.requests.validation import MAX_STOP_TEXTS
from router.structure.fields import MAX_TOOLS

_MODES: Final = {
    "auto": api.TOOL_MODE_AUTO,
    "any": api.TOOL_MODE_REQUIRED,
    "none": api.TOOL_MODE_NONE,
}
_EFFORTS: Final = {"xhigh": "high", "max": "high"}
"""Efforts that templates do not know."""
HARMLESS: Final = frozenset(
    (
        "cache_control",
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    )
)
"""Fields that are ignored, since they change no answer."""


class Tool(ApiObject):
    """A tool. Those of the client's own are the only kind."""

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: JsonText = None
    strict: bool | None = None

    defer_loading: Annotated[bool, Unless(False)] = False

    def refused(self, path: str) -> Iterator[Violation]:
        """Violations: another kind of tool."""
        yield from self.refusals(f"{path}.")
        if self.type not in (None, "custom"):
            yield Violation(f"{path}.type", "is not supported: there are no tools but custom ones")


class ToolChoice(ApiObject):
    """How tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(ApiObject):
    """Whether the model thinks, and how much."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: UInt32 | None = None
    display: str | None = None


class Format(ApiObject):
    """A form of the text."""

    type: Literal["json_schema"]
    schema_: Annotated[JsonText, Field(alias="schema")]


class OutputConfig(ApiObject):
    """The form of the text, and the effort."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


class Edit(ApiObject):
    """An edit of the conversation."""

    type: str


class ContextManagement(ApiObject):
    """Edits of the conversation before it is answered."""

    edits: Annotated[list[Edit], Field(max_length=16)] | None = None


class CountRequest(ModelRequest):
    """A request of /v1/messages/count_tokens, and the part that makes a prompt."""

    messages: Annotated[list[Message], Field(max_length=MAX_TURNS)]
    system: Texts | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    """If it is left out, the model does not think, where its template can be told so."""
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    """The older place of `output_config.format`."""
    context_management: ContextManagement | None = None
    """Thinking of earlier turns may be cleared: templates leave it out anyway."""

    container: Annotated[bool, Unless({})] = False
    mcp_servers: Annotated[bool, Unless([])] = False

    def refused(self) -> list[Violation]:
        """Fields that are set and cannot be honoured."""
        found = super().refused()
        for index, message in enumerate(self.messages):
            found += message.refused(f"messages[{index}]")
        found += refused_texts(self.system or [], "system")
        for index, tool in enumerate(self.tools or ()):
            found += tool.refused(f"tools[{index}]")
        if (choice := self.tool_choice) is not None and choice.type == "tool" and not choice.name:
            found.append(Violation("tool_choice.name", "must be set"))
        edits = (self.context_management and self.context_management.edits) or ()
        for index, edit in enumerate(edits):
            if not edit.type.startswith("clear_thinking"):
                path = f"context_management.edits[{index}].type"
                found.append(Violation(path, "only thinking can be cleared"))
        return found

    def chat(self) -> tuple[api.ChatPrompt, list[str]]:
        """The conversation, and the path in the request of each of its turns."""
        runs: list[list[api.ChatMessage]] = []
        paths = []
        if self.system:
            runs.append([api.ChatMessage(role=api.ROLE_SYSTEM, **said(texts_in(self.system)))])
            paths.append("system")
        for index, message in enumerate(self.messages):
            for turn in turns_of(message):
                if runs and belongs(turn, runs[-1][-1]):
                    runs[-1].append(turn)
                    continue
                runs.append([turn])
                paths.append(f"messages[{index}].content")
        turns = [combined(run) for run in runs]
        continues = bool(self.messages) and self.messages[-1].role == "assistant"
        chat = api.ChatPrompt(messages=turns, continue_last=continues)
        self._add_tools(chat)
        self._add_thinking(chat)
        return chat, paths

    def structure(self) -> api.Structure | None:
        """The form of the text; None for any."""
        form = (self.output_config and self.output_config.format) or self.output_format
        if form is None:
            return None
        return api.Structure(json_schema=api.JsonSchema(schema=form.schema_ or ""))

    def _add_tools(self, chat: api.ChatPrompt) -> None:
        for tool in self.tools or ():
            chat.tools.add(
                name=tool.name,
                description=tool.description or "",
                parameters=tool.input_schema or "",
                strict=bool(tool.strict),
            )
        choice = self.tool_choice
        if choice is None or (not self.tools and choice.type in ("auto", "none")):
            return
        if choice.type == "tool":
            chat.tool_choice.name = choice.name or ""
        else:
            chat.tool_choice.mode = _MODES[choice.type]
        if choice.disable_parallel_tool_use:
            chat.parallel_tool_calls = False

    def _add_thinking(self, chat: api.ChatPrompt) -> None:
        given = self.thinking
        if given is None or given.type == "disabled":
            chat.reasoning_effort = "none"
            return
        effort = (self.output_config and self.output_config.effort) or ""
        chat.reasoning_effort = _EFFORTS.get(effort, effort)
        chat.template_variables.update(dict.fromkeys(THINKING_SWITCHES, True))
        if given.type == "enabled" and given.budget_tokens is not None:
            chat.thinking_token_budget = given.budget_tokens


class MessageRequest(CountRequest):
    """A request of /v1/messages."""

    max_tokens: UInt32
    """If the context leaves fewer, those; 0: the prompt is computed and cached, and no more."""
    stream: bool | None = None
    stop_sequences: Annotated[
        list[str], AtMost(MAX_STOP_TEXTS, "texts"), BeforeValidator(texts_of)
    ] = Field(default_factory=list)
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: UInt32 | None = None
    seed: Int | None = None
    """A field of ours: only the lowest 64 bits are used."""

    def refused(self) -> list[Violation]:
        """Fields that are set and cannot be honoured."""
        found = super().refused()
        if self.stream and not self.max_tokens:
            found.append(Violation("stream", "has nothing to send where max_tokens is 0"))
        return found

    def generation(self, chat: api.ChatPrompt) -> api.GenerationInput:
        """The request as a message of the gRPC API."""
        display = self.thinking and self.thinking.display
        return api.GenerationInput(
            model=self.model,
            sampling=api.SamplingOptions(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                seed=None if self.seed is None else self.seed % (1 << 64),
            ),
            stop=api.StopOptions(
                max_tokens=max(self.max_tokens, 1),
                sequences=self.stop_sequences,
                cut_max_tokens=True,
            ),
            output=api.OutputOptions(message=True, omit_reasoning=display == "omitted"),
            structure=self.structure(),
            chat=chat,
        )
