"""Every error that a client can get, and its conversion to a status.

One constructor below raises each row of the API's error table. The edge converts errors once:
`describe` turns any exception into a `RouterError`, and `to_status` turns that into a
`google.rpc.Status`. The text of a foreign exception is dropped, since it may hold a prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from telemetry import logs

if TYPE_CHECKING:
    from google.protobuf.message import Message

logger = logging.getLogger(__name__)

DOMAIN: Final = "baton.inference.v1"
"""`ErrorInfo.domain` of every error: the package that defines the reasons."""
MAX_VIOLATIONS: Final = 32
"""Most violations in one error. Statuses travel in trailers, which hold a few KiB."""
PROMPT: Final = "input"
"""Field of a violation that the prompt is to blame for, whichever form it has."""
_MAX_VALUE_CHARS: Final = 128
"""A client's own values in an error are cut at this length."""
_MAX_NAMES: Final = 8
"""Most names in an error; ListModels has them all."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One field that breaks a rule."""

    field: str
    """Path from the request, such as `input.sampling.top_p`."""
    description: str
    """The rule; never the value."""


@dataclass(eq=False)
class RouterError(Exception):
    """A status for the client. Use the constructors of this module."""

    code: grpc.StatusCode
    reason: str
    """`ErrorInfo.reason`, stable."""
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    """`ErrorInfo.metadata`: every dynamic value of the message."""
    retry_after_s: float | None = None
    """Set if a retry can help."""
    violations: Sequence[Violation] = ()
    resource: tuple[str, str] | None = None
    """Type and name of the missing resource."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


@contextmanager
def naming_prompt(path: str) -> Iterator[None]:
    """Within it, violations of the prompt name the field that holds it."""
    try:
        yield
    except RouterError as error:
        error.violations = [
            Violation(path, one.description) if one.field == PROMPT else one
            for one in error.violations
        ]
        raise


def malformed_request(message: str = "the request could not be parsed") -> RouterError:
    """The bytes are not a message of the method's type."""
    return RouterError(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST", message)


def invalid_fields(violations: Sequence[Violation], count: int | None = None) -> RouterError:
    """All violations at once: fields out of range, an empty prompt, ids outside the vocabulary.
    `count` is the total if `violations` holds only some."""
    count = len(violations) if count is None else count
    shown = [
        Violation(one.field[:_MAX_VALUE_CHARS], one.description)
        for one in violations[:MAX_VIOLATIONS]
    ]
    first = shown[0]
    others = f" (and {count - 1} more)" if count > 1 else ""
    return RouterError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_FIELD",
        f"{first.field}: {first.description}{others}",
        {"field": first.field, "violations": str(count)},
        violations=shown,
    )


def context_length_exceeded(
    prompt_tokens: int,
    max_tokens: int,
    limit_tokens: int,
    limited_by: str = "",
    *,
    at_least: bool = False,
) -> RouterError:
    """Prompt and `max_tokens` together do not fit the context, or the largest pool. The message
    begins as OpenAI's does, since clients match on it.

    Args:
        prompt_tokens: length of the prompt.
        max_tokens: most tokens of an output.
        limit_tokens: most of both.
        limited_by: what sets the limit, if it is not the model.
        at_least: the prompt was not tokenized, because its bytes show that it has at least that
            many tokens.
    """
    limit = f"This model's maximum context length is {limit_tokens} tokens{limited_by}: "
    if prompt_tokens >= limit_tokens:  # for any max_tokens, set or not
        at_fault = PROMPT
        message = (
            f"{limit}{'at least ' * at_least}{prompt_tokens} prompt tokens leave none for output, "
            "which is at least 1"
        )
    else:
        at_fault = "input.stop.max_tokens"
        message = f"{limit}{prompt_tokens} prompt tokens and max_tokens {max_tokens} exceed it"
    return RouterError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "CONTEXT_LENGTH_EXCEEDED",
        message,
        {
            "prompt_tokens": str(prompt_tokens),
            "max_tokens": str(max_tokens),
            "max_context_tokens": str(limit_tokens),
        },
        violations=[Violation(at_fault, message)],
    )


def model_not_found(name: str, served: Sequence[str] = ()) -> RouterError:
    """No such model is served; `served` are. An empty name means that there are several."""
    name = name[:_MAX_VALUE_CHARS]
    names = ", ".join(one[:_MAX_VALUE_CHARS] for one in served[:_MAX_NAMES])
    names += ", ..." if len(served) > _MAX_NAMES else ""
    wrong = f"model {name!r} is not served" if name else "several models are served: name one"
    return RouterError(
        grpc.StatusCode.NOT_FOUND,
        "MODEL_NOT_FOUND",
        f"{wrong} (served: {names})" if names else wrong,
        {"model": name, "served": names},
        resource=("model", name),
    )


