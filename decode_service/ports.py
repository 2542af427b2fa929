"""What the decode service needs of the engine and of the transfer thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.types import Request, Sink, TokenRecord
from kv_transfer.specs import ReceiveSpec


class DecodeEngine(Protocol):
    """What a decode worker needs of `engine.engine.Engine`."""

    def submit(self, request: Request, sink: Sink) -> None:
        """Takes a request on."""
        ...

    def deliver(self, request_id: bytes, records: Sequence[TokenRecord]) -> None:
        """The prompt's KV is in the reserved pages."""
        ...

    def cancel(self, request_id: bytes) -> None:
        """Ends a request; pages under a grant wait for `release`."""
        ...

    def release(self, request_id: bytes) -> None:
        """Nothing outside touches the pages any more."""
        ...


class ReceivingThread(Protocol):
    """What a decode worker needs of `kv_transfer.thread.TransferThread`."""

    def expect(self, spec: ReceiveSpec) -> None:
        """A grant was made."""
        ...

    def abort_receive(self, transfer_id: bytes) -> None:
        """Compare-and-set, answered by ReceiveAborted."""
        ...
