"""Adapters in memory that all ranks of a worker map: it is there once, and each rank reads its
slices of it.

A file of it begins with the digest. Then come the length of a description in JSON, that
description, and the pairs, each at a multiple of `_ALIGNMENT` bytes.
"""

from __future__ import annotations

import json
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from engine.adapters.types import DIGEST_BYTES, Adapter, AdapterError, LowRank

_ALIGNMENT: Final = 64
"""Bytes of a cache line; any tensor may begin there."""
_LENGTH_BYTES: Final = 8
"""In which the description has its length."""
_HEAD_BYTES: Final = DIGEST_BYTES + _LENGTH_BYTES


class SharedFile:
    """Memory that has no name in any folder. It ends with the last process that maps it."""

    def __init__(self, size: int) -> None:
        """`size`: bytes."""
        self._fd = os.memfd_create("baton-adapter", os.MFD_CLOEXEC)
        self._closes = weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, size)
        self.memory = mmap.mmap(self._fd, size)

    @property
    def path(self) -> str:
        """By which processes of this user on this host open it, as long as this object is."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"


def shared(adapter: Adapter) -> Adapter:
    """The adapter in memory that others can map."""
    about: dict[str, list[Any]] = {}
    end = 0
    for name, pair in adapter.modules.items():
        halves = []
        for half in (pair.a, pair.b):
            halves += [list(half.shape), end]
            end = _aligned(end + half.numel() * half.element_size())
        about[name] = [str(pair.a.dtype).removeprefix("torch."), pair.scale, *halves]
    told = json.dumps({"rank": adapter.rank, "pairs": about}).encode()
    first = _aligned(_HEAD_BYTES + len(told))
    file = SharedFile(first + end)
    head = adapter.digest + len(told).to_bytes(_LENGTH_BYTES, "little") + told
    file.memory[: len(head)] = head
    made = opened(file.memory)
    for name, pair in adapter.modules.items():
        made.modules[name].a.copy_(pair.a)
        made.modules[name].b.copy_(pair.b)
    return replace(made, base=adapter.base, file=file)


def mapped(path: str, digest: bytes) -> Adapter:
    """What another process shares.

    Raises:
        AdapterError: another file has taken its place.
        OSError: there is none any more.
    """
    with open(path, "rb") as file:
        # Private, and so writable: tensors of memory that is not would warn.
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if memory[:DIGEST_BYTES] != digest:
        raise AdapterError("the memory of an adapter has another's")
    return opened(memory)


def opened(memory: mmap.mmap | bytearray) -> Adapter:
    """The adapter that such memory has; its tensors are there."""
    length = int.from_bytes(memory[DIGEST_BYTES:_HEAD_BYTES], "little")
    about = json.loads(memory[_HEAD_BYTES : _HEAD_BYTES + length])
    first = _aligned(_HEAD_BYTES + length)
    pairs = {
        name: LowRank(_tensor(memory, kind, first, *a), _tensor(memory, kind, first, *b), scale)
        for name, (kind, scale, *halves) in about["pairs"].items()
        for a, b in [(halves[:2], halves[2:])]
    }
    return Adapter(bytes(memory[:DIGEST_BYTES]), pairs, about["rank"])


def _tensor(
    memory: mmap.mmap | bytearray, kind: str, first: int, shape: list[int], offset: int
) -> Tensor:
    make: Callable[..., Tensor] = torch.frombuffer
    count = shape[0] * shape[1]
    own = make(memory, dtype=getattr(torch, kind), count=count, offset=first + offset)
    return own.view(shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
