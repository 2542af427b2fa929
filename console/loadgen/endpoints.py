"""The two kinds of endpoint under load: Baton's gRPC API, and the OpenAI API of any server.

During a run a message is only stamped and kept: it is neither parsed nor checked. It is read when
the run is over, so that a sender spends its time on sending and receiving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from baton.client.channels import TLS_SCHEME
from baton.tls import NO_FILES, TlsFiles
from console.loadgen.errors import WrongUseError
from console.loadgen.outcome import TIMEOUT


class EndpointError(Exception):
    """A request failed. Failures are counted by `status`, a short word."""

    def __init__(self, status: str, message: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message or status


@dataclass(slots=True)
class Kept:
    """An unread answer: its parts and their arrival times."""

    at_s: list[float] = field(default_factory=list)
    """Arrival of each part, by `time.perf_counter`."""
    parts: list[bytes] = field(default_factory=list)
    trace_id: str = ""


class Reading(NamedTuple):
    """The contents of an answer."""

    arrivals_s: list[float]
    """Arrival of each message that carried tokens."""
    tokens: int
    trace_id: str = ""
    whole: bool = True
    """Whether the answer reached its end with nothing missing."""
    token_ids: tuple[int, ...] = ()
    """The answer's tokens, if the server sent them."""
    cached_tokens: int = 0
    """Prompt tokens that the server found cached."""
    loaded_tokens: Mapping[str, int] = MappingProxyType({})
    """Cached tokens that came from beyond the pool, by source."""


class Asked(NamedTuple):
    """Properties that all requests share."""

    model: str
    """"": the only model, where the server allows that."""
    force_length: bool
    """Whether to generate past the end of sequence up to the requested length."""
    timeout_s: float
    api_key: str = ""
    files: TlsFiles = NO_FILES
    """Files of TLS, for grpcs:// and https:// alone."""
    ids: bool = False
    """Whether the answers' token ids are needed."""


class BenchEndpoint(Protocol):
    """Speaks to one server. Belongs to the running event loop."""

    def write(self, prompt: list[int], output_tokens: int) -> bytes:
        """Returns a request, serialized."""
        ...

    async def send(self, request: bytes, kept: Kept) -> None:
        """Sends a request and keeps its answer unread.

        Raises:
            EndpointError: the request failed, perhaps after a part of the answer.
        """
        ...

    def read(self, kept: Kept) -> Reading:
        """Reads an answer."""
        ...

    async def close(self) -> None:
        """Closes the connection."""
        ...


class Target(NamedTuple):
    """Protocol and address of an endpoint."""

    protocol: str
    """"grpc" or "openai"."""
    address: str
    """HOST:PORT, grpcs://HOST:PORT, or the base URL with `/v1` and no slash at its end."""


def parse_url(url: str) -> Target:
    """Reads `grpc(s)://HOST:PORT`, `HOST:PORT`, or an `http(s)` URL with or without `/v1`.

    Raises:
        WrongUseError: the URL is none of these.
    """
    parts = urlsplit(url if "://" in url else f"grpc://{url}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme in ("grpc", "grpcs") and parts.hostname and port and not parts.path.strip("/"):
        return Target("grpc", parts.netloc if parts.scheme == "grpc" else TLS_SCHEME + parts.netloc)
    if parts.scheme in ("http", "https") and parts.hostname:
        base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        return Target("openai", base if base.endswith("/v1") else f"{base}/v1")
    raise WrongUseError(f"{url} is neither grpc://HOST:PORT nor http://HOST:PORT/v1")


def timed_out(timeout_s: float) -> EndpointError:
    """The error of a request that the client gave up."""
    return EndpointError(TIMEOUT, f"no end after {timeout_s:g} s")


JSON = dict[str, Any]