def unauthenticated() -> RouterError:
    """The caller sent no token or an unknown one."""
    message = "a valid token is needed"
    return RouterError(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", message)


def permission_denied(message: str = "the caller may not do this") -> RouterError:
    """The caller is known and may not do this."""
    return RouterError(grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED", message)


def queue_full(queued_requests: int, retry_after_s: float) -> RouterError:
    """The queue, or its token budget, is full. `retry_after_s` comes from the measured drain
    rate."""
    return RouterError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        f"the queue is full: {queued_requests} requests wait",
        {"queued_requests": str(queued_requests)},
        retry_after_s,
    )


def router_busy(held_bytes: int, retry_after_s: float = 1.0) -> RouterError:
    """The bodies that are being read fill their memory budget."""
    code, metadata = grpc.StatusCode.RESOURCE_EXHAUSTED, {"held_bytes": str(held_bytes)}
    message = f"{held_bytes} bytes of other requests are being read"
    return RouterError(code, "ROUTER_BUSY", message, metadata, retry_after_s)


def quota_exceeded(
    what: str, used: int, wanted: int, limit: int, retry_after_s: float = 1.0
) -> RouterError:
    """The tenant has as much under way as it may; `what` is requests, tokens or sequences. A
    request that is too much by itself is not to be tried again."""
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    message = f"{wanted} {what} beside {used} under way are more than the tenant's {limit}"
    metadata = {"quota": what, "used": str(used), "wanted": str(wanted), "limit": str(limit)}
    retry = retry_after_s if wanted <= limit else None
    return RouterError(code, "QUOTA_EXCEEDED", message, metadata, retry)


def queue_timeout(waited_s: float, retry_after_s: float) -> RouterError:
    """The request waited longer than the queue allows."""
    code, metadata = grpc.StatusCode.RESOURCE_EXHAUSTED, {"waited_s": f"{waited_s:.1f}"}
    message = f"no worker had room within {waited_s:.1f} s"
    return RouterError(code, "QUEUE_TIMEOUT", message, metadata, retry_after_s)


def deadline_unreachable(needed_s: float, left_s: float, retry_after_s: float) -> RouterError:
    """The answer would not be whole by the deadline, with what waits ahead of it."""
    return RouterError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "DEADLINE_UNREACHABLE",
        f"about {needed_s:.1f} s to the last token, and {left_s:.1f} s to the deadline",
        {"needed_s": f"{needed_s:.1f}", "left_s": f"{left_s:.1f}"},
        retry_after_s,
    )


def no_workers(model: str = "", retry_after_s: float = 1.0, *, missing: str = "") -> RouterError:
    """No attached worker could run the request; `missing` is the role that no worker has."""
    kind = f"{missing} worker" if missing else "worker"
    message = f"no {kind} for model {model!r}" if model else "no worker is attached"
    return _unavailable("NO_WORKERS", message, {"model": model}, retry_after_s)


def workers_differ(model: str, retry_after_s: float = 1.0) -> RouterError:
    """Both roles are attached, but no two of the workers have the same weights and layout."""
    message = f"the workers of model {model!r} differ in weights or settings: no pair can run it"
    return _unavailable("NO_WORKERS", message, {"model": model}, retry_after_s)


def model_loading(model: str, retry_after_s: float = 5.0, why: str = "is loading") -> RouterError:
    """Workers still load the model, or an adapter."""
    message = f"model {model!r} {why}"
    return _unavailable("MODEL_LOADING", message, {"model": model}, retry_after_s)


def draining(retry_after_s: float = 1.0) -> RouterError:
    """This router takes no new work."""
    return _unavailable("DRAINING", "this router shuts down", {}, retry_after_s)


def workers_draining(model: str, retry_after_s: float = 1.0) -> RouterError:
    """Every worker that could run the request is shutting down."""
    message = f"the workers of model {model!r} shut down"
    return _unavailable("DRAINING", message, {"model": model}, retry_after_s)


def worker_lost(attempts: int, retry_after_s: float = 1.0) -> RouterError:
    """A worker was lost before the first token, and the router's own retries are spent."""
    message = f"the worker was lost, attempts: {attempts}"
    return _unavailable("WORKER_LOST", message, {"attempts": str(attempts)}, retry_after_s)


def kv_transfer_failed(attempts: int, retry_after_s: float = 1.0) -> RouterError:
    """The KV pages could not be moved, nor computed again."""
    message = f"the KV pages could not be moved, attempts: {attempts}"
    return _unavailable("KV_TRANSFER_FAILED", message, {"attempts": str(attempts)}, retry_after_s)


def worker_lost_mid_stream(tokens_sent: int, *, lacks_adapter: bool = False) -> RouterError:
    """A worker was lost after the first token, and no other could resume the stream."""
    why = ", and no others have the adapter as it was when the stream began"
    return RouterError(
        grpc.StatusCode.ABORTED,
        "WORKER_LOST_MID_STREAM",
        f"the worker was lost after {tokens_sent} tokens{why if lacks_adapter else ''}",
        {"tokens_sent": str(tokens_sent)},
    )


