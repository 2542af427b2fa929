"""Request bodies: the fields of OpenAI's API, and the extra fields of vLLM's server.

A request passes through here once. `parse` reads it. `sampling`, `stopping` and `output` translate
it into the messages of `inference.proto`, and `router.requests.validation` checks those. This
module checks only the values that these messages cannot hold. `null` means that a field is not set.

Unknown fields are ignored and dropped, as is usual for this API. Some known fields change the
result and are not supported. They are refused by name, unless their value asks for nothing. The
models keep only whether they were set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from baton.inference.v1 import inference_pb2 as api
from router import errors
from router.errors import Violation
from router.requests.bounds import LEAST_ELEMENTS
from router.requests.validation import (
    MAX_LOGIT_BIASES,
    MAX_STOP_TEXTS,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
)

MAX_PROMPTS: Final = 256
"""Prompts of one request, times `n`: each is a generation of its own."""

UInt32 = Annotated[int, Field(ge=0, lt=1 << 32)]
Prompt = str | list[int]
"""A text, or token ids."""


def _prompts(value: object, info: ValidationInfo) -> list[Prompt]:
    """One prompt or several, each a text or token ids. A list of numbers means token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and len(value) >= 1:
        if isinstance(value[0], int):
            return [_ids(value, info)]
        if len(value) <= MAX_PROMPTS:
            return [one if isinstance(one, str) else _ids(one, info) for one in value]
    rule = "must be a text, a list of token ids, or a list of at most {most} of these"
    raise PydanticCustomError("prompt", rule, {"most": MAX_PROMPTS})


def _ids(value: object, info: ValidationInfo) -> list[int]:
    # pydantic would report each wrong element, and prompts are long.
    most: int = (info.context or {})["most_ids"]
    if isinstance(value, list) and len(value) > most:
        raise PydanticCustomError("prompt", "must have at most {most} ids", {"most": most})
    if isinstance(value, list) and set(map(type, value)) <= {int}:
        ids: list[int] = value
        if not ids or (min(ids) >= 0 and max(ids) < 1 << 32):
            return ids
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


def _name(value: object) -> object:
    return "" if value is None else value


def _texts(value: object) -> object:
    """The stop texts as a list. An empty text stops nothing."""
    if isinstance(value, str):
        return [value] if value else []
    if not isinstance(value, list | None):
        raise PydanticCustomError("stop", "must be a text or a list of texts")
    return value or []


class StreamOptions(BaseModel):
    """Options for the contents of a stream beside tokens."""

    include_usage: bool = False
    """Adds a last chunk with the token counts."""
    continuous_usage_stats: bool = False
    """Adds the counts so far to every chunk, if `include_usage` is set."""


class ChatMessage(BaseModel):
    """An object of the API, with fields that are not supported."""

    model_config = ConfigDict(extra="ignore")
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

    def refusals(self, path: str) -> list[Violation]:
        """Violations for fields that are set and not supported; their names follow the path."""
        given = self.model_fields_set & self.unsupported
        return [
            Violation(path + name, "is not supported")
            for name in sorted(given)
            if getattr(self, name)
        ]


class ModelRequest(ChatMessage):
    """The part that every method's request has."""

    model: Annotated[str, BeforeValidator(_name)] = ""
    """May be left out if just one model is served."""

    def refused(self) -> list[Violation]:
        """Violations: fields that are not supported, or that contradict each other."""
        return self.refusals("")


