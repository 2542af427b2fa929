"""A grant, as each of its two sides hands it to the transfer thread."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.types import PageIds

TRANSFER_ID_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
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
    """8 bytes, or empty."""
    yields: bool = False
    """A fetch: the pushes of hand-offs go first."""

    @property
    def num_pages(self) -> int:
        """Pages of the prompt."""
        return len(self.target_pages)

    def is_sound(self) -> bool:
        """Whether the page lists, the held pages and the token count fit each other."""
        return (
            len(self.transfer_id) == TRANSFER_ID_BYTES
            and len(self.span_id) in (0, 8)
            and self.page_size_tokens > 0
            and self.num_tokens > 0
            and self.num_pages == -(-self.num_tokens // self.page_size_tokens)
            and len(self.source_pages) == self.num_pages
            and 0 <= self.held_pages <= self.num_pages
        )


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
    may_be_short: bool = False
    """A fetch: the peer may write fewer pages. Its last notification ends where they do."""
