"""Checks requests against the rules of the API.

The rules are those beside the fields in `inference.proto`. All broken rules are collected before
the request is refused, so that a client can correct all of them at once. Descriptions state the
rule and never repeat the client's values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from baton.inference.v1 import inference_pb2 as api
from router import errors
from router.errors import PROMPT, Violation
from router.requests.bounds import MAX_TURNS
from router.requests.selecting import MAX_BEAM_CANDIDATES, beam_candidates
from router.split_names import NO_SPLIT_NAMES, SplitNames
from router.structure.fields import MAX_ALLOWED_TOKENS, check_answer, check_chat
from serving.wire import MAX_EXTENSION_BYTES, MAX_EXTENSIONS, extension_bytes

if TYPE_CHECKING:
    from router.jobs import ServedModel

MAX_MESSAGE_MS: Final = 1000
"""Longest time for which tokens are gathered, milliseconds. Readers wait for them."""
MAX_TOP_LOGPROBS: Final = 20
MAX_PRIORITY: Final = 100
MAX_LOGIT_BIAS: Final = 100.0
MAX_LOGIT_BIASES: Final = 1024
MAX_STOP_TEXTS: Final = 16
MAX_STOP_TEXT_BYTES: Final = 256
MAX_STOP_TOKENS: Final = 1024
MAX_CLIENT_TAG_BYTES: Final = 128
MAX_LENGTH_PENALTY: Final = 5.0
"""Powers of a length up to this one are far from the limits of float32."""
MAX_BEAM_STOP_TOKENS: Final = 8
"""Each costs a search as many candidates as it has beams, and those of the first token have to fit
into a hand-off's notification (`worker_base.messages.MAX_PAYLOAD_BYTES`)."""
TEMPLATE_OWN: Final = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
"""Variables of a chat template that a client cannot set."""

_RANGES: Final = (
    ("temperature", 0.0, math.inf),
    ("min_p", 0.0, 1.0),
    ("frequency_penalty", -2.0, 2.0),
    ("presence_penalty", -2.0, 2.0),
)
"""Options of sampling with their least and largest values."""
_MAX_REPORTED_IDS: Final = 8
"""Most reported ids of one list. A prompt with another model's tokens would have thousands."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that an operator may set. The defaults are those of the router's settings."""

    default_max_tokens: int = 1024
    """`max_tokens` of a request that sets none, if the context leaves as many."""
    max_output_tokens: int = 32_768
    max_choices: int = 16
    max_request_duration_s: float = 600.0
    """Longest deadline, and that of a request that sets none."""
    max_unread_tokens: int = 8192
    """Tokens kept for a client that does not read its stream; one more aborts it."""
    split_names: SplitNames = NO_SPLIT_NAMES


@dataclass(slots=True)
class Violations:
    """Broken rules, collected under one path."""

    found: list[Violation] = field(default_factory=list)

    def add(self, path: str, rule: str) -> None:
        """Notes a broken rule."""
        self.found.append(Violation(path, rule))

    def unless(self, ok: bool, path: str, rule: str) -> None:
        """Notes a broken rule if `ok` is false."""
        if not ok:
            self.add(path, rule)

    def raise_if_any(self) -> None:
        """Refuses the request.

        Raises:
            RouterError: INVALID_FIELD, with every violation.
        """
        if self.found:
            raise errors.invalid_fields(self.found)


