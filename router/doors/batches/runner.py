"""Runs the batches of a store, each as its tenant.

A batch is run by the router that holds the lock on its results, which the kernel takes back when
that process ends. So routers that share a folder need not know each other: each looks for batches
that nobody runs. One that was killed loses what was under way, and nothing else: a line that has a
result is not run again.

A tenant has one batch at a time, so that a second one cannot take the share of another tenant.
Where its quota is small, a batch takes half of it, and leaves the rest to interactive requests.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from router.batching.journal import Journal, TakenError
from router.batching.lines import BatchError, Line, expired, read_lines, went_well
from router.batching.running import Answer, run
from router.doors.batches.store import ENDED
from router.requests.bounds import BYTES_A_TOKEN, MOST_BATCH_LINES, MOST_REQUEST_BYTES, broken_shape

if TYPE_CHECKING:
    from router.call import Caller
    from router.doors.auth import Gate
    from router.doors.batches.room import Room
    from router.doors.batches.store import Batch, FileStore
    from router.doors.openai.inside import Inside
    from router.events import RouterEvents

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Time between two looks at the store: so late a router sees what another one's client cancelled,
and what another one left behind."""
SWEEP_S: Final = 600.0
"""Time between two looks for what is too old."""
MOST_RUNNING: Final = 4
"""Batches that a router runs at once, of as many tenants. Others wait; not tuned."""


