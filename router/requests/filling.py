"""Fills the fields of a job with what a request says and with the defaults for the rest."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from baton.inference.v1 import inference_pb2 as api
from baton.worker.v1 import worker_pb2
from router import errors
from router.answers.detokenization import (
    CONTEXT_TOKENS,
    Detokenizer,
    ShowsSpecial,
    StopTexts,
)
from router.errors import Violation
from router.requests.outputs import ChoiceOutput
from router.requests.selecting import selects

if TYPE_CHECKING:
    from router.answers.token_texts import ByteDetokenizer
    from router.jobs import Job, ServedModel
    from router.requests.tokenization import PromptIds, Tokenizer
    from router.requests.validation import Limits
    from router.structure.plan import AnswerPlan

_GREEDY_BELOW: Final = 1e-5
"""Below this temperature only the likeliest token can be drawn, and logits would overflow."""


def fill_sampling(generation: api.GenerationInput, model: ServedModel) -> worker_pb2.Sampling:
    """Sampling with every default filled in, the model's first, and a drawn seed if none is
    given."""
    sampling, output = generation.sampling, generation.output
    chosen = worker_pb2.SamplingDefaults(temperature=1.0, top_p=1.0, repetition_penalty=1.0)
    if model.sampling is not None:
        chosen.MergeFrom(model.sampling)
    for field, value in sampling.ListFields():
        if field.name in chosen.DESCRIPTOR.fields_by_name:
            setattr(chosen, field.name, value)
    return worker_pb2.Sampling(
        temperature=chosen.temperature if chosen.temperature >= _GREEDY_BELOW else 0.0,
        top_p=chosen.top_p,
        top_k=chosen.top_k if chosen.top_k < model.vocab_size else 0,
        min_p=chosen.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=chosen.repetition_penalty,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        logit_bias=sampling.logit_bias,
        top_logprobs=output.top_logprobs if output.logprobs or selects(generation) else None,
        allowed_token_ids=sampling.allowed_token_ids,
    )


def fill_beams(generation: api.GenerationInput) -> worker_pb2.BeamSearch | None:
    """The search that a request asks for, with every default filled in; None: none."""
    if not generation.HasField("beams"):
        return None
    beams = generation.beams
    early = api.EarlyStopping.Name(beams.early_stopping)
    return worker_pb2.BeamSearch(
        width=beams.width,
        length_penalty=beams.length_penalty if beams.HasField("length_penalty") else 1.0,
        early_stopping=worker_pb2.EarlyStopping.Value(early),
    )


def fill_stopping(
    stop: api.StopOptions, prompt_tokens: int, model: ServedModel, limits: Limits
) -> worker_pb2.Stopping:
    """Stopping rules with `max_tokens` filled in, so that prompt and output fit the context.

    Raises:
        RouterError: CONTEXT_LENGTH_EXCEEDED, or INVALID_FIELD if `min_tokens` exceeds `max_tokens`.
    """
    room = model.max_context_tokens - prompt_tokens
    max_tokens = stop.max_tokens or max(1, min(room, limits.default_max_tokens))
    if stop.cut_max_tokens:
        max_tokens = max(1, min(max_tokens, room, limits.max_output_tokens))
    if max_tokens > room:
        raise errors.context_length_exceeded(prompt_tokens, max_tokens, model.max_context_tokens)
    if stop.min_tokens > max_tokens:
        rule = f"must be at most max_tokens, which is {max_tokens} here"
        raise errors.invalid_fields([Violation("input.stop.min_tokens", rule)])
    return worker_pb2.Stopping(
        max_tokens=max_tokens,
        min_tokens=stop.min_tokens,
        token_ids=stop.token_ids,
        ignore_eos=stop.ignore_eos,
    )


def restrict(job: Job, bad_words: Iterable[bytes], plan: AnswerPlan) -> None:
    """Adds to the job what narrows the tokens that may be drawn."""
    job.sampling.grammar = plan.grammar
    if plan.thinking is not None:
        job.sampling.thinking.CopyFrom(plan.thinking)
    job.sampling.bad_words.extend(bad_words)


def most_kept(generation: api.GenerationInput, max_context_tokens: int) -> int | None:
    """The tokens of a prompt that are kept at most; None for all."""
    if not generation.HasField("truncate_prompt_tokens"):
        return None
    room = max(1, max_context_tokens - (generation.stop.max_tokens or 1))
    return min(generation.truncate_prompt_tokens, room)


def last(ids: PromptIds, count: int | None) -> PromptIds:
    """The last `count` ids; None for all."""
    return ids if count is None else ids[-count:]


def salted(tenant: str, salt: str) -> bytes:
    """What a request's cached pages are keyed by: its tenant, and its own salt if it has one."""
    if not salt:
        return tenant.encode()
    return hashlib.sha256(f"{len(tenant)}:{tenant}{salt}".encode()).digest()


def choices_of(
    job: Job, generation: api.GenerationInput, tokenizer: Tokenizer | None, plan: AnswerPlan
) -> Iterator[ChoiceOutput]:
    """The outputs of a job's choices, to be filled."""
    stop, output = generation.stop, generation.output
    wants_text = bool(stop.sequences) or plan.is_message or not output.omit_text
    shown: frozenset[int] = frozenset()
    hidden_names: dict[int, str] = {}
    if tokenizer is not None:
        shown = _shown_ids(tokenizer, output, plan)
        in_stops = tokenizer.ids_within(stop.sequences) - shown if stop.sequences else ()
        hidden_names = {one: tokenizer.token_text(one) for one in in_stops}
    for index in range(job.choices):
        detokenizer = None
        if tokenizer is not None and wants_text:
            detokenizer = _detokenizer(tokenizer, shown, job)
        texts = StopTexts(stop.sequences, stop.include_stop) if stop.sequences else None
        yield ChoiceOutput(index, job, detokenizer, texts, generation, plan, hidden_names)


def _detokenizer(
    tokenizer: Tokenizer, shown: frozenset[int], job: Job
) -> Detokenizer | ByteDetokenizer:
    """Text of a choice of a job, with some special tokens shown."""
    tail = job.prompt_ids[-CONTEXT_TOKENS:].tolist()
    if tokenizer.texts is not None:
        return tokenizer.texts.detokenizer(tokenizer.special_ids - shown, tail)
    return Detokenizer(ShowsSpecial(tokenizer, shown) if shown else tokenizer, tail)


def _shown_ids(tokenizer: Tokenizer, output: api.OutputOptions, plan: AnswerPlan) -> frozenset[int]:
    """Special tokens that the text must show: all that the client wants, and those by which parts
    of the answer are found."""
    if output.HasField("skip_special_tokens") and not output.skip_special_tokens:
        return tokenizer.special_ids
    if plan.form is None or not plan.form.markers:
        return frozenset()
    return tokenizer.ids_within(plan.form.markers)
