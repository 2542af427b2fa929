"""The parts of the engine and of the transfer thread that the two services use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.types import Request, Sink, TokenRecord
from kv_transfer.specs import ReceiveSpec, SendSpec


class LegEngine(Protocol):
    """What `engine.engine.Engine` does for a leg, which it knows as a request of the same id."""

    def submit(self, request: Request, sink: Sink) -> None:
        """Takes a request on."""
        ...

    def deliver(self, request_id: bytes, records: Sequence[TokenRecord]) -> None:
        """Lets a request join the batch: the prompt's KV is in the pages reserved for it."""
        ...

    def rank_skew_s(self, start_ns: int, end_ns: int) -> float:
        """How long the fastest rank waited for the slowest, in the steps that ended between two
        times, Unix nanoseconds; 0 with one rank."""
        ...

    def cancel(self, request_id: bytes) -> None:
        """Ends a request. Pages that another worker may touch wait for `release`."""
        ...

    def release(self, request_id: bytes) -> None:
        """Frees the pages: no other worker touches them any more."""
        ...


class SendingThread(Protocol):
    """What `kv_transfer.thread.TransferThread` does for a prefill leg."""

    def begin_send(self, spec: SendSpec) -> None:
        """Begins a transfer: the grant and the pages are both known."""
        ...

    def chunk_computed(self, transfer_id: bytes, end_token: int, payload: bytes | None) -> None:
        """Sends the new pages: the KV of [0, end_token) is final."""
        ...

    def abort_send(self, transfer_id: bytes) -> None:
        """Sends nothing more. SendQuiesced follows."""
        ...


class ReceivingThread(Protocol):
    """What `kv_transfer.thread.TransferThread` does for a decode leg."""

    def expect(self, spec: ReceiveSpec) -> None:
        """Expects the pages of a grant."""
        ...

    def abort_receive(self, transfer_id: bytes) -> None:
        """Ends a transfer unless it is delivered already. ReceiveAborted says which it was."""
        ...
