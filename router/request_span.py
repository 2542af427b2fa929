"""What is recorded of one generation: its span, the steps below it, one line in the log.

Nothing here holds a prompt, an output or the text of an exception.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from baton.inference.v1 import inference_pb2 as api
from router.errors import RouterError

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from router.calls import Call
    from router.jobs import Job

logger = logging.getLogger(__name__)

_FINISH_WORDS: Final = {
    api.FINISH_REASON_END_OF_SEQUENCE: "stop",
    api.FINISH_REASON_STOP: "stop",
    api.FINISH_REASON_LENGTH: "length",
}
_MAX_NAME_CHARS: Final = 128


class RequestSpan:
    """The span `text_completion MODEL` below the call's; a context manager around the request."""

    def __init__(
        self, call: Call, request: api.GenerateRequest | api.StreamGenerateRequest
    ) -> None:
        self._call = call
        self._tracer = trace.get_tracer("baton.router")
        self._model = request.input.model[:_MAX_NAME_CHARS]
        self._span: Span = self._tracer.start_span(
            f"text_completion {self._model}",
            call.context,
            SpanKind.INTERNAL,
            {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.provider.name": "baton",
                "gen_ai.request.stream": isinstance(request, api.StreamGenerateRequest),
                "gen_ai.response.id": call.id,
            },
            start_time=call.arrived_ns,
        )
        self.context: Context = trace.set_span_in_context(self._span, call.context)
        """Holds this span: the parent of all that is done for the request."""
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._first_token_s = 0.0
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
        reasons = [reason for _, reason in sorted(self._finish_reasons.items())]
        self._span.set_attributes(
            {
                "gen_ai.usage.output_tokens": self._output_tokens,
                "gen_ai.response.finish_reasons": reasons,
            }
        )
        _end(self._span, outcome)
        self._log(outcome, reasons)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A span below this one around a step of the front door."""
        span = self._tracer.start_span(name, self.context)
        try:
            yield
        except BaseException as error:
            _end(span, _outcome(error))
            raise
        _end(span, "")

    def describe_job(self, job: Job) -> None:
        """Notes what is asked for, defaults filled in."""
        self._model = job.model.name
        self._prompt_tokens = job.prompt_tokens
        self._span.update_name(f"text_completion {job.model.name}")
        sampling = job.sampling
        self._span.set_attributes(
            {
                "gen_ai.request.model": job.model.name,
                "gen_ai.response.model": job.model.name,
                "gen_ai.request.choice.count": job.choices,
                "gen_ai.request.max_tokens": job.stopping.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.top_k": sampling.top_k,
                "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
                "gen_ai.request.presence_penalty": sampling.presence_penalty,
                "gen_ai.usage.input_tokens": job.prompt_tokens,
            }
        )

    def observe(self, message: api.StreamGenerateResponse) -> None:
        """Takes note of a message on its way to the client."""
        match message.WhichOneof("event"):
            case "started":
                cached = message.started.cached_prompt_tokens
                self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", cached)
            case "delta":
                if not self._output_tokens:
                    self._first_token_s = (time.time_ns() - self._call.arrived_ns) / 1e9
                    self._span.set_attribute(
                        "gen_ai.response.time_to_first_chunk", self._first_token_s
                    )
                self._output_tokens += len(message.delta.token_ids)
            case "finished":
                finished = message.finished
                self._finish_reasons[finished.choice_index] = _FINISH_WORDS[finished.finish_reason]

    def _log(self, outcome: str, reasons: list[str]) -> None:
        duration_s = (time.time_ns() - self._call.arrived_ns) / 1e9
        logger.info(
            "generation ended",
            extra={
                "trace_id": self._call.id,
                "model": self._model,
                "outcome": outcome or "OK",
                "prompt_tokens": self._prompt_tokens,
                "output_tokens": self._output_tokens,
                "finish_reasons": reasons,
                "first_token_s": round(self._first_token_s, 6),
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


def _end(span: Span, outcome: str) -> None:
    if outcome:
        span.set_attribute("error.type", outcome)
        span.set_status(Status(StatusCode.ERROR, outcome))
    span.end()