def poison_request(workers_lost: int, tokens_sent: int, *, started: bool) -> RouterError:
    """The request lost so many workers that it may be the cause of their deaths.

    The code is ABORTED after the first token and INTERNAL before it. Clients retry neither of them
    by themselves, as they would UNAVAILABLE.
    """
    return RouterError(
        grpc.StatusCode.ABORTED if started else grpc.StatusCode.INTERNAL,
        "POISON_REQUEST",
        f"{workers_lost} workers were lost while they ran the request, after {tokens_sent} tokens",
        {"workers_lost": str(workers_lost), "tokens_sent": str(tokens_sent)},
    )


def reader_too_slow(tokens_sent: int, tokens_waiting: int) -> RouterError:
    """The client left more tokens unread than the router keeps for one stream."""
    return RouterError(
        grpc.StatusCode.ABORTED,
        "READER_TOO_SLOW",
        f"{tokens_waiting} tokens were left unread after {tokens_sent}",
        {"tokens_sent": str(tokens_sent), "tokens_waiting": str(tokens_waiting)},
    )


def numerical_error() -> RouterError:
    """The model's logits held NaN or infinity."""
    words = "the model computed NaN or infinity"
    return RouterError(grpc.StatusCode.INTERNAL, "NUMERICAL_ERROR", words)


def structure_too_complex(tokens_sent: int) -> RouterError:
    """The form of the output takes more time or memory to check than it may, or needs more fuel for
    a token than it has. It would do so again."""
    words = f"the structure is too complex to be followed after {tokens_sent} tokens"
    sent = {"tokens_sent": str(tokens_sent)}
    return RouterError(grpc.StatusCode.INVALID_ARGUMENT, "STRUCTURE_TOO_COMPLEX", words, sent)


def no_token_left(tokens_sent: int) -> RouterError:
    """What narrows the tokens of the output, together, leaves none to draw."""
    words = f"allowed_token_ids, bad_words and structure leave no token after {tokens_sent} tokens"
    sent = {"tokens_sent": str(tokens_sent)}
    return RouterError(grpc.StatusCode.INVALID_ARGUMENT, "NO_TOKEN_LEFT", words, sent)


def hook_failed(hook: str) -> RouterError:
    """A hook that the operator has installed raised, or was too slow. It would do so again."""
    message = f"the hook {hook} failed"
    return RouterError(grpc.StatusCode.INTERNAL, "HOOK_FAILED", message, {"hook": hook})


def tokenizer_unsupported(why: str) -> RouterError:
    """The model's folder has a tokenizer that is not read as transformers reads it."""
    return RouterError(grpc.StatusCode.INTERNAL, "TOKENIZER_UNSUPPORTED", why, {"why": why})


def cancelled() -> RouterError:
    """The caller went away."""
    return RouterError(grpc.StatusCode.CANCELLED, "CANCELLED", "the caller cancelled")


def deadline_exceeded(tokens_sent: int) -> RouterError:
    """The deadline passed while the request ran; tokens already sent stay valid."""
    return RouterError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "DEADLINE_EXCEEDED",
        f"the deadline was met after {tokens_sent} tokens",
        {"tokens_sent": str(tokens_sent)},
    )


def internal() -> RouterError:
    """Any bug. The text says nothing; the trace id in the details leads to the log."""
    return RouterError(grpc.StatusCode.INTERNAL, "INTERNAL", "an internal error occurred")


def describe(error: BaseException, trace_id: str = "") -> RouterError:
    """The error as a client may see it. A foreign exception is logged without its text."""
    if isinstance(error, RouterError):
        return error
    logger.error("internal error", extra={"exception": logs.describe(error), "trace_id": trace_id})
    return internal()


def to_status(error: RouterError, trace_id: str = "") -> status_pb2.Status:
    """The status with its details; `trace_id` becomes RequestInfo."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    ]
    if error.violations:
        details.append(
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(
                        field=violation.field, description=violation.description
                    )
                    for violation in error.violations
                ]
            )
        )
    if error.resource is not None:
        kind, name = error.resource
        details.append(error_details_pb2.ResourceInfo(resource_type=kind, resource_name=name))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1e3))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if trace_id:
        details.append(error_details_pb2.RequestInfo(request_id=trace_id))
    return status_pb2.Status(
        code=error.code.value[0], message=error.message, details=[_packed(one) for one in details]
    )


def _unavailable(
    reason: str, message: str, metadata: Mapping[str, str], retry_after_s: float
) -> RouterError:
    return RouterError(grpc.StatusCode.UNAVAILABLE, reason, message, metadata, retry_after_s)


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
