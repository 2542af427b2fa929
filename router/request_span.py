"""What is recorded of one generation: its span, the steps below it, figures, a line in the log.

Nothing here holds a prompt, an output or the text of an exception.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Self

from baton.inference.v1 import inference_pb2 as api
from router.errors import RouterError
from telemetry.names import Attr, SpanName
from telemetry.tracing import context_of, end_span, start_span, trace_id_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from opentelemetry.util.types import AttributeValue

    from router.calls import Call
    from router.events import RouterEvents
    from router.jobs import Job

logger = logging.getLogger(__name__)

_FINISH_WORDS: Final = {
    api.FINISH_REASON_END_OF_SEQUENCE: "stop",
    api.FINISH_REASON_STOP: "stop",
    api.FINISH_REASON_LENGTH: "length",
}
_MAX_NAME_CHARS: Final = 128
_PROVIDER: Final = "baton"
_DEADLINE_SLACK_S: Final = 0.02
"""gRPC's clock and ours may differ by this much about when a deadline is met."""


class RequestSpan:
    """The span `text_completion MODEL` below the call's; a context manager around the request."""

    def __init__(
        self,
        call: Call,
        request: api.GenerateRequest | api.StreamGenerateRequest,
        events: RouterEvents,
    ) -> None:
        self._call = call
        self._events = events
        self._model = request.input.model[:_MAX_NAME_CHARS]
        self._client_tag = request.client_tag[:_MAX_NAME_CHARS]
        self._span = start_span(
            SpanName.request(self._model),
            call.context,
            {
                Attr.OPERATION_NAME: Attr.TEXT_COMPLETION,
                Attr.PROVIDER_NAME: _PROVIDER,
                Attr.REQUEST_STREAM: isinstance(request, api.StreamGenerateRequest),
                Attr.RESPONSE_ID: call.id,
            },
            start_ns=call.arrived_ns,
        )
        self.context = context_of(self._span)
        """Holds this span: the parent of all that is done for the request."""
        self._served_model = ""
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._first_token_s: float | None = None
        self._last_tokens_s: dict[int, float] = {}
        """By choice: when its last message of tokens left, from the arrival."""
        self._finish_reasons: dict[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        stack: TracebackType | None,
    ) -> None:
        outcome = _outcome(error)
        if outcome == "CANCELLED" and self._is_overdue():
            outcome = "DEADLINE_EXCEEDED"  # gRPC tells both to a handler in the same way.
        reasons = [reason for _, reason in sorted(self._finish_reasons.items())]
        totals: dict[str, AttributeValue] = {
            Attr.OUTPUT_TOKENS: self._output_tokens,
            Attr.RESPONSE_FINISH_REASONS: reasons,
        }
        end_span(self._span, attributes=totals, error=outcome)
        duration_s = self._passed_s
        self._events.ended(
            self._served_model,
            outcome or "OK",
            duration_s,
            first_token_s=self._first_token_s,
            output_tokens=self._output_tokens,
            trace_id=trace_id_of(self.context),
        )
        self._log(outcome, duration_s, reasons)

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
        """Notes what is asked for, defaults filled in."""
        self._model = self._served_model = job.model.name
        self._prompt_tokens = job.prompt_tokens
        self._span.update_name(SpanName.request(job.model.name))
        sampling = job.sampling
        self._span.set_attributes(
            {
                Attr.REQUEST_MODEL: job.model.name,
                Attr.RESPONSE_MODEL: job.model.name,
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

    def observe(self, message: api.StreamGenerateResponse) -> None:
        """Takes note of a message on its way to the client."""
        match message.WhichOneof("event"):
            case "started":
                cached = message.started.cached_prompt_tokens
                self._span.set_attribute(Attr.CACHED_INPUT_TOKENS, cached)
            case "delta":
                self._observe_tokens(message.delta)
            case "finished":
                finished = message.finished
                self._finish_reasons[finished.choice_index] = _FINISH_WORDS[finished.finish_reason]

    def _observe_tokens(self, delta: api.TokenDelta) -> None:
        if not delta.token_ids:  # Text that was held back.
            return
        now_s = self._passed_s
        if self._first_token_s is None:
            self._first_token_s = now_s
            self._span.set_attribute(Attr.RESPONSE_FIRST_TOKEN_S, now_s)
            trace_id = trace_id_of(self.context)
            self._events.first_token(self._model, now_s, self._prompt_tokens, trace_id)
        last_s = self._last_tokens_s.get(delta.choice_index)
        self._last_tokens_s[delta.choice_index] = now_s
        count = len(delta.token_ids)
        self._output_tokens += count
        self._events.tokens(self._model, count, None if last_s is None else now_s - last_s)

    @property
    def _passed_s(self) -> float:
        return (time.time_ns() - self._call.arrived_ns) / 1e9

    def _is_overdue(self) -> bool:
        left_s = self._call.time_left_s
        return left_s is not None and self._passed_s > left_s - _DEADLINE_SLACK_S

    def _log(self, outcome: str, duration_s: float, reasons: list[str]) -> None:
        logger.info(
            "generation ended",
            extra={
                "trace_id": self._call.id,
                "client_tag": self._client_tag,
                "model": self._model,
                "outcome": outcome or "OK",
                "prompt_tokens": self._prompt_tokens,
                "output_tokens": self._output_tokens,
                "finish_reasons": reasons,
                "first_token_s": round(self._first_token_s or 0.0, 6),
                "duration_s": round(duration_s, 6),
            },
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
