"""The HTTP port of a router: its routes.

`stop` waits a moment for running requests. The caller has ended the jobs before, so their last
messages are on the way.
"""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from baton.version import __version__
from router import errors
from router.doors.auth import OPEN, Gate
from router.doors.batches.pages import BATCHES, FILES, BatchRequest, FilePages
from router.doors.batches.runner import BatchRunner
from router.doors.http import statuses
from router.doors.http.bodies import Bodies
from router.doors.http.connections import Connections
from router.doors.http.dialect import CHATS, NAMED_EVENTS, OWN_NAMES, Dialect
from router.doors.http.edge import REQUEST_ID, Guards, HttpEndpoint, Method
from router.doors.http.elsewhere import not_served
from router.doors.http.origins import guarded
from router.doors.http.targets import Targets
from router.doors.messages.dialect import MESSAGES_DIALECT, VERSION_HEADER
from router.doors.messages.method import Messages
from router.doors.messages.models import model_of, models_page
from router.doors.messages.schema import CountRequest, MessageRequest
from router.doors.openai.description import Posts, description
from router.doors.openai.inside import CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS, Inside
from router.doors.openai.pooling import EmbeddingRequest, RerankRequest, ScoreRequest, Scores
from router.doors.openai.schema import CompletionRequest, DetokenizeRequest
from router.doors.openai.tokens import Tokens
from router.doors.openai.turns import ChatRequest, TokenizeRequest
from router.doors.responses.method import Responses
from router.doors.responses.pages import ResponsePages
from router.doors.responses.schema import ResponseRequest
from router.errors import Violation
from router.events import NO_EVENTS, RouterEvents
from router.one_line import json_of
from router.requests.bounds import BodyShape, most_connections
from router.visible import Visible
from serving.embedded_http import EmbeddedHttpServer
from telemetry.rpc import TRACEPARENT
from telemetry.tracing import context_of, trace_id_of

if TYPE_CHECKING:
    import ssl

    from starlette.requests import Request

    from router.doors.batches.room import Room
    from router.doors.batches.store import FileStore
    from router.doors.http.statuses import JSON
    from router.doors.responses.store import ResponseStore
    from router.jobs import Dispatcher, ServedModel
    from router.requests.tokenization import Tokenizers
    from router.requests.validation import Limits
    from router.split_names import SplitNames

MESSAGES: Final = "/v1/messages"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
RESPONSES: Final = "/v1/responses"
INPUT_TOKENS: Final = f"{RESPONSES}/input_tokens"
SCORE: Final = "/v1/score"
RERANK: Final = "/v1/rerank"
ALIASES: Final = {SCORE: ("/score",), RERANK: ("/v2/rerank", "/rerank")}
"""Further paths of the same: those of vLLM's server, and of Cohere's second version."""
MODELS: Final = "/v1/models"
TOKENIZE: Final = "/tokenize"
DETOKENIZE: Final = "/detokenize"
TOKENIZER_INFO: Final = "/tokenizer_info"
HEALTH: Final = "/health"
HEALTHZ: Final = "/healthz"
"""Path of the health check, as Kubernetes names it."""
PING: Final = "/ping"
"""Path of the health check, as SageMaker names it."""
OPENAPI: Final = "/openapi.json"
VERSION: Final = "/version"
_SERVED: Final = ", ".join(
    (
        CHAT_COMPLETIONS,
        COMPLETIONS,
        RESPONSES,
        MESSAGES,
        COUNT_TOKENS,
        EMBEDDINGS,
        SCORE,
        RERANK,
        FILES,
        BATCHES,
        MODELS,
        TOKENIZE,
        DETOKENIZE,
        TOKENIZER_INFO,
        HEALTH,
        VERSION,
        OPENAPI,
    )
)


_REFUSED: Final = (errors.RouterError, sqlite3.Error)
"""Errors of pages: those of the API, and of the stores that they show."""
_POSTS: Final[Posts] = (
    (CHAT_COMPLETIONS, ChatRequest, "The next turn of a conversation, as in OpenAI's API"),
    (COMPLETIONS, CompletionRequest, "A text that goes on, as in OpenAI's API"),
    (RESPONSES, ResponseRequest, "A response, as in OpenAI's API"),
    (INPUT_TOKENS, ResponseRequest, "The number of a response's input tokens"),
    (MESSAGES, MessageRequest, "A message, as in Anthropic's API"),
    (COUNT_TOKENS, CountRequest, "The number of a message's tokens"),
    (EMBEDDINGS, EmbeddingRequest, "A vector for each input, as in OpenAI's API"),
    *(
        (path, ScoreRequest, "How well pairs of texts go together, as in vLLM's server")
        for path in (SCORE, *ALIASES[SCORE])
    ),
    *(
        (path, RerankRequest, "Documents by relevance, as in Cohere's API and vLLM's server")
        for path in (RERANK, *ALIASES[RERANK])
    ),
    (BATCHES, BatchRequest, "Begins a batch over a file of requests, as in OpenAI's API"),
    (TOKENIZE, TokenizeRequest, "The ids that a generation would run"),
    (DETOKENIZE, DetokenizeRequest, "The text of ids"),
)


