"""One attempt at a job: a prefill leg, a decode leg, and the states that join them.

Life of an attempt with a hand-off:

1. PREFILLING: submitted to both workers under one random id. The router passes the decode worker's
   grant on to the prefill worker. The first token comes from the prefill worker.
2. DELIVERED: the decode worker has the KV, or has taken the prompt over and computes it itself.
   The prefill worker is let go, and its leg no longer matters.
3. ENDED: every open leg is cancelled, its reservation is released and its span is closed.

If the prefill leg fails before delivery, the attempt is ABORTING. Only the decode worker knows
whether the KV arrived, so it is asked to abort. If it aborted, the attempt is over. If it has the
KV, the attempt is DELIVERED. No other attempt starts before this answer or the decode worker's
death, since two could run at once otherwise. There is one exception: the prompt's log probabilities
are wanted and have not come. Only the lost leg had them, and the client has nothing yet, so the
attempt is over at once.

An attempt at a group that has begun is a *resume*. It carries the generated tokens. They are
computed behind the prompt and never sampled again. It is like other attempts in all else.
"""

from __future__ import annotations

import enum
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from baton.worker.v1 import worker_pb2
from router.dispatch import merge
from router.dispatch.clocks import Clocks
from router.dispatch.fault import Fault
from router.dispatch.leg import Leg
from router.jobs import ChoiceEnded, JobTimings
from router.placement.placing import LocalReason

if TYPE_CHECKING:
    from router.dispatch.job_run import ChoiceGroup
    from router.jobs import JobTokens
    from router.placement.routing import Route
    from router.workers.link import WorkerLink

ATTEMPT_ID_BYTES: Final = 16
"""128 bits: drawn numbers never meet, and nobody guesses one."""


class Phase(enum.IntEnum):
    """State of an attempt. Failure is the smallest."""

    ENDED = 0
    ABORTING = 1
    PREFILLING = 2
    DELIVERED = 3


