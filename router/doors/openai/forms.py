"""Fields that give an answer a form: structured output, and tools.

OpenAI's `response_format`, vLLM's `structured_outputs` and the older names of both vLLM and SGLang
mean the same. A request may use one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import to_json

from baton.inference.v1 import inference_pb2 as api
from router.doors.http.values import ApiObject, JsonText, Unless
from router.errors import Violation
from router.structure.fields import MAX_CHOICES, MAX_TOOLS

Texts = Annotated[list[str], Field(max_length=MAX_CHOICES)]


class SchemaFormat(BaseModel):
    """The schema of a `response_format`."""

    schema_: Annotated[JsonText, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(ApiObject):
    """OpenAI's form."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: SchemaFormat | None = None


class StructuredOutputs(ApiObject):
    """vLLM's form."""

    json_: Annotated[JsonText, Field(alias="json")] = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None

    disable_additional_properties: Annotated[bool, Unless(False)] = False
    disable_any_whitespace: Annotated[bool, Unless(False)] = False
    structural_tag: Annotated[bool, Unless()] = False
    whitespace_pattern: Annotated[bool, Unless()] = False


class FormFields(BaseModel):
    """The fields by which a request asks for structured output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    ebnf: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_json: JsonText = None
    guided_regex: str | None = None
    json_schema: JsonText = None
    regex: str | None = None

    guided_whitespace_pattern: Annotated[bool, Unless()] = False
    structural_tag: Annotated[bool, Unless()] = False

    def structure(self) -> api.Structure | None:
        """The form as a message of the gRPC API; None for any."""
        return next((form for _, form in self._forms()), None)

    def several_forms(self) -> list[Violation]:
        """Violations: a form that is not supported, or more than one."""
        found = []
        if (given := self.structured_outputs) is not None:
            found += given.refusals("structured_outputs.")
        if self.response_format is not None:
            kind, schema = self.response_format.type, self.response_format.json_schema
            if kind == "structural_tag":
                found.append(Violation("response_format.type", "structural_tag is not supported"))
            elif kind == "json_schema" and (schema is None or schema.schema_ is None):
                found.append(Violation("response_format.json_schema.schema", "must be set"))
        names = [name for name, _ in self._forms()]
        if len(names) > 1:
            found.append(Violation(names[1], f"cannot stand beside {names[0]}"))
        return found

    def _forms(self) -> Iterator[tuple[str, api.Structure]]:
        """Each form that is set, with its field."""
        if (given := self.response_format) is not None:
            if given.type == "json_object":
                yield "response_format", api.Structure(json_object=True)
            elif given.type == "json_schema" and given.json_schema is not None:
                strict = bool(given.json_schema.strict)
                yield "response_format", _of_schema(given.json_schema.schema_, strict=strict)
        if (wanted := self.structured_outputs) is not None:
            name = "structured_outputs"
            if wanted.json_ is not None:
                yield name, _of_schema(wanted.json_)
            if wanted.json_object:
                yield name, api.Structure(json_object=True)
            if wanted.regex is not None:
                yield name, api.Structure(regex=wanted.regex)
            if wanted.choice is not None:
                yield name, _of_choice(wanted.choice)
            if wanted.grammar is not None:
                yield name, _of_grammar(wanted.grammar)
        for name in ("guided_json", "json_schema"):
            if (text := getattr(self, name)) is not None:
                yield name, _of_schema(text)
        for name in ("guided_regex", "regex"):
            if (text := getattr(self, name)) is not None:
                yield name, api.Structure(regex=text)
        if self.guided_choice is not None:
            yield "guided_choice", _of_choice(self.guided_choice)
        for name in ("guided_grammar", "ebnf"):
            if (text := getattr(self, name)) is not None:
                yield name, _of_grammar(text)


def _of_schema(text: str | None, *, strict: bool = False) -> api.Structure:
    return api.Structure(json_schema=api.JsonSchema(schema=text or "", strict=strict))


def _of_choice(texts: list[str]) -> api.Structure:
    return api.Structure(choice=api.Choices(texts=texts))


def _of_grammar(text: str) -> api.Structure:
    """vLLM takes both kinds of grammars under one name."""
    return api.Structure(gbnf=text) if "::=" in text else api.Structure(lark=text)


class Function(BaseModel):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: JsonText = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool. Functions are the only kind."""

    type: Literal["function"]
    function: Function
    _sent: dict[str, Any] | None = PrivateAttr(default=None)
    """The tool as it was sent, if its schema is an object in it."""

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        found = handler(value)
        function = value.get("function") if isinstance(value, dict) else None
        if isinstance(function, dict) and not isinstance(function.get("parameters"), str):
            found._sent = value
        return found

    def message(self) -> api.Tool:
        """The tool as a message of the gRPC API."""
        given = self.function
        return api.Tool(
            name=given.name,
            description=given.description or "",
            parameters=given.parameters or "",
            strict=bool(given.strict),
            definition="" if self._sent is None else to_json(self._sent).decode(),
        )


class FunctionName(BaseModel):
    """Names a function."""

    name: str


class NamedTool(BaseModel):
    """Names the tool to call."""

    type: Literal["function"] = "function"
    function: FunctionName


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool
_MODES: Final = {
    "none": api.TOOL_MODE_NONE,
    "auto": api.TOOL_MODE_AUTO,
    "required": api.TOOL_MODE_REQUIRED,
}


class CalledFunction(BaseModel):
    """The function of an earlier call."""

    name: str
    arguments: str = ""


class Call(BaseModel):
    """A call of an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


def tool_fields(tools: list[Tool] | None, choice: ToolChoice | None) -> dict[str, Any]:
    """Fields of a chat prompt."""
    fields: dict[str, Any] = {"tools": [tool.message() for tool in tools or ()]}
    if isinstance(choice, NamedTool):
        fields["tool_choice"] = api.ToolChoice(name=choice.function.name)
    elif choice is not None and (tools or choice == "required"):
        fields["tool_choice"] = api.ToolChoice(mode=_MODES[choice])
    return fields