class BatchRunner:
    """The batches of one router. Belongs to the event loop.

    Args:
        store: has the batches.
        inside: answers their lines.
        gate: knows the tenants.
        events: receives the lines that are done.
        at_once: most requests of a batch under way.
        room: lets each line in; None: at once.
    """

    def __init__(
        self,
        store: FileStore,
        inside: Inside,
        gate: Gate,
        events: RouterEvents,
        at_once: int,
        room: Room | None = None,
    ) -> None:
        self._store = store
        self._inside = inside
        self._gate = gate
        self._events = events
        self._at_once = at_once
        self._room = room
        self._look = asyncio.Event()
        self._draining = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._running: dict[str, _Running] = {}
        """By batch."""
        self._elsewhere_s: dict[str, float] = {}
        """When another router was last seen to run a tenant's batch, by tenant."""

    @property
    def running(self) -> int:
        """Batches that run here."""
        return sum(bool(one.counts) for one in self._running.values())

    def start(self) -> None:
        """Begins to look for batches."""
        self._task = asyncio.create_task(self._watch())

    def look(self) -> None:
        """There is something new."""
        self._look.set()

    def drain(self) -> None:
        """Begins no further line. Another router, or the next process, goes on."""
        self._draining.set()
        for one in self._running.values():
            one.ended.set()

    async def stop(self) -> None:
        """Ends all that runs. What has no result yet is run again later."""
        self.drain()
        tasks = [one.task for one in self._running.values() if one.task is not None]
        for task in (self._task, *tasks):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})

    async def _watch(self) -> None:
        swept_s = -SWEEP_S
        while True:
            try:
                if time.monotonic() > swept_s + SWEEP_S:
                    swept_s = time.monotonic()
                    await self._store.sweep()
                await self._look_once()
            except (sqlite3.Error, OSError) as error:
                logger.error("batches cannot be read: %s", error)
            self._look.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), LOOK_S)

    async def _look_once(self) -> None:
        batches = await self._store.open_batches()
        tenants = {batch.tenant for batch in batches}
        self._elsewhere_s = {name: at for name, at in self._elsewhere_s.items() if name in tenants}
        # Those that others run come last: tried first, they could keep all of `MOST_RUNNING`.
        for batch in sorted(batches, key=lambda batch: self._elsewhere_s.get(batch.tenant, 0.0)):
            if (one := self._running.get(batch.id)) is not None:
                if batch.status == "cancelling":
                    one.cancel()
                elif one.counts_changed():
                    await self._store.change(batch.id, request_counts=one.counts)
            elif not self._draining.is_set() and self._may_begin(batch):
                one = self._running[batch.id] = _Running(batch.tenant, is_over=_is_over(batch))
                one.task = asyncio.create_task(self._run(batch, one))

    def _may_begin(self, batch: Batch) -> bool:
        """What only has to be ended waits for no batch that runs, its own tenant's included."""
        is_over = _is_over(batch)
        tenants = [one.tenant for one in self._running.values() if one.is_over == is_over]
        return len(tenants) < MOST_RUNNING and (is_over or batch.tenant not in tenants)

    async def _run(self, batch: Batch, one: _Running) -> None:
        held = ExitStack()
        try:
            try:
                contents, names = self._store.contents, (batch.output, batch.errors)
                opened = await asyncio.to_thread(_open, held, [contents / name for name in names])
                now = await self._store.batch(batch.id)
                if opened is not None and now is not None and now.status not in ENDED:
                    await self._own(now, one, opened)
            finally:
                await asyncio.to_thread(held.close)  # Journals wait for the disk.
            self.look()
        except TakenError:
            self._elsewhere_s[batch.tenant] = time.monotonic()
        except BatchError:  # It would be so again.
            one.counts = batch.object["request_counts"]
            await self._finish(batch, one, None, "failed", "stopped", "its results are damaged")
        except (OSError, sqlite3.Error) as error:
            logger.error("a batch cannot go on: %s", error, extra={"batch": batch.id})
            await asyncio.sleep(LOOK_S)
        finally:
            del self._running[batch.id]

    async def _own(self, batch: Batch, one: _Running, results: _Results) -> None:
        """Runs a batch whose results this process holds."""
        finish = partial(self._finish, batch, one, results)
        completed, failed = results.counts
        one.counts = {**batch.object["request_counts"], "completed": completed, "failed": failed}
        caller = self._gate.caller_named(batch.tenant)
        if batch.status == "cancelling":
            await finish("cancelled")
            return
        if caller is None:
            await finish("failed", "tenant_gone", "its tenant is not served any more")
            return
        source = self._store.contents / batch.content
        try:
            one.counts["total"] = total = await asyncio.to_thread(_count_lines, source)
        except FileNotFoundError:
            await finish("failed", "file_gone", "its input file is gone")
            return
        if not 1 <= total <= MOST_BATCH_LINES:
            rule = f"a batch has 1 to {MOST_BATCH_LINES} lines, and at most as many empty ones"
            await finish("failed", "wrong_number_of_lines", rule)
            return
        if batch.status == "validating":
            counts = one.counts
            await self._store.change(
                batch.id, ("validating",), status="in_progress", request_counts=counts
            )
        results.room = await self._store.room(batch.tenant) - results.size
        left_s = batch.object["expires_at"] - time.time()
        try:
            async with asyncio.timeout(left_s):
                await one.work(
                    self._work(self._lines(batch, source), results, one, caller, batch.id)
                )
        except TimeoutError:
            await asyncio.to_thread(_expire, self._lines(batch, source), results)
            await finish("expired")
        except BatchError as error:
            await finish("failed", "stopped", str(error))
        else:
            if one.is_cancelled:
                await finish("cancelled")
            elif not self._draining.is_set():
                await self._store.change(batch.id, status="finalizing")
                await finish("completed")

    def _lines(self, batch: Batch, source: Path) -> Iterator[Line]:
        return read_lines(source, (batch.object["endpoint"],), MOST_REQUEST_BYTES, _broken)

    async def _work(
        self,
        lines: Iterator[Line],
        results: _Results,
        one: _Running,
        caller: Caller,
        batch_id: str,
    ) -> None:
        async def send(url: str, body: Any) -> Answer:
            if self._room is not None:
                await self._room.enter()
            return await self._inside.send(url, body, caller, batch_id)

        def on_line(went_well: bool) -> None:
            one.counts["completed" if went_well else "failed"] += 1
            self._events.batch_line(went_well)

        await run(
            lines,
            results,
            send,
            at_once=_share(self._at_once, caller),
            patience_s=float("inf"),
            on_line=on_line,
            ended=one.ended,
        )

    async def _finish(
        self,
        batch: Batch,
        one: _Running,
        results: _Results | None,
        status: str,
        code: str = "",
        message: str = "",
    ) -> None:
        if results is not None:  # What was under way may have had its answer.
            completed, failed = await asyncio.to_thread(results.end)
            one.counts.update(completed=completed, failed=failed)
        fields: dict[str, object] = {"request_counts": one.counts}
        if code:
            wrong = {"code": code, "message": message, "param": None, "line": None}
            fields["errors"] = {"object": "list", "data": [wrong]}
        await self._store.finish(batch, status, **fields)
        logger.info("a batch ended", extra={"batch": batch.id, "status": status, **one.counts})


