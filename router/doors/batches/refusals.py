"""Errors of requests that name a file or a batch."""

from __future__ import annotations

import grpc

from router.errors import RouterError, Violation, invalid_fields


def not_kept() -> RouterError:
    """The router has no folder for files."""
    message = "this router keeps no files: batches_folder is not set"
    return RouterError(grpc.StatusCode.NOT_FOUND, "FILE_NOT_FOUND", message)


def file_not_found() -> RouterError:
    """The tenant has no such file, or no longer."""
    message = "there is no such file, or no longer"
    return RouterError(grpc.StatusCode.NOT_FOUND, "FILE_NOT_FOUND", message)


def batch_not_found() -> RouterError:
    """The tenant has no such batch, or no longer."""
    message = "there is no such batch, or no longer"
    return RouterError(grpc.StatusCode.NOT_FOUND, "BATCH_NOT_FOUND", message)


def store_full(what: str, most: int) -> RouterError:
    """The tenant has as much as the router keeps of one."""
    return RouterError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "STORE_FULL",
        f"the router keeps at most {most} {what} of a tenant: delete files that are not needed",
        {"what": what, "limit": str(most)},
    )


def wrong(field: str, rule: str) -> RouterError:
    """A field breaks a rule."""
    return invalid_fields([Violation(field, rule)])
