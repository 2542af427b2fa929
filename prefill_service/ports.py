"""What the prefill service needs of the engine and of the transfer thread."""

from __future__ import annotations

from typing import Protocol

from engine.types import Request, Sink
from kv_transfer.specs import SendSpec


class PrefillEngine(Protocol):
    """What a prefill worker needs of `engine.engine.Engine`."""

    def submit(self, request: Request, sink: Sink) -> None:
        """Takes a request on."""
        ...

    def cancel(self, request_id: bytes) -> None:
        """Ends a request; its pages wait for `release`."""
        ...

    def release(self, request_id: bytes) -> None:
        """Nothing outside touches the pages any more."""
        ...


class SendingThread(Protocol):
    """What a prefill worker needs of `kv_transfer.thread.TransferThread`."""

    def begin_send(self, spec: SendSpec) -> None:
        """A grant arrived and the pages are known."""
        ...

    def chunk_computed(self, transfer_id: bytes, end_token: int, payload: bytes | None) -> None:
        """KV of [0, end_token) is final."""
        ...

    def abort_send(self, transfer_id: bytes) -> None:
        """Send nothing more; SendQuiesced follows."""
        ...
