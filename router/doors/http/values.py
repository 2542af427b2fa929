"""Kinds of values in request bodies, beside those that pydantic has."""

from __future__ import annotations

from array import array
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema, to_json

from router.errors import Violation
from router.structure.schema import MAX_SCHEMA_BYTES

MAX_PROMPTS: Final = 256
"""Prompts of one request, times `n`: each is a generation of its own."""


def _number(value: object) -> object:
    """`true` and `false` are no numbers, though Python counts with them."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "must be a number")
    return value


IsNumber: Final = BeforeValidator(_number)
MAX_METADATA: Final = 16
"""Entries of a metadata. OpenAI's own bound."""
Int = Annotated[int, IsNumber]
Float = Annotated[float, IsNumber]
UInt32 = Annotated[int, Field(ge=0, lt=1 << 32), IsNumber]
Kept = Annotated[int, Field(ge=-1, lt=1 << 32), IsNumber]
"""So many tokens of a prompt are kept, its last; -1: as many as the context holds."""
Prompt = str | list[int]
"""A text, or token ids."""


def kept_tokens(kept: int | None) -> int | None:
    """The number for the gRPC API, where all that fit is a large one."""
    return (1 << 32) - 1 if kept == -1 else kept


def prompts(value: object, info: ValidationInfo) -> list[Prompt]:
    """One prompt or several, each a text or token ids. A list of numbers means token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and len(value) >= 1:
        if isinstance(value[0], int):
            return [ids_of(value, info)]
        if len(value) <= MAX_PROMPTS:
            return [one if isinstance(one, str) else ids_of(one, info) for one in value]
    rule = "must be a text, a list of token ids, or a list of at most {most} of these"
    raise PydanticCustomError("prompt", rule, {"most": MAX_PROMPTS})


def ids_of(value: object, info: ValidationInfo) -> list[int]:
    """Token ids."""
    # pydantic would report each wrong element, and prompts are long.
    most: int = (info.context or {})["most_ids"]
    if isinstance(value, list) and len(value) > most:
        raise PydanticCustomError("prompt", "must have at most {most} ids", {"most": most})
    if isinstance(value, list) and set(map(type, value)) <= {int}:
        with suppress(OverflowError):
            array("I", value)  # fits 32 bits; sooner than two looks at each id
            return value
    raise PydanticCustomError("prompt", "token ids must be integers of 32 bits")


@dataclass(frozen=True, slots=True)
class AtMost:
    """Counts the entries of a value before any entry is checked, since each wrong entry would be
    reported. For lists pydantic's own `max_length` does the same."""

    most: int
    what: str

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """What pydantic asks for."""
        return core_schema.no_info_before_validator_function(self._count, handler(source))

    def _count(self, value: object) -> object:
        if isinstance(value, list | dict) and len(value) > self.most:
            rule = "must have at most {most} {what}"
            raise PydanticCustomError("count", rule, {"most": self.most, "what": self.what})
        return value


class Unless:
    """Marks a field that is not supported. The field is true if it was set to a value other than
    null and the given values, which ask for nothing."""

    def __init__(self, *neutral: object) -> None:
        self._neutral = neutral

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """What pydantic asks for."""
        return core_schema.no_info_plain_validator_function(self._is_set)

    def _is_set(self, value: object) -> bool:
        return value is not None and value not in self._neutral


def name_of(value: object) -> object:
    """A name; null is an empty one."""
    return "" if value is None else value


def texts_of(value: object) -> object:
    """The stop texts as a list. An empty text stops nothing."""
    if isinstance(value, str):
        return [value] if value else []
    if not isinstance(value, list | None):
        raise PydanticCustomError("stop", "must be a text or a list of texts")
    return value or []


class ApiObject(BaseModel):
    """An object of the API, with fields that are not supported. Of unknown ones it is kept whether
    they are set, so that an answer can name them."""

    model_config = ConfigDict(extra="allow")
    unsupported: ClassVar[frozenset[str]] = frozenset()
    """Names of the fields that are marked `Unless`."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Collects the names of these fields."""
        super().__pydantic_init_subclass__(**options)
        cls.unsupported = frozenset(
            name
            for name, info in cls.model_fields.items()
            if any(isinstance(one, Unless) for one in info.metadata)
        )

    @model_validator(mode="after")
    def _drop_unknown_values(self) -> Self:
        unknown = self.model_extra or {}
        for name, value in unknown.items():
            unknown[name] = value is not None
        return self

    def ignored(self, path: str = "") -> list[str]:
        """The fields that are set and have no effect; their names follow the path."""
        return [path + name for name, is_set in (self.model_extra or {}).items() if is_set]

    def refusals(self, path: str) -> list[Violation]:
        """Violations for fields that are set and not supported; their names follow the path."""
        given = self.model_fields_set & self.unsupported
        return [
            Violation(path + name, "is not supported")
            for name in sorted(given)
            if getattr(self, name)
        ]


def _json_text(value: object) -> object:
    """A JSON value as text, in its own order. A text is taken to be JSON already."""
    if isinstance(value, str | None):
        return value
    if not isinstance(value, dict | bool):
        raise PydanticCustomError("schema", "must be a JSON schema: an object")
    # A longer text is refused for its length later. An error here would copy all of the value.
    return to_json(value)[: MAX_SCHEMA_BYTES + 1].decode(errors="ignore")


def text_or_json(value: object) -> str:
    """A text, or any other JSON value as text; null is empty."""
    if isinstance(value, str):
        return value
    return "" if value is None else to_json(value).decode()


JsonText = Annotated[str | None, BeforeValidator(_json_text, str | dict[str, Any] | bool | None)]
"""A JSON schema."""


def _metadata(value: object) -> object:
    """Counts and measures the entries, and says nothing of them."""
    rule = "must be at most {most} texts of at most 512 characters, with names of at most 64"
    if value is not None and not (
        isinstance(value, dict)
        and len(value) <= MAX_METADATA
        and all(isinstance(one, str) and len(one) <= 512 for one in value.values())
        and all(len(name) <= 64 for name in value)
    ):
        raise PydanticCustomError("metadata", rule, {"most": MAX_METADATA})
    return value


Metadata = Annotated[dict[str, str], PlainValidator(_metadata)]
"""Texts that a client wants to find again, by name."""
