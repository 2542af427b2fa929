"""Workers with a transfer thread of their own."""

from __future__ import annotations

import threading
from typing import TypeVar

import numpy as np
import torch

from kv_transfer.events import TransferCounters, TransferEvent
from kv_transfer.thread import TransferThread
from kv_transfer.transports.factory import make_transport
from kv_transfer.types import KvTransport, PageGroup

E = TypeVar("E", bound=TransferEvent)
WAIT_S = 30.0
"""For what must happen, on a machine with other work."""


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

    def counters(self) -> TransferCounters:
        return self.thread.counters

    def close(self) -> None:
        assert self.thread.stop(WAIT_S)
