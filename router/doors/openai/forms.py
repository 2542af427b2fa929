"""Fields that give an answer a form: structured output, and tools.

OpenAI's `response_format`, vLLM's `structured_outputs` and the older names of both vLLM and SGLang
mean the same. A request may use one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)
from pydantic_core import to_json

from baton.inference.v1 import inference_pb2 as api
from router.doors.http.values import ApiObject, JsonText, Unless, text_or_json
from router.errors import Violation
from router.structure.fields import MAX_CHOICES, MAX_TOOLS, is_gbnf

Texts = Annotated[list[str], Field(max_length=MAX_CHOICES)]


class SchemaFormat(BaseModel):
    """The schema of a `response_format`."""

    schema_: Annotated[JsonText, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(ApiObject):
    """OpenAI's form. Other servers put a schema beside the type, as `schema` or `value`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: SchemaFormat | None = None
    schema_: Annotated[JsonText, Field(alias="schema")] = None
    value: JsonText = None

    def structure(self) -> tuple[str, api.Structure] | None:
        """The form, and the field that holds it; None for any text."""
        if self.type not in ("json_object", "json_schema"):
            return None
        given = self.json_schema or SchemaFormat()
        for name, text in (
            ("json_schema.schema", given.schema_),
            ("schema", self.schema_),
            ("value", self.value),
        ):
            if text is not None:
                return f"response_format.{name}", _of_schema(text, strict=bool(given.strict))
        if self.type == "json_object":
            return "response_format", api.Structure(json_object=True)
        return None


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

    def form_field(self) -> str:
        """The field that holds the form; "" for none."""
        return next((name for name, _ in self._forms()), "")

    def several_forms(self) -> list[Violation]:
        """Violations: a form that is not supported, or more than one. Some clients send the same
        form under two names."""
        found = []
        forms = list(self._forms())
        if (given := self.structured_outputs) is not None:
            found += given.refusals("structured_outputs.")
            if not found and not any(name.startswith("structured_outputs") for name, _ in forms):
                found.append(Violation("structured_outputs", "must hold a form"))
        if (wanted := self.response_format) is not None:
            if wanted.type == "structural_tag":
                found.append(Violation("response_format.type", "structural_tag is not supported"))
            elif wanted.type == "json_schema" and wanted.structure() is None:
                found.append(Violation("response_format.json_schema.schema", "must be set"))
        for name, form in forms[1:]:
            if form != forms[0][1]:
                found.append(Violation(name, f"cannot stand beside {forms[0][0]}"))
                break
        return found

    def _forms(self) -> Iterator[tuple[str, api.Structure]]:
        """Each form that is set, with its field."""
        if self.response_format is not None and (found := self.response_format.structure()):
            yield found
        given = self.structured_outputs or StructuredOutputs()
        for name, text in (
            ("structured_outputs.json", given.json_),
            ("guided_json", self.guided_json),
            ("json_schema", self.json_schema),
        ):
            if text is not None:
                yield name, _of_schema(text)
        if given.json_object:
            yield "structured_outputs.json_object", api.Structure(json_object=True)
        for name, text in (
            ("structured_outputs.regex", given.regex),
            ("guided_regex", self.guided_regex),
            ("regex", self.regex),
        ):
            if text is not None:
                yield name, api.Structure(regex=text)
        for name, texts in (
            ("structured_outputs.choice", given.choice),
            ("guided_choice", self.guided_choice),
        ):
            if texts is not None:
                yield name, api.Structure(choice=api.Choices(texts=texts))
        for name, text in (
            ("structured_outputs.grammar", given.grammar),
            ("guided_grammar", self.guided_grammar),
            ("ebnf", self.ebnf),
        ):
            if text is not None:  # vLLM takes both kinds of grammars under one name.
                form = api.Structure(gbnf=text) if is_gbnf(text) else api.Structure(lark=text)
                yield name, form


def _of_schema(text: str | None, *, strict: bool = False) -> api.Structure:
    return api.Structure(json_schema=api.JsonSchema(schema=text or "", strict=strict))


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
    """The function of an earlier call. Some clients send its arguments as an object."""

    name: str
    arguments: Annotated[str, BeforeValidator(text_or_json)] = ""


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
