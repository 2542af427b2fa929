"""Bounds on the cost of a call before it is parsed: sizes, counts and times, in one place.

Anyone who reaches a port can send anything. So bytes are bounded before they are parsed, elements
before they become objects, lists before they are walked, and every wait has a limit.
`BodyShape` checks the bytes. `router.requests.wire_shape` counts the fields of a gRPC message.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from baton.grpc_options import PUBLIC_MESSAGE_BYTES
from router import errors
from router.requests.wire_shape import count_fields
from serving.event_loop import MAX_OPEN_FILES

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

    from router.jobs import ServedModel

# Bounds on the bytes of a request.

BYTES_A_TOKEN: Final = 32
"""Bytes of a request for each token of the largest context: long words, with JSON around each."""
LEAST_REQUEST_BYTES: Final = 1 << 20
"""This size is accepted for any context, so that the error for a long prompt can count tokens."""
MOST_REQUEST_BYTES: Final = PUBLIC_MESSAGE_BYTES
"""Largest request. Such a body is parsed in a few hundredths of a second."""

# Bounds on the parts of a request.

MOST_FIELDS: Final = 65_536
"""Most fields of a gRPC message with those in it. Counting one takes half a microsecond. All ids
are one field together. The turns of the longest conversation have a fifth of this."""
LEAST_ELEMENTS: Final = 65_536
"""Objects and lists of a body that are accepted with any context. A larger context allows one for
each token."""
COMMAS_AN_ELEMENT: Final = 8
"""Commas allowed for each element. They occur in texts, between ids and between fields of a
turn."""
MAX_TURNS: Final = 4096
"""Most turns of a conversation. Each costs about ten microseconds on the event loop."""
MAX_CONTENT_PARTS: Final = 4096
"""Most parts of one turn's content."""
MAX_TEMPLATE_VALUES: Final = 4096
"""Most values in a chat template's variables, at any depth. Each becomes a message of its own."""

MOST_POOLED: Final = 2048
"""Most inputs of a call that embeds, and most documents of one that scores, as in OpenAI's API."""
MOST_POOLED_TOKENS: Final = 1_000_000
"""Most tokens of all inputs of such a call together: two minutes of a small prefill worker."""
MOST_PAIRED_CHARS: Final = BYTES_A_TOKEN * MOST_POOLED_TOKENS
"""Most characters of all pairs of such a call together, where one query is read with each document:
ten seconds of a thread. A request of a megabyte could stand for two gigabytes."""
MOST_WRITTEN_NUMBERS: Final = 1 << 20
"""Most numbers that an answer has in decimal. Writing them takes a tenth of a second of the event
loop; base64 takes a hundredth of that, and has no such bound."""

# Bounds on batches.

MOST_FILE_BYTES: Final = 200 << 20
"""Largest file of requests, as in OpenAI's API."""
MOST_BATCH_LINES: Final = 50_000
"""Most requests of a batch, as in OpenAI's API."""

# Bounds on the bodies of HTTP requests.

MOST_HELD_BODY_BYTES: Final = 256 << 20
"""Most bytes of all bodies that are read and not yet parsed."""
BODY_BYTES_A_SECOND: Final = 16 << 10
"""Slowest pace of a body: a tenth of a poor mobile network's."""
BODY_GRACE_S: Final = 10.0
"""Extra time for a body, for a network that stalls or a client that computes while it sends."""

# Bounds on connections.

HEADERS_S: Final = 10.0
"""Longest time from a connection's opening, or a request's first byte, to the end of its
headers."""
TURN_BYTES: Final = 4096
"""Bytes of one HTTP connection that are parsed in one turn of the event loop. They hold seven
hundred chunks of one byte, which take a hundredth of a second."""
MOST_UNWANTED_BYTES: Final = 2 * MOST_REQUEST_BYTES
"""Most bytes of a body that are read after an early answer, so that its sender sees the answer."""
UNREAD_GRACE_S: Final = 5.0
"""Time from a call's deadline to its end if the client reads neither the answer nor the error."""
RESERVED_FILES: Final = 256
"""Open files that are kept free for workers, logs, operators and gRPC itself."""
GRPC_SHARE: Final = 4
"""One connection in this many is for gRPC, whose connections carry many calls at once."""
FEWEST_CONNECTIONS: Final = 16
"""Least connections of either kind, if the system allows hardly any files."""


