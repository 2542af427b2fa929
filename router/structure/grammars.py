"""The grammars of answers, checked by processes aside and kept.

The latest grammars are kept by a digest of what they are made of, and so are refusals. A check that
crashed or met its bounds is a refusal like any other: nobody has it done again. Callers take turns,
so one with many grammars does not keep another waiting. A check ends when all who wait for it have
left.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from router import errors
from router.aside.forks import (
    ForkServer,
    NotReadyError,
    WorkEndedError,
    WorkFailedError,
    WorkLateError,
)
from router.aside.turns import Turns
from router.errors import RouterError, Violation
from router.structure import checking
from router.structure.checking import BOUNDS, Checked, Question, answer_of, question_of
from router.structure.schema import SchemaError

if TYPE_CHECKING:
    from router.jobs import ServedModel

log = logging.getLogger("baton.router")

KEPT: Final = 64
"""Grammars that are kept."""
KEPT_REFUSALS: Final = 1024
AT_ONCE: Final = 2
"""Checks that run at the same time."""
Kept = TypeVar("Kept")


class _Latest(Generic[Kept]):
    """The entries that were used last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: OrderedDict[bytes, Kept] = OrderedDict()

    def get(self, key: bytes) -> Kept | None:
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, entry: Kept) -> None:
        self._entries[key] = entry
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)


class TooComplex:
    """The process ended, or took too long."""


TOO_COMPLEX: Final = TooComplex()
LATE: Final = TooComplex()
"""The machine may be to blame, so it is tried again."""


@dataclass(eq=False, slots=True)
class _Check:
    task: asyncio.Task[Checked]
    waiting: int = 0


class Grammars:
    """Belongs to an event loop."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, int, tuple[int, ...]], ForkServer] = {}
        self._turns = Turns(AT_ONCE)
        self._kept: _Latest[Checked] = _Latest(KEPT)
        self._refused: _Latest[SchemaError | TooComplex] = _Latest(KEPT_REFUSALS)
        self._checks: dict[bytes, _Check] = {}
        self._warming: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Ends the processes."""
        for server in self._servers.values():
            server.close()

    def warm(self, model: ServedModel) -> asyncio.Task[None]:
        """Starts a model's process, so that no form waits for it. Errors are left to forms."""
        task = asyncio.create_task(self._warm(model))
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)
        return task

    async def grammar(self, question: Question, model: ServedModel, caller: str) -> Checked:
        """The grammar of an answer.

        Raises:
            RouterError: INVALID_FIELD or STRUCTURE_TOO_COMPLEX.
        """
        data = question_of(question)
        key = _key(data, model)
        if (known := self._kept.get(key)) is not None:
            return known
        if (refusal := self._refused.get(key)) is not None:
            raise _error_of(refusal)
        check = self._checks.get(key)
        if check is None:
            check = _Check(asyncio.create_task(self._check(key, data, model, caller)))
            check.task.add_done_callback(lambda _: self._checks.pop(key, None))
            self._checks[key] = check
        check.waiting += 1
        try:
            return await asyncio.shield(check.task)
        finally:
            check.waiting -= 1
            if not check.waiting and not check.task.done():
                self._checks.pop(key, None)
                check.task.cancel()

    async def _warm(self, model: ServedModel) -> None:
        with suppress(NotReadyError):
            await self._server(model).start()

    async def _check(self, key: bytes, data: bytes, model: ServedModel, caller: str) -> Checked:
        async with self._turns.turn(caller):
            found = await self._ask(data, model)
        if isinstance(found, Checked):
            self._kept.put(key, found)
            return found
        if found is not LATE:
            self._refused.put(key, found)
        raise _error_of(found)

    async def _ask(self, data: bytes, model: ServedModel) -> Checked | SchemaError | TooComplex:
        try:
            return answer_of(await self._server(model).ask("check", data, BOUNDS))
        except WorkEndedError:
            return TOO_COMPLEX
        except WorkLateError:
            return LATE
        except (NotReadyError, WorkFailedError) as error:
            log.error("a grammar could not be checked: %s", error)
            raise errors.internal() from None

    def _server(self, model: ServedModel) -> ForkServer:
        key = model.path, model.vocab_size, model.eos_token_ids
        if key not in self._servers:
            self._servers[key] = ForkServer(checking.__name__, key)
        return self._servers[key]


def _key(question: bytes, model: ServedModel) -> bytes:
    """A digest of everything that a grammar is made of."""
    parts = (model.path.encode(), model.revision.encode(), question)
    return hashlib.sha256(b"".join(b"%d:%b" % (len(one), one) for one in parts)).digest()


def _error_of(refusal: SchemaError | TooComplex) -> RouterError:
    if isinstance(refusal, TooComplex):
        return errors.structure_too_complex(0)
    return errors.invalid_fields([Violation(refusal.field, refusal.rule)])
