"""Asks a server under test for its model, before anything is measured."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Final, NamedTuple

from baton.client.clients import Client
from baton.tls import NO_FILES, TlsFiles
from console.loadgen.endpoints import Target
from console.loadgen.errors import BenchError, WrongUseError
from console.tls_hint import over_http

_TIMEOUT_S: Final = 10.0
"""For the list of models, which a server has ready."""


class Served(NamedTuple):
    """The model under test."""

    model: str
    max_context_tokens: int
    """Longest prompt and output together; 0 where the server does not say."""


def served(target: Target, model: str, api_key: str = "", files: TlsFiles = NO_FILES) -> Served:
    """Returns the named model, or the only one if no name is given.

    Raises:
        BenchError: the server has no such model, has several and none is named, or does not answer.
        BatonError: a router does not answer.
        WrongUseError: a header cannot hold the API key.
    """
    ask = _grpc if target.protocol == "grpc" else _openai
    found = ask(target, api_key, files)
    chosen = [one for one in found if one.model == model or not model]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(one.model for one in found) or "none"
    if not chosen and model:
        raise BenchError(f"{target.address} does not serve {model} (it serves: {names})")
    if not chosen:
        raise BenchError(f"{target.address} serves no model yet")
    raise BenchError(f"{target.address} serves several models, name one: {names}")


def _grpc(target: Target, api_key: str, files: TlsFiles) -> list[Served]:
    ca, cert, key, _ = files
    try:
        client = Client(target.address, token=api_key, tls_ca=ca, tls_cert=cert, tls_key=key)
    except ValueError as error:
        raise WrongUseError(str(error)) from None
    with client:
        models = client.models(timeout_s=_TIMEOUT_S)
    return [Served(model.name, model.max_context_tokens) for model in models]


def _openai(target: Target, api_key: str, files: TlsFiles) -> list[Served]:
    url = f"{target.address}/models"
    request = urllib.request.Request(url)
    context = files.client_context() if any(files) else None
    if api_key:
        request.add_header("authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context) as response:
            data = json.load(response)["data"]
        return [Served(str(one["id"]), int(one.get("max_model_len") or 0)) for one in data]
    except urllib.error.HTTPError as error:
        with error:
            raise BenchError(f"{url} answered {error.code}") from None
    except (OSError, http.client.HTTPException) as error:
        why = over_http(error)
        raise BenchError(f"{url} {why}" if why else f"nobody answers at {url}") from None
    except (ValueError, KeyError, TypeError):
        raise BenchError(f"{url} does not speak the OpenAI API") from None
