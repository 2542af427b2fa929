"""Counts the fields of a gRPC message in its bytes, before it is parsed.

A message of two bytes becomes an object of a hundred bytes. So a parser would turn megabytes of
messages into hundreds of megabytes. Only messages that hold others, or texts, are walked. All other
messages cost no more than their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_VARINT_BYTES: Final = 10
"""Bytes of the longest number."""
_TEXTS: Final = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


class _MalformedError(Exception):
    """The bytes are not fields."""


def count_fields(data: bytes, kind: Descriptor, most: int) -> int:
    """The number of fields of the message and of the messages in it. Stops at one more than `most`.

    Bytes that are not a message count as far as they can be read. The parser will refuse them.
    """
    count, parts = 0, [(0, len(data), kind)]
    try:
        while parts:
            at, end, kind = parts.pop()
            inner = _inner(kind)
            while at < end:
                count += 1
                if count > most:
                    return count
                number, start, at = _field(data, at)
                if number in inner:
                    parts.append((start, min(at, end), inner[number]))
    except (_MalformedError, IndexError):
        pass
    return count


def _field(data: bytes, at: int) -> tuple[int, int, int]:
    """The number of the field at a place (0: it holds nothing), and the begin and end of its
    content."""
    tag, at = _varint(data, at)
    match tag & 7:
        case 2:  # Bytes, a text or a message.
            size, at = _varint(data, at)
            return tag >> 3, at, at + size
        case 0:
            _, at = _varint(data, at)
            return 0, at, at
        case 1:
            return 0, at, at + 8
        case 5:
            return 0, at, at + 4
        case 3 | 4:  # A group begins or ends.
            return 0, at, at
        case _:
            raise _MalformedError


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and the place after it."""
    value = data[at]
    if value < 0x80:
        return value, at + 1
    value &= 0x7F
    for index in range(1, _VARINT_BYTES):
        byte = data[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise _MalformedError


@lru_cache(maxsize=64)
def _inner(kind: Descriptor) -> Mapping[int, Descriptor]:
    """The fields whose messages are walked, by number."""
    return {
        field.number: field.message_type
        for field in kind.fields
        if field.message_type is not None and _holds_many(field.message_type)
    }


def _holds_many(kind: Descriptor) -> bool:
    """Whether it has fields that may hold messages, or any number of texts."""
    return any(
        field.message_type is not None or (field.is_repeated and field.type in _TEXTS)
        for field in kind.fields
    )
