"""Request bodies: the fields of OpenAI's API, and the extra fields of vLLM's server.

A request passes through here once. `router.doors.http.parsing` reads it. `sampling`, `stopping` and
`output` translate it into the messages of `inference.proto`. `router.requests.validation` checks
those, and this module only the values that they cannot hold. `null` means that a field is not set.

The models keep of fields that are not supported only whether they were set.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field, PlainValidator

from baton.inference.v1 import inference_pb2 as api
from router.doors.http.parsing import ModelRequest
from router.doors.http.statuses import chat_name
from router.doors.http.values import (
    MAX_PROMPTS,
    AtMost,
    Float,
    Int,
    IsNumber,
    Kept,
    Prompt,
    UInt32,
    Unless,
    ids_of,
    kept_tokens,
    prompts,
    texts_of,
)
from router.doors.openai.forms import FormFields
from router.errors import Violation
from router.requests.validation import (
    MAX_LOGIT_BIASES,
    MAX_STOP_TEXTS,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
)
from router.structure.fields import MAX_ALLOWED_TOKENS, MAX_BAD_WORDS
from serving.wire import MAX_EXTENSIONS


class StreamOptions(BaseModel):
    """Options for the contents of a stream beside tokens."""

    include_usage: bool | None = None
    """Adds a last chunk with the token counts."""
    continuous_usage_stats: bool | None = None
    """Adds the counts so far to every chunk, if `include_usage` is set."""


HARMLESS: Final = frozenset(
    (
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "store",
        "user",
    )
)
"""Fields of OpenAI's API and of vLLM's server that are ignored, since they change no answer."""
_EARLY: Final = {
    None: api.EARLY_STOPPING_UNSPECIFIED,
    False: api.EARLY_STOPPING_UNSPECIFIED,
    True: api.EARLY_STOPPING_AT_ONCE,
    "never": api.EARLY_STOPPING_NEVER_BETTER,
}
_TIERS: Final = {"flex": -10, "priority": 10}
"""Priorities of service tiers; of all others 0."""


def served_tier(asked: str | None) -> str:
    """The tier that a request is served in."""
    return asked if asked in _TIERS else "default"


class GenerationRequest(FormFields, ModelRequest):
    """The fields that both methods that generate share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: UInt32 | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 32), IsNumber] | None = None
    """-1 disables it, as 0 does."""
    min_p: Float | None = None
    frequency_penalty: Float | None = None
    presence_penalty: Float | None = None
    repetition_penalty: Float | None = None
    seed: Int | None = None
    """Any integer; only the lowest 64 bits are used."""
    logit_bias: Annotated[dict[UInt32, Float] | None, AtMost(MAX_LOGIT_BIASES, "entries")] = None
    stop: Annotated[
        list[str],
        AtMost(MAX_STOP_TEXTS, "texts"),
        BeforeValidator(texts_of, str | list[str] | None),
    ] = Field(default_factory=list)
    stop_token_ids: Annotated[list[UInt32], Field(max_length=MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: UInt32 | None = None
    priority: Annotated[int, Field(gt=-(1 << 31), lt=1 << 31), IsNumber] | None = None
    """Lower runs first, as in vLLM: the opposite of the gRPC API."""
    return_tokens_as_token_ids: bool | None = None
    """Writes tokens beside log probabilities as `token_id:7` instead of their text."""
    add_special_tokens: bool | None = None
    """If it is left out, a text gets special tokens and turns do not."""

    allowed_token_ids: Annotated[list[UInt32], Field(max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    cache_salt: str | None = None
    """Requests share cached pages only with those of the same salt."""
    extensions: Annotated[dict[str, str] | None, AtMost(MAX_EXTENSIONS, "names")] = None
    """Texts for hooks of the workers, by the hooks' names. They travel as UTF-8."""
    return_token_ids: bool | None = None
    """Adds the ids of the prompt and of the output."""
    speculation: bool | None = None
    """False: no drafts of the output are verified. The answer is the same."""
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    """Stands for a priority, unless `priority` is set."""
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Kept | None = None
    use_beam_search: bool | None = None
    """Searches with `n` beams, or `best_of`, and returns the `n` best hypotheses."""
    length_penalty: Float | None = None
    """See `inference.proto`; needs `use_beam_search`."""
    early_stopping: Literal[True, False, "never"] | None = None
    """When a search ends, in the words of transformers; needs `use_beam_search`. Null is false."""

    custom_logit_processor: Annotated[bool, Unless()] = False
    dry_allowed_length: Annotated[bool, Unless()] = False
    dry_base: Annotated[bool, Unless()] = False
    dry_multiplier: Annotated[bool, Unless(0)] = False
    dry_sequence_breakers: Annotated[bool, Unless()] = False
    kv_transfer_params: Annotated[bool, Unless({})] = False
    logit_processors: Annotated[bool, Unless([])] = False
    logits_processors: Annotated[bool, Unless([])] = False
    logprob_token_ids: Annotated[bool, Unless([])] = False
    lora_path: Annotated[bool, Unless()] = False
    max_repetition_pattern_size: Annotated[bool, Unless(0)] = False
    min_repetition_pattern_size: Annotated[bool, Unless(0)] = False
    mm_processor_kwargs: Annotated[bool, Unless({})] = False
    moderation: Annotated[bool, Unless(False)] = False
    prompt_logprobs: Annotated[bool, Unless()] = False
    repetition_detection: Annotated[bool, Unless()] = False
    repetition_min_count: Annotated[bool, Unless(0)] = False
    spaces_between_special_tokens: Annotated[bool, Unless(True)] = False
    stop_regex: Annotated[bool, Unless([])] = False
    typical_p: Annotated[bool, Unless(1)] = False
    vllm_xargs: Annotated[bool, Unless({})] = False
    xtc_probability: Annotated[bool, Unless(0)] = False
    xtc_threshold: Annotated[bool, Unless()] = False

    def refused(self) -> list[Violation]:
        """Fields that are set and cannot be honoured."""
        found = [*super().refused(), *self.several_forms()]
        if not self.use_beam_search and self.length_penalty not in (None, 1):
            found.append(Violation("length_penalty", "needs use_beam_search"))
        if not self.use_beam_search and self.early_stopping:
            found.append(Violation("early_stopping", "needs use_beam_search"))
        return found

    def width(self) -> int:
        """Beams of a search."""
        return 1 if self.n is None else self.n

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
                logprobs=top_logprobs is not None,
                top_logprobs=top_logprobs or 0,
                skip_special_tokens=self.skip_special_tokens,
            ),
            choices=self.n,
            priority=self._priority(),
            add_special_tokens=self.add_special_tokens,
            structure=self.structure(),
            cache_salt=self.cache_salt or "",
            truncate_prompt_tokens=kept_tokens(self.truncate_prompt_tokens),
            extensions={name: text.encode() for name, text in (self.extensions or {}).items()},
            speculation=self.speculation,
            beams=self._beams(),
            **prompt,
        )

    def _beams(self) -> api.BeamSearch | None:
        if not self.use_beam_search:
            return None
        return api.BeamSearch(
            width=self.width(),
            length_penalty=self.length_penalty,
            early_stopping=_EARLY[self.early_stopping],
        )

    def name_of(self, path: str) -> str:
        """The name that this request has for a field of `inference.proto`."""
        if path.startswith("input.structure") and (name := self.form_field()):
            return name
        return chat_name(path)

    def _priority(self) -> int:
        if self.priority is None:
            return _TIERS.get(self.service_tier or "", 0)
        return -self.priority

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
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
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

    prompt: Annotated[
        list[Prompt], PlainValidator(prompts, str | list[str] | list[int] | list[list[int]])
    ]
    max_tokens: UInt32 | None = 16
    """16 if it is left out, as in OpenAI's API; null for the server's default; 0 with `echo` for
    the prompt alone."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), IsNumber] | None = None
    echo: bool | None = None
    best_of: UInt32 | None = None
    """Draws so many and returns the `n` best; the beams of a search."""

    add_generation_prompt: Annotated[bool, Unless(True)] = False
    audio: Annotated[bool, Unless()] = False
    chat_template: Annotated[bool, Unless()] = False
    chat_template_kwargs: Annotated[bool, Unless({})] = False
    continue_final_message: Annotated[bool, Unless(False)] = False
    documents: Annotated[bool, Unless([])] = False
    function_call: Annotated[bool, Unless("none")] = False
    functions: Annotated[bool, Unless([])] = False
    include_reasoning: Annotated[bool, Unless(True)] = False
    max_completion_tokens: Annotated[bool, Unless()] = False
    messages: Annotated[bool, Unless([])] = False
    modalities: Annotated[bool, Unless(["text"])] = False
    parallel_tool_calls: Annotated[bool, Unless(True)] = False
    prompt_embeds: Annotated[bool, Unless()] = False
    reasoning_effort: Annotated[bool, Unless("none")] = False
    suffix: Annotated[bool, Unless("")] = False
    thinking_token_budget: Annotated[bool, Unless()] = False
    tool_choice: Annotated[bool, Unless("none", "auto")] = False
    tools: Annotated[bool, Unless([])] = False
    top_logprobs: Annotated[bool, Unless()] = False
    verbosity: Annotated[bool, Unless("medium")] = False
    web_search_options: Annotated[bool, Unless()] = False

    @property
    def echo_only(self) -> bool:
        """Whether to generate nothing, for example to score a text."""
        return bool(self.echo) and self.max_tokens == 0

    def refused(self) -> list[Violation]:
        """Fields that are set and cannot be honoured."""
        found = super().refused()
        if len(self.prompt) * max(self.n or 1, self.best_of or 1) > MAX_PROMPTS:
            rule = f"prompts times n, or best_of, must be at most {MAX_PROMPTS}"
            found.append(Violation("n", rule))
        return found

    def width(self) -> int:
        """Beams of a search."""
        return super().width() if self.best_of is None else self.best_of


class DetokenizeRequest(ModelRequest):
    """A request of /detokenize."""

    tokens: Annotated[list[int], PlainValidator(ids_of, list[int])]
