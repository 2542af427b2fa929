"""What a store is. Stores run in a child process, so they may block, hang or crash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

Buffers = Sequence[memoryview]
"""The parts of one object, in order. All objects of a worker have the same parts. Each part begins
and ends at multiples of 4 KiB of memory."""


class StoreError(Exception):
    """A store cannot be opened. The message names it."""


class PageStore(Protocol):
    """Keeps objects: KV of 256 tokens under a name of letters, digits, dots and dashes.

    Only one thread calls it. A call may take its time: the caller has a deadline. An error that it
    raises is logged and counts as a miss. The bytes need no check: a checksum is in the first part.
    """

    shared: bool
    """Whether others can write to the store. Then objects must be signed."""

    def lookup(self, keys: Sequence[str]) -> list[bool]:
        """For each object, whether it is probably there."""
        ...

    def load(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[bool]:
        """Reads objects into their buffers. For each, whether all of it was there."""
        ...

    def store(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[bool]:
        """Writes objects. The store may drop others, or any of these, to stay within its size. For
        each, whether it is there."""
        ...

    def remove(self, keys: Sequence[str]) -> None:
        """Removes objects that turned out to be damaged."""
        ...

    def close(self) -> None:
        """Ends the use of the store."""
        ...


@runtime_checkable
class RegisteringStore(Protocol):
    """A store that wants to know the memory of all buffers beforehand, as a network card does."""

    def register(self, memory: memoryview) -> None:
        """Parts of this memory may be in buffers from now on."""
        ...

    def unregister(self, memory: memoryview) -> None:
        """No part of it is any more."""
        ...
