"""Runs a handful of processes as one: a merged log, restarts, an orderly end.

The life of a child:

1. RUNNING: in a session of its own, so that the terminal's Ctrl-C reaches only the supervisor;
   every line it writes is passed on with its name.
2. It exits unasked. Before `settled` is set, or if it is essential, that ends everything: see
   `failed`. Otherwise BACKING OFF: 0.5 s, doubling up to 30 s, and RUNNING again; a life of a
   minute clears the count.
3. STOPPING: SIGTERM and the time to drain, then SIGKILL to all that it started. Children stop
   rank by rank, the lowest first; the next rank hears nothing before the last has ended.

A supervisor that is killed takes its children with it: see `end_with_parent`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

PARENT_VARIABLE: Final = "BATON_SUPERVISOR_PID"
"""Tells a child whose death it must not outlive."""
FIRST_BACKOFF_S: Final = 0.5
LONGEST_BACKOFF_S: Final = 30.0
STEADY_LIFE_S: Final = 60.0
"""A child that lived this long starts from the first back-off again."""
_LINE_LIMIT_BYTES: Final = 1 << 20
_PR_SET_PDEATHSIG: Final = 1

Write = Callable[[str, str], None]
"""Takes a child's name and a line that it wrote."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to run."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's own."""
    essential: bool = False
    """Its death ends everything; it is never restarted."""
    stop_rank: int = 0
    """Lower ranks are stopped first."""


class Supervisor:
    """Starts, watches and stops processes; belongs to one event loop."""

    def __init__(self, specs: Sequence[ProcessSpec], write: Write) -> None:
        self.failed: str = ""
        """Why the supervisor gave up; "" while it has not."""
        self.ended = asyncio.Event()
        """Set when it gave up or was asked to stop."""
        self.settled = False
        """Set by the owner once everything works: from then on deaths are answered by restarts."""
        self._children = [_Child(spec, self, write) for spec in specs]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Starts all processes."""
        self._tasks = [asyncio.create_task(child.keep()) for child in self._children]

    def pids(self) -> dict[str, int]:
        """Process ids by name, of those that run."""
        return {child.spec.name: child.pid for child in self._children if child.pid}

    async def stop(self, drain_s: float) -> None:
        """Ends all processes, giving each rank `drain_s` seconds to finish by itself."""
        self.ended.set()
        for rank in sorted({child.spec.stop_rank for child in self._children}):
            group = [child for child in self._children if child.spec.stop_rank == rank]
            await asyncio.gather(*(child.stop(drain_s) for child in group))
        await asyncio.gather(*self._tasks)

    def kill(self) -> None:
        """Ends all processes at once; a running `stop` returns soon after."""
        self.ended.set()
        for child in self._children:
            child.signal(signal.SIGKILL)

    def give_up(self, why: str) -> None:
        """Records the first reason and wakes the owner, who is to call `stop`."""
        self.failed = self.failed or why
        self.ended.set()


class _Child:
    """One process and its successors."""

    def __init__(self, spec: ProcessSpec, owner: Supervisor, write: Write) -> None:
        self.spec = spec
        self._owner = owner
        self._write = write
        self._process: asyncio.subprocess.Process | None = None
        self._gone = asyncio.Event()
        """Set while there is no process."""
        self._gone.set()

    @property
    def pid(self) -> int:
        """0 while there is no process."""
        return 0 if self._process is None or self._gone.is_set() else self._process.pid

    async def keep(self) -> None:
        """Runs the process, again and again, until the owner has ended."""
        backoff_s = FIRST_BACKOFF_S
        while not self._owner.ended.is_set():
            started = time.monotonic()
            code = await self._run()
            if self._owner.ended.is_set():
                return
            how = _describe_exit(code)
            if self.spec.essential or not self._owner.settled:
                self._owner.give_up(f"{self.spec.name} {how}")
                return
            if time.monotonic() - started > STEADY_LIFE_S:
                backoff_s = FIRST_BACKOFF_S
            self._write(self.spec.name, f"{how}; starts again in {backoff_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._owner.ended.wait(), backoff_s)
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)

    async def _run(self) -> int:
        """One life of the process; its exit status, negative for a signal."""
        environment = os.environ | dict(self.spec.environment) | {PARENT_VARIABLE: str(os.getpid())}
        try:
            process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                limit=_LINE_LIMIT_BYTES,
            )
        except OSError as error:
            self._write(self.spec.name, f"cannot be started: {error.strerror}")
            return 127
        self._process = process
        self._gone.clear()
        if self._owner.ended.is_set():  # Asked to stop while the process was being started.
            self.signal(signal.SIGTERM)
        passing_on = asyncio.create_task(self._pass_on(process))
        code = await process.wait()
        self._gone.set()
        # A grandchild may hold the pipe open for longer than its parent lived.
        await asyncio.wait([passing_on], timeout=1.0)
        passing_on.cancel()
        return code

    async def _pass_on(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # Longer than the limit: dropped.
                continue
            if not line:
                return
            self._write(self.spec.name, line.decode(errors="replace").rstrip())

    async def stop(self, drain_s: float) -> None:
        """SIGTERM, `drain_s` seconds, SIGKILL."""
        if self._gone.is_set():
            return
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._gone.wait(), drain_s)
        except TimeoutError:
            self._write(self.spec.name, f"still runs after {drain_s:g} s: killed")
            self.signal(signal.SIGKILL)
            await self._gone.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process; SIGKILL goes to all that it started, too."""
        if not self.pid:
            return
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"exited with status {code}"


def end_with_parent() -> None:
    """Asks the kernel for SIGTERM when the supervisor that started this process dies.

    Does nothing in a process that no supervisor started.
    """
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if not parent or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # It died before the kernel was asked.
        os.kill(os.getpid(), signal.SIGTERM)
