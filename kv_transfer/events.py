"""What the transfer thread reports to its owner, as plain records.

Times are Unix nanoseconds of this process's clock.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeerOpened:
    """A peer is wired up, warmed up and measured on the scratch page. Reported again when a figure
    came late."""

    agent_name: str
    transport: str
    """The transport really in use, as far as it can be told, such as "nixl/shm"."""
    gigabytes_per_s: float
    """0 where it is not measured, or not yet."""
    latency_us: float = 0.0
    """Time of one page, posted to done; 0 likewise."""


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """A peer could not be opened, or was lost; `cause` is a short stable word."""

    agent_name: str
    cause: str


@dataclass(frozen=True, slots=True)
class SendStats:
    """Figures of one transfer, at the prefill side."""

    pages: int
    bytes: int
    pushes: int
    descriptors: int
    """After merging adjacent pages."""
    started_ns: int
    """First push posted."""
    last_posted_ns: int
    done_ns: int
    """Last push reported done."""
    posting_s: float
    """Time the thread spent in posting."""


@dataclass(frozen=True, slots=True)
class Sent:
    """COMPUTING/SENDING -> DELIVERED: every page and the last notification are over there."""

    transfer_id: bytes
    stats: SendStats


@dataclass(frozen=True, slots=True)
class SendQuiesced:
    """QUIESCING -> QUIESCED: the transfer was aborted (by this side or by the decode side) and
    nothing of it can land any more: its source pages may be reused."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class SendFailed:
    """The transfer cannot complete. Its source pages stay pinned until `SendQuiesced` or until
    the peer is proven dead; a `SendQuiesced` follows then."""

    transfer_id: bytes
    cause: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """FILLING -> READY: the pages granted are covered exactly, by the granted peer."""

    transfer_id: bytes
    payload: bytes
    """What the prefill worker put into the last notification."""
    send_span_id: bytes
    """Span id (8 bytes) of the sender's kv.send span; empty where it has none."""
    granted_ns: int
    first_notification_ns: int
    delivered_ns: int
    notifications: int
    num_pages: int = 0
    """Pages of group 0 from the first one on that are there, those held before included."""


@dataclass(frozen=True, slots=True)
class ReceiveAborted:
    """Answer to `abort_receive`: GRANTED or FILLING -> QUARANTINED, or READY already."""

    transfer_id: bytes
    already_ready: bool
    landed_pages: int = 0
    """Pages of a fetch that have arrived: leading pages of group 0 that have landed. The peer
    writes a page once, so nothing lands in these any more, even while the others are in
    quarantine."""


@dataclass(frozen=True, slots=True)
class ReceiveExpired:
    """GRANTED or FILLING -> QUARANTINED: the grant was not used up in time."""

    transfer_id: bytes
    landed_pages: int = 0
    """As for `ReceiveAborted`."""


@dataclass(frozen=True, slots=True)
class ReceiveFreed:
    """QUARANTINED -> FREE: nothing can land in the granted pages any more."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class QuiesceUnanswered:
    """A transfer is in quarantine and its peer does not answer: to be asked by another path, too.
    Reported again for as long as that is so."""

    transfer_id: bytes
    peer: str
    """The prefill side."""
    processes: tuple[str, ...] = ()
    """Its processes, as `Endpoint.process` names them; none: it is not known any more."""


@dataclass(frozen=True, slots=True)
class QuiesceAnswered:
    """Answer to `TransferThread.quiesce`: nothing of the transfer can land any more. Not sent while
    something still can: the decode side asks again."""

    transfer_id: bytes
    peer: str
    """The decode side."""
    decode_epoch: int


TransferEvent = (
    PeerOpened
    | PeerFailed
    | Sent
    | SendQuiesced
    | SendFailed
    | Delivered
    | ReceiveAborted
    | ReceiveExpired
    | ReceiveFreed
    | QuiesceUnanswered
    | QuiesceAnswered
)


@dataclass(slots=True)
class TransferCounters:
    """Counts since the start; read from any thread."""

    stale_notifications: int = 0
    """Notifications dropped: unknown transfer, old epoch, wrong peer, bad coverage."""
    transfers_sent: int = 0
    transfers_received: int = 0
    transfers_aborted: int = 0
    transfers_failed: int = 0
    bytes_sent: int = 0
    descriptors_posted: int = 0
    expired_grants: int = 0
    quarantined_transfers: int = 0
    """Transfers in quarantine now."""
    sends_in_progress: int = 0
    """Pushes not reported done, now."""
