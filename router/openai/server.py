"""The HTTP port of a router: its routes, and the server in the process's own event loop.

Signals are left to the process. `stop` lets what is under way end for a moment: whoever stops the
router has ended the jobs before, so that their last words are on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import uvicorn
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from router import errors
from router.generation import Generations
from router.openai import statuses
from router.openai.chat import ChatCompletions
from router.openai.completions import Completions
from router.openai.edge import Endpoint

if TYPE_CHECKING:
    from starlette.requests import Request

    from router.jobs import Dispatcher, ServedModel
    from router.openai.statuses import JSON
    from router.tokenization import Tokenizers
    from router.validation import Limits

COMPLETIONS: Final = "/v1/completions"
CHAT_COMPLETIONS: Final = "/v1/chat/completions"
STOP_TIMEOUT_S: Final = 2.0
_KEEP_ALIVE_S: Final = 75
"""Longer than clients keep idle connections, so that none is closed under a request."""


class OpenAiServer:
    """Serves the OpenAI-compatible API. Belongs to the event loop that started it.

    Args:
        listen: HOST:PORT; port 0 takes a free one.
    """

    def __init__(
        self,
        listen: str,
        dispatcher: Dispatcher,
        tokenizers: Tokenizers,
        limits: Limits,
    ) -> None:
        self._host, _, self._port = listen.rpartition(":")
        self.address = ""
        """HOST:PORT, set by `start`."""
        self._pages = _Pages(dispatcher)
        config = uvicorn.Config(
            _application(self._pages, dispatcher, tokenizers, limits),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = _EmbeddedServer(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Binds and serves.

        Raises:
            OSError: the address cannot be bound.
        """
        host = self._host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.create_server((host, int(self._port)), family=family)
        self.address = f"{self._host}:{bound.getsockname()[1]}"
        self._task = asyncio.create_task(self._server.serve([bound]), name="openai-server")
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)
        if self._task.done():
            await self._task

    def drain(self) -> None:
        """From now on /health sends clients elsewhere; requests are refused by the dispatcher."""
        self._pages.draining = True

    async def stop(self) -> None:
        """Ends it; requests under way get a second."""
        if self._task is None:
            return
        self._server.should_exit = True
        _, late = await asyncio.wait({self._task}, timeout=STOP_TIMEOUT_S)
        for task in late:
            task.cancel()


class _EmbeddedServer(uvicorn.Server):
    """Leaves signals to the process that it is part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _application(
    pages: _Pages,
    dispatcher: Dispatcher,
    tokenizers: Tokenizers,
    limits: Limits,
) -> Starlette:
    """The API as an ASGI application."""
    generations = Generations(dispatcher, tokenizers, limits)
    completions = Completions(generations, dispatcher, tokenizers)
    chat = ChatCompletions(generations, dispatcher, tokenizers)
    return Starlette(
        routes=[
            Route(COMPLETIONS, Endpoint(COMPLETIONS, completions), methods=["POST"]),
            Route(CHAT_COMPLETIONS, Endpoint(CHAT_COMPLETIONS, chat), methods=["POST"]),
            Route("/v1/models", pages.models),
            Route("/v1/models/{name:path}", pages.model),
            Route("/health", pages.health),
        ],
        exception_handlers={HTTPException: _not_served},
    )


class _Pages:
    """What is asked beside generations."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.draining = False
        self._dispatcher = dispatcher
        self._started_s = int(time.time())

    async def models(self, request: Request) -> Response:
        """All models served now."""
        models = [self._describe(model) for model in self._dispatcher.models()]
        return _json({"object": "list", "data": models})

    async def model(self, request: Request) -> Response:
        """One of them."""
        name = request.path_params["name"]
        for model in self._dispatcher.models():
            if model.name == name:
                return _json(self._describe(model))
        error = errors.model_not_found(name)
        return _json(statuses.error_body(error), statuses.http_status(error))

    async def health(self, request: Request) -> Response:
        """200 while some model can be run."""
        ready = self._dispatcher.models() and not self.draining
        return Response(status_code=200 if ready else 503)

    def _describe(self, model: ServedModel) -> JSON:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "baton",
            "root": model.name,
            "max_model_len": model.max_context_tokens,
        }


async def _not_served(request: Request, error: Exception) -> Response:
    """Paths and methods that there are not, in the words of the API."""
    assert isinstance(error, HTTPException)
    content = statuses.body(error.detail, "invalid_request_error", None, "not_found")
    return _json(content, error.status_code)


def _json(content: JSON, status: int = 200) -> Response:
    return Response(to_json(content), status, media_type="application/json")