class GenerationRequest(ModelRequest):
    """The fields that both methods that generate share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: UInt32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 32)] | None = None
    """-1 disables it, as 0 does."""
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    """Any integer; only the lowest 64 bits are used."""
    logit_bias: Annotated[dict[UInt32, float] | None, AtMost(MAX_LOGIT_BIASES, "entries")] = None
    stop: Annotated[list[str], AtMost(MAX_STOP_TEXTS, "texts"), BeforeValidator(_texts)] = []
    stop_token_ids: Annotated[list[UInt32], Field(max_length=MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: UInt32 | None = None
    priority: Annotated[int, Field(gt=-(1 << 31), lt=1 << 31)] | None = None
    """Lower runs first, as in vLLM: the opposite of the gRPC API."""
    return_tokens_as_token_ids: bool | None = None
    """Writes tokens beside log probabilities as `token_id:7` instead of their text."""
    add_special_tokens: bool | None = None
    """If it is left out, a text gets special tokens and turns do not."""

    allowed_token_ids: Annotated[bool, Unless([])] = False
    bad_words: Annotated[bool, Unless([])] = False
    ebnf: Annotated[bool, Unless()] = False
    guided_choice: Annotated[bool, Unless()] = False
    guided_grammar: Annotated[bool, Unless()] = False
    guided_json: Annotated[bool, Unless()] = False
    guided_regex: Annotated[bool, Unless()] = False
    json_schema: Annotated[bool, Unless()] = False
    length_penalty: Annotated[bool, Unless(1)] = False
    logits_processors: Annotated[bool, Unless([])] = False
    prompt_logprobs: Annotated[bool, Unless()] = False
    regex: Annotated[bool, Unless()] = False
    response_format: Annotated[bool, Unless({"type": "text"})] = False
    skip_special_tokens: Annotated[bool, Unless(True)] = False
    structural_tag: Annotated[bool, Unless()] = False
    structured_outputs: Annotated[bool, Unless()] = False
    truncate_prompt_tokens: Annotated[bool, Unless()] = False
    use_beam_search: Annotated[bool, Unless(False)] = False

    def input(
        self, max_tokens: int | None, top_logprobs: int | None, **prompt: Any
    ) -> api.GenerationInput:
        """The request as a message of the gRPC API.

        Args:
            max_tokens: None for the server's default.
            top_logprobs: alternatives beside each token; None for no log probabilities.
            prompt: one of the fields `text`, `token_ids` and `chat`.
        """
        return api.GenerationInput(
            model=self.model,
            sampling=self._sampling(),
            stop=self._stopping(max_tokens),
            output=api.OutputOptions(
                logprobs=top_logprobs is not None, top_logprobs=top_logprobs or 0
            ),
            choices=self.n,
            priority=-(self.priority or 0),
            add_special_tokens=self.add_special_tokens,
            **prompt,
        )

    def _sampling(self) -> api.SamplingOptions:
        return api.SamplingOptions(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(self.top_k, 0),
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=None if self.seed is None else self.seed % (1 << 64),
            logit_bias=self.logit_bias,
        )

    def _stopping(self, max_tokens: int | None) -> api.StopOptions:
        return api.StopOptions(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            sequences=self.stop,
            token_ids=self.stop_token_ids,
            ignore_eos=bool(self.ignore_eos),
            include_stop=bool(self.include_stop_str_in_output),
        )


class CompletionRequest(GenerationRequest):
    """A request of /v1/completions."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    max_tokens: UInt32 | None = 16
    """16 if it is left out, as in OpenAI's API; null for the server's default; 0 with `echo` for
    the prompt alone."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None

    prompt_embeds: Annotated[bool, Unless()] = False
    suffix: Annotated[bool, Unless("")] = False

    @property
    def echo_only(self) -> bool:
        """Whether to generate nothing, for example to score a text."""
        return bool(self.echo) and self.max_tokens == 0

    def refused(self) -> list[Violation]:
        """Fields that are set and cannot be honoured."""
        found = super().refused()
        if len(self.prompt) * (self.n or 1) > MAX_PROMPTS:
            rule = f"prompts times n must be at most {MAX_PROMPTS}"
            found.append(Violation("n", rule))
        if self.best_of not in (None, self.n or 1):
            found.append(Violation("best_of", "other than n is not supported"))
        return found


class DetokenizeRequest(ModelRequest):
    """A request of /detokenize."""

    tokens: Annotated[list[int], PlainValidator(_ids)]


Request = TypeVar("Request", bound=ModelRequest)


def parse(kind: type[Request], body: bytes, most_ids: int = LEAST_ELEMENTS) -> Request:
    """Reads a request whose shape was checked (`router.requests.bounds.BodyShape`).

    Args:
        kind: the kind of request.
        body: JSON.
        most_ids: most ids that a prompt may have.

    Raises:
        RouterError: MALFORMED_REQUEST, or INVALID_FIELD with every violation.
    """
    try:
        request = kind.model_validate_json(body, context={"most_ids": most_ids})
    except ValidationError as error:
        raise _refusal(error) from None
    if found := request.refused():
        raise errors.invalid_fields(found)
    return request


def _refusal(error: ValidationError) -> errors.RouterError:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    if any(detail["type"] == "json_invalid" for detail in details):
        return errors.malformed_request("the body is not JSON")
    shown = details[: errors.MAX_VIOLATIONS]
    found = [Violation(_path(detail["loc"]), detail["msg"]) for detail in shown]
    return errors.invalid_fields(found, len(details))


def _path(location: tuple[int | str, ...]) -> str:
    """The path of a location, such as `messages[0].content`. An empty location is the body
    itself."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.lstrip(".") or "body"