class OpenAiServer(EmbeddedHttpServer):
    """Serves the OpenAI-compatible API. Belongs to the event loop that started it.

    Args:
        listen: HOST:PORT; port 0 takes a free one.
        dispatcher: runs the jobs.
        tokenizers: tokenizers of the models served.
        limits: limits of requests.
        events: receives events of requests.
        routes: further routes beside those of the API.
        gate: admits callers to the API; /health and `routes` are open to all.
        allowed_origins: origins of web pages that may call; see `origins`.
        reuse_port: share the port with other routers.
        tls: encrypts connections; None: they are in clear.
        store: keeps responses; None: none are kept.
        files: keeps files and batches; None: none are kept.
        batch_requests: most requests of a batch under way.
        room: lets lines of batches in; None: all at once.
    """

    def __init__(
        self,
        listen: str,
        dispatcher: Dispatcher,
        tokenizers: Tokenizers,
        limits: Limits,
        events: RouterEvents = NO_EVENTS,
        routes: Sequence[BaseRoute] = (),
        gate: Gate = OPEN,
        *,
        allowed_origins: Sequence[str] = (),
        reuse_port: bool = False,
        tls: ssl.SSLContext | None = None,
        store: ResponseStore | None = None,
        files: FileStore | None = None,
        batch_requests: int = 32,
        room: Room | None = None,
    ) -> None:
        self._pages = _Pages(dispatcher, tokenizers, gate, limits.split_names)
        shape = BodyShape(dispatcher.models)
        inside = Inside(dispatcher, tokenizers, limits, events, shape)
        generations = inside.generations
        self._batches = None
        if files is not None:
            self._batches = BatchRunner(files, inside, gate, events, batch_requests, room)
        pages = FilePages(files, gate, allowed_origins, self._look)
        messages = Messages(generations)
        responses = Responses(generations, shape, store)
        tokens = Tokens(generations, dispatcher, shape)
        scores = Scores(inside.poolings)
        longest_s = limits.max_request_duration_s
        method = partial(_method, Guards(Bodies(shape), gate, longest_s), events)
        api = (
            *(method(path, inside.methods[path]) for path in (COMPLETIONS, CHAT_COMPLETIONS)),
            method(RESPONSES, responses.create, NAMED_EVENTS),
            method(INPUT_TOKENS, responses.count_tokens, NAMED_EVENTS),
            *ResponsePages(store, gate).routes(RESPONSES),
            method(MESSAGES, messages.create, MESSAGES_DIALECT),
            method(COUNT_TOKENS, messages.count_tokens, MESSAGES_DIALECT),
            method(EMBEDDINGS, inside.methods[EMBEDDINGS], OWN_NAMES),
            *(method(path, scores.score, OWN_NAMES) for path in (SCORE, *ALIASES[SCORE])),
            *(method(path, scores.rerank, OWN_NAMES) for path in (RERANK, *ALIASES[RERANK])),
            method(BATCHES, pages.begin, OWN_NAMES),
            *pages.routes(),
            method(TOKENIZE, tokens.tokenize),
            method(DETOKENIZE, tokens.detokenize),
            Route(MODELS, self._pages.models),
            Route(f"{MODELS}/{{name:path}}", self._pages.model),
            Route(TOKENIZER_INFO, self._pages.tokenizer),
            Route(HEALTH, self._pages.health),
            Route(HEALTHZ, self._pages.health),
            Route(PING, self._pages.health, methods=["GET", "POST"]),
            Route(OPENAPI, self._pages.description),
            Route(VERSION, self._pages.version),
        )
        self.application = application = Starlette(
            routes=[*api, *routes],
            exception_handlers={HTTPException: _not_served, **dict.fromkeys(_REFUSED, _refused)},
        )
        connections = Connections(most_connections().http, tls)
        super().__init__(
            listen,
            connections.around(Targets(guarded(application, listen, allowed_origins))),
            "openai-server",
            reuse_port=reuse_port,
            protocol=connections.protocol,
        )

    @property
    def running_batches(self) -> int:
        """Batches that this router runs."""
        return 0 if self._batches is None else self._batches.running

    async def start(self) -> None:
        """Serves, and runs batches."""
        await super().start()
        if self._batches is not None:
            self._batches.start()

    def drain(self) -> None:
        """Lets /health fail, so that clients go elsewhere. The dispatcher refuses requests."""
        self._pages.draining = True
        if self._batches is not None:
            self._batches.drain()

    async def stop(self) -> None:
        """Ends batches for now, and stops serving."""
        if self._batches is not None:
            await self._batches.stop()
        await super().stop()

    def _look(self) -> None:
        if self._batches is not None:
            self._batches.look()


def _method(
    guards: Guards, events: RouterEvents, path: str, method: Method, dialect: Dialect = CHATS
) -> Route:
    endpoint = HttpEndpoint(path, method, guards, events, dialect)
    return Route(path, endpoint, methods=["POST"])


