"""Errors that a client of Baton can meet.

Every failure of a call is one `BatonError`, made from the `google.rpc` details in the server's
trailers. The subclass says what the caller can do: correct the request, wait, or report a bug.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, cast

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

DETAILS_KEY: Final = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of the request that the server refused."""

    field: str
    description: str


class BatonError(Exception):
    """A call failed. Tokens streamed before it stay valid."""

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        violations: tuple[FieldViolation, ...] = (),
        trace_id: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        """Stable word such as QUEUE_FULL, or "" where the server gave none."""
        self.metadata = dict(metadata or {})
        """The values that the message mentions."""
        self.retry_after_s = retry_after_s
        """Seconds to wait before the same request may be sent again; None: do not send it again."""
        self.violations = violations
        self.trace_id = trace_id


class InvalidRequestError(BatonError):
    """The request itself is wrong: see `violations`."""


class NotFoundError(BatonError):
    """There is no such model."""


class DeniedError(BatonError):
    """The credentials are missing, wrong or insufficient."""


class OverloadedError(BatonError):
    """The service is full: wait `retry_after_s`."""


class UnavailableError(BatonError):
    """No worker can serve the request now: wait `retry_after_s`."""


class UnreachableError(UnavailableError):
    """There is no router at this address."""


class BrokenOffError(BatonError):
    """The generation broke off after tokens were sent; asking again starts anew."""


class DeadlineError(BatonError):
    """The time set for the call has passed."""


class CancelledError(BatonError):
    """The call was cancelled."""


class ServerError(BatonError):
    """A bug on the server: report it with `trace_id`."""


class ProtocolError(BatonError):
    """The server broke the stream's grammar: tokens are missing, doubled or out of order."""


_KINDS: Final[Mapping[grpc.StatusCode, type[BatonError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.UNAUTHENTICATED: DeniedError,
    grpc.StatusCode.PERMISSION_DENIED: DeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.ABORTED: BrokenOffError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.INTERNAL: ServerError,
    grpc.StatusCode.DATA_LOSS: ServerError,
}


class _FailedCall(Protocol):
    """The methods of every `grpc.RpcError` that a call raises, synchronous or not."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Iterable[tuple[str, bytes]] | None: ...


def from_rpc_error(failed: grpc.RpcError) -> BatonError:
    """Converts the error of a synchronous or asynchronous call to its typed form."""
    error = cast("_FailedCall", failed)
    code = error.code()
    message = error.details() or code.name.replace("_", " ").lower()
    status = _status(error)
    if status is None and code is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = "the time set for the call has passed"  # gRPC has several odd texts for it.
    if status is None and code is grpc.StatusCode.UNAVAILABLE:
        return UnreachableError(message, code=code, reason="UNREACHABLE")
    return _typed(code, message, status)


def from_status(status: status_pb2.Status) -> BatonError:
    """Converts a status to its typed form, for servers' code that runs in this process."""
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    return _typed(code, status.message, status)


def _typed(code: grpc.StatusCode, message: str, status: status_pb2.Status | None) -> BatonError:
    info, retry, bad, request = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.RetryInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RequestInfo(),
    )
    found = {part.DESCRIPTOR.name for part in (info, retry, bad, request) if _unpack(status, part)}
    return _KINDS.get(code, BatonError)(
        message,
        code=code,
        reason=info.reason,
        metadata=info.metadata,
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if "RetryInfo" in found else None,
        violations=tuple(FieldViolation(v.field, v.description) for v in bad.field_violations),
        trace_id=request.request_id,
    )


def _status(error: _FailedCall) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _unpack(status: status_pb2.Status | None, into: Message) -> bool:
    """Fills `into` from the detail of its type. Returns whether there was one."""
    return any(detail.Unpack(into) for detail in (status.details if status else ()))
