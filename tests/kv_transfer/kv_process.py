"""Workers with a transfer thread of their own: in this process, and in another one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
import torch

from kv_transfer.events import PeerOpened, TransferCounters, TransferEvent
from kv_transfer.thread import TransferThread
from kv_transfer.transports.factory import make_transport
from kv_transfer.types import Endpoint, KvTransport, PageGroup

E = TypeVar("E", bound=TransferEvent)
WAIT_S = 30.0
"""For what must happen, on a machine with other work."""

_PROCESSES = multiprocessing.get_context("forkserver")
"""Processes of their own, which share no more than the seconds that importing torch takes."""
_PROCESSES.set_forkserver_preload(["torch", "kv_transfer.transports.factory", "kv_transfer.thread"])


class Events:
    """Events as they come, to be waited for."""

    def __init__(self) -> None:
        self.all: list[TransferEvent] = []
        self._changed = threading.Condition()

    def add(self, event: TransferEvent) -> None:
        with self._changed:
            self.all.append(event)
            self._changed.notify_all()

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.all if isinstance(event, kind)]

    def wait(self, kind: type[E], times: int = 1, timeout_s: float = WAIT_S) -> E:
        """The event of a kind that came as the given one."""
        with self._changed:
            in_time = self._changed.wait_for(lambda: len(self.of(kind)) >= times, timeout_s)
        assert in_time, f"no {kind.__name__}; got {self.all}"
        return self.of(kind)[times - 1]

    def wait_tested(self, agent_name: str, timeout_s: float = WAIT_S) -> PeerOpened:
        """That peer's figures. On a busy machine it is told of twice, first without them: what
        befalls it then may befall a push of the self-test."""

        def found() -> list[PeerOpened]:
            opened = [e for e in self.of(PeerOpened) if e.agent_name == agent_name]
            return [event for event in opened if event.gigabytes_per_s]

        with self._changed:
            assert self._changed.wait_for(lambda: bool(found()), timeout_s), self.all
        return found()[0]

    def absent(self, kind: type[E], for_s: float) -> None:
        """Asserts that no event of a kind comes for a while."""
        with self._changed:
            came = self._changed.wait_for(lambda: bool(self.of(kind)), for_s)
        assert not came, f"{kind.__name__} came too early"


class LocalWorker:
    """A transfer thread in this process."""

    def __init__(
        self, kind: str, agent_name: str, num_pages: int, page_bytes: int, epoch: int
    ) -> None:
        self.pool = torch.zeros(num_pages, page_bytes, dtype=torch.uint8)
        self.events = Events()
        self.transport: KvTransport | None = None

        def make() -> KvTransport:
            self.transport = make_transport(
                kind, agent_name, self.pool, [PageGroup(page_bytes, num_pages)]
            )
            return self.transport

        self.thread = TransferThread(make, epoch, lambda event: self.events.add(event))
        self.endpoint = self.thread.start()

    def fill(self, pages: np.ndarray, content: np.ndarray) -> None:
        self.pool[torch.from_numpy(pages).long()] = torch.from_numpy(content)

    def read(self, pages: np.ndarray) -> np.ndarray:
        return self.pool[torch.from_numpy(pages).long()].numpy()

    def counters(self) -> TransferCounters:
        return self.thread.counters

    def idle_cpu_share(self, seconds: float) -> float:
        """CPU time of this process over wall time while nothing is asked of it."""
        began_s = time.process_time()
        time.sleep(seconds)
        return (time.process_time() - began_s) / seconds

    def close(self) -> None:
        assert self.thread.stop(WAIT_S)


class RemoteWorker:
    """A transfer thread in a process of its own, steered over a pipe."""

    def __init__(
        self, kind: str, agent_name: str, num_pages: int, page_bytes: int, epoch: int
    ) -> None:
        self._pipe, theirs = _PROCESSES.Pipe()
        arguments = (theirs, kind, agent_name, num_pages, page_bytes, epoch)
        self._process = _PROCESSES.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.events = Events()
        self._answers: list[Any] = []
        self._answered = threading.Semaphore(0)
        threading.Thread(target=self._listen, daemon=True).start()
        self.endpoint: Endpoint = self._answer()
        self.thread = _RemoteThread(self._call)

    def fill(self, pages: np.ndarray, content: np.ndarray) -> None:
        self._call("fill", pages, content)
        self._answer()

    def read(self, pages: np.ndarray) -> np.ndarray:
        self._call("read", pages)
        answer: np.ndarray = self._answer()
        return answer

    def idle_cpu_share(self, seconds: float) -> float:
        self._call("idle_cpu_share", seconds)
        share: float = self._answer()
        return share

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
        if number is signal.SIGKILL:
            self._process.join(WAIT_S)

    def close(self) -> None:
        if self._process.is_alive():
            self._call("close")
            self._process.join(WAIT_S)
        if self._process.is_alive():
            self._process.kill()

    def _call(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))

    def _answer(self) -> Any:
        assert self._answered.acquire(timeout=60.0), "the other process does not answer"
        return self._answers.pop(0)

    def _listen(self) -> None:
        try:
            while True:
                what, value = self._pipe.recv()
                if what == "event":
                    self.events.add(value)
                else:
                    self._answers.append(value)
                    self._answered.release()
        except (EOFError, OSError):
            return


class _RemoteThread:
    """The methods of a TransferThread, called over there."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self._call(name, *arguments)


def _serve(pipe: Connection, kind: str, *arguments: Any) -> None:
    lock = threading.Lock()

    def send(what: str, value: Any) -> None:
        with lock:
            pipe.send((what, value))

    worker = LocalWorker(kind, *arguments)
    worker.events.add = lambda event: send("event", event)
    send("answer", worker.endpoint)
    while True:
        name, call_arguments = pipe.recv()
        if name in ("fill", "read", "idle_cpu_share"):
            send("answer", getattr(worker, name)(*call_arguments))
        elif name == "close":
            worker.close()
            return
        else:
            getattr(worker.thread, name)(*call_arguments)
