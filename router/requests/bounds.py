"""What a call may cost before it is known what it asks for: sizes, counts and times, in one place.

Whoever reaches a port can send anything. So bytes are bounded before they are parsed, elements
before they become objects, lists before they are walked, and times before somebody is waited for.
`BodyShape` judges what was read; `router.requests.wire_shape` counts what a message of gRPC holds.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from baton.grpc_options import PUBLIC_MESSAGE_BYTES
from baton.process.event_loop import MAX_OPEN_FILES
from router import errors
from router.requests.wire_shape import count_fields

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

    from router.jobs import ServedModel

# Of a request's bytes.

BYTES_A_TOKEN: Final = 32
"""Of a request, for each token of the largest context: words of several bytes, JSON around each."""
LEAST_REQUEST_BYTES: Final = 1 << 20
"""Accepted however short the context is, so that a prompt that is too long is told so in tokens."""
MOST_REQUEST_BYTES: Final = PUBLIC_MESSAGE_BYTES
"""Accepted at most: such a body is parsed in a few hundredths of a second."""

# Of what a request holds.

MOST_FIELDS: Final = 65_536
"""Of a message of gRPC and those in it: counting one takes half a microsecond. Ids are one field
together, and the turns of the longest conversation a fifth of this."""
LEAST_ELEMENTS: Final = 65_536
"""Objects and lists of a body that are accepted with any context; larger ones may have one for each
token."""
COMMAS_AN_ELEMENT: Final = 8
"""Commas may stand in texts, and between ids and the fields of a turn."""
MAX_TURNS: Final = 4096
"""Of a conversation. Each costs about ten microseconds on the event loop."""
MAX_CONTENT_PARTS: Final = 4096
"""Of one turn's content."""
MAX_TEMPLATE_VALUES: Final = 4096
"""Values in a chat template's variables, at any depth: each becomes a message of its own."""

# Of the bodies of HTTP requests.

MOST_HELD_BODY_BYTES: Final = 256 << 20
"""Of all bodies that were read and not yet made into requests."""
BODY_BYTES_A_SECOND: Final = 16 << 10
"""A body comes at this pace at least: a tenth of what a poor mobile network does."""
BODY_GRACE_S: Final = 10.0
"""What a body may take beside that: a network that stalls, a client that computes what it sends."""

# Of connections.

HEADERS_S: Final = 10.0
"""From a connection's opening, or the first byte of a request, to the end of its headers."""
TURN_BYTES: Final = 4096
"""Of one HTTP connection, parsed in one turn of the event loop: chunks of one byte, of which there
are seven hundred in it, take a hundredth of a second."""
MOST_UNWANTED_BYTES: Final = 2 * MOST_REQUEST_BYTES
"""Read behind an answer that came before the end of a body, so that its sender sees the answer."""
UNREAD_GRACE_S: Final = 5.0
"""From a call's deadline to its end where nobody reads the answer, nor the error in its place."""
RESERVED_FILES: Final = 256
"""Open files that clients leave to workers, logs, operators and gRPC itself."""
GRPC_SHARE: Final = 4
"""One connection in so many is gRPC's, which carries many calls at once."""
FEWEST_CONNECTIONS: Final = 16
"""Of either kind, where the system allows hardly any files."""


class ConnectionLimits(NamedTuple):
    """How many may be open at the same time."""

    http: int
    grpc: int


def most_connections() -> ConnectionLimits:
    """As many as the process may have open files, but for those that it needs itself."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else min(soft, MAX_OPEN_FILES)
    free = max(files - RESERVED_FILES, 2 * FEWEST_CONNECTIONS)
    of_grpc = max(free // GRPC_SHARE, FEWEST_CONNECTIONS)
    return ConnectionLimits(http=free - of_grpc, grpc=of_grpc)


class BodyShape:
    """Judges requests by their bytes, before anything is made of them.

    Args:
        models: those that are served now.
    """

    def __init__(self, models: Callable[[], Iterable[ServedModel]]) -> None:
        self._models = models

    def most_bytes(self) -> int:
        """Of a request."""
        allowed = BYTES_A_TOKEN * self._largest_context()
        return max(LEAST_REQUEST_BYTES, min(allowed, MOST_REQUEST_BYTES))

    def most_elements(self) -> int:
        """Objects and lists of a body; ids of a prompt."""
        return max(LEAST_ELEMENTS, self._largest_context())

    def check_size(self, size_bytes: int) -> None:
        """Refuses what is larger than any prompt.

        Raises:
            RouterError: MALFORMED_REQUEST.
        """
        if size_bytes > LEAST_REQUEST_BYTES and size_bytes > (most := self.most_bytes()):
            raise errors.malformed_request(f"the request exceeds {most} bytes")

    def check_message(self, data: bytes, kind: Descriptor) -> None:
        """Judges the bytes of a message of gRPC.

        Raises:
            RouterError: MALFORMED_REQUEST.
        """
        self.check_size(len(data))
        if len(data) <= MOST_FIELDS:  # No field takes less than a byte.
            return
        if count_fields(data, kind, MOST_FIELDS) > MOST_FIELDS:
            raise errors.malformed_request(f"the request holds more than {MOST_FIELDS} fields")

    def check_json(self, body: bytes) -> None:
        """Judges the body of an HTTP request, whose strings are counted as well.

        Raises:
            RouterError: MALFORMED_REQUEST.
        """
        self.check_size(len(body))
        if len(body) <= LEAST_ELEMENTS:
            return
        most = self.most_elements()
        if body.count(b"{") + body.count(b"[") > most:
            raise errors.malformed_request(f"the body holds more than {most} objects and lists")
        if body.count(b":") > most:  # One in each entry of an object; a token at least in a text.
            raise errors.malformed_request(f"the body has more than {most} colons")
        if body.count(b",") > COMMAS_AN_ELEMENT * most:
            raise errors.malformed_request(
                f"the body has more than {COMMAS_AN_ELEMENT * most} commas"
            )

    def _largest_context(self) -> int:
        return max((model.max_context_tokens for model in self._models()), default=0)
