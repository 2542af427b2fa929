"""What a router has to say to a worker, in order."""

from __future__ import annotations

import asyncio
from collections import deque

from baton.worker.v1 import worker_pb2


class SendQueue:
    """Messages to be written, in order, but with Cancel and Abort first.

    Invariant: no message of an attempt is behind its own Cancel or Abort. Messages that these
    overtake are dropped, so that no worker gets an attempt that has ended.
    """

    def __init__(self) -> None:
        self._urgent: deque[worker_pb2.WorkRequest] = deque()
        self._ordinary: deque[worker_pb2.WorkRequest] = deque()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._urgent) + len(self._ordinary)

    def put(self, message: worker_pb2.WorkRequest) -> None:
        """Queues a message."""
        match message.WhichOneof("message"):
            case "cancel":
                self._overtake(message.cancel.attempt_id)
                self._urgent.append(message)
            case "abort":
                self._overtake(message.abort.attempt_id)
                self._urgent.append(message)
            case _:
                self._ordinary.append(message)
        self._filled.set()

    async def get(self) -> worker_pb2.WorkRequest:
        """The next message, as soon as there is one."""
        while not len(self):
            self._filled.clear()
            await self._filled.wait()
        return (self._urgent or self._ordinary).popleft()

    def _overtake(self, attempt_id: bytes) -> None:
        kept = [message for message in self._ordinary if _attempt_of(message) != attempt_id]
        self._ordinary = deque(kept)


def _attempt_of(message: worker_pb2.WorkRequest) -> bytes:
    match message.WhichOneof("message"):
        case "submit":
            return message.submit.attempt_id
        case "grant":
            return message.grant.attempt_id
        case _:
            return b""
