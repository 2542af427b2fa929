"""The transfer thread: the one thread of a process that owns its transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.events import TransferCounters, TransferEvent
from kv_transfer.types import Endpoint, KvTransport, PageIds


@dataclass(frozen=True, slots=True)
class SendSpec:
    """A grant, as the prefill side uses it."""

    transfer_id: bytes
    peer: str
    """Agent name of the decode worker; must be open or opening."""
    decode_epoch: int
    source_pages: PageIds
    """Page of this pool of each page of the prompt, in order."""
    target_pages: PageIds
    """Page of the peer's pool of each page of the prompt, in order."""
    held_pages: int
    """Leading pages not to be sent."""
    num_tokens: int
    """Tokens of the prompt."""
    page_size_tokens: int
    span_id: bytes = b""


@dataclass(frozen=True, slots=True)
class ReceiveSpec:
    """A grant, as the decode side made it."""

    transfer_id: bytes
    peer: str
    """Agent name of the prefill worker allowed to write."""
    num_pages: int
    held_pages: int
    num_tokens: int
    timeout_s: float
    """Without delivery in this time GRANTED or FILLING becomes QUARANTINED."""


class TransferThread:
    """Posts pushes, polls, and keeps the states of every transfer of this process.

    Every method may be called from any thread and returns at once; what comes of it is told to
    `on_event`, on the transfer thread, which must not block.
    """

    def __init__(
        self,
        make_transport: Callable[[], KvTransport],
        epoch: int,
        on_event: Callable[[TransferEvent], None],
    ) -> None:
        raise NotImplementedError

    counters: TransferCounters

    def start(self) -> Endpoint:
        """Builds the transport on the thread; blocks until it stands. Raises TransportError."""
        raise NotImplementedError

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread; waits for pushes in progress. True if none was left behind."""
        raise NotImplementedError

    def meet(self, peer: Endpoint) -> None:
        """Wires up to a peer in the background: PeerOpened or PeerFailed."""
        raise NotImplementedError

    def part(self, agent_name: str, proven_dead: bool) -> None:
        """A peer left. Only `proven_dead` lets anything out of quarantine."""
        raise NotImplementedError

    def begin_send(self, spec: SendSpec) -> None:
        """Prefill side: a grant arrived. Chunks told before or after it are pushed."""
        raise NotImplementedError

    def chunk_computed(self, transfer_id: bytes, end_token: int, payload: bytes | None) -> None:
        """Prefill side: KV of [0, end_token) is final. `payload` is set with the last chunk, when
        the first tokens are known, and travels in the last notification."""
        raise NotImplementedError

    def abort_send(self, transfer_id: bytes) -> None:
        """Prefill side: send nothing more; SendQuiesced follows, also for an unknown transfer,
        which leaves a tombstone that refuses a later begin_send (SendQuiesced again)."""
        raise NotImplementedError

    def expect(self, spec: ReceiveSpec) -> None:
        """Decode side: a grant was made; must be called before the grant is told to anyone."""
        raise NotImplementedError

    def abort_receive(self, transfer_id: bytes) -> None:
        """Decode side: compare-and-set. ReceiveAborted follows, and ReceiveFreed when the
        quarantine is over (never, where it was READY already)."""
        raise NotImplementedError