class ConnectionLimits(NamedTuple):
    """Most connections that may be open at the same time."""

    http: int
    grpc: int


def body_s(size: int) -> float:
    """Longest time that so many bytes of a body may take, seconds."""
    return BODY_GRACE_S + size / BODY_BYTES_A_SECOND


def most_connections() -> ConnectionLimits:
    """The limits from the number of files that the process may open, less those that it needs
    itself."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else min(soft, MAX_OPEN_FILES)
    free = max(files - RESERVED_FILES, 2 * FEWEST_CONNECTIONS)
    of_grpc = max(free // GRPC_SHARE, FEWEST_CONNECTIONS)
    return ConnectionLimits(http=free - of_grpc, grpc=of_grpc)


def broken_shape(data: bytes, most_elements: Callable[[], int]) -> str:
    """The bound on elements that JSON breaks, so that it is not to be parsed; empty: none."""
    if len(data) <= LEAST_ELEMENTS:
        return ""
    most = most_elements()
    if data.count(b"{") + data.count(b"[") > most:
        return f"holds more than {most} objects and lists"
    if data.count(b":") > most:  # One in each entry of an object; in a text, a token each.
        return f"has more than {most} colons"
    if data.count(b",") > COMMAS_AN_ELEMENT * most:
        return f"has more than {COMMAS_AN_ELEMENT * most} commas"
    return ""


class BodyShape:
    """Checks requests by their bytes, before they are parsed.

    Args:
        models: the models that are served now.
    """

    def __init__(self, models: Callable[[], Iterable[ServedModel]]) -> None:
        self._models = models

    def most_bytes(self) -> int:
        """Largest size of a request."""
        allowed = BYTES_A_TOKEN * self._largest_context()
        return max(LEAST_REQUEST_BYTES, min(allowed, MOST_REQUEST_BYTES))

    def most_elements(self) -> int:
        """Most objects and lists of a body, and most ids of a prompt."""
        return max(LEAST_ELEMENTS, self._largest_context())

    def check_size(self, size_bytes: int) -> None:
        """Refuses a request that is larger than any prompt.

        Raises:
            RouterError: MALFORMED_REQUEST.
        """
        if size_bytes > LEAST_REQUEST_BYTES and size_bytes > (most := self.most_bytes()):
            raise errors.malformed_request(f"the request exceeds {most} bytes")

    def check_known(self, size_bytes: int) -> None:
        """Asks for patience where a bound is not known yet, since no worker is attached.

        Raises:
            RouterError: NO_WORKERS.
        """
        if size_bytes > LEAST_ELEMENTS and not self._largest_context():
            raise errors.no_workers()

    def check_message(self, data: bytes, kind: Descriptor) -> None:
        """Checks the bytes of a gRPC message.

        Raises:
            RouterError: MALFORMED_REQUEST.
        """
        self.check_size(len(data))
        if len(data) <= MOST_FIELDS:  # A field takes at least one byte.
            return
        if count_fields(data, kind, MOST_FIELDS) > MOST_FIELDS:
            raise errors.malformed_request(f"the request holds more than {MOST_FIELDS} fields")

    def check_json(self, body: bytes) -> None:
        """Checks the body of an HTTP request. Characters in its strings count as well.

        Raises:
            RouterError: MALFORMED_REQUEST.
        """
        self.check_size(len(body))
        if rule := broken_shape(body, self.most_elements):
            raise errors.malformed_request(f"the body {rule}")

    def _largest_context(self) -> int:
        return max((model.max_context_tokens for model in self._models()), default=0)
