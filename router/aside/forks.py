"""A fork server as the router sees it, and the processes that it forks.

Life of a server: not started -> starts -> ready -> gone, by `close` or by an accident; then the
next task starts another one. It is not started again for a while if it could not get
ready.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from router.aside.wire import BEGUN, DONE, HEAD, MOST_ORDER_BYTES, Bounds, message

log = logging.getLogger("baton.router")

PREPARE: Final = Bounds(cpu_s=60.0, memory_bytes=4 << 30, time_s=240.0)
"""For a model's tokenizer; one of 256,000 tokens takes some seconds and some 100 MB."""
MOST_IDLE: Final = 2
"""Processes of a kind that wait for the next question. A new one costs some 10 ms of CPU time."""
MOST_ANSWERS: Final = 64
"""After so many a process is ended, so that nothing grows for ever."""
DYING_S: Final = 0.05
AGAIN_S: Final = 30.0
"""Time after which a server that could not get ready is tried again."""


class WorkFailedError(Exception):
    """The work raised, which is an error of ours; the message says what and where."""


class WorkEndedError(Exception):
    """The process ended before it answered: it crashed, or met a bound. It would do so again."""


class WorkLateError(Exception):
    """The time has passed. That may be the machine's fault."""


class NotReadyError(Exception):
    """The server cannot get ready, or is gone."""


class ForkServer:
    """One server and what it forks. Belongs to an event loop.

    Args:
        module: has what the server does (`router.aside.server`).
        argument: is given to it; JSON.
    """

    def __init__(self, module: str, argument: Any) -> None:
        self._module = module
        self._argument = argument
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._ready: asyncio.Task[None] | None = None
        self._next_number = 0
        self._idle: dict[str, list[Forked]] = {}
        self._try_again_s = 0.0

    async def start(self) -> None:
        """Starts the server, unless it runs, and waits until it is ready.

        Raises:
            NotReadyError: it ended before, and may not be tried again yet.
        """
        starts = self._ready is not None and not self._ready.done()
        if not starts and self._process is not None and self._process.poll() is not None:
            self._end()
        if self._ready is None:
            if asyncio.get_running_loop().time() < self._try_again_s:
                raise NotReadyError
            self._ready = asyncio.create_task(self._start())
        # Shielded: a caller that gives up must not end the start that others wait for.
        await asyncio.shield(self._ready)

    async def ask(self, kind: str, question: bytes, bounds: Bounds) -> bytes:
        """Answers one question in a process that has answered others well, or in a new one.

        Raises:
            NotReadyError: see `start`.
            WorkEndedError: the process ended before it answered.
            WorkFailedError: the work raised.
            WorkLateError: the time has passed.
        """
        idle = self._idle.setdefault(kind, [])
        process = idle.pop() if idle else await self.fork(kind, bounds)
        try:
            answer = await process.ask(question)
        except WorkEndedError:
            process.close()
            if not await self._is_lost():
                raise
            return await self.ask(kind, question, bounds)
        except BaseException:
            process.close()
            raise
        if len(idle) < MOST_IDLE and process.answers < MOST_ANSWERS:
            idle.append(process)
        else:
            process.close()
        return answer

    def close(self) -> None:
        """Ends the server and all that it has forked."""
        self._end()

    async def fork(self, kind: str, bounds: Bounds) -> Forked:
        """A process for work of a kind, which its owner closes. A server that was lost meanwhile is
        started again, once.

        Raises:
            NotReadyError: see `start`.
            WorkLateError: the time has passed.
        """
        for _ in range(2):
            await self.start()
            orders = self._orders
            assert orders is not None
            self._next_number += 1
            number, (ours, its) = self._next_number, socket.socketpair()
            order = {"do": "fork", "number": number, "kind": kind, "bounds": bounds}
            with its, suppress(OSError):
                socket.send_fds(orders, [json.dumps(order).encode()], [its.fileno()])
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                async with asyncio.timeout(bounds.time_s):
                    if await reader.read(len(BEGUN)):
                        return Forked(reader, writer, bounds, partial(self._kill, orders, number))
            except TimeoutError:
                writer.close()
                raise WorkLateError from None
            except BaseException:
                writer.close()
                raise
            writer.close()
            if self._orders is orders:  # Nobody else has started another one.
                self._end()
        raise NotReadyError

    async def _is_lost(self) -> bool:
        """Whether the server itself has ended a moment ago."""
        await asyncio.sleep(DYING_S)
        return self._process is None or self._process.poll() is not None

    def _kill(self, orders: socket.socket, number: int) -> None:
        if self._orders is orders:
            with suppress(OSError):  # It is gone, and all that it had forked with it.
                orders.send(json.dumps({"do": "end", "number": number}).encode())

    async def _start(self) -> None:
        """Tries twice, since the first try may meet with an accident."""
        if await self._is_prepared():
            return
        ready = self._ready
        self._end()
        self._ready = ready
        if not await self._is_prepared():
            self._end()
            self._try_again_s = asyncio.get_running_loop().time() + AGAIN_S
            log.error("a process beside the router could not get ready: %s", self._module)
            raise NotReadyError

    async def _is_prepared(self) -> bool:
        """Starts a process, and says whether it got ready."""
        loop = asyncio.get_running_loop()
        orders = self._launch()
        order = {"argument": self._argument, "bounds": PREPARE}
        found = b""
        with suppress(OSError, TimeoutError):
            orders.send(json.dumps(order).encode())
            async with asyncio.timeout(PREPARE.time_s):
                found = await loop.sock_recv(orders, MOST_ORDER_BYTES)
        return bool(found)

    def _launch(self) -> socket.socket:
        self._orders, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)
        with its:
            command = [sys.executable, "-P", "-m", "router.aside.server", self._module]
            self._process = subprocess.Popen(command, stdin=its.fileno(), env=_environment())
        return self._orders

    def _end(self) -> None:
        process, self._process = self._process, None
        orders, self._orders = self._orders, None
        ready, self._ready = self._ready, None
        self._idle.clear()
        if orders is not None:
            orders.close()
        if process is not None:
            process.kill()
            process.wait()
        if ready is not None and not ready.done() and ready is not asyncio.current_task():
            ready.cancel()


class Forked:
    """A process that answers one question after the other."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        bounds: Bounds,
        kill: Callable[[], None],
    ) -> None:
        self.answers = 0
        """Number of questions that it has answered."""
        self.was_gone = False
        """Whether it had ended before the latest question."""
        self._reader = reader
        self._writer = writer
        self._bounds = bounds
        self._kill = kill

    def close(self) -> None:
        """Ends the process."""
        self._writer.close()
        self._kill()

    async def ask(self, question: bytes) -> bytes:
        """The answer to a question. After an error the process is of no more use.

        Raises:
            WorkEndedError: the process ended before it answered.
            WorkFailedError: the work raised.
            WorkLateError: the time has passed.
        """
        self.was_gone = self._reader.at_eof()
        try:
            async with asyncio.timeout(self._bounds.time_s):
                self._writer.write(message(question))
                kind, size = HEAD.unpack(await self._reader.readexactly(HEAD.size))
                answer = await self._reader.readexactly(size)
        except TimeoutError:
            raise WorkLateError from None
        except (OSError, asyncio.IncompleteReadError):
            raise WorkEndedError from None
        if kind != DONE:
            raise WorkFailedError(answer.decode())
        self.answers += 1
        return answer


def _environment() -> dict[str, str]:
    """Environment of a server: it may have one thread alone, and finds our modules."""
    own = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))
    one_thread = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **one_thread, "PYTHONPATH": path}
