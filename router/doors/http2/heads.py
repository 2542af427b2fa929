"""Heads and ends of gRPC's calls as headers of HTTP/2."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple
from urllib.parse import quote

import grpc
from hpack import HeaderTuple, NeverIndexedHeaderTuple

Headers = Sequence[tuple[bytes, bytes]]

MOST_METADATA_BYTES: Final = 1 << 14
"""Most bytes of a call's headers, each with 32 as HTTP/2 counts them: what gRPC's servers take."""
_BYTES_A_HEADER: Final = 32  # RFC 9113, 6.5.2
_CONTENT_TYPE: Final = re.compile(rb"application/grpc(\Z|[+;])")
_TIMEOUT: Final = re.compile(rb"(\d{1,8})([HMSmun])")
_UNIT_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_PLAIN: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
"""Characters that stand for themselves in `grpc-message`."""
_ENCODING: Final = (b"grpc-accept-encoding", b"identity")
_BEGIN: Final = ((b":status", b"200"), (b"content-type", b"application/grpc"), _ENCODING)
_OWN: Final = (b":", b"grpc-")
"""How names begin that are the protocol's own, and no metadata."""
_PSEUDO: Final = (
    [b":method", b":path", b":scheme"],
    [b":authority", b":method", b":path", b":scheme"],
)
"""Headers of the protocol that every request has once, sorted."""
_OWN_NAMES: Final = frozenset((b"te", b"content-type"))
_BINARY: Final = b"-bin"


class HeadError(Exception):
    """A call that is refused by its headers alone."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class NotGrpcError(Exception):
    """A request that is none of gRPC's."""

    def __init__(self, status: int, headers: Headers = ()) -> None:
        super().__init__(status)
        self.status = status
        """The status of HTTP for it."""
        self.headers = headers


class Head(NamedTuple):
    """What the headers of a call say."""

    method: str
    """`/package.Service/Method`."""
    timeout_s: float | None
    """Until the caller's deadline; None if it has none."""
    metadata: tuple[tuple[str, str], ...]
    """The caller's own, without binary ones, which nobody reads here."""

    @classmethod
    def of(cls, headers: Iterable[tuple[bytes, bytes]]) -> Head:
        """Reads the headers.

        Raises:
            NotGrpcError: it is no call of gRPC.
            HeadError: it is one that cannot be answered.
        """
        pairs = [(bytes(name), bytes(value)) for name, value in headers]
        found = dict(pairs)
        pseudo = sorted(name for name, _ in pairs if name.startswith(b":"))
        if pseudo not in _PSEUDO:
            raise NotGrpcError(400)
        if found.get(b":method") != b"POST":
            raise NotGrpcError(405, ((b"allow", b"POST"),))
        if not _CONTENT_TYPE.match(found.get(b"content-type", b"")):
            raise NotGrpcError(415)
        size = sum(len(name) + len(value) + _BYTES_A_HEADER for name, value in pairs)
        if size > MOST_METADATA_BYTES:
            raise HeadError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the metadata have {size} bytes, more than {MOST_METADATA_BYTES}",
            )
        if found.get(b"grpc-encoding", b"identity") != b"identity":
            raise HeadError(
                grpc.StatusCode.UNIMPLEMENTED,
                "messages must not be compressed: a few bytes could stand for megabytes",
            )
        return cls(
            _text(found[b":path"]),
            _timeout_s(found.get(b"grpc-timeout")),
            tuple(
                (_text(name), _text(value))
                for name, value in pairs
                if not name.startswith(_OWN)
                and name not in _OWN_NAMES
                and not name.endswith(_BINARY)
            ),
        )


def begin() -> list[HeaderTuple]:
    """Headers before the first message."""
    return [HeaderTuple(*one) for one in _BEGIN]


def end(
    code: grpc.StatusCode, message: str = "", metadata: Sequence[tuple[str, str | bytes]] = ()
) -> list[HeaderTuple]:
    """Trailers behind the last message. Those that no other call repeats stay out of the table."""
    trailers = [HeaderTuple(b"grpc-status", b"%d" % code.value[0])]
    if message:
        said = quote(message, safe=_PLAIN, errors="replace").encode()
        trailers.append(NeverIndexedHeaderTuple(b"grpc-message", said))
    for name, value in metadata:
        text = value.encode() if isinstance(value, str) else base64.b64encode(value).rstrip(b"=")
        trailers.append(NeverIndexedHeaderTuple(name.encode(), text))
    return trailers


def not_grpc(error: NotGrpcError) -> list[HeaderTuple]:
    """The whole answer to a request that is none of gRPC's."""
    return [
        HeaderTuple(b":status", b"%d" % error.status),
        *(HeaderTuple(*one) for one in error.headers),
    ]


def _timeout_s(value: bytes | None) -> float | None:
    if value is None:
        return None
    if (found := _TIMEOUT.fullmatch(value)) is None:
        raise HeadError(grpc.StatusCode.INTERNAL, "grpc-timeout must be up to 8 digits and a unit")
    return int(found[1]) * _UNIT_S[found[2]]


def _text(value: bytes) -> str:
    return value.decode("utf-8", errors="replace")
