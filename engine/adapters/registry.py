"""The adapters that are loaded, by name and by content. Every method may be called from any thread.

A name leads new requests to a digest. Requests hold the content by its digest: when a name goes, or
comes to mean another content, those under way end with what they began with.

Host memory has room for some. The content that was used longest ago makes room for another, unless
a request holds it; when a request wants it, it is read again, and the request waits for it. Who
waits for room waits in turn: as long as the first one has none, those whose content is there wait
behind it, so that it gets some.

Where a folder has another content by then, its name goes. Where it cannot be read, the requests
that wait fail and the name stays: a later request tries again, `REST_S` after that at the earliest.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from engine.adapters.types import Adapter, AdapterError, AdapterInfo, AdapterUnreadError

log = logging.getLogger("baton.engine")

MOST_NAME_BYTES: Final = 128
REST_S: Final = 1.0
"""Time in which a content that could not be read is not tried again, seconds: the wait that routers
ask of clients then."""
Read = Callable[[Path, Path | None], Adapter]
"""Reads a folder. Of one below the second path, nothing outside of that is read; None: no bound.

Raises:
    AdapterError: it does not fit the model; the message says why.
"""


class _Source(NamedTuple):
    """Where a content can be read again."""

    path: Path
    within: Path | None
    num_bytes: int


@dataclass(eq=False)
class _Wait:
    """Requests that wait for a content."""

    source: _Source
    requests: int = 0
    done: Future[Adapter] = field(default_factory=Future)


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
        self.on_gone: Callable[[], None] = lambda: None
        """Is called, on some thread, when names are gone because their content is. It must return
        at once."""
        self._changed = threading.Condition()
        """Guards all else here. Room may be there when it is notified."""
        self._named: dict[str, AdapterInfo] = {}
        self._sources: dict[bytes, _Source] = {}
        """Where contents that have a name can be read again."""
        self._contents: OrderedDict[bytes, Adapter] = OrderedDict()
        """What is in memory; what was used longest ago comes first."""
        self._users: Counter[bytes] = Counter()
        """Requests that have each content."""
        self._waits: OrderedDict[bytes, _Wait] = OrderedDict()
        self._unread_s: dict[bytes, float] = {}
        """When each content that has a name could not be read, since it last could."""
        self._reading_bytes = 0
        """Bytes of what is being read again."""
        self._lacks_room = False
        """Whether the first wait does."""
        self._reads = False
        """Whether there is a thread for the waits."""

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
        check_name(name)
        adapter = self._read(path, within)
        return self._add(name, adapter, _Source(path, within, adapter.num_bytes), again=again)

    def add(self, name: str, adapter: Adapter, *, again: bool = False) -> AdapterInfo:
        """Takes an adapter that stays in memory as long as it has a name. See `load`."""
        return self._add(name, adapter, None, again=again)

    def _add(
        self, name: str, adapter: Adapter, source: _Source | None, *, again: bool
    ) -> AdapterInfo:
        path = "" if source is None else str(source.path)
        info = AdapterInfo(name, adapter.digest, adapter.rank, adapter.num_bytes, path)
        with self._changed:
            before = self._named.get(name)
            if before is not None and before.digest != info.digest and not again:
                raise AdapterError(
                    f"the name {name!r} is taken by another adapter: unload that one, or load in"
                    " place of it"
                )
            self._keep_new(adapter, source)
            self._named[name] = info
            if before is not None:
                self._forget(before.digest)
        return info

    def _keep_new(self, adapter: Adapter, source: _Source | None) -> None:
        digest = adapter.digest
        if digest not in self._contents:
            has_room = self._make_room(adapter.num_bytes)
            if adapter.num_bytes > self._most_bytes or not (has_room or source):
                raise AdapterError(
                    f"an adapter would take {adapter.num_bytes >> 20} MiB of host memory, and"
                    f" {self._most_bytes >> 20} MiB are allowed for all (adapters_host_gib)"
                )
            if has_room:
                self._contents[digest] = adapter
        self._unread_s.pop(digest, None)
        if source is not None:
            self._sources[digest] = source

    def unload(self, name: str) -> bool:
        """Forgets a name; whether there was one. Its content stays until no request holds it."""
        with self._changed:
            info = self._named.pop(name, None)
            if info is not None:
                self._forget(info.digest)
        return info is not None

    def named(self) -> tuple[AdapterInfo, ...]:
        """All that have a name, by name."""
        with self._changed:
            return tuple(info for _, info in sorted(self._named.items()))

    def has(self, digest: bytes) -> bool:
        """Whether a request for this content can run."""
        with self._changed:
            return digest in self._contents or digest in self._sources or digest in self._waits

    @property
    def in_host(self) -> tuple[bytes, ...] | None:
        """Digests of the contents in memory, those that were used last first; None: all that can be
        asked for."""
        with self._changed:
            if self._sources.keys() <= self._contents.keys():
                return None
            return tuple(reversed(self._contents))

    def hold(self, digest: bytes) -> Future[Adapter] | None:
        """The content, which stays until `release`; it may have to be read first. None: it is not
        here. The future raises AdapterUnreadError if it cannot be read now, and AdapterError if its
        folder has it no more."""
        with self._changed:
            found = self._contents.get(digest)
            if found is not None and not self._lacks_room:
                self._users[digest] += 1
                self._contents.move_to_end(digest)
                done: Future[Adapter] = Future()
                done.set_result(found)
                return done
            return self._wait_for(digest, found)

    def _wait_for(self, digest: bytes, found: Adapter | None) -> Future[Adapter] | None:
        wait = self._waits.get(digest)
        if wait is None:
            source = self._sources.get(digest)
            if source is None and found is not None:  # It is there, and stays.
                source = _Source(Path(), None, found.num_bytes)
            if source is None:
                return None
            if found is None and time.monotonic() < self._unread_s.get(digest, -REST_S) + REST_S:
                failed: Future[Adapter] = Future()
                failed.set_exception(AdapterUnreadError("it could not be read a moment ago"))
                return failed
            wait = self._waits[digest] = _Wait(source)
        wait.requests += 1
        if not self._reads:
            self._reads = True
            threading.Thread(target=self._work, name="baton-adapters", daemon=True).start()
        return wait.done

    def release(self, digest: bytes, held: Future[Adapter]) -> None:
        """A request that held the content has ended, or does not wait for it any more."""
        with self._changed:
            wait = self._waits.get(digest)
            if wait is not None and wait.done is held:
                wait.requests -= 1
            elif held.exception() is None:
                self._let_go(digest)
            self._changed.notify_all()

    @property
    def held(self) -> int:
        """How many holds of requests there are."""
        with self._changed:
            return self._users.total() + sum(wait.requests for wait in self._waits.values())

    def _let_go(self, digest: bytes) -> None:
        self._users[digest] -= 1
        if not self._users[digest]:
            del self._users[digest]
            self._drop_unnamed(digest)

    def _forget(self, digest: bytes) -> None:
        """A name means a content no more."""
        if all(info.digest != digest for info in self._named.values()):
            self._sources.pop(digest, None)
            self._unread_s.pop(digest, None)
            self._drop_unnamed(digest)

    def _drop_unnamed(self, digest: bytes) -> None:
        named = any(info.digest == digest for info in self._named.values())
        if not named and digest not in self._users:
            self._contents.pop(digest, None)

    def _make_room(self, num_bytes: int) -> bool:
        """Whether there is room, now that enough of what nobody holds and can be read again is
        gone. Where all of that would not suffice, nothing goes."""
        used = sum(each.num_bytes for each in self._contents.values()) + self._reading_bytes
        lacking = used + num_bytes - self._most_bytes
        idle = {
            digest: content.num_bytes
            for digest, content in self._contents.items()
            if digest not in self._users and digest in self._sources
        }
        if lacking > sum(idle.values()):
            return False
        for digest, freed in idle.items():
            if lacking <= 0:
                break
            lacking -= freed
            del self._contents[digest]
        return True

    # -- the thread of the waits ------------------------------------------------------------------

    def _work(self) -> None:
        """Serves waits in turn, until there are none."""
        while (first := self._first()) is not None:
            digest, wait, found = first
            try:
                found = found or self._again(digest, wait.source)
            except AdapterError as error:
                self._fail(digest, wait, error)
            else:
                self._give(digest, wait, found)

    def _first(self) -> tuple[bytes, _Wait, Adapter | None] | None:
        """The first wait, once its content is there, or there is room for it; None: the thread
        ends."""
        with self._changed:
            while self._waits:
                digest, wait = next(iter(self._waits.items()))
                found = self._contents.get(digest)
                if found is not None or self._has_room_for(wait):
                    return digest, wait, found
                del self._waits[digest]  # Nobody waits any more.
            self._reads = False
            return None

    def _has_room_for(self, wait: _Wait) -> bool:
        """Waits until there is room, which is kept for it, or nobody waits any more."""
        size = wait.source.num_bytes
        self._lacks_room = True
        while wait.requests and not self._make_room(size):
            self._changed.wait()
        self._lacks_room = False
        self._reading_bytes = size if wait.requests else 0
        return wait.requests > 0

    def _again(self, digest: bytes, source: _Source) -> Adapter:
        """Reads a content again.

        Raises:
            AdapterUnreadError: it cannot be read now.
            AdapterError: its folder has it no more.
        """
        assert self._read is not None
        try:
            found = self._read(source.path, source.within)
        except AdapterError:
            raise
        except Exception as failed:  # Such as no memory, or no file number, to put it in.
            raise AdapterUnreadError("it cannot be read again") from failed
        if found.digest != digest:
            raise AdapterError("its folder has another content now")
        return found

    # A wait goes in the moment in which its future is done: `release` asks the one or the other.

    def _give(self, digest: bytes, wait: _Wait, found: Adapter) -> None:
        """Gives the content to those who waited."""
        with self._changed:
            self._reading_bytes = 0
            del self._waits[digest]
            self._contents[digest] = found
            self._contents.move_to_end(digest)
            if wait.requests:
                self._users[digest] += wait.requests
            self._unread_s.pop(digest, None)
            self._drop_unnamed(digest)
            wait.done.set_result(found)

    def _fail(self, digest: bytes, wait: _Wait, error: AdapterError) -> None:
        """The content cannot be read now, or its names are gone."""
        with self._changed:
            self._reading_bytes = 0
            names = [name for name, info in self._named.items() if info.digest == digest]
            if isinstance(error, AdapterUnreadError):
                if names:
                    self._unread_s[digest] = time.monotonic()
                told = ", ".join(names) or "of no name"
                log.warning("adapter %s cannot be read now: %s", told, _cause_of(error))
            else:
                for name in names:
                    log.warning("adapter %s is gone: its folder has it no more", name)
                    del self._named[name]
                self._forget(digest)
                self.on_gone()  # Before those who waited hear of it.
            del self._waits[digest]
            wait.done.set_exception(error)


def _cause_of(error: AdapterUnreadError) -> str:
    """Without any path."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno in errno.errorcode:
        return errno.errorcode[cause.errno]
    return "a file is missing" if cause is None else type(cause).__name__


def check_name(name: str) -> None:
    """Raises AdapterError if no adapter can be named so."""
    if not name or len(name.encode()) > MOST_NAME_BYTES or not name.isprintable():
        raise AdapterError(
            f"an adapter's name has 1 to {MOST_NAME_BYTES} bytes, and no control characters:"
            f" {name[:40]!r} does not"
        )
