"""Calls of an operator to a router's admin port, which needs the operator's token for them."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from console.top.scrape import base_url

TOKEN_VARIABLE: Final = "BATON_OPERATOR_TOKEN"


class OperatorCallError(Exception):
    """What an operator asked for was not done. The message says why."""


def ask_router(
    admin: str, path: str, change: Mapping[str, Any] | None = None, *, timeout_s: float
) -> str:
    """What the router answers.

    Args:
        admin: its admin address.
        path: what is asked for.
        change: sent as JSON; None: something is only looked at.
        timeout_s: how long to wait for the answer.

    Raises:
        OperatorCallError: it refuses, or does not answer.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    url, body = f"{base_url(admin)}{path}", json.dumps(change).encode() if change else None
    request = urllib.request.Request(url, body, {"authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            raise OperatorCallError(_why(error.code, error.read(), url)) from None
    except (OSError, ValueError, http.client.HTTPException):
        raise _silent(url) from None


def ask_router_json(
    admin: str, path: str, change: Mapping[str, Any] | None = None, *, timeout_s: float
) -> Any:
    """What the router answers, parsed; see `ask_router`."""
    try:
        return json.loads(ask_router(admin, path, change, timeout_s=timeout_s))
    except ValueError:
        raise _silent(f"{base_url(admin)}{path}") from None


def _silent(url: str) -> OperatorCallError:
    return OperatorCallError(f"{url} does not answer: does the router run there?")


def _why(status: int, body: bytes, url: str) -> str:
    if status == 403:
        return f"this needs the router's operator token: set {TOKEN_VARIABLE} here and there"
    with suppress(ValueError, KeyError, TypeError):
        if isinstance(why := json.loads(body)["error"], str):
            return why
    return f"{url} answered {status}: is this a router's admin port?"