class _Pages:
    """The pages other than generations."""

    def __init__(
        self, dispatcher: Dispatcher, tokenizers: Tokenizers, gate: Gate, names: SplitNames
    ) -> None:
        self.draining = False
        self._names = names
        self._gate = gate
        self._dispatcher = dispatcher
        self._tokenizers = tokenizers
        self._started_s = int(time.time())

    async def models(self, request: Request) -> Response:
        """All models served now; while there is none, the error that a generation would get."""
        visible = self._admit(request)
        served = self._names.listed(visible.models())
        if not served:
            raise errors.no_workers(visible.model("").name)
        if _is_anthropics(request):
            return _json(models_page([model.called for model in served], self._started_s))
        models = [self._describe(model) for model in served]
        return _json({"object": "list", "data": models})

    async def model(self, request: Request) -> Response:
        """One of them."""
        visible = self._admit(request)
        name = request.path_params["name"]
        listed = self._names.listed(visible.models())
        models = {model.called: model for model in listed}
        if name not in models:
            raise errors.model_not_found(name, list(models))
        if _is_anthropics(request):
            return _json(model_of(name, self._started_s))
        return _json(self._describe(models[name]))

    async def tokenizer(self, request: Request) -> Response:
        """The special tokens and the chat template of the model that `?model=` names. With
        /tokenize, a client can write its own prompts with them."""
        visible, name = self._admit(request), request.query_params.get("model", "")
        listed = {model.called: model for model in self._names.listed(visible.models())}
        model = listed.get(name) or visible.model(name)
        try:
            tokenizer = await self._tokenizers.get(model.path)
        except Exception as error:
            raise errors.describe(error) from None
        if tokenizer is None:
            raise errors.invalid_fields([Violation("model", "has no tokenizer")])
        return _json({**tokenizer.special_tokens, "chat_template": tokenizer.template_source})

    async def health(self, request: Request) -> Response:
        """200 while some model can run."""
        ready = self._dispatcher.models() and not self.draining
        return Response(status_code=200 if ready else 503)

    async def description(self, request: Request) -> Response:
        """The API as an OpenAPI document."""
        return _json(description(_POSTS))

    async def version(self, request: Request) -> Response:
        """The release."""
        return _json({"version": __version__})

    def _admit(self, request: Request) -> Visible:
        """What the caller sees."""
        caller = self._gate.caller_of(_dialect(request).authorization(request.headers))
        return Visible(self._dispatcher, caller)

    def _describe(self, model: ServedModel) -> JSON:
        parent = {"parent": model.name} if model.adapter else {}
        return {
            "id": model.called,
            "object": "model",
            "created": self._started_s,
            "owned_by": "baton",
            "root": model.name,
            **parent,
            "max_model_len": model.max_context_tokens,
        }


async def _not_served(request: Request, error: Exception) -> Response:
    """The error for an unknown path or method. It says what there is, since most callers have
    forgotten /v1 in the base URL or use a part of the API that is not supported."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message, code, headers = not_served(path, _SERVED), "not_found", dict[str, str]()
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = ", ".join(_methods_of(request))
        message, code = f"this path takes {allowed}", "method_not_allowed"
        headers["allow"] = allowed
    content = statuses.body(message, "invalid_request_error", None, code)
    trace_id = _trace_id(request)
    if _is_anthropics(request):
        content = MESSAGES_DIALECT.body(error.status_code, message, trace_id)
    return _failed(request, content, error.status_code, headers, trace_id)


async def _refused(request: Request, error: Exception) -> Response:
    """The response to an error of the API's pages, or of the store that they show."""
    trace_id = _trace_id(request)
    error = errors.describe(error, trace_id)
    content = _dialect(request).error(error)
    if _is_anthropics(request):
        content["request_id"] = trace_id
    headers = statuses.retry_headers(error)
    return _failed(request, content, statuses.http_status(error), headers, trace_id)


def _is_anthropics(request: Request) -> bool:
    """Whether Anthropic's client asks."""
    return VERSION_HEADER in request.headers


def _dialect(request: Request) -> Dialect:
    """The dialect of the caller's client."""
    return MESSAGES_DIALECT if _is_anthropics(request) else CHATS


def _methods_of(request: Request) -> list[str]:
    """The methods of a path, which may have several routes."""
    routes = [one for one in request.app.routes if isinstance(one, Route)]
    fitting = [one for one in routes if one.matches(request.scope)[0] != Match.NONE]
    return sorted({method for one in fitting for method in one.methods or ()})


def _failed(
    request: Request, content: JSON, status: int, headers: Mapping[str, str], trace_id: str
) -> Response:
    """A response with an error. Its id is the caller's trace id, if it sends one."""
    ids = {REQUEST_ID: trace_id, **_dialect(request).headers(trace_id)}
    return _json(content, status, {**headers, **ids})


def _trace_id(request: Request) -> str:
    return trace_id_of(context_of(request.headers.get(TRACEPARENT))) or uuid.uuid4().hex


def _json(content: JSON, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json_of(content), status, headers, media_type="application/json")
