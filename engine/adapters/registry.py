"""The adapters that are loaded, by name and by content. Every method may be called from any thread.

A name leads new requests to a digest. Requests hold the content by its digest: when a name goes, or
comes to mean another content, those under way end with what they began with.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from engine.adapters.types import Adapter, AdapterError, AdapterInfo

MOST_NAME_BYTES: Final = 128
Read = Callable[[Path, Path | None], Adapter]
"""Reads a folder. Of one below the second path, nothing outside of that is read; None: no bound.

Raises:
    AdapterError: it does not fit the model; the message says why.
"""


class Adapters:
    """See the module."""

    def __init__(self, read: Read | None = None, most_bytes: int = 0) -> None:
        """Nothing is loaded yet.

        Args:
            read: None: this engine takes no adapters.
            most_bytes: of host memory, for all together.
        """
        self._read = read
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._named: dict[str, AdapterInfo] = {}
        self._contents: dict[bytes, Adapter] = {}
        self._users: Counter[bytes] = Counter()
        """Requests and names that hold each content."""

    @property
    def on(self) -> bool:
        """Whether this engine takes adapters."""
        return self._read is not None

    def load(
        self, name: str, path: Path, *, again: bool = False, within: Path | None = None
    ) -> AdapterInfo:
        """Reads an adapter. It takes a while.

        Args:
            name: by which requests choose it.
            path: its folder, in peft's format.
            again: the name may be taken already: from now on it means what the folder has.
            within: a folder without links in its path; nothing outside of it is read.

        Raises:
            AdapterError: it cannot be had.
        """
        if self._read is None:
            raise AdapterError("this worker takes no adapters: start it with max_adapters above 0")
        _check_name(name)
        return self.add(name, self._read(path, within), str(path), again=again)

    def add(
        self, name: str, adapter: Adapter, path: str = "", *, again: bool = False
    ) -> AdapterInfo:
        """Takes an adapter that was read. See `load`."""
        info = AdapterInfo(name, adapter.digest, adapter.rank, adapter.num_bytes, path)
        with self._lock:
            before = self._named.get(name)
            if before is not None and before.digest == info.digest:
                return before
            if before is not None and not again:
                raise AdapterError(
                    f"the name {name!r} is taken by another adapter: unload that one, or load in"
                    " place of it"
                )
            self._check_room(adapter)
            self._hold(self._contents.setdefault(adapter.digest, adapter).digest)
            self._named[name] = info
            if before is not None:
                self._let_go(before.digest)
        return info

    def unload(self, name: str) -> bool:
        """Forgets a name; whether there was one. Its content stays until no request holds it."""
        with self._lock:
            info = self._named.pop(name, None)
            if info is not None:
                self._let_go(info.digest)
        return info is not None

    def named(self) -> tuple[AdapterInfo, ...]:
        """All that have a name, by name."""
        with self._lock:
            return tuple(info for _, info in sorted(self._named.items()))

    def has(self, digest: bytes) -> bool:
        """Whether a request for this content can run."""
        with self._lock:
            return digest in self._contents

    def hold(self, digest: bytes) -> Adapter | None:
        """The content, which stays until `release`; None: it is not here."""
        with self._lock:
            found = self._contents.get(digest)
            if found is not None:
                self._hold(digest)
            return found

    def release(self, digest: bytes) -> None:
        """A request that held the content has ended."""
        with self._lock:
            self._let_go(digest)

    @property
    def held(self) -> int:
        """How many holds of requests there are."""
        with self._lock:
            return sum(self._users.values()) - len(self._named)

    def _hold(self, digest: bytes) -> None:
        self._users[digest] += 1

    def _let_go(self, digest: bytes) -> None:
        self._users[digest] -= 1
        if not self._users[digest]:
            del self._users[digest], self._contents[digest]

    def _check_room(self, adapter: Adapter) -> None:
        others = {digest: each for digest, each in self._contents.items() if digest in self._users}
        others[adapter.digest] = adapter
        wanted = sum(each.num_bytes for each in others.values())
        if wanted > self._most_bytes:
            raise AdapterError(
                f"all adapters together would take {wanted >> 20} MiB of host memory, and"
                f" {self._most_bytes >> 20} MiB are allowed (adapters_host_gib): unload one first"
            )


def _check_name(name: str) -> None:
    if not name or len(name.encode()) > MOST_NAME_BYTES or not name.isprintable():
        raise AdapterError(
            f"an adapter's name has 1 to {MOST_NAME_BYTES} bytes, and no control characters:"
            f" {name[:40]!r} does not"
        )
