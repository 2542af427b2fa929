"""The child process of a store.

    python -m engine.tiers.stores.child SOCKET WORKER'S-PROCESS

It opens the store, answers the opening, and then works through questions, one at a time: look-ups
before loads before stores. It maps the worker's host slots and writes a digest into each object
that it stores. An object that it loads counts only if the digest is right. It ends when its worker
does: it has two seconds if the worker closes it, none if the worker dies.

Where the worker has several ranks, each has a part of every page and slots of its own. The child
maps those of all. A rank's part is an object of its own in the store, with the rank's KV heads in
its name. A question names no ranks: it is about the parts of all, and one part that is missing,
damaged or not written is a no.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Final

from engine.parent import end_with_parent
from engine.tiers.stores.messages import (
    LOAD,
    LOOKUP,
    STORE,
    Answer,
    Opening,
    Question,
    receive,
    send,
)
from engine.tiers.stores.objects import HEADER_BYTES, ObjectForm, read_secret
from engine.tiers.stores.opening import open_store
from engine.tiers.stores.protocol import Buffers, PageStore, RegisteringStore, StoreError
from faults import failpoints

log = logging.getLogger("baton.store")

_ORDER: Final = {LOOKUP: 0, LOAD: 1, STORE: 2}
_END: Final = 9
_END_S: Final = 2.0
_WRITTEN_S: Final = 15.0
"""A cluster may have lost a member, such as this worker before it started again, and not know it
yet. Mooncake's master needs 10 s."""
_AGAIN_S: Final = 0.5
"""Until a store that did not take the first object is asked again, when it is opened."""


