"""Layout of the notifications: little-endian, packed, at most 4096 bytes.

    header  magic "BT" | version u8 | kind u8 | transfer id 16 bytes | decode epoch u64
    chunk   group u8 | first page u32 | end page u32 | end token u32 | flags u8
            | send span id 8 bytes | payload length u16 | payload

Only CHUNK has a body. Flags: 1 the last of its transfer, 2 the span id is set. The last is one of
group 0. Whatever does not parse to the byte raises `MalformedNotification`, which receivers count
and drop. Version 1 had no groups.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from kv_transfer.specs import TRANSFER_ID_BYTES
from kv_transfer.types import MAX_GROUPS, MAX_NOTIFICATION_BYTES, TransportError

_MAGIC = b"BT"
VERSION = 2
"""Version of what two workers send each other. It is part of the fingerprints that routers and
workers compare, so workers of different versions never exchange pages."""
_HEADER = struct.Struct("<2sBB16sQ")
_CHUNK = struct.Struct("<BIIIB8sH")
_LAST = 1
"""Flag: no chunk comes after this one, and it carries the payload."""
_HAS_SPAN = 2
"""Flag: the span of the sending follows."""

MAX_PAYLOAD_BYTES = MAX_NOTIFICATION_BYTES - _HEADER.size - _CHUNK.size
"""Room for the owner's payload in the last notification of a transfer."""


class MalformedNotification(Exception):  # noqa: N818 - it names the thing dropped
    """The bytes are not a notification of this version."""


class Kind(enum.IntEnum):
    """What a notification says."""

    CHUNK = 1
    """The pages of a range have landed."""
    QUIESCE = 2
    """Decode side: stop writing for this transfer and say when nothing can land any more."""
    QUIESCED = 3
    """Prefill side: nothing of this transfer can land any more, now or later."""
    PROBE = 4
    """Rides on a warm-up or a self-test; means nothing."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pages [first_page, end_page) of the prompt have landed, of one group."""

    transfer_id: bytes
    decode_epoch: int
    first_page: int
    end_page: int
    end_token: int
    """Prompt tokens final so far; all of them in the last."""
    last: bool = False
    payload: bytes = b""
    """The owner's, in the last only."""
    send_span_id: bytes = b""
    """8 bytes or empty, in the last only."""
    group: int = 0


@dataclass(frozen=True, slots=True)
class Quiesce:
    """See `Kind.QUIESCE`."""

    transfer_id: bytes
    decode_epoch: int


@dataclass(frozen=True, slots=True)
class Quiesced:
    """See `Kind.QUIESCED`; repeats the epoch of the decode side."""

    transfer_id: bytes
    decode_epoch: int


@dataclass(frozen=True, slots=True)
class Probe:
    """See `Kind.PROBE`."""


Message = Chunk | Quiesce | Quiesced | Probe


def encode(message: Message) -> bytes:
    """Packs a message.

    Raises:
        TransportError: `payload_too_large`, where it would not fit a notification.
    """
    match message:
        case Chunk():
            return _header(Kind.CHUNK, message.transfer_id, message.decode_epoch) + _body(message)
        case Quiesce(transfer_id, epoch):
            return _header(Kind.QUIESCE, transfer_id, epoch)
        case Quiesced(transfer_id, epoch):
            return _header(Kind.QUIESCED, transfer_id, epoch)
        case Probe():
            return _header(Kind.PROBE, bytes(TRANSFER_ID_BYTES), 0)


def decode(data: bytes) -> Message:
    """Unpacks a message.

    Raises:
        MalformedNotification: the bytes are anything else.
    """
    if len(data) < _HEADER.size or len(data) > MAX_NOTIFICATION_BYTES:
        raise MalformedNotification("length")
    magic, version, kind, transfer_id, epoch = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != VERSION:
        raise MalformedNotification("magic or version")
    if kind == Kind.CHUNK:
        return _decode_chunk(transfer_id, epoch, data[_HEADER.size :])
    if len(data) != _HEADER.size:
        raise MalformedNotification("trailing bytes")
    match kind:
        case Kind.QUIESCE:
            return Quiesce(transfer_id, epoch)
        case Kind.QUIESCED:
            return Quiesced(transfer_id, epoch)
        case Kind.PROBE:
            return Probe()
        case _:
            raise MalformedNotification("kind")


def _header(kind: Kind, transfer_id: bytes, epoch: int) -> bytes:
    return _HEADER.pack(_MAGIC, VERSION, kind, transfer_id, epoch)


def _body(chunk: Chunk) -> bytes:
    if len(chunk.payload) > MAX_PAYLOAD_BYTES:
        raise TransportError("payload_too_large", f"{len(chunk.payload)} bytes")
    flags = (_LAST if chunk.last else 0) | (_HAS_SPAN if chunk.send_span_id else 0)
    pages = (chunk.group, chunk.first_page, chunk.end_page, chunk.end_token)
    last = (flags, chunk.send_span_id, len(chunk.payload))
    return _CHUNK.pack(*pages, *last) + chunk.payload


def _decode_chunk(transfer_id: bytes, epoch: int, body: bytes) -> Chunk:
    if len(body) < _CHUNK.size:
        raise MalformedNotification("chunk length")
    group, first_page, end_page, end_token, flags, span, payload_bytes = _CHUNK.unpack_from(body)
    payload = body[_CHUNK.size :]
    last = bool(flags & _LAST)
    if flags & ~(_LAST | _HAS_SPAN) or len(payload) != payload_bytes or first_page > end_page:
        raise MalformedNotification("chunk fields")
    if not last and (payload or flags & _HAS_SPAN):
        raise MalformedNotification("payload before the last")
    if group >= MAX_GROUPS or (last and group):
        raise MalformedNotification("group")
    span_id = span if flags & _HAS_SPAN else b""
    pages = (first_page, end_page, end_token)
    return Chunk(transfer_id, epoch, *pages, last, payload, span_id, group)
