"""What clients send: the fields of OpenAI's API, and those of vLLM's server beside them.

A request passes through here once: `parse` reads it, and `sampling`, `stopping` and `output` say
the same in the words of `inference.proto`, whose rules `router.validation` then judges. What is
judged here is only what those words could not hold. `null` means that a field is not set.

Unknown fields are ignored, as everywhere in this API's world. Those known to change the result
that cannot be honoured are refused by name, unless they are set to what happens anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from baton.inference.v1 import inference_pb2 as api
from router import errors
from router.errors import Violation
from router.validation import MAX_TOP_LOGPROBS

MAX_PROMPTS: Final = 256
"""Prompts of one request: each is a generation of its own."""

UInt32 = Annotated[int, Field(ge=0, lt=1 << 32)]
Prompt = str | list[int]
"""A text, or token ids."""


def _prompts(value: object) -> list[Prompt]:
    """One prompt or several, each a text or token ids; ids are what a list of numbers means."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and len(value) >= 1:
        if isinstance(value[0], int):
            return [_ids(value)]
        if len(value) <= MAX_PROMPTS:
            return [one if isinstance(one, str) else _ids(one) for one in value]
    rule = "must be a text, a list of token ids, or a list of at most {most} of these"
    raise PydanticCustomError("prompt", rule, {"most": MAX_PROMPTS})


def _ids(value: object) -> list[int]:
    # Not by pydantic: prompts are long, and it would report each wrong element.
    if isinstance(value, list) and set(map(type, value)) <= {int}:
        ids: list[int] = value
        if not ids or (min(ids) >= 0 and max(ids) < 1 << 32):
            return ids
    raise PydanticCustomError("prompt", "token ids must be integers of 32 bits")


def _name(value: object) -> object:
    return "" if value is None else value


def _texts(value: object) -> object:
    """A stop text alone is a list of one; an empty one stops nothing."""
    if isinstance(value, str):
        return [value] if value else []
    if not isinstance(value, list | None):
        raise PydanticCustomError("stop", "must be a text or a list of texts")
    return value or []


class StreamOptions(BaseModel):
    """What a stream tells beside tokens."""

    include_usage: bool = False
    """A last chunk with the token counts."""
    continuous_usage_stats: bool = False
    """Counts so far in every chunk, where `include_usage` is set."""


class ModelRequest(BaseModel):
    """What every method's request has."""

    model_config = ConfigDict(extra="allow")
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """By name, the values beside null that ask for nothing."""

    model: Annotated[str, BeforeValidator(_name)] = ""
    """May be left out where just one model is served."""

    def refused(self) -> list[Violation]:
        """Fields that are set and cannot be honoured."""
        return refusals(self, "", self.unsupported)


class GenerationRequest(ModelRequest):
    """The fields that both methods that generate share."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "add_special_tokens": (True,),
        "allowed_token_ids": ([],),
        "bad_words": ([],),
        "ebnf": (),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "json_schema": (),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "prompt_logprobs": (),
        "regex": (),
        "response_format": ({"type": "text"},),
        "skip_special_tokens": (True,),
        "structural_tag": (),
        "structured_outputs": (),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
    }

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
    """Any integer; the lowest 64 bits count."""
    logit_bias: dict[UInt32, float] | None = None
    stop: Annotated[list[str], BeforeValidator(_texts)] = []
    stop_token_ids: list[UInt32] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: UInt32 | None = None
    priority: Annotated[int, Field(gt=-(1 << 31), lt=1 << 31)] | None = None
    """Lower runs first, as in vLLM: the opposite of the gRPC API."""
    return_tokens_as_token_ids: bool | None = None
    """Tokens beside log probabilities read `token_id:7` instead of their text."""

    def input(
        self, max_tokens: int | None, top_logprobs: int | None, **prompt: Any
    ) -> api.GenerationInput:
        """The request in the words of the gRPC API.

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
    """Of /v1/completions."""

    unsupported = {
        **GenerationRequest.unsupported,
        "prompt_embeds": (),
        "suffix": ("",),
    }

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    max_tokens: UInt32 | None = 16
    """16 where it is left out, as the API has it; null for the server's default; 0 beside `echo`
    for the prompt alone."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None

    @property
    def echo_only(self) -> bool:
        """Whether nothing is to be generated, as where texts are scored."""
        return bool(self.echo) and self.max_tokens == 0

    def refused(self) -> list[Violation]:
        """Fields that are set and cannot be honoured."""
        found = super().refused()
        if self.best_of not in (None, self.n or 1):
            found.append(Violation("best_of", "other than n is not supported"))
        return found


class DetokenizeRequest(ModelRequest):
    """Of /detokenize."""

    tokens: Annotated[list[int], PlainValidator(_ids)]


Request = TypeVar("Request", bound=ModelRequest)


def parse(kind: type[Request], body: bytes) -> Request:
    """Reads a request.

    Raises:
        RouterError: MALFORMED_REQUEST, or INVALID_FIELD with every violation.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None
    if found := request.refused():
        raise errors.invalid_fields(found)
    return request


def refusals(
    model: BaseModel, path: str, unsupported: Mapping[str, tuple[object, ...]]
) -> list[Violation]:
    """Fields of the model that are set and not supported."""
    extra = model.model_extra or {}
    return [
        Violation(path + name, "is not supported")
        for name, neutral in unsupported.items()
        if extra.get(name) is not None and extra[name] not in neutral
    ]


def _refusal(error: ValidationError) -> errors.RouterError:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    if any(detail["type"] == "json_invalid" for detail in details):
        return errors.malformed_request("the body is not JSON")
    return errors.invalid_fields(
        [Violation(_path(detail["loc"]), detail["msg"]) for detail in details]
    )


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`; the body itself where the location is empty."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.lstrip(".") or "body"