def check_request(
    request: api.GenerateRequest | api.StreamGenerateRequest, limits: Limits
) -> Violations:
    """Checks the rules that need no model."""
    found = Violations()
    tag_bytes = len(request.client_tag.encode())
    found.unless(
        tag_bytes <= MAX_CLIENT_TAG_BYTES,
        "client_tag",
        f"must have at most {MAX_CLIENT_TAG_BYTES} bytes",
    )
    generation = request.input
    _check_prompt(found, generation, "input")
    if generation.HasField("sampling"):
        _check_sampling(found, generation.sampling)
    _check_stop(found, generation.stop, limits)
    _check_output(found, generation.output)
    found.found += check_answer(generation)
    _check_extensions(found, generation)
    if generation.HasField("choices"):
        ok = 1 <= generation.choices <= limits.max_choices
        found.unless(ok, "input.choices", f"must be in [1, {limits.max_choices}]")
    ok = abs(generation.priority) <= MAX_PRIORITY
    found.unless(ok, "input.priority", f"must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
    _check_selection(
        found, generation, limits, streams=isinstance(request, api.StreamGenerateRequest)
    )
    return found


def check_tokenize(request: api.TokenizeRequest) -> Violations:
    """Checks the rules of a Tokenize request. Paths start at the request itself."""
    found = Violations()
    _check_prompt(found, request, "")
    if request.WhichOneof("prompt") == "chat":
        found.found += check_chat(request.chat, "chat")
    return found


def check_against_model(
    found: Violations, generation: api.GenerationInput, model: ServedModel
) -> None:
    """Checks ids against the model's vocabulary, and extensions against its workers."""
    if model.pooling is not None and model.pooling.only_pools:
        found.add("input.model", "has no head that draws tokens: it embeds, or scores")
    unknown = sorted(set(generation.extensions) - model.extensions)
    if unknown and len(generation.extensions) <= MAX_EXTENSIONS:
        known = ", ".join(sorted(model.extensions)) or "none"
        rule = f"this model's workers have no hook of this name; those that they have: {known}"
        found.add("input.extensions", rule)
    if generation.HasField("beams"):
        candidates, path = beam_candidates(generation, model), "input.beams.width"
        most = min(MAX_BEAM_CANDIDATES, model.vocab_size)
        rule = f"looks at {candidates} candidates: the hand-off and the vocabulary allow {most}"
        found.unless(candidates <= most, path, rule)
    ids = {
        "input.token_ids.ids": (generation.token_ids.ids, model.max_context_tokens),
        "input.stop.token_ids": (generation.stop.token_ids, MAX_STOP_TOKENS),
        "input.sampling.allowed_token_ids": (
            generation.sampling.allowed_token_ids,
            MAX_ALLOWED_TOKENS,
        ),
    }
    for path, (values, most) in ids.items():
        if len(values) <= most:  # A longer list is refused for its length.
            check_ids(found, path, values, model.vocab_size)
    if len(generation.sampling.logit_bias) > MAX_LOGIT_BIASES:
        return
    for token_id in _first_outside(sorted(generation.sampling.logit_bias), model.vocab_size):
        found.add(f"input.sampling.logit_bias[{token_id}]", _vocabulary_rule(model.vocab_size))


def prompt_path(generation: api.GenerationInput) -> str:
    """The field that holds the prompt; `errors.PROMPT` if none is set."""
    held = {"text": "text", "token_ids": "token_ids.ids", "chat": "chat.messages"}
    kind = generation.WhichOneof("prompt")
    return f"{PROMPT}.{held[kind]}" if kind else PROMPT


def check_prompt_ids(generation: api.GenerationInput, model: ServedModel) -> None:
    """Counts the ids of a prompt that is not truncated, before they are converted.

    Raises:
        RouterError: CONTEXT_LENGTH_EXCEEDED.
    """
    tokens, most = len(generation.token_ids.ids), model.max_context_tokens
    if tokens >= most and not generation.HasField("truncate_prompt_tokens"):
        raise errors.context_length_exceeded(tokens, generation.stop.max_tokens or 1, most)


def check_encoded(
    generation: api.GenerationInput, token_ids: NDArray[np.uint32], model: ServedModel
) -> None:
    """Refuses a text with a token that the tokenizer has and the model has not. A folder may name
    special tokens for which there are no weights.

    Raises:
        RouterError: INVALID_FIELD.
    """
    if int(token_ids.max()) >= model.vocab_size:
        rule = "holds a special token for which the model has no weights"
        raise errors.invalid_fields([Violation(prompt_path(generation), rule)])


def check_without_tokenizer(found: Violations, generation: api.GenerationInput) -> None:
    """Checks for options that need a tokenizer, for a model that has none."""
    _check_tokenizable(found, generation, "input")
    for path, given in (
        ("input.stop.sequences", bool(generation.stop.sequences)),
        ("input.sampling.bad_words", bool(generation.sampling.bad_words)),
        ("input.structure", generation.HasField("structure")),
    ):
        found.unless(not given, path, "the model has no tokenizer")


def check_tokenizable(found: Violations, request: api.TokenizeRequest) -> None:
    """Refuses to tokenize for a model without a tokenizer."""
    _check_tokenizable(found, request, "")


def _check_prompt(
    found: Violations, holder: api.GenerationInput | api.TokenizeRequest, path: str
) -> None:
    match holder.WhichOneof("prompt"):
        case None:
            found.add(path or "prompt", "a prompt must be set")
        case "text":
            found.unless(bool(holder.text), _join(path, "text"), "must not be empty")
        case "chat":
            _check_chat(found, holder.chat, _join(path, "chat"))
        case _ if isinstance(holder, api.GenerationInput):
            ids = _join(path, "token_ids.ids")
            found.unless(bool(holder.token_ids.ids), ids, "must not be empty")
            special = _join(path, "add_special_tokens")
            found.unless(not holder.add_special_tokens, special, "token ids are used as they are")


def _check_chat(found: Violations, chat: api.ChatPrompt, path: str) -> None:
    found.unless(bool(chat.messages), f"{path}.messages", "must not be empty")
    if len(chat.messages) > MAX_TURNS:
        found.add(f"{path}.messages", f"must have at most {MAX_TURNS} turns")
        return
    known = {api.ROLE_SYSTEM, api.ROLE_USER, api.ROLE_ASSISTANT, api.ROLE_TOOL}
    for index, message in enumerate(chat.messages):
        ok = message.role in known
        found.unless(ok, f"{path}.messages[{index}].role", "must be a known role")
        ok = not (message.content and message.content_parts)
        found.unless(ok, f"{path}.messages[{index}].content_parts", "cannot stand beside content")
    for name in sorted(TEMPLATE_OWN):
        if name in chat.template_variables.fields:
            found.add(f"{path}.template_variables.{name}", "is set by the server")
    last = chat.messages[-1].role if chat.messages else api.ROLE_UNSPECIFIED
    ok = not chat.continue_last or last == api.ROLE_ASSISTANT
    found.unless(ok, f"{path}.continue_last", "needs a last turn of the assistant's")


def _check_extensions(found: Violations, generation: api.GenerationInput) -> None:
    extensions, path = generation.extensions, "input.extensions"
    ok = len(extensions) <= MAX_EXTENSIONS
    found.unless(ok, path, f"must have at most {MAX_EXTENSIONS} names")
    ok = extension_bytes(extensions) <= MAX_EXTENSION_BYTES
    found.unless(ok, path, f"must have at most {MAX_EXTENSION_BYTES} bytes with its names")


def _check_sampling(found: Violations, sampling: api.SamplingOptions) -> None:
    for name, low, high in _RANGES:
        if not _within(getattr(sampling, name), low, high):
            within = (
                f"in [{low:g}, {high:g}]" if high < math.inf else f"finite and at least {low:g}"
            )
            found.add(f"input.sampling.{name}", f"must be {within}")
    if sampling.HasField("top_p"):
        ok = sampling.top_p > 0.0 and _within(sampling.top_p, 0.0, 1.0)
        found.unless(ok, "input.sampling.top_p", "must be in (0, 1]")
    if sampling.HasField("repetition_penalty"):
        value = sampling.repetition_penalty
        ok = math.isfinite(value) and value > 0.0
        found.unless(ok, "input.sampling.repetition_penalty", "must be finite and above 0")
    _check_logit_bias(found, sampling)


def _check_selection(
    found: Violations, generation: api.GenerationInput, limits: Limits, *, streams: bool
) -> None:
    """Checks what says how the returned choices are chosen."""
    fewest, most = max(generation.choices, 1), limits.max_choices
    rule = f"must be at least the number of choices, and at most {most}"
    unseen = "has no stream: what is best is known at the end"
    if generation.HasField("best_of"):
        ok = fewest <= generation.best_of <= most
        found.unless(ok, "input.best_of", rule)
        found.unless(not streams or generation.best_of <= fewest, "input.best_of", unseen)
    if not generation.HasField("beams"):
        return
    beams, path = generation.beams, "input.beams"
    found.unless(fewest <= beams.width <= most, f"{path}.width", rule)
    found.unless(not streams, path, unseen)
    ok = _within(beams.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    bounds = f"[-{MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]"
    found.unless(ok, f"{path}.length_penalty", f"must be in {bounds}")
    ok = beams.early_stopping in api.EarlyStopping.values()
    found.unless(ok, f"{path}.early_stopping", "must be a known way to stop")
    sampling, chat = generation.sampling, generation.chat
    for name, is_set in (
        ("best_of", generation.HasField("best_of")),
        ("sampling.temperature", sampling.temperature > 0),
        ("sampling.top_p", sampling.HasField("top_p") and sampling.top_p != 1),
        ("sampling.top_k", sampling.top_k > 0),
        ("sampling.min_p", sampling.min_p != 0),
        ("sampling.frequency_penalty", sampling.frequency_penalty != 0),
        ("sampling.presence_penalty", sampling.presence_penalty != 0),
        (
            "sampling.repetition_penalty",
            sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1,
        ),
        ("sampling.logit_bias", bool(sampling.logit_bias)),
        ("sampling.allowed_token_ids", bool(sampling.allowed_token_ids)),
        ("sampling.bad_words", bool(sampling.bad_words)),
        ("structure", generation.HasField("structure")),
        ("stop.sequences", bool(generation.stop.sequences)),
        ("chat.tools", bool(chat.tools)),
        ("chat.thinking_token_budget", chat.HasField("thinking_token_budget")),
    ):
        rule = "does not go with beam search, which draws nothing and follows several outputs"
        found.unless(not is_set, f"input.{name}", rule)
    ok = len(generation.stop.token_ids) <= MAX_BEAM_STOP_TOKENS
    rule = f"must have at most {MAX_BEAM_STOP_TOKENS} ids beside beam search"
    found.unless(ok, "input.stop.token_ids", rule)


def _check_logit_bias(found: Violations, sampling: api.SamplingOptions) -> None:
    path = "input.sampling.logit_bias"
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        found.add(path, f"must have at most {MAX_LOGIT_BIASES} entries")
        return
    outside = sorted(
        token_id
        for token_id, bias in sampling.logit_bias.items()
        if not _within(bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    )
    for token_id in outside[:_MAX_REPORTED_IDS]:
        found.add(f"{path}[{token_id}]", f"must be in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]")


def _check_stop(found: Violations, stop: api.StopOptions, limits: Limits) -> None:
    if stop.HasField("max_tokens"):
        ok = stop.max_tokens >= 1 and (
            stop.cut_max_tokens or stop.max_tokens <= limits.max_output_tokens
        )
        found.unless(ok, "input.stop.max_tokens", f"must be in [1, {limits.max_output_tokens}]")
    path = "input.stop.sequences"
    found.unless(
        len(stop.sequences) <= MAX_STOP_TEXTS, path, f"must have at most {MAX_STOP_TEXTS} texts"
    )
    for index, text in enumerate(stop.sequences[:MAX_STOP_TEXTS]):
        ok = 1 <= len(text.encode()) <= MAX_STOP_TEXT_BYTES
        found.unless(ok, f"{path}[{index}]", f"must have 1 to {MAX_STOP_TEXT_BYTES} bytes")
    ok = len(stop.token_ids) <= MAX_STOP_TOKENS
    found.unless(ok, "input.stop.token_ids", f"must have at most {MAX_STOP_TOKENS} ids")


def _check_output(found: Violations, output: api.OutputOptions) -> None:
    path = "input.output.top_logprobs"
    found.unless(
        output.top_logprobs <= MAX_TOP_LOGPROBS, path, f"must be at most {MAX_TOP_LOGPROBS}"
    )
    found.unless(output.logprobs or not output.top_logprobs, path, "needs logprobs")
    rule = f"must be at most {MAX_MESSAGE_MS}"
    found.unless(output.min_message_ms <= MAX_MESSAGE_MS, "input.output.min_message_ms", rule)


def check_ids(found: Violations, path: str, ids: Sequence[int], vocab_size: int) -> None:
    """Notes ids outside a vocabulary."""
    if not ids or np.max(np.asarray(ids)) < vocab_size:
        return
    outside = [index for index, token_id in enumerate(ids) if token_id >= vocab_size]
    for index in outside[:_MAX_REPORTED_IDS]:
        found.add(f"{path}[{index}]", _vocabulary_rule(vocab_size))


def _check_tokenizable(
    found: Violations, holder: api.GenerationInput | api.TokenizeRequest, path: str
) -> None:
    kind = holder.WhichOneof("prompt")
    if kind in ("text", "chat"):
        found.add(_join(path, kind), "the model has no tokenizer")


def _first_outside(ids: Iterable[int], vocab_size: int) -> list[int]:
    return [token_id for token_id in ids if token_id >= vocab_size][:_MAX_REPORTED_IDS]


def _vocabulary_rule(vocab_size: int) -> str:
    return f"must be below the vocabulary's size, {vocab_size}"


def _within(value: float, low: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
