"""One attempt at a decode worker, as the event loop sees it."""

from __future__ import annotations

import enum
import time
from array import array
from dataclasses import dataclass, field

from baton.worker.v1 import worker_pb2
from baton.worker_attempts import Attempt
from engine.types import Mode, PageIds, SequenceEnded


class DecodeState(enum.IntEnum):
    """State of an attempt under way; failure is the smallest."""

    QUARANTINED = 0
    """Given up, but a write may still land in its pages."""
    WAITING = 1
    """For a slot and pages; where the prompt is computed here, for that."""
    GRANTED = 2
    """The prefill worker may write its pages."""
    READY = 3
    """Every page has been written."""
    RUNNING = 4
    """In the batch."""


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeAttempt(Attempt):
    """Life: see `decode_service.service`. Times are Unix nanoseconds, 0 before they are known."""

    state: DecodeState = DecodeState.WAITING
    transfer_id: bytes = b""
    num_pages: int = 0
    held_pages: int = 0
    took_over: bool = False
    """The prompt was to come from elsewhere, and is computed here."""
    quarantined_s: float = 0.0
    """Since when it has been in quarantine, on the table's clock."""
    abort_wanted: bool = False
    """The router waits for an Aborted."""
    computed_ns: int = 0
    """First token, where the prompt is computed here."""
    granted_ns: int = 0
    first_token_ns: int = 0
    """Sampled, by the clock of whoever computed the prompt."""
    second_token_ns: int = 0
    """The first that was sampled after those."""
    ready_ns: int = 0
    joined_ns: int = 0
    last_token_ns: int = 0
    tokens: int = 0
    """Sampled here, over all choices."""
    steps: int = 0
    preemptions: int = 0
    gaps_ms: array[float] = field(default_factory=lambda: array("f"))
    """Between tokens of one choice."""
    last_token_of: dict[int, int] = field(default_factory=dict)
    """By choice, when its last token was sampled."""

    @property
    def is_whole(self) -> bool:
        """The prompt is computed here."""
        return self.took_over or self.request.mode is Mode.WHOLE

    @property
    def has_kv(self) -> bool:
        """The prompt's KV is here, or computed here: the attempt must not be tried elsewhere."""
        return self.took_over or self.state >= DecodeState.READY

    @property
    def second_token_gap_ms(self) -> float | None:
        """From the first token to the second, where a hand-off shows; None before it, or where
        nobody said when the first was sampled. Not below 0 where clocks disagree."""
        if not (self.first_token_ns and self.second_token_ns):
            return None
        return max(0, self.second_token_ns - self.first_token_ns) / 1e6

    def reserve(self, transfer_id: bytes, pages: PageIds, held_pages: int) -> None:
        """WAITING -> GRANTED."""
        self.state, self.transfer_id = DecodeState.GRANTED, transfer_id
        self.num_pages, self.held_pages = len(pages), held_pages
        self.granted_ns = time.time_ns()

    def count(self, choice: int, at_ns: int) -> None:
        """Takes note of a choice's token of a step."""
        if not self.second_token_ns and at_ns != self.first_token_ns:
            self.second_token_ns = at_ns
        self.steps += at_ns != self.last_token_ns
        self.tokens += 1
        self.last_token_ns = at_ns
        if before_ns := self.last_token_of.get(choice):
            self.gaps_ms.append((at_ns - before_ns) / 1e6)
        self.last_token_of[choice] = at_ns

    def timings(self, event: SequenceEnded) -> worker_pb2.WorkTimings:
        """When things happened, for the last message about the attempt."""
        return worker_pb2.WorkTimings(
            received_unix_ns=self.received_ns,
            prefill_started_unix_ns=self.started_ns,
            ready_unix_ns=self.ready_ns,
            joined_unix_ns=self.joined_ns,
            last_token_unix_ns=self.last_token_ns or event.at_ns,
            cached_prompt_tokens=self.cached_tokens,
            preemptions=self.preemptions,
        )
