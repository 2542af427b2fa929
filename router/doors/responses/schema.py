"""Requests of /v1/responses: OpenAI's fields, and those of vLLM's server that chats know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from baton.inference.v1 import inference_pb2 as api
from router.doors.http.values import ApiObject, JsonText, Metadata, UInt32, Unless
from router.doors.openai.forms import Function, FunctionName, NamedTool, Tool, tool_fields
from router.doors.openai.schema import GenerationRequest
from router.doors.responses.items import Item
from router.errors import Violation
from router.requests.bounds import MAX_TURNS
from router.structure.fields import MAX_TOOLS

MAX_INCLUDES: Final = 32
"""More than OpenAI has names of."""
_LOGPROBS: Final = "message.output_text.logprobs"


def _items(value: object) -> object:
    """A text is one message of the user's."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("input", "must be a text or a list of items")
    return value


class Format(ApiObject):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Annotated[JsonText, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(ApiObject):
    """What the text must be."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """A variable of the chat template, if that reads it."""


class Reasoning(ApiObject):
    """How the model thinks. It is never summed up: thinking is returned as it is."""

    effort: str | None = None


class FunctionTool(Function):
    """A tool. Functions are the only kind."""

    name: str = ""
    type: str

    def refused(self, path: str) -> Iterator[Violation]:
        """Violations: another kind of tool."""
        if self.type != "function":
            yield Violation(f"{path}.type", "is not supported: there are no tools but functions")
        elif not self.name:
            yield Violation(f"{path}.name", "must be set")


class Choice(FunctionName):
    """Names the tool to call."""

    type: str
    name: str = ""


class ResponseRequest(GenerationRequest):
    """A request of /v1/responses."""

    items: Annotated[
        list[Item], Field(max_length=MAX_TURNS, alias="input"), BeforeValidator(_items)
    ]
    instructions: str | None = None
    previous_response_id: Annotated[str | None, Field(max_length=128)] = None
    store: bool | None = None
    metadata: Metadata | None = None
    max_output_tokens: UInt32 | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[str], Field(max_length=MAX_INCLUDES)] | None = None
    """Only what hosted tools would answer is asked for by this, and the log probabilities."""
    thinking_token_budget: UInt32 | None = None

    max_tool_calls: UInt32 | None = None
    """Bounds the calls of hosted tools, of which there are none."""

    access_programs: Annotated[bool, Unless()] = False
    background: Annotated[bool, Unless(False)] = False
    background_options: Annotated[bool, Unless({})] = False
    conversation: Annotated[bool, Unless()] = False
    context_management: Annotated[bool, Unless([])] = False
    image: Annotated[bool, Unless()] = False
    max_tokens: Annotated[bool, Unless()] = False
    max_completion_tokens: Annotated[bool, Unless()] = False
    messages: Annotated[bool, Unless([])] = False
    modalities: Annotated[bool, Unless(["text"])] = False
    prompt: Annotated[bool, Unless()] = False
    top_logprobs: Annotated[bool, Unless(0)] = False
    truncation: Annotated[bool, Unless("disabled")] = False

    def refused(self) -> list[Violation]:
        """Fields that are set and cannot be honoured."""
        found = super().refused()
        for index, item in enumerate(self.items):
            found += item.refused(f"input[{index}]")
        for index, tool in enumerate(self.tools or ()):
            found += tool.refused(f"tools[{index}]")
        if isinstance(self.tool_choice, Choice) and self.tool_choice.type != "function":
            found.append(Violation("tool_choice.type", "only functions are supported"))
        if self.text is not None:
            found += self.text.refusals("text.")
        if (form := self.format).type == "json_schema" and form.schema_ is None:
            found.append(Violation("text.format.schema", "must be set"))
        if self.response_format is not None:
            found.append(Violation("response_format", "is text.format in this API"))
        if self.n not in (None, 1):
            found.append(Violation("n", "must be 1 in this API"))
        if _LOGPROBS in (self.include or ()):
            found.append(Violation("include", f"{_LOGPROBS} is not supported"))
        return found

    @property
    def format(self) -> Format:
        """The form of the text."""
        return (self.text and self.text.format) or Format()

    def generation(self, turns: Sequence[api.ChatMessage]) -> api.GenerationInput:
        """The request as a message of the gRPC API, with its turns and those before it."""
        chat = api.ChatPrompt(
            messages=turns,
            parallel_tool_calls=self.parallel_tool_calls if self.tools else None,
            reasoning_effort=(self.reasoning and self.reasoning.effort) or "",
            thinking_token_budget=self.thinking_token_budget,
            **tool_fields(
                [Tool(type="function", function=tool) for tool in self.tools or ()], self._choice()
            ),
        )
        if self.text is not None and self.text.verbosity is not None:
            chat.template_variables["verbosity"] = self.text.verbosity
        generation = self.input(self.max_output_tokens, None, chat=chat)
        generation.output.message = True
        return generation

    def _choice(self) -> Literal["none", "auto", "required"] | NamedTool | None:
        if isinstance(self.tool_choice, Choice):
            return NamedTool(function=FunctionName(name=self.tool_choice.name))
        return self.tool_choice

    def _forms(self) -> Iterator[tuple[str, api.Structure]]:
        """Each form that is set, with its field."""
        if self.format.type == "json_object":
            yield "text.format", api.Structure(json_object=True)
        elif self.format.type == "json_schema":
            schema, strict = self.format.schema_ or "", bool(self.format.strict)
            schema_form = api.JsonSchema(schema=schema, strict=strict)
            yield "text.format", api.Structure(json_schema=schema_form)
        yield from super()._forms()
