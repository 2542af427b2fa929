"""Puts a caller's options into the fields of a message. Errors name the option."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_RANGES: Final = {
    FieldDescriptor.CPPTYPE_UINT32: "from 0 to 2^32 - 1",
    FieldDescriptor.CPPTYPE_UINT64: "from 0 to 2^64 - 1",
    FieldDescriptor.CPPTYPE_INT32: "from -2^31 to 2^31 - 1",
}
_ALL: Final = {"top_k": "; 0 takes all tokens"}
"""How an option is turned off that other servers turn off by -1."""


def set_fields(message: Message, options: Mapping[str, object], names: Iterable[str]) -> None:
    """Sets those fields that the options have.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a number is out of its field's range, or a text is no Unicode.
    """
    for name in names:
        if name in options:
            with named(name):
                _set(message, name, options[name])


def _set(message: Message, name: str, value: object) -> None:
    try:
        setattr(message, name, value)
    except ValueError as error:
        bounds = _RANGES.get(message.DESCRIPTOR.fields_by_name[name].cpp_type)
        if bounds is None or "range" not in str(error):
            raise
        raise ValueError(f"must be {bounds}, and not {value}{_ALL.get(name, '')}") from None


@contextmanager
def named(name: str) -> Iterator[None]:
    """Puts an option's name before what is wrong with its value."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    except ValueError as error:  # Of its kinds one cannot be made of a message alone.
        raise ValueError(f"{name}: {error}") from None
