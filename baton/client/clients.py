"""Python clients of a Baton router. Needs neither torch nor OpenTelemetry.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("The capital of France is", max_tokens=8).text)
        with client.stream(messages=[{"role": "user", "content": "Hello!"}]) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
        print(stream.result.usage)

`AsyncClient` is the same with `await` and `async for`. A stream is open until it is read to its
end, closed, or its `with` block is left. Closing a stream cancels the generation on the servers; so
does dropping it, or cancelling the task that reads it. Where OpenTelemetry is installed, calls
carry the caller's current trace context. Every failure is a `baton.errors.BatonError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Self, TypedDict, Unpack

from baton.addresses import ROUTER_ADDRESS
from baton.client.channels import open_aio_channel, open_channel
from baton.client.generation import Gathering, Generation, Model
from baton.client.options import Message, Options
from baton.client.pooling import (
    Embeddings,
    EmbedOptions,
    Input,
    ScoreOptions,
    Scores,
    embed_request,
    embeddings_of,
    score_request,
    scores_of,
)
from baton.client.requests import generation_request, tokenize_request
from baton.client.streams import AsyncGenerationStream, GenerationStream, typed_errors
from baton.grpc_options import client_options
from baton.inference.v1 import inference_pb2 as pb
from baton.inference.v1 import inference_pb2_grpc as pb_grpc
from baton.tls import TlsFiles

Metadata = tuple[tuple[str, str], ...]
LONGEST_S: Final = 1e9
"""Longest time bound. A larger one is dropped: gRPC's clock cannot hold it and would take it for
the past."""


class _CallOptions(TypedDict):
    """Arguments of a call beside its request."""

    timeout: float | None
    metadata: Metadata


def _inject_nothing(carrier: dict[str, str]) -> None:
    """Does nothing: without OpenTelemetry there is no trace to join."""


def _find_inject() -> Callable[[dict[str, str]], None]:
    try:
        from opentelemetry.propagate import inject
    except ImportError:
        return _inject_nothing
    return inject


_inject = _find_inject()


def check_token(token: str) -> str:
    """Returns the token if a header can hold it. Raises ValueError otherwise."""
    if not (token.isascii() and token.isprintable()):
        raise ValueError("a token is of printable ASCII characters")
    return token


class _Caller:
    """Makes the options that both clients send with every call."""

    def __init__(self, token: str, timeout_s: float | None) -> None:
        self._token = check_token(token)
        self._timeout_s = timeout_s

    def _of_call(self, timeout_s: float | None) -> _CallOptions:
        """Options of a call: its time bound, its trace, its token."""
        carrier = {"authorization": f"Bearer {self._token}"} if self._token else {}
        _inject(carrier)
        is_bounded = timeout_s is not None and timeout_s < LONGEST_S
        return {
            "timeout": timeout_s if is_bounded else None,
            "metadata": tuple(carrier.items()),
        }

    def _of_generation(self, timeout_s: float | None) -> _CallOptions:
        """Options of a generation. Without a bound of its own the client's bound applies."""
        return self._of_call(self._timeout_s if timeout_s is None else timeout_s)


