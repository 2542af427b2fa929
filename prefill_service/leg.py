"""The prefill leg: this worker computes the prompt and sends its KV."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.worker.v1 import worker_pb2
from engine.types import Prefilled
from kv_transfer.events import SendStats
from prefill_service.outgoing import OutgoingPrompt
from worker_base.legs import WorkerLeg
from worker_base.messages import resumed_tokens


class PrefillState(enum.IntEnum):
    """State of a leg under way; failure is the smallest."""

    QUIESCING = 0
    RECEIVED = 1
    COMPUTING = 2
    SENDING = 3


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillLeg(WorkerLeg):
    """One prefill leg. Its states are those of `prefill_service.service`."""

    outgoing: OutgoingPrompt = field(init=False)
    """The prompt's KV on its way out. The service sets it before the leg is under way."""
    state: PrefillState = PrefillState.RECEIVED
    computed_tokens: int = 0
    """Prompt tokens whose KV is computed, cached ones included."""
    chunks: int = 0
    sending_s: float | None = None
    """On the table's clock: since then only the send is left. The prompt is computed and granted,
    or the leg was given up after its grant."""
    deadline_s: float = 0.0
    """The value of `expires_s` before the wait for the grant cut it short."""
    sent: SendStats | None = None
    """Counts and times of the whole send, once all of it is delivered."""

    def send_ends(self, event: Prefilled) -> None:
        """Reports to the router which choices ended with their first new token."""
        for choice, reason in enumerate(event.ends):
            if reason is None:
                continue
            self.choices_left -= 1
            tokens = resumed_tokens(self.request, choice) + 1
            timings = None if self.choices_left else self._timings(event)
            self.send_finished(choice, reason, tokens, timings)

    def send_done(self) -> None:
        """Reports to the router that nothing more comes of the leg."""
        done = worker_pb2.PrefillDone(
            attempt_id=self.id,
            received_unix_ns=self.received_ns,
            started_unix_ns=self.started_ns,
            computed_unix_ns=self.computed_ns,
            sent_unix_ns=self.sent.done_ns if self.sent else 0,
            cached_prompt_tokens=self.cached_tokens,
            bytes_sent=self.sent.bytes if self.sent else 0,
        )
        self.send(prefill_done=done)

    def _timings(self, event: Prefilled) -> worker_pb2.WorkTimings:
        return worker_pb2.WorkTimings(
            received_unix_ns=self.received_ns,
            prefill_started_unix_ns=self.started_ns,
            ready_unix_ns=event.at_ns,
            last_token_unix_ns=event.at_ns,
            cached_prompt_tokens=self.cached_tokens,
        )
