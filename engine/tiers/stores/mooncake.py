"""`mooncake://HOST:PORT`: a Mooncake store, the memory of a cluster's hosts, by its master.

Options after a question mark: `protocol=tcp|rdma`, `device=NAME` of the network card,
`metadata=URL` (the default is the master's own, P2PHANDSHAKE), `gib=N` of this host's memory that
the worker's child gives to the store (0: none) and `local=NAME` under which others reach this host.

All memory is registered, so objects go from and to the host slots without a copy in between.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from engine.tiers.stores.protocol import Buffers, StoreError

_BUFFER_BYTES = 1 << 24
"""The client's own memory, through which nothing here passes."""
_REACHED_S = 5.0
"""To the master's port: its own client waits for minutes where nobody listens."""
_KNOWN = {"protocol", "device", "metadata", "gib", "local"}


class MooncakeStore:
    """See the module. Bounds and eviction are the cluster's.

    Args:
        address: as above.
        object_bytes: bytes of an object.

    Raises:
        StoreError: the package is missing, or the master does not answer.
    """

    shared = True

    def __init__(self, address: str, object_bytes: int) -> None:
        parts = urlsplit(address)
        options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if not parts.netloc or options.keys() - _KNOWN:
            raise StoreError(
                f"{address}: the form is mooncake://HOST:PORT?{'&'.join(sorted(_KNOWN))}"
            )
        os.environ.setdefault("GLOG_minloglevel", "2")  # Errors alone.
        try:
            socket.create_connection((parts.hostname or "", parts.port or 0), _REACHED_S).close()
        except OSError as error:
            raise StoreError(f"{address}: the master cannot be reached: {error}") from error
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise StoreError(f"{address}: mooncake-transfer-engine is missing: {error}") from error
        self._object_bytes = object_bytes
        self._store: Any = MooncakeDistributedStore()
        given = int(float(options.get("gib", 0)) * (1 << 30))
        failed = self._store.setup(
            options.get("local", socket.gethostname()),
            options.get("metadata", "P2PHANDSHAKE"),
            given,
            _BUFFER_BYTES,
            options.get("protocol", "tcp"),
            options.get("device", ""),
            parts.netloc,
        )
        if failed:
            raise StoreError(f"{address}: the master does not answer ({failed})")

    def lookup(self, keys: Sequence[str]) -> list[bool]:
        """See `PageStore`."""
        return [found == 1 for found in self._store.batch_is_exist(list(keys))]

    def register(self, memory: memoryview) -> None:
        """See `RegisteringStore`.

        Raises:
            StoreError: it cannot be.
        """
        if failed := self._store.register_buffer(_address(memory), len(memory)):
            raise StoreError(f"{len(memory)} bytes of memory cannot be registered ({failed})")

    def unregister(self, memory: memoryview) -> None:
        """See `RegisteringStore`."""
        self._store.unregister_buffer(_address(memory))

    def load(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[bool]:
        """See `PageStore`."""
        found = self._store.batch_get_into_multi_buffers(list(keys), *_places(buffers))
        return [
            read == self._object_bytes or self._is_of_another_size(key)
            for key, read in zip(keys, found, strict=True)
        ]

    def _is_of_another_size(self, key: str) -> bool:
        """Then it is damaged, and not missing: the caller removes it."""
        size: int = self._store.get_size(key)
        return size > 0 and size != self._object_bytes

    def store(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[bool]:
        """See `PageStore`."""
        put = self._store.batch_put_from_multi_buffers(list(keys), *_places(buffers))
        return [failed == 0 for failed in put]

    def remove(self, keys: Sequence[str]) -> None:
        """See `PageStore`."""
        for key in keys:
            self._store.remove(key, True)  # Although somebody may just have read it.

    def close(self) -> None:
        """See `PageStore`."""
        self._store.close()


def _places(buffers: Sequence[Buffers]) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and sizes of all parts."""
    addresses = [[_address(part) for part in parts] for parts in buffers]
    return addresses, [[len(part) for part in parts] for parts in buffers]


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