class _Running:
    """A batch that runs here, or is about to."""

    def __init__(self, tenant: str, *, is_over: bool) -> None:
        self.tenant = tenant
        self.is_over = is_over
        """Whether it only has to be ended."""
        self.task: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()
        self.counts: dict[str, int] = {}
        self.is_cancelled = False
        self._seen: dict[str, int] = {}
        self._work: asyncio.Task[None] | None = None

    def counts_changed(self) -> bool:
        """Whether they did since the last call."""
        changed, self._seen = self._seen != self.counts, dict(self.counts)
        return changed

    def cancel(self) -> None:
        """Its owner does not want it any more."""
        self.is_cancelled = True
        if self._work is not None:
            self._work.cancel()

    async def work(self, lines: Any) -> None:
        """Runs its lines, until they are done or it is cancelled."""
        self._work = asyncio.create_task(lines)
        try:
            await asyncio.wait({self._work})
        finally:
            self._work.cancel()
            await asyncio.wait({self._work})
        if not self._work.cancelled():
            self._work.result()


class _Results:
    """The results of a batch: those of lines that went well, and those of others."""

    def __init__(self, output: Journal, errors: Journal) -> None:
        self._journals = output, errors
        self._lock = threading.Lock()
        self.done = {**output.done, **errors.done}
        self.counts = [len(output.done), len(errors.done)]
        """Lines that went well, and others."""
        self.room = 0
        """Bytes that may still be written."""
        self._is_ended = False

    @property
    def size(self) -> int:
        """Bytes of both."""
        return sum(journal.size for journal in self._journals)

    def write(self, result: Mapping[str, Any]) -> None:
        """Keeps a result, the first one of a line.

        Raises:
            BatchError: the tenant has no room for it, or the batch has ended.
        """
        if self.room <= 0:
            raise BatchError("the tenant's files leave no room for results")
        failed = not went_well(result)
        with self._lock:  # A thread may still write what was under way when the batch expired.
            if self._is_ended:
                raise BatchError("the batch has ended")
            if result["id"] not in self.done:
                self.room -= self._journals[failed].write(result)
                self.done[result["id"]] = result["custom_id"]
                self.counts[failed] += 1

    def end(self) -> tuple[int, int]:
        """Keeps nothing from now on. Returns the lines that went well, and the others."""
        with self._lock:
            self._is_ended = True
            completed, failed = self.counts
            return completed, failed


def _is_over(batch: Batch) -> bool:
    """Whether none of its lines is to be run: it is cancelled, or its day is over."""
    return batch.status == "cancelling" or batch.object["expires_at"] <= time.time()


def _open(held: ExitStack, paths: list[Path]) -> _Results | None:
    """Opens the results; None if they have gone, since the batch has ended."""
    try:
        return _Results(*(held.enter_context(Journal(path, make=False)) for path in paths))
    except FileNotFoundError:
        return None


def _expire(lines: Iterator[Line], results: _Results) -> None:
    """Says of each line that is not done that its batch expired."""
    for line in lines:  # None is kept: together they may be as large as the file.
        if line.id not in results.done:
            try:
                results.write(expired(line))
            except BatchError:  # No room.
                results.counts[1] += 1


def _broken(data: bytes) -> str:
    """The rule that a line breaks with any context. That of the workers is its request's."""
    rule = broken_shape(data, lambda: MOST_REQUEST_BYTES // BYTES_A_TOKEN)
    return f"the line {rule}" if rule else ""


def _count_lines(path: Path) -> int:
    """Empty ones are none, as they are to `read_lines`. Counts no further than is allowed, since a
    file may have 200 million empty ones: `MOST_BATCH_LINES` + 1 stand for too many of either."""
    count, empty, has_text = 0, 0, False
    with path.open("rb") as file:
        while data := file.readline(1 << 20):
            has_text = has_text or not data.isspace()
            if data.endswith(b"\n"):
                count, empty, has_text = count + has_text, empty + (not has_text), False
            if max(count, empty) > MOST_BATCH_LINES:
                return MOST_BATCH_LINES + 1
    return count + has_text


def _share(at_once: int, caller: Caller) -> int:
    """Requests of a batch at once, by its tenant's quota."""
    limits = [one for one in (caller.quota.requests, caller.quota.sequences) if one is not None]
    return max(1, min([at_once, *(limit // 2 for limit in limits)]))