class Client(_Caller):
    """Talks to a router. Threads may share a client."""

    def __init__(
        self,
        address: str = ROUTER_ADDRESS,
        *,
        token: str = "",
        retries: bool = True,
        timeout_s: float | None = None,
        tls_ca: str = "",
        tls_cert: str = "",
        tls_key: str = "",
        tls_name: str = "",
    ) -> None:
        """Makes a client, which connects on its first call.

        Args:
            address: HOST:PORT of a router, or grpcs://HOST:PORT of one with TLS.
            token: sent with every call, for routers that ask for one.
            retries: whether the channel repeats calls that were refused for now, before anything
                was generated. `baton.grpc_options.client_options` has the rules.
            timeout_s: bounds every generation whose call sets no bound. None: the server's limit
                applies.
            tls_ca: PEM file of the authorities to trust, with grpcs://; "": gRPC's own.
            tls_cert: PEM file of a certificate to show, where the router wants one.
            tls_key: PEM file of its key.
            tls_name: the name that the router's certificate must have; "": the address's host.

        Raises:
            ValueError: the address or the token is malformed, or the TLS files do not fit.
            OSError: a file cannot be read.
        """
        super().__init__(token, timeout_s)
        files = TlsFiles(tls_ca, tls_cert, tls_key, tls_name)
        self._channel = open_channel(address, client_options(retries=retries), files)
        self._stub = pb_grpc.InferenceServiceStub(self._channel)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Generates and returns the whole result.

        Args:
            prompt: raw text; or
            messages: chat turns, rendered with the model's template; or
            token_ids: ids, used as they are.
            timeout_s: bounds the whole generation. None: the client's own bound applies.
            options: see `baton.client.options.Options`.

        Raises:
            BatonError: the call failed.
            ValueError: not exactly one form of prompt was given.
        """
        request = generation_request(pb.GenerateRequest, prompt, messages, token_ids, options)
        with typed_errors():
            response = self._stub.Generate(request, **self._of_generation(timeout_s))
        return Gathering(options.get("choices") or 1).add_whole(response)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> GenerationStream:
        """Starts a generation and returns its stream of deltas. Takes `generate`'s arguments."""
        request = generation_request(pb.StreamGenerateRequest, prompt, messages, token_ids, options)
        call = self._stub.StreamGenerate(request, **self._of_generation(timeout_s))
        return GenerationStream(iter(call), call.cancel, options.get("choices") or 1)

    def models(self, *, timeout_s: float | None = 10.0) -> tuple[Model, ...]:
        """The models served now."""
        with typed_errors():
            response = self._stub.ListModels(pb.ListModelsRequest(), **self._of_call(timeout_s))
        return _models(response)

    def embed(
        self,
        inputs: str | Sequence[Input],
        *,
        model: str = "",
        timeout_s: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """Returns a vector for each input: a text or token ids. One text is one input."""
        request = embed_request(inputs, model, options)
        with typed_errors():
            return embeddings_of(self._stub.Embed(request, **self._of_call(timeout_s)))

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        model: str = "",
        timeout_s: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Scores:
        """Returns how relevant each document is to the query; queries may also be one for each."""
        request = score_request(query, documents, model, options)
        with typed_errors():
            return scores_of(self._stub.Score(request, **self._of_call(timeout_s)))

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = "",
        add_special_tokens: bool | None = None,
        timeout_s: float | None = 10.0,
    ) -> tuple[int, ...]:
        """Returns the token ids of a text, or of chat turns in the model's template.

        Without `add_special_tokens` these are the ids that a generation would use.
        """
        request = tokenize_request(text, messages, model, add_special_tokens)
        with typed_errors():
            response = self._stub.Tokenize(request, **self._of_call(timeout_s))
        return tuple(response.token_ids)

    def close(self) -> None:
        """Closes the connection and cancels running calls."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_Caller):
    """Talks to a router. It belongs to the event loop in which it was made."""

    def __init__(
        self,
        address: str = ROUTER_ADDRESS,
        *,
        token: str = "",
        retries: bool = True,
        timeout_s: float | None = None,
        tls_ca: str = "",
        tls_cert: str = "",
        tls_key: str = "",
        tls_name: str = "",
    ) -> None:
        """Makes a client, which connects on its first call. Takes `Client`'s arguments."""
        super().__init__(token, timeout_s)
        files = TlsFiles(tls_ca, tls_cert, tls_key, tls_name)
        self._channel = open_aio_channel(address, client_options(retries=retries), files)
        self._stub: pb_grpc.InferenceServiceAsyncStub = pb_grpc.InferenceServiceStub(self._channel)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Generates and returns the whole result. See `Client.generate`."""
        request = generation_request(pb.GenerateRequest, prompt, messages, token_ids, options)
        with typed_errors():
            response = await self._stub.Generate(request, **self._of_generation(timeout_s))
        return Gathering(options.get("choices") or 1).add_whole(response)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerationStream:
        """Starts a generation and returns its stream of deltas. See `Client.generate`."""
        request = generation_request(pb.StreamGenerateRequest, prompt, messages, token_ids, options)
        call = self._stub.StreamGenerate(request, **self._of_generation(timeout_s))
        return AsyncGenerationStream(aiter(call), call.cancel, options.get("choices") or 1)

    async def models(self, *, timeout_s: float | None = 10.0) -> tuple[Model, ...]:
        """The models served now."""
        with typed_errors():
            response = await self._stub.ListModels(
                pb.ListModelsRequest(), **self._of_call(timeout_s)
            )
        return _models(response)

    async def embed(
        self,
        inputs: str | Sequence[Input],
        *,
        model: str = "",
        timeout_s: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """Embeds texts. See `Client.embed`."""
        request = embed_request(inputs, model, options)
        with typed_errors():
            return embeddings_of(await self._stub.Embed(request, **self._of_call(timeout_s)))

    async def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        model: str = "",
        timeout_s: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Scores:
        """Scores documents. See `Client.score`."""
        request = score_request(query, documents, model, options)
        with typed_errors():
            return scores_of(await self._stub.Score(request, **self._of_call(timeout_s)))

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = "",
        add_special_tokens: bool | None = None,
        timeout_s: float | None = 10.0,
    ) -> tuple[int, ...]:
        """Returns the token ids of a text or of chat turns. See `Client.tokenize`."""
        request = tokenize_request(text, messages, model, add_special_tokens)
        with typed_errors():
            response = await self._stub.Tokenize(request, **self._of_call(timeout_s))
        return tuple(response.token_ids)

    async def close(self) -> None:
        """Closes the connection and cancels running calls."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _models(response: pb.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(
        Model(
            m.name,
            m.revision,
            m.max_context_tokens,
            m.max_output_tokens,
            m.has_tokenizer,
            m.parent,
            m.digest,
        )
        for m in response.models
    )
