from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details
from google.rpc import status_pb2

from router import errors
from router.doors.batches import refusals as of_batches
from router.doors.http.bodies import unsupported_encoding
from router.doors.http.statuses import http_status
from router.doors.responses import refusals
from router.errors import RouterError, Violation

Code = grpc.StatusCode
Detail = TypeVar("Detail", bound=Message)
ROWS: list[tuple[RouterError, grpc.StatusCode, str, type[Message] | None]] = [
    (errors.malformed_request(), Code.INVALID_ARGUMENT, "MALFORMED_REQUEST", None),
    (unsupported_encoding(), Code.UNIMPLEMENTED, "UNSUPPORTED_ENCODING", None),
    (
        errors.invalid_fields([Violation("input.choices", "at least 1")]),
        Code.INVALID_ARGUMENT,
        "INVALID_FIELD",
        details.BadRequest,
    ),
    (
        errors.context_length_exceeded(60, 5, 64),
        Code.INVALID_ARGUMENT,
        "CONTEXT_LENGTH_EXCEEDED",
        details.BadRequest,
    ),
    (errors.model_not_found("m"), Code.NOT_FOUND, "MODEL_NOT_FOUND", details.ResourceInfo),
    (of_batches.file_not_found(), Code.NOT_FOUND, "FILE_NOT_FOUND", None),
    (of_batches.batch_not_found(), Code.NOT_FOUND, "BATCH_NOT_FOUND", None),
    (of_batches.store_full("files", 9), Code.RESOURCE_EXHAUSTED, "STORE_FULL", None),
    (refusals.response_not_found(), Code.NOT_FOUND, "RESPONSE_NOT_FOUND", None),
    (
        refusals.previous_response_not_found(),
        Code.INVALID_ARGUMENT,
        "PREVIOUS_RESPONSE_NOT_FOUND",
        details.BadRequest,
    ),
    (errors.unauthenticated(), Code.UNAUTHENTICATED, "UNAUTHENTICATED", None),
    (errors.permission_denied(), Code.PERMISSION_DENIED, "PERMISSION_DENIED", None),
    (errors.queue_full(9, 1.5), Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", details.RetryInfo),
    (
        errors.quota_exceeded("tokens", 1, 2, 2, 1.5),
        Code.RESOURCE_EXHAUSTED,
        "QUOTA_EXCEEDED",
        details.RetryInfo,
    ),
    (errors.router_busy(9, 1.5), Code.RESOURCE_EXHAUSTED, "ROUTER_BUSY", details.RetryInfo),
    (errors.queue_timeout(60, 1.5), Code.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT", details.RetryInfo),
    (
        errors.deadline_unreachable(9, 2, 1.5),
        Code.RESOURCE_EXHAUSTED,
        "DEADLINE_UNREACHABLE",
        details.RetryInfo,
    ),
    (errors.no_workers("m", 1.5), Code.UNAVAILABLE, "NO_WORKERS", details.RetryInfo),
    (errors.model_loading("m", 1.5), Code.UNAVAILABLE, "MODEL_LOADING", details.RetryInfo),
    (errors.draining(1.5), Code.UNAVAILABLE, "DRAINING", details.RetryInfo),
    (errors.workers_draining("m", 1.5), Code.UNAVAILABLE, "DRAINING", details.RetryInfo),
    (errors.worker_lost(3, 1.5), Code.UNAVAILABLE, "WORKER_LOST", details.RetryInfo),
    (errors.kv_transfer_failed(3, 1.5), Code.UNAVAILABLE, "KV_TRANSFER_FAILED", details.RetryInfo),
    (errors.worker_lost_mid_stream(7), Code.ABORTED, "WORKER_LOST_MID_STREAM", None),
    (errors.poison_request(2, 0, started=False), Code.INTERNAL, "POISON_REQUEST", None),
    (errors.poison_request(2, 7, started=True), Code.ABORTED, "POISON_REQUEST", None),
    (errors.reader_too_slow(7, 9), Code.ABORTED, "READER_TOO_SLOW", None),
    (errors.numerical_error(), Code.INTERNAL, "NUMERICAL_ERROR", None),
    (errors.hook_failed("quest"), Code.INTERNAL, "HOOK_FAILED", None),
    (errors.tokenizer_unsupported("no"), Code.INTERNAL, "TOKENIZER_UNSUPPORTED", None),
    (errors.structure_too_complex(3), Code.INVALID_ARGUMENT, "STRUCTURE_TOO_COMPLEX", None),
    (errors.no_token_left(3), Code.INVALID_ARGUMENT, "NO_TOKEN_LEFT", None),
    (errors.cancelled(), Code.CANCELLED, "CANCELLED", None),
    (errors.deadline_exceeded(7), Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", None),
    (errors.internal(), Code.INTERNAL, "INTERNAL", None),
]


def unpacked(status: status_pb2.Status, kind: type[Detail]) -> Detail | None:
    found = kind()
    return found if any(one.Unpack(found) for one in status.details) else None


@pytest.mark.parametrize(("error", "code", "reason", "detail"), ROWS, ids=[row[2] for row in ROWS])
def test_every_row(
    error: RouterError, code: grpc.StatusCode, reason: str, detail: type[Message] | None
) -> None:
    status = errors.to_status(error, "ab" * 16)
    assert status.code == code.value[0]
    info = unpacked(status, details.ErrorInfo)
    assert info is not None
    assert (info.reason, info.domain) == (reason, errors.DOMAIN)
    request = unpacked(status, details.RequestInfo)
    assert request is not None
    assert request.request_id == "ab" * 16
    expected = {details.ErrorInfo, details.RequestInfo, detail} - {None}
    assert {kind for kind in vars(details).values() if _is_detail(kind, status)} == expected
    if detail is details.RetryInfo:
        assert unpacked(status, details.RetryInfo).retry_delay.ToMilliseconds() == 1500
    numbers = {word for word in _words(error.message) if word.isdigit()}
    assert numbers <= set(_words(" ".join(info.metadata.values()))), "a value is not in metadata"


def _is_detail(kind: object, status: status_pb2.Status) -> bool:
    return isinstance(kind, type) and any(one.Is(kind.DESCRIPTOR) for one in status.details)


def _words(text: str) -> list[str]:
    return text.replace(".", " ").replace(",", " ").split()


def test_a_status_fits_the_trailers() -> None:
    many = [Violation(f"input.token_ids.ids[{index}]", "x" * 60) for index in range(5000)]
    status = errors.to_status(errors.invalid_fields(many), "ab" * 16)
    assert status.ByteSize() < 7000
    info = unpacked(status, details.ErrorInfo)
    assert info is not None
    assert info.metadata["violations"] == "5000"
    assert errors.to_status(errors.model_not_found("n" * 100_000)).ByteSize() < 1000


def raise_foreign() -> None:
    raise ValueError("the prompt was: secret")


def raise_ours() -> None:
    raise errors.draining()


@pytest.mark.parametrize(
    ("raise_it", "reason"), [(raise_foreign, "INTERNAL"), (raise_ours, "DRAINING")]
)
def test_text_of_foreign_exceptions_goes_nowhere(
    raise_it: Callable[[], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Exception) as caught, caplog.at_level(logging.DEBUG):  # noqa: PT011 - ours or not
        raise_it()
    described = errors.describe(caught.value, "ab" * 16)
    assert described.reason == reason
    assert "secret" not in f"{described}{errors.to_status(described)}{caplog.text}"
    for record in caplog.records:
        assert "secret" not in str(vars(record))
        described = vars(record)["exception"]
        assert described[0] == "ValueError"
        assert any("raise_foreign" in frame for frame in described)
    assert len(caplog.records) == (reason == "INTERNAL")


def test_the_page_has_every_reason_with_its_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.count("|") == 7]
    told = {row[4].strip(): (row[2].strip(), row[3].strip()) for row in rows[2:]}
    known = {
        error.reason: (error.code.name, str(http_status(error)))
        for error, *_ in ROWS
        if error.reason != "CANCELLED"
    }
    assert told.pop("CANCELLED") == ("CANCELLED", "499, logged")
    assert told == known
