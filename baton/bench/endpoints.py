"""The two kinds of endpoint under load: our gRPC API, and the OpenAI API of anyone.

While a run lasts, a message is stamped and kept and nothing else: no parsing, no checking. What it
said is read when the run is over, so that a sender's time goes into sending and receiving.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from baton.bench.errors import WrongUseError
from baton.bench.outcome import TIMEOUT
from baton.channels import TLS_SCHEME


class EndpointError(Exception):
    """A request failed; the status is the word to count it under."""

    def __init__(self, status: str, message: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message or status


@dataclass(slots=True)
class Kept:
    """An answer as it came: when, and what."""

    at_s: list[float] = field(default_factory=list)
    """Of `time.perf_counter`, one for each part."""
    parts: list[bytes] = field(default_factory=list)
    trace_id: str = ""


class Reading(NamedTuple):
    """An answer, read."""

    arrivals_s: list[float]
    """Of messages that carried tokens."""
    tokens: int
    trace_id: str = ""
    whole: bool = True
    """Whether its end was there, and nothing was missing before."""


class Asked(NamedTuple):
    """How requests are written."""

    model: str
    """"": the only one, where that is allowed."""
    force_length: bool
    """Go on past the end of sequence until the length asked for."""
    timeout_s: float
    api_key: str = ""


class Endpoint(Protocol):
    """One server's address and how to speak to it. Belongs to the running loop."""

    def write(self, prompt: list[int], output_tokens: int) -> bytes:
        """A request in full."""
        ...

    async def send(self, request: bytes, kept: Kept) -> None:
        """Sends it and keeps what comes back.

        Raises:
            EndpointError: the request failed, perhaps after a part of the answer.
        """
        ...

    def read(self, kept: Kept) -> Reading:
        """What the answer said."""
        ...

    async def close(self) -> None:
        """Hangs up."""
        ...


class Target(NamedTuple):
    """Where an endpoint is."""

    protocol: str
    """"grpc" or "openai"."""
    address: str
    """HOST:PORT, grpcs://HOST:PORT, or the base URL with `/v1` and no slash at its end."""


def parse_url(url: str) -> Target:
    """`grpc(s)://HOST:PORT`, `HOST:PORT`, or an `http(s)` URL whose path is or ends in `/v1`.

    Raises:
        WrongUseError: it is none of these.
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
    """The client gave up."""
    return EndpointError(TIMEOUT, f"no end after {timeout_s:g} s")


JSON = dict[str, Any]