class Child:
    """Answers the questions of one worker about one store."""

    def __init__(self, connection: Connection, opening: Opening) -> None:
        self._connection = connection
        secret = read_secret(opening.secret_file)
        self._forms = [
            ObjectForm(opening.fingerprint, (first, end), opening.pages, opening.slot_bytes, secret)
            for first, end in opening.heads
        ]
        """By rank."""
        self._form = self._forms[0]
        """In all but the name, and so the heads, the parts are alike."""
        size = opening.num_slots * opening.slot_bytes
        self._memories = [
            memoryview(mmap.mmap(file, size, mmap.MAP_SHARED)) for file in opening.memory_fds
        ]
        """By rank."""
        self._headers: list[memoryview] = []
        self._store: PageStore = open_store(opening.address, self._form)
        for memory in self._memories:
            self._register(memory)
        self._questions: queue.PriorityQueue[tuple[int, int, Question | None]] = (
            queue.PriorityQueue()
        )

    def serve(self) -> None:
        """Answers until the worker is gone."""
        threading.Thread(target=self._listen, daemon=True).start()
        while (question := self._questions.get()[2]) is not None:
            began = time.monotonic()
            try:
                answer = self._answer(question)
            except Exception as error:
                log.exception("a store failed", extra={"verb": question.verb})
                answer = Answer(question.number, [False] * len(question.keys), error=repr(error))
            answer.seconds = time.monotonic() - began
            send(self._connection, answer)
        self._store.close()

    def probe(self, address: str) -> float:
        """Stores an object of its own and loads it again. Returns the seconds of the load.

        Raises:
            StoreError: the object did not come back.
        """
        names = list(dict.fromkeys(self._names([secrets.token_bytes(32)])))
        memory = memoryview(mmap.mmap(-1, len(names) * self._form.object_bytes))
        self._register(memory)
        try:
            return self._probe(address, names, self._divided(memory, len(names)))
        finally:
            if isinstance(self._store, RegisteringStore):
                self._store.unregister(memory)

    def _probe(self, address: str, names: list[str], buffers: list[Buffers]) -> float:
        for name, parts in zip(names, buffers, strict=True):
            self._form.seal(name, parts)
        ends_s = time.monotonic() + _WRITTEN_S
        while not all(self._store.store(names, buffers)):
            if time.monotonic() > ends_s:
                raise StoreError(f"{address}: an object cannot be written")
            time.sleep(_AGAIN_S)
        headers = [bytes(parts[0]) for parts in buffers]
        for parts in buffers:
            parts[0][:] = bytes(HEADER_BYTES)
        began = time.monotonic()
        found = self._store.load(names, buffers)
        seconds = time.monotonic() - began
        whole = all(map(self._form.is_whole, names, buffers))
        if not all(found) or [bytes(parts[0]) for parts in buffers] != headers or not whole:
            raise StoreError(f"{address}: an object that was written cannot be read")
        self._store.remove(names)
        return seconds

    def _divided(self, memory: memoryview, count: int) -> list[Buffers]:
        """Memory as the buffers of `count` objects."""
        form, found = self._form, list[Buffers]()
        for start in range(0, count * form.object_bytes, form.object_bytes):
            pages = range(start + HEADER_BYTES, start + form.object_bytes, form.slot_bytes)
            parts = [memory[page : page + form.slot_bytes] for page in pages]
            found.append([memory[start : start + HEADER_BYTES], *parts])
        return found

    def _register(self, memory: memoryview) -> None:
        if isinstance(self._store, RegisteringStore):
            self._store.register(memory)

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        """The parts of the first object by rank, then of the next."""
        return [form.name(key) for key in keys for form in self._forms]

    def _listen(self) -> None:
        try:
            while True:
                question = receive(self._connection, Question)
                self._questions.put((_ORDER[question.verb], question.number, question))
        except (EOFError, OSError):
            self._questions.put((_END, 0, None))
            threading.Timer(_END_S, os._exit, (1,)).start()  # The store may hang.

    def _answer(self, question: Question) -> Answer:
        names = self._names([bytes.fromhex(key) for key in question.keys])
        if question.verb == LOOKUP:
            failpoints.hit("store.lookup")
            return Answer(question.number, self._of_objects(self._store.lookup(names)))
        buffers = self._buffers(question.slots)
        if question.verb == STORE:
            failpoints.hit("store.store")
            return Answer(question.number, self._of_objects(self._save(names, buffers)))
        failpoints.hit("store.load")
        return self._load(question.number, names, buffers)

    def _of_objects(self, good: list[bool]) -> list[bool]:
        """For each object whether all its parts are good."""
        ranks = len(self._forms)
        return [all(good[first : first + ranks]) for first in range(0, len(good), ranks)]

    def _save(self, names: list[str], buffers: list[Buffers]) -> list[bool]:
        """Seals and stores parts. Ranks that have the same heads have the same part."""
        once = dict(zip(names, buffers, strict=True))
        for name, parts in once.items():
            self._form.seal(name, parts)
        stored = self._store.store(list(once), list(once.values()))
        good = dict(zip(once, stored, strict=True))
        return [good[name] for name in names]

    def _load(self, number: int, names: list[str], buffers: list[Buffers]) -> Answer:
        for parts in buffers:
            parts[0][:] = bytes(HEADER_BYTES)
        there = self._store.load(names, buffers)
        failpoints.hit("store.loaded")
        whole = [
            found and self._form.is_whole(name, parts)
            for found, name, parts in zip(there, names, buffers, strict=True)
        ]
        judged = zip(there, whole, names, strict=True)
        damaged = list(dict.fromkeys(name for found, good, name in judged if found and not good))
        if damaged:
            log.error("objects are damaged and removed", extra={"names": damaged})
            self._store.remove(damaged)
        return Answer(number, self._of_objects(whole), len(damaged))

    def _buffers(self, objects: list[list[int]]) -> list[Buffers]:
        """For each part a header of this process, and the slots of its rank."""
        size = self._form.slot_bytes
        found: list[Buffers] = []
        for slots in objects:
            for memory in self._memories:
                if len(self._headers) == len(found):
                    self._headers.append(memoryview(mmap.mmap(-1, HEADER_BYTES)))
                    self._register(self._headers[-1])
                pages = [memory[slot * size : (slot + 1) * size] for slot in slots]
                found.append([self._headers[len(found)], *pages])
        return found


def main(socket_fd: int, worker: int) -> int:
    """Runs a child of the process `worker`; returns its exit code."""
    end_with_parent(worker)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    connection = Connection(socket_fd)
    try:
        opening = receive(connection, Opening)
        failpoints.arm(opening.failpoints)
        child = Child(connection, opening)
        seconds = child.probe(opening.address)
    except StoreError as error:
        send(connection, Answer(0, error=str(error)))
        return 1
    except Exception as error:
        send(connection, Answer(0, error=f"{opening.address}: {error!r}"))
        return 1
    send(connection, Answer(0, seconds=seconds))
    child.serve()
    return 0


if __name__ == "__main__":
    # A store's own threads, which may hang, do not keep the process.
    os._exit(main(*map(int, sys.argv[1:])))
