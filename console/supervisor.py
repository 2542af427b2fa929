"""Runs a handful of processes as one: a merged log, restarts, an orderly end.

The life of a child:

1. RUNNING: it has a session of its own, so that the terminal's Ctrl-C reaches only the supervisor.
   Each line that it writes is passed on with its name.
2. It exits by itself. Before `settled` is set, the supervisor gives up: see `failed`. Later the
   child is BACKING OFF for 0.5 s, doubling up to 30 s, and RUNNING again. A life of a minute resets
   the back-off.
3. STOPPING: it gets SIGTERM and time to drain. Then it and all processes that it started get
   SIGKILL. Children stop rank by rank, the lowest first: a rank gets its signal when the one before
   has ended.

If nobody reads the log any more, as in `baton up | head`, everything ends as it does when asked to.
If the supervisor is killed, its children end, too: see `end_with_parent`.
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
"""Variable with the supervisor's process id: a child must not outlive that process."""
FIRST_BACKOFF_S: Final = 0.5
LONGEST_BACKOFF_S: Final = 30.0
STEADY_LIFE_S: Final = 60.0
"""A life this long resets a child's back-off."""
_LINE_LIMIT_BYTES: Final = 1 << 20
"""Longest line of a process: a log in JSON has a stack in one line."""
_PR_SET_PDEATHSIG: Final = 1
"""Number of Linux: sets the signal that a process gets when its parent's thread ends."""

Write = Callable[[str, str], None]
"""Takes a child's name and a line that it wrote."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to run."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the supervisor's own."""
    stop_rank: int = 0
    """Lower ranks are stopped first."""


class Supervisor:
    """Starts, watches and stops processes; belongs to one event loop."""

    def __init__(self, specs: Sequence[ProcessSpec], write: Write) -> None:
        self.failed: str = ""
        """The reason why the supervisor gave up; "" if it has not."""
        self.ended = asyncio.Event()
        """Set when the supervisor gave up or was asked to stop."""
        self.settled = False
        """Set by the owner once everything works. From then on dead children are restarted."""
        self._write = write
        self._is_unread = False
        """A line could not be written, as into a closed pipe."""
        self._children = [_Child(spec, self, self._write_line) for spec in specs]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Starts all processes."""
        self._tasks = [asyncio.create_task(child.keep()) for child in self._children]

    def pids(self) -> dict[str, int]:
        """Ids of the running processes, by name."""
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
        """Records the first reason and wakes the owner, which then calls `stop`."""
        self.failed = self.failed or why
        self.ended.set()

    def _write_line(self, name: str, line: str) -> None:
        """Passes a line on, as long as somebody reads them."""
        if self._is_unread:
            return
        try:
            self._write(name, line)
        except (OSError, SystemExit):  # rich makes a SystemExit of a broken pipe.
            self._is_unread = True
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
        """Process id; 0 while there is no process."""
        return 0 if self._process is None or self._gone.is_set() else self._process.pid

    async def keep(self) -> None:
        """Runs the process again and again, until the owner has ended."""
        backoff_s = FIRST_BACKOFF_S
        while not self._owner.ended.is_set():
            started = time.monotonic()
            code = await self._run()
            if self._owner.ended.is_set():
                return
            how = _describe_exit(code)
            if not self._owner.settled:
                self._owner.give_up(f"{self.spec.name} {how}")
                return
            if time.monotonic() - started > STEADY_LIFE_S:
                backoff_s = FIRST_BACKOFF_S
            self._write(self.spec.name, f"{how}; starts again in {backoff_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._owner.ended.wait(), backoff_s)
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)

    async def _run(self) -> int:
        """Runs the process once. Returns its exit status, negative for a signal."""
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
        if self._owner.ended.is_set():  # The owner was stopped while the process was starting.
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
            except ValueError:  # The line is longer than the limit, and dropped.
                continue
            if not line:
                return
            self._write(self.spec.name, line.decode(errors="replace").rstrip())

    async def stop(self, drain_s: float) -> None:
        """Sends SIGTERM, waits up to `drain_s` seconds, then sends SIGKILL."""
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
        """Sends a signal to the process. SIGKILL also goes to all processes that it started."""
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
    """Asks the kernel to send SIGTERM when the supervisor of this process dies.

    Does nothing in a process without a supervisor.
    """
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if not parent or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # The supervisor died before this call.
        os.kill(os.getpid(), signal.SIGTERM)