class Attempt:
    """Runs a group on a route. If it fails, it calls `on_over` once."""

    def __init__(
        self, group: ChoiceGroup, route: Route, on_over: Callable[[Attempt, Fault], None]
    ) -> None:
        self.id = secrets.token_bytes(ATTEMPT_ID_BYTES)
        self.group = group
        self.run = group.run
        self.route = route
        self.granted_pages = 0
        """Leading pages that the decode worker held when it granted the rest."""
        self.is_compared = False
        """Whether its first token was compared with the forecast."""
        self.phase = Phase.PREFILLING
        self.prefill, self.decode = self._legs(route)
        self._first_indexes = [len(tokens) for tokens in group.generated] or [0] * len(
            group.choices
        )
        """Index of the first new token of each choice."""
        self.is_computed = False
        """Whether a worker has computed the prompt."""
        self.is_delivered = False
        """Whether its KV has come to the decode worker, whose word may overtake the other's."""
        self._dispatched_s = self._first_s = self._last_s = time.monotonic()
        self._came, self._beside = 0, 0
        """Runs of tokens that came, and the sum of the attempts that ran as they did."""
        self._on_over = on_over
        self._fault: Fault | None = None
        self._first_ids: list[int] = []
        """The first new token of each choice, from the prefill worker."""
        self._clocks = Clocks(group.waits_since_ns)

    @property
    def legs(self) -> list[Leg]:
        """The one or two legs."""
        return [leg for leg in (self.prefill, self.decode) if leg is not None]

    @property
    def workers(self) -> list[WorkerLink]:
        """Workers of its legs."""
        return [leg.worker for leg in self.legs]

    @property
    def pair(self) -> tuple[WorkerLink, WorkerLink] | None:
        """The prefill and the decode worker, if there are two."""
        if self.prefill is None or self.decode is None:
            return None
        return self.prefill.worker, self.decode.worker

    @property
    def age_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._dispatched_s

    @property
    def prefill_open(self) -> bool:
        """Whether the prefill worker is not done yet."""
        return self.prefill is not None and self.prefill.open

    def start(self) -> None:
        """Submits to both workers, first to the one that sends the first token."""
        self._clocks.dispatched_ns = time.time_ns()
        self.run.pace.running += 1
        for leg in self.legs:
            leg.submit()

    def receive(self, worker: WorkerLink, message: worker_pb2.WorkResponse) -> bool:
        """Takes a message from one of its workers that concerns only this attempt. Returns whether
        that worker still had a part in it; if not, the message is dropped."""
        leg = self._leg_of(worker)
        if self.phase is Phase.ENDED or leg is None or not leg.open:
            return False
        match message.WhichOneof("message"):
            case "granted":
                self._granted(message.granted)
            case "taken_over":
                self._charge(leg, message.taken_over.cached_prompt_tokens)
                self._taken_over(leg)
            case "first_token":
                self._first_token(leg, message.first_token)
            case "prompt_logprobs":
                self.run.scored(merge.prompt_logprobs(message.prompt_logprobs))
            case "prefill_done":
                self._prefill_done(leg, message.prefill_done)
            case "pooled":
                self._pooled(leg, message.pooled)
            case "delivered":
                self.phase, self.is_delivered = Phase.DELIVERED, True
                self._clocks.delivered_ns = message.delivered.delivered_unix_ns
            case "finished":
                self._finished(leg, message.finished)
            case "failed":
                self._leg_failed(leg, Fault(worker, message.failed.reason, message.failed.hook))
            case "aborted":
                self._aborted(leg, already_ready=message.aborted.already_ready)
        return True

    def tokens(self, worker: WorkerLink, tokens: JobTokens, now_s: float) -> bool:
        """Takes tokens of one choice from one of its workers, and says whether that choice has
        ended. The choice's index is that in the attempt."""
        leg, choices = self.decode, self.group.choices
        if leg is None or leg.worker is not worker:
            leg = self._leg_of(worker)
        if self.phase is Phase.ENDED or leg is None or tokens.choice >= len(choices):
            return False
        if not self.is_computed and leg.mode == worker_pb2.WORK_MODE_WHOLE:
            self._prompt_computed(leg)
        if self._first_ids and self._contradicts(tokens):
            self._over(Fault(worker, worker_pb2.FAILURE_REASON_KV_TRANSFER))
            return False
        self._last_s = now_s
        self._came += 1
        self._beside += self.run.pace.running
        if (choice := choices[tokens.choice]) != tokens.choice:
            tokens = tokens._replace(choice=choice)
        return self.run.add(tokens)

    def worker_lost(self, worker: WorkerLink) -> None:
        """A worker is gone, and its leg with it."""
        if (leg := self._leg_of(worker)) is not None and leg.open:
            if self._had_in_hand(leg) and not worker.was_slept_through:
                self.run.lost.add(worker)
            self._leg_failed(leg, Fault(worker, None))

    def decode_enough(self) -> None:
        """No more tokens are needed."""
        if self.decode is not None:
            self.decode.cancel()

    def end(self, fault: str = "") -> None:
        """Ends the attempt at every worker that may still hold something of it."""
        if self.phase is not Phase.ENDED:
            self.phase = Phase.ENDED
            self.run.pace.running -= 1
        for leg in self.legs:
            leg.cancel(fault)

    def report_rates(self) -> None:
        """The group is over: how long it took helps to foretell others. It counts, too, if its
        reader left: of those that are late, none ends by itself. Those that were begun before say
        nothing of a whole request."""
        if any(self._first_indexes) or self.run.job.pooling is not None:
            return
        choices = [self.run.choices[choice] for choice in self.group.choices]
        if self.is_computed:
            self.run.pace.served(
                self._first_s - self._dispatched_s,
                max(0.0, self._last_s - self._first_s),
                [len(choice.token_ids) for choice in choices],
                beside=self._beside / self._came if self._came else self.run.pace.running,
                whole=self.group.complete,
            )
        else:
            self.run.pace.unserved(self.age_s)

    def timings(self) -> JobTimings:
        """Time in each phase, as far as the workers reported it."""
        return self._clocks.timings()

    def _legs(self, route: Route) -> tuple[Leg | None, Leg | None]:
        def leg(mode: worker_pb2.WorkMode.ValueType) -> Leg:
            return Leg(mode, route, self.group, self.id)

        if self.run.job.pooling is not None:
            return leg(worker_pb2.WORK_MODE_POOL), None
        if route.whole:
            whole = leg(worker_pb2.WORK_MODE_WHOLE)
            if route.local_reason is not None:
                whole.mark_local(route.local_reason)
            return None, whole
        prefill = leg(worker_pb2.WORK_MODE_PREFILL)
        return prefill, None if route.decode is None else leg(worker_pb2.WORK_MODE_DECODE)

    def _had_in_hand(self, leg: Leg) -> bool:
        """Whether the worker may have run a part of the attempt. One that only kept room has
        not."""
        if leg.mode == worker_pb2.WORK_MODE_DECODE:
            return self.phase is Phase.DELIVERED
        return leg.mode == worker_pb2.WORK_MODE_WHOLE or self.phase is Phase.PREFILLING

    def _leg_of(self, worker: WorkerLink) -> Leg | None:
        for leg in (self.prefill, self.decode):
            if leg is not None and leg.worker is worker:
                return leg
        return None

    def _granted(self, grant: worker_pb2.Grant) -> None:
        self.granted_pages = grant.held_pages
        if self.prefill is not None and self.prefill.open:
            self.prefill.worker.send(worker_pb2.WorkRequest(grant=grant))

    def _taken_over(self, leg: Leg) -> None:
        """The decode worker holds most of the prompt and computes the rest itself.

        While ABORTING, its answer to the Abort is still to come. It will say that it goes on.
        """
        leg.mark_local(LocalReason.CACHED)
        if self.prefill is not None:
            self.prefill.cancel()
        if self.phase is Phase.PREFILLING:
            self.phase = Phase.DELIVERED

    def _charge(self, leg: Leg, cached_tokens: int) -> None:
        """The worker said how much of the prompt it need not compute."""
        uncached = max(0, self.group.demand.prompt_tokens - cached_tokens)
        leg.worker.estimate.charge(self.id, uncached)

    def _contradicts(self, tokens: JobTokens) -> bool:
        """Whether these tokens continue from another first token than the client has.

        The prefill worker may have drawn the client's token before it was let go. The same noise
        draws the same token, unless rounding decides between two.
        """
        if tokens.first_index != self._first_indexes[tokens.choice]:
            return False
        return tokens.token_ids[0] != self._first_ids[tokens.choice]

    def _first_token(self, leg: Leg, first: worker_pb2.FirstToken) -> None:
        self._charge(leg, first.cached_prompt_tokens)
        self._prompt_computed(leg)
        leg.worker.estimate.prefilled(self.id)  # Also of a take-over behind another first token.
        self.run.first_known(first.cached_prompt_tokens, dict(first.loaded_prompt_tokens))
        if self.run.job.beams is not None:
            return  # Which tokens come first is known at the end.
        if leg is self.prefill:
            self._first_ids = [record.token_id for record in first.records]
        for tokens in merge.first_tokens(first, self.group.choices, self._first_indexes):
            self.run.add(tokens)

    def _pooled(self, leg: Leg, pooled: worker_pb2.Pooled) -> None:
        """The worker has pooled the prompt, and holds nothing of it any more."""
        self._charge(leg, pooled.cached_prompt_tokens)
        self._prompt_computed(leg)
        self._clocks.prefill = worker_pb2.PrefillDone(
            received_unix_ns=pooled.received_unix_ns,
            started_unix_ns=pooled.started_unix_ns,
            computed_unix_ns=pooled.ended_unix_ns,
            sent_unix_ns=pooled.ended_unix_ns,
        )
        self.run.first_known(pooled.cached_prompt_tokens, {})
        leg.close()
        self.run.pooled(pooled.values)

    def _prompt_computed(self, leg: Leg) -> None:
        """Notes at the first token that the prompt is computed. A resume on one worker gives no
        other sign."""
        if not self.is_computed:
            self.is_computed = True
            self._first_s = time.monotonic()
            self.run.pace.done(self.group.demand.prompt_tokens)
            leg.worker.estimate.prefilled(self.id)

    def _prefill_done(self, leg: Leg, done: worker_pb2.PrefillDone) -> None:
        self._clocks.prefill = done
        self.run.prefill_over()
        leg.close()

    def _finished(self, leg: Leg, finished: worker_pb2.Finished) -> None:
        if finished.HasField("timings"):
            self._clocks.work = finished.timings
        if finished.choice_index < len(self.group.choices):
            choice = self.group.choices[finished.choice_index]
            drafts = finished.drafted_tokens, finished.accepted_tokens
            score = finished.score if finished.HasField("score") else None
            self.run.end_choice(
                ChoiceEnded(choice, finished.reason, finished.output_tokens, *drafts, score)
            )
            leg.finished.add(finished.choice_index)
        if leg is self.decode and len(leg.finished) == len(self.group.choices):
            leg.close()

    def _leg_failed(self, leg: Leg, fault: Fault) -> None:
        leg.close(fault.name)
        decode = self.decode
        if leg is self.prefill and decode is not None and decode.open and not self.run.owes_scores:
            if self.phase is Phase.PREFILLING:
                self.phase, self._fault = Phase.ABORTING, fault
                abort = worker_pb2.Abort(attempt_id=self.id)
                decode.worker.send(worker_pb2.WorkRequest(abort=abort))
            return
        self._over(self._fault if self._fault and self.phase is Phase.ABORTING else fault)

    def _aborted(self, leg: Leg, *, already_ready: bool) -> None:
        if self.phase is not Phase.ABORTING or self._fault is None:
            return
        if already_ready:
            self.phase = Phase.DELIVERED
            return
        leg.close(self._fault.name)
        self._over(self._fault)

    def _over(self, fault: Fault) -> None:
        self.end(fault.name)
        self._on_over(self, fault)
