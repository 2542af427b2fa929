"""The child process of a store.

    python -m engine.tiers.stores.child SOCKET WORKER'S-PROCESS

It opens the store, answers the opening, and then works through questions, one at a time: look-ups
before loads before stores. It maps the worker's host slots and writes a digest into each object
that it stores. An object that it loads counts only if the digest is right. It ends when its worker
does: it has two seconds if the worker closes it, none if the worker dies.
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
from engine.tiers.stores.protocol import Buffers, PageStore, StoreError
from telemetry import failpoints

log = logging.getLogger("baton.store")

_ORDER: Final = {LOOKUP: 0, LOAD: 1, STORE: 2}
_END: Final = 9
_END_S: Final = 2.0


class Child:
    """Answers the questions of one worker about one store."""

    def __init__(self, connection: Connection, opening: Opening) -> None:
        self._connection = connection
        self._form = ObjectForm(
            opening.fingerprint,
            (opening.heads[0], opening.heads[1]),
            opening.pages,
            opening.slot_bytes,
            read_secret(opening.secret_file),
        )
        size = opening.num_slots * opening.slot_bytes
        self._memory = memoryview(mmap.mmap(opening.memory_fd, size, mmap.MAP_SHARED))
        self._headers: list[memoryview] = []
        self._store: PageStore = open_store(opening.address, self._form)
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
        parts = [memoryview(mmap.mmap(-1, HEADER_BYTES))]
        size = self._form.slot_bytes
        parts += [memoryview(mmap.mmap(-1, size)) for _ in range(self._form.pages)]
        name = self._form.name(secrets.token_bytes(32))
        self._form.seal(name, parts)
        header = bytes(parts[0])
        if self._store.store([name], [parts]) != [True]:
            raise StoreError(f"{address}: an object cannot be written")
        parts[0][:] = bytes(HEADER_BYTES)
        began = time.monotonic()
        found = self._store.load([name], [parts])
        seconds = time.monotonic() - began
        if found != [True] or bytes(parts[0]) != header or not self._form.is_whole(name, parts):
            raise StoreError(f"{address}: an object that was written cannot be read")
        self._store.remove([name])
        return seconds

    def _listen(self) -> None:
        try:
            while True:
                question = receive(self._connection, Question)
                self._questions.put((_ORDER[question.verb], question.number, question))
        except (EOFError, OSError):
            self._questions.put((_END, 0, None))
            threading.Timer(_END_S, os._exit, (1,)).start()  # The store may hang.

    def _answer(self, question: Question) -> Answer:
        names = [self._form.name(bytes.fromhex(key)) for key in question.keys]
        if question.verb == LOOKUP:
            failpoints.hit("store.lookup")
            return Answer(question.number, self._store.lookup(names))
        buffers = [self._parts(i, slots) for i, slots in enumerate(question.slots)]
        if question.verb == STORE:
            failpoints.hit("store.store")
            for name, parts in zip(names, buffers, strict=True):
                self._form.seal(name, parts)
            return Answer(question.number, self._store.store(names, buffers))
        failpoints.hit("store.load")
        return self._load(question.number, names, buffers)

    def _load(self, number: int, names: list[str], buffers: list[Buffers]) -> Answer:
        for parts in buffers:
            parts[0][:] = bytes(HEADER_BYTES)
        there = self._store.load(names, buffers)
        failpoints.hit("store.loaded")
        whole = [
            found and self._form.is_whole(name, parts)
            for found, name, parts in zip(there, names, buffers, strict=True)
        ]
        damaged = [
            name
            for found, good, name in zip(there, whole, names, strict=True)
            if found and not good
        ]
        if damaged:
            log.error("objects are damaged and removed", extra={"names": damaged})
            self._store.remove(damaged)
        return Answer(number, whole, len(damaged))

    def _parts(self, index: int, slots: list[int]) -> Buffers:
        """A header of this process, and the slots."""
        while len(self._headers) <= index:
            self._headers.append(memoryview(mmap.mmap(-1, HEADER_BYTES)))
        size = self._form.slot_bytes
        pages = [self._memory[slot * size : (slot + 1) * size] for slot in slots]
        return [self._headers[index], *pages]


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
