"""The decode leg: this worker receives a prompt's KV, or computes it, and draws the tokens."""

from __future__ import annotations

import enum
import time
from array import array
from dataclasses import dataclass, field
from typing import Final

from baton.worker.v1 import worker_pb2
from engine.types import Mode, Reserved, SequenceEnded
from kv_transfer.events import Delivered
from kv_transfer.specs import Range
from serving.wire import pack_ids
from worker_base.legs import WorkerLeg
from worker_base.outbox import Outbox

GAP_PARTS: Final = ("seen", "taken", "launched", "begun", "out")
"""Parts of the time between the first two tokens of a hand-off; see `DecodeLeg.gap_parts_ms`."""


class DecodeState(enum.IntEnum):
    """State of a leg under way; failure is the smallest."""

    QUARANTINED = 0
    """The leg was given up, but a write may still land in its pages."""
    WAITING = 1
    """It waits for a slot and pages. If the prompt is computed here, it stays here until then."""
    GRANTED = 2
    """The prefill worker may write its pages."""
    READY = 3
    """Every page has been written."""
    RUNNING = 4
    """It is in the batch."""


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeLeg(WorkerLeg):
    """One decode leg. Its states are those of `decode_service.service`.

    Times are Unix nanoseconds, 0 before they are known. `computed_ns` stays 0 unless the prompt is
    computed here.
    """

    state: DecodeState = DecodeState.WAITING
    transfer_id: bytes = b""
    share_bytes: int = 0
    """What it takes of its peer's share: bytes of all pages that a hand-off of the prompt may
    write."""
    ranges: tuple[Range, ...] = ()
    """Pages of the prompt that the prefill worker is to write, by group."""
    held_pages: int = 0
    """Pages of the prompt that this worker had already, over all groups."""
    drafts: bool = False
    """What a draft head keeps of the prompt comes, too: the last of the ranges."""
    took_over: bool = False
    """The prompt was to come from elsewhere, and is computed here."""
    quarantined_s: float = 0.0
    """On the table's clock: the quarantine began."""
    abort_wanted: bool = False
    """The router waits for an Aborted."""
    delivered: Delivered | None = None
    """The end of the transfer, if there was one."""
    granted_ns: int = 0
    first_token_ns: int = 0
    """The first token was sampled, by the clock of the worker that computed the prompt."""
    second_token_ns: int = 0
    second_step: tuple[int, int] = (0, 0)
    """When the step of the second token was launched, and when it began."""
    """The first token after that was sampled."""
    ready_ns: int = 0
    joined_ns: int = 0
    last_token_ns: int = 0
    tokens: int = 0
    """Tokens sampled here, over all choices."""
    steps: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    """Drafts verified here, over the choices that have ended."""
    accepted_tokens: int = 0
    gaps_ms: array[float] = field(default_factory=lambda: array("f"))
    """Times between two messages with tokens of one choice."""
    longest_gap_ms: float = 0.0
    longest_gap_end_ns: int = 0
    last_token_of: dict[int, int] = field(default_factory=dict)
    """Time of each choice's last token."""

    @property
    def is_whole(self) -> bool:
        """The prompt is computed here."""
        return self.took_over or self.request.mode is Mode.WHOLE

    @property
    def has_kv(self) -> bool:
        """The prompt's KV is here or is computed here, so no other attempt may be begun."""
        return self.took_over or self.state >= DecodeState.READY

    @property
    def second_token_gap_ms(self) -> float | None:
        """Time from the first token to the second, which a hand-off lengthens.

        It is not below 0 if clocks disagree. It is None before the second token, and if the prefill
        worker did not say when it sampled the first.
        """
        if not (self.first_token_ns and self.second_token_ns):
            return None
        return max(0, self.second_token_ns - self.first_token_ns) / 1e6

    def reserve(self, transfer_id: bytes, event: Reserved, *, drafts: bool = False) -> None:
        """WAITING -> GRANTED. `drafts`: what a draft head keeps is to come, too."""
        self.state, self.transfer_id = DecodeState.GRANTED, transfer_id
        others = [
            Range(other.first_page + other.held_pages, other.first_page + len(other.pages))
            for other in event.others
        ]
        own, self.drafts = Range(event.held_pages, len(event.pages)), drafts
        self.ranges = own, *others, *([own] if drafts else ())
        self.held_pages = event.held_pages + sum(other.held_pages for other in event.others)
        self.granted_ns = time.time_ns()

    def receive(self, event: Delivered) -> None:
        """GRANTED -> READY."""
        self.state, self.delivered = DecodeState.READY, event
        self.ready_ns = event.delivered_ns

    def compute(self, at_ns: int) -> None:
        """Takes the time at which this worker computed the prompt."""
        self.computed_ns = self.ready_ns = self.first_token_ns = at_ns

    @property
    def gap_parts_ms(self) -> dict[str, float]:
        """The second token's gap after a hand-off in its parts: until all pages were *seen*, the
        step loop had *taken* the request, a step with it was *launched* and *begun* on the device,
        and its token was *out*. Empty while they are not known."""
        if self.delivered is None or not (self.second_token_ns and all(self.second_step)):
            return {}
        ends_ns = (self.delivered.delivered_ns, self.joined_ns, *self.second_step)
        parts, before_ns = {}, self.first_token_ns
        for part, end_ns in zip(GAP_PARTS, (*ends_ns, self.second_token_ns), strict=True):
            parts[part] = max(0, end_ns - before_ns) / 1e6
            before_ns = max(before_ns, end_ns)  # A late row is taken behind the launch.
        return parts

    def count(self, choice: int, at_ns: int, step: tuple[int, int] = (0, 0)) -> None:
        """Counts one token of a choice. The tokens of a step come together, so nobody waits between
        them. `step`: when it was launched, and when it began."""
        if not self.second_token_ns and at_ns != self.first_token_ns:
            self.second_token_ns, self.second_step = at_ns, step
        self.steps += at_ns != self.last_token_ns
        self.tokens += 1
        self.last_token_ns = at_ns
        before_ns = self.last_token_of.get(choice, at_ns)
        if before_ns != at_ns:
            self._add_gap(before_ns, at_ns)
        self.last_token_of[choice] = at_ns

    def _add_gap(self, before_ns: int, at_ns: int) -> None:
        gap_ms = (at_ns - before_ns) / 1e6
        self.gaps_ms.append(gap_ms)
        if gap_ms > self.longest_gap_ms:
            self.longest_gap_ms, self.longest_gap_end_ns = gap_ms, at_ns

    def send_granted(self, event: Reserved, epoch: int, agent_name: str) -> None:
        """Reports to the router which pages of this worker's pool the prefill worker may write."""
        others = [
            worker_pb2.GroupGrant(
                first_page=other.first_page,
                page_ids=pack_ids(other.pages),
                held_pages=other.held_pages,
            )
            for other in event.others
        ]
        if self.drafts:  # Its pages have the ids of group 0's.
            ids, held = pack_ids(event.pages), event.held_pages
            others.append(worker_pb2.GroupGrant(page_ids=ids, held_pages=held))
        granted = worker_pb2.Grant(
            attempt_id=self.id,
            transfer_id=self.transfer_id,
            decode_epoch=epoch,
            decode_agent_name=agent_name,
            page_ids=pack_ids(event.pages),
            held_pages=event.held_pages,
            groups=others,
        )
        self.send(granted=granted)

    def answer_wanted_abort(self, *, already_ready: bool) -> None:
        """Answers the router's Abort, if one waits. The verdict may be known before the answer to
        `abort_receive` comes, and the leg may be over by then."""
        if self.abort_wanted:
            self.abort_wanted = False
            answer_abort(self.stream, self.id, already_ready=already_ready)

    def send_end(self, event: SequenceEnded) -> None:
        """Reports to the router that a choice ended."""
        timings = self._timings(event) if event.last else None
        drafts = event.drafted_tokens, event.accepted_tokens
        self.drafted_tokens += drafts[0]
        self.accepted_tokens += drafts[1]
        values = event.choice, event.reason, event.output_tokens, timings, drafts, event.score
        self.send_finished(*values)

    def _timings(self, event: SequenceEnded) -> worker_pb2.WorkTimings:
        return worker_pb2.WorkTimings(
            received_unix_ns=self.received_ns,
            prefill_started_unix_ns=self.started_ns,
            ready_unix_ns=self.ready_ns,
            joined_unix_ns=self.joined_ns,
            last_token_unix_ns=self.last_token_ns or event.at_ns,
            cached_prompt_tokens=self.cached_tokens,
            preemptions=self.preemptions,
        )


def answer_abort(stream: Outbox, leg_id: bytes, *, already_ready: bool) -> None:
    """Answers an Abort, whether or not the leg is under way or silent."""
    aborted = worker_pb2.Aborted(attempt_id=leg_id, already_ready=already_ready)
    stream.send(worker_pb2.WorkResponse(aborted=aborted))
