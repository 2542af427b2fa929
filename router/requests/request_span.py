"""The records of one generation: its span, the steps below it, metrics, its part of the log.

Nothing here holds a prompt, an output or the text of an exception.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from baton.inference.v1 import inference_pb2 as api
from router.errors import RouterError
from router.requests.outputs import FINISH_WORDS, Finished, Output, Started, TextDelta
from telemetry.names import Attr, SpanName
from telemetry.tracing import context_of, end_span, start_span, trace_id_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from types import TracebackType

    from opentelemetry.util.types import AttributeValue

    from router.call import Call
    from router.events import RouterEvents
    from router.jobs import Job, JobFinished, ServedModel
    from router.requests.outputs import ShortWay

_MAX_NAME_CHARS: Final = 128
"""Characters of a name that a client sent: spans are stored, and longer ones would be a way to fill
them."""
_PROVIDER: Final = "baton"


class RequestSpan:
    """The span `OPERATION MODEL` (text_completion, chat, embeddings or score), below the call's; a
    context manager around the request."""

    def __init__(
        self,
        call: Call,
        events: RouterEvents,
        operation: str,
        model: str,
        client_tag: str,
        *,
        stream: bool = False,
    ) -> None:
        self._call = call
        self._events = events
        self._model = model[:_MAX_NAME_CHARS]
        self._record = call.record
        self._record.client_tag = client_tag[:_MAX_NAME_CHARS]
        self._operation = operation
        self._span = start_span(
            SpanName.request(self._operation, self._model),
            call.context,
            {
                Attr.OPERATION_NAME: self._operation,
                Attr.PROVIDER_NAME: _PROVIDER,
                Attr.REQUEST_STREAM: stream,
                Attr.RESPONSE_ID: call.id,
            },
            start_ns=call.arrived_ns,
        )
        self.context = context_of(self._span)
        """Context with this span, the parent of all other spans of the request."""
        self._served_model = ""
        self._adapter = ""
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._cached_tokens = 0
        self._first_token_s: float | None = None
        self._paces: dict[int, _Pace] = {}
        """Pace of each choice."""
        self._finish_reasons: dict[int, str] = {}

    @classmethod
    def of(
        cls,
        call: Call,
        request: api.GenerateRequest | api.StreamGenerateRequest,
        events: RouterEvents,
    ) -> Self:
        """The span of a generation."""
        is_chat = request.input.WhichOneof("prompt") == "chat"
        operation = Attr.CHAT if is_chat else Attr.TEXT_COMPLETION
        stream = isinstance(request, api.StreamGenerateRequest)
        given = operation, request.input.model, request.client_tag
        return cls(call, events, *given, stream=stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        stack: TracebackType | None,
    ) -> None:
        outcome = _outcome(error)
        if outcome == "CANCELLED":
            outcome = self._call.left().reason
        reasons = [reason for _, reason in sorted(self._finish_reasons.items())]
        totals: dict[str, AttributeValue] = {
            Attr.OUTPUT_TOKENS: self._output_tokens,
            Attr.RESPONSE_FINISH_REASONS: reasons,
        }
        end_span(self._span, attributes=totals, error=outcome)
        is_batch = self._call.is_batch
        self._events.ended(
            self._served_model,
            outcome or "OK",
            None if is_batch else self._call.passed_s,
            per_token_s=None if is_batch else _per_token_s(self._paces.values()),
            trace_id=trace_id_of(self.context),
            method=self._record.method,
        )
        if self._adapter:
            self._events.adapter_ended(self._adapter, not outcome)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A span below this one around a step of the front door, which may refuse the request."""
        span = start_span(name, self.context)
        try:
            yield
        except BaseException as error:
            end_span(span, error=_outcome(error))
            if isinstance(error, RouterError):
                self._events.rejected(error.reason)
            raise
        end_span(span)

    def describe_job(self, job: Job) -> None:
        """Notes the parameters of the job, with defaults filled in."""
        self._model = self._served_model = job.model.name
        self._adapter = job.model.adapter
        self._prompt_tokens = job.prompt_tokens
        self._record.model = job.model.called
        self._record.prompt_tokens += job.prompt_tokens
        self._span.update_name(SpanName.request(self._operation, job.model.called))
        sampling = job.sampling
        self._span.set_attributes(
            {
                Attr.REQUEST_MODEL: job.model.called,
                Attr.RESPONSE_MODEL: job.model.called,
                Attr.REQUEST_CHOICES: job.choices,
                Attr.REQUEST_MAX_TOKENS: job.stopping.max_tokens,
                Attr.REQUEST_TEMPERATURE: sampling.temperature,
                Attr.REQUEST_TOP_P: sampling.top_p,
                Attr.REQUEST_TOP_K: sampling.top_k,
                Attr.REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
                Attr.REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
                Attr.INPUT_TOKENS: job.prompt_tokens,
            }
        )

    def describe_prompts(self, model: ServedModel, prompt_tokens: int) -> None:
        """Notes the model of prompts that are pooled, and their tokens together."""
        self._model = self._served_model = model.name
        self._adapter, self._record.model = model.adapter, model.called
        self._record.prompt_tokens += prompt_tokens
        self._span.update_name(SpanName.request(self._operation, model.called))
        named = dict.fromkeys((Attr.REQUEST_MODEL, Attr.RESPONSE_MODEL), model.called)
        self._span.set_attributes({**named, Attr.INPUT_TOKENS: prompt_tokens})

    def pooled(self, finished: JobFinished) -> None:
        """Notes the end of one of these prompts."""
        self._observe_cached(self._cached_tokens + finished.cached_prompt_tokens)
        self._record.add_timings(finished.timings)

    def observe(self, output: Output, left_s: float) -> None:
        """Notes an output that left for the client, `left_s` seconds after the request's arrival.
        Call it after the output was sent, so that a first token does not wait for its metrics."""
        match output:
            case TextDelta():
                self.observe_tokens(output, left_s)
            case Started():
                self._observe_cached(output.cached_prompt_tokens)
            case Finished():
                self._observe_end(output)

    def observe_tokens(self, delta: TextDelta, now_s: float) -> None:
        """Notes tokens that left for the client."""
        if not delta.token_ids:  # Text that was held back.
            return
        if self._first_token_s is None:
            self._first_token_s = now_s
            self._span.set_attribute(Attr.RESPONSE_FIRST_TOKEN_S, now_s)
            trace_id = trace_id_of(self.context)
            shown_s = None if self._call.is_batch else now_s
            self._events.first_token(self._model, shown_s, self._prompt_tokens, trace_id)
            if self._adapter:
                self._events.adapter_tokens(self._adapter, "prompt", self._prompt_tokens)
            if self._record.first_token_s is None:
                self._record.first_token_s = now_s
        count = len(delta.token_ids)
        gap_s = None
        if (pace := self._paces.get(delta.choice)) is None:
            self._paces[delta.choice] = _Pace(now_s, now_s, count)
        else:
            gap_s = now_s - pace.last_s
            pace.last_s, pace.tokens = now_s, pace.tokens + count
        self._output_tokens += count
        self._record.output_tokens += count
        self._events.tokens(self._model, count, None if self._call.is_batch else gap_s)
        if self._adapter:
            self._events.adapter_tokens(self._adapter, "output", count)

    def _observe_cached(self, tokens: int) -> None:
        """The count at the end replaces the one at the start."""
        self._record.cached_prompt_tokens += tokens - self._cached_tokens
        self._cached_tokens = tokens
        self._span.set_attribute(Attr.CACHED_INPUT_TOKENS, tokens)

    def _observe_end(self, finished: Finished) -> None:
        if finished.usage is not None:
            self._observe_cached(finished.usage.cached_prompt_tokens)
            self._output_tokens += finished.dropped_tokens
            self._record.output_tokens += finished.dropped_tokens
        reason = FINISH_WORDS[finished.reason]
        self._finish_reasons[finished.choice] = reason
        self._record.finish_reasons.append(reason)
        if finished.timings is not None:
            self._record.add_timings(finished.timings)


class ObservedWay:
    """A short way whose deltas are noted."""

    def __init__(self, short_way: ShortWay, span: RequestSpan, call: Call) -> None:
        self._short_way = short_way
        self._span = span
        self._call = call

    def take(self, delta: TextDelta) -> bool:
        """Sends a delta if it can."""
        if not self._short_way.take(delta):
            return False
        self._span.observe_tokens(delta, self._call.passed_s)
        return True


@dataclass(slots=True)
class _Pace:
    """Times of a choice's first and last messages of tokens, seconds from the arrival."""

    first_s: float
    last_s: float
    tokens: int


def _per_token_s(paces: Collection[_Pace]) -> float | None:
    """Mean time of a token after its choice's first; None if there is no such token."""
    later_tokens = sum(pace.tokens - 1 for pace in paces)
    return (
        sum(pace.last_s - pace.first_s for pace in paces) / later_tokens if later_tokens else None
    )


def _outcome(error: BaseException | None) -> str:
    """Reason of the error table, "" for none."""
    match error:
        case None:
            return ""
        case RouterError():
            return error.reason
        case asyncio.CancelledError() | GeneratorExit():
            return "CANCELLED"
        case _:
            return "INTERNAL"
