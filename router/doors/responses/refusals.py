"""Errors of requests that name a response."""

from __future__ import annotations

import grpc

from router import errors
from router.errors import RouterError, Violation

PREVIOUS = "previous_response_id"


def response_not_found() -> RouterError:
    """The tenant has no such response, or no longer."""
    message = "there is no such response, or no longer: it was not stored, or deleted"
    return RouterError(grpc.StatusCode.NOT_FOUND, "RESPONSE_NOT_FOUND", message)


def previous_response_not_found() -> RouterError:
    """A request follows a response that is not there, or whose own chain is not whole."""
    message = "the previous response, or one before it, is not there: send the whole conversation"
    return RouterError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "PREVIOUS_RESPONSE_NOT_FOUND",
        message,
        violations=[Violation(PREVIOUS, message)],
    )


def not_kept(field: str) -> RouterError:
    """The router has no store."""
    rule = "is not supported: this router keeps no responses (responses_folder is not set)"
    return errors.invalid_fields([Violation(field, rule)])


def too_long(field: str) -> RouterError:
    """What the store holds is more than a request may hold."""
    rule = "names a conversation that is longer than a request may be"
    return errors.invalid_fields([Violation(field, rule)])
