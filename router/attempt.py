"""One attempt at a job: a prefill leg, a decode leg, and what ties them together.

Life of an attempt that is handed off:

1. PREFILLING: submitted to both workers under one random id. The decode worker's grant goes on to
   the prefill worker; the first token comes from there.
2. DELIVERED: the decode worker has the KV. What becomes of the prefill worker matters no more.
3. ENDED: every leg still open is cancelled, what it was charged is released, its span is closed.

When the prefill leg fails before delivery, the attempt is ABORTING: only the decode worker knows
whether the KV made it, so it is asked to abort. It answers that it did, and the attempt is over; or
that the KV is there, and the attempt is DELIVERED. No other attempt starts before the answer or the
decode worker's death: else two could run at once.

Invariant: a leg is open from its Submit until its worker said that it holds nothing of the attempt
any more, or was sent a Cancel, or was lost.
"""

from __future__ import annotations

import enum
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from baton.worker.v1 import worker_pb2
from router import merge
from router.faults import Fault
from router.jobs import ChoiceEnded, JobTimings
from router.routing import decode_charge, prefill_charge
from telemetry.names import Attr, SpanName
from telemetry.tracing import SpanKind, end_span, start_span, traceparent_of

if TYPE_CHECKING:
    from router.job_run import JobRun
    from router.jobs import Job, JobTokens
    from router.ledger import Charge
    from router.link import WorkerLink
    from router.routing import Route

ATTEMPT_ID_BYTES: Final = 16


class Phase(enum.IntEnum):
    """State of an attempt; failure is the smallest."""

    ENDED = 0
    ABORTING = 1
    PREFILLING = 2
    DELIVERED = 3


class Leg:
    """One worker's part in an attempt."""

    def __init__(
        self,
        worker: WorkerLink,
        mode: worker_pb2.WorkMode.ValueType,
        job: Job,
        attempt_id: bytes,
        peer: WorkerLink | None,
    ) -> None:
        self.worker = worker
        self.mode = mode
        self.open = False
        self.finished: set[int] = set()
        """Choices that ended here."""
        self._job = job
        self._attempt_id = attempt_id
        self._peer = peer
        prefills = mode == worker_pb2.WORK_MODE_PREFILL
        self._span = start_span(
            SpanName.PREFILL if prefills else SpanName.DECODE,
            job.context,
            {
                Attr.WORKER_ID: worker.worker_id,
                Attr.ATTEMPT_ID: attempt_id.hex(),
                Attr.WORK_MODE: _word(worker_pb2.WorkMode.Name(mode)),
            },
            kind=SpanKind.CLIENT,
        )

    def submit(self, generated: list[worker_pb2.GeneratedTokens], now_s: float) -> None:
        """Hands the worker its part, and charges it."""
        self.open = True
        self.worker.ledger.charge(self._attempt_id, self._charge(), now_s)
        self.worker.send(worker_pb2.WorkRequest(submit=self._message(generated)))

    def cancel(self, fault: str = "") -> None:
        """Ends the part at the worker, if it is still open there; a fault says why."""
        if self.open:
            cancel = worker_pb2.Cancel(attempt_id=self._attempt_id)
            self.worker.send(worker_pb2.WorkRequest(cancel=cancel))
            self.close(fault)

    def close(self, fault: str = "") -> None:
        """The worker holds nothing of the attempt any more; a fault says why."""
        if not self.open:
            return
        self.open = False
        self.worker.ledger.release(self._attempt_id)
        end_span(self._span, error=fault)

    def _charge(self) -> Charge:
        match self.mode:
            case worker_pb2.WORK_MODE_PREFILL:
                return prefill_charge(self._job)
            case worker_pb2.WORK_MODE_DECODE:
                return decode_charge(self._job)
            case _:
                prompt = prefill_charge(self._job).prefill_tokens
                return decode_charge(self._job)._replace(prefill_tokens=prompt)

    def _message(self, generated: list[worker_pb2.GeneratedTokens]) -> worker_pb2.Submit:
        job = self._job
        return worker_pb2.Submit(
            attempt_id=self._attempt_id,
            mode=self.mode,
            prompt_ids=job.prompt_ids.astype("<u4").tobytes(),
            generated=generated,
            sampling=job.sampling,
            stopping=job.stopping,
            choices=job.choices,
            priority=job.priority,
            cache_salt=job.cache_salt,
            traceparent=traceparent_of(self._span),
            deadline_unix_ns=job.deadline_ns,
            peer_agent_name=self._peer.agent_name if self._peer else "",
            prompt_logprobs=job.prompt_logprobs and self.mode != worker_pb2.WORK_MODE_DECODE,
            tenant=job.tenant,
        )


class Attempt:
    """Runs a job on a route. `on_over` is called once, where it failed."""

    def __init__(
        self, run: JobRun, route: Route, on_over: Callable[[Attempt, Fault], None]
    ) -> None:
        self.id = secrets.token_bytes(ATTEMPT_ID_BYTES)
        self.run = run
        self.phase = Phase.PREFILLING
        self.prefill, self.decode = self._legs(run.job, route)
        self._on_over = on_over
        self._fault: Fault | None = None
        self._clocks = _Clocks(run.job.arrived_ns)

    @property
    def legs(self) -> list[Leg]:
        """The one or two parts."""
        return [leg for leg in (self.prefill, self.decode) if leg is not None]

    @property
    def prefill_open(self) -> bool:
        """The prefill worker is not done yet."""
        return self.prefill is not None and self.prefill.open

    def start(self, now_s: float) -> None:
        """Submits to the decode worker and the prefill worker together."""
        self._clocks.dispatched_ns = time.time_ns()
        for leg in reversed(self.legs):
            leg.submit(self._generated(), now_s)

    def receive(self, worker: WorkerLink, message: worker_pb2.WorkResponse) -> None:
        """Takes a message of one of its workers that is about it alone."""
        leg = self._leg_of(worker)
        if self.phase is Phase.ENDED or leg is None:
            return
        match message.WhichOneof("message"):
            case "granted":
                self._granted(message.granted)
            case "first_token":
                self._first_token(leg, message.first_token)
            case "prompt_logprobs":
                self.run.scored(merge.prompt_logprobs(message.prompt_logprobs))
            case "prefill_done":
                self._prefill_done(leg, message.prefill_done)
            case "delivered":
                self.phase = Phase.DELIVERED
                self._clocks.delivered_ns = message.delivered.delivered_unix_ns
            case "finished":
                self._finished(leg, message.finished)
            case "failed":
                self._leg_failed(leg, Fault(worker, message.failed.reason))
            case "aborted":
                self._aborted(leg, already_ready=message.aborted.already_ready)

    def tokens(self, worker: WorkerLink, tokens: JobTokens) -> None:
        """Takes tokens of one choice from one of its workers."""
        if self.phase is not Phase.ENDED and self._leg_of(worker) is not None:
            self.run.add([tokens])

    def worker_lost(self, worker: WorkerLink) -> None:
        """A worker is gone, and its part with it."""
        if (leg := self._leg_of(worker)) is not None and leg.open:
            self._leg_failed(leg, Fault(worker, None))

    def decode_enough(self) -> None:
        """No more tokens are needed."""
        if self.decode is not None:
            self.decode.cancel()

    def end(self, fault: str = "") -> None:
        """Ends the attempt at every worker that may still hold something of it."""
        self.phase = Phase.ENDED
        for leg in self.legs:
            leg.cancel(fault)

    def timings(self) -> JobTimings:
        """Where the time went, as far as the workers said."""
        return self._clocks.timings()

    def _legs(self, job: Job, route: Route) -> tuple[Leg | None, Leg | None]:
        if route.whole:
            return None, Leg(route.prefill, worker_pb2.WORK_MODE_WHOLE, job, self.id, None)
        prefill = Leg(route.prefill, worker_pb2.WORK_MODE_PREFILL, job, self.id, route.decode)
        if route.decode is None:
            return prefill, None
        return prefill, Leg(route.decode, worker_pb2.WORK_MODE_DECODE, job, self.id, route.prefill)

    def _generated(self) -> list[worker_pb2.GeneratedTokens]:
        """What the client has already: to be repeated, never sampled again."""
        if not self.run.started:
            return []
        return [
            worker_pb2.GeneratedTokens(token_ids=merge.pack_ids(choice.token_ids))
            for choice in self.run.choices
        ]

    def _leg_of(self, worker: WorkerLink) -> Leg | None:
        return next((leg for leg in self.legs if leg.worker is worker), None)

    def _granted(self, grant: worker_pb2.Grant) -> None:
        if self.prefill is not None and self.prefill.open:
            self.prefill.worker.send(worker_pb2.WorkRequest(grant=grant))

    def _first_token(self, leg: Leg, first: worker_pb2.FirstToken) -> None:
        leg.worker.ledger.prefilled(self.id)
        self.run.first_known(first.cached_prompt_tokens)
        self.run.add(merge.first_tokens(first))

    def _prefill_done(self, leg: Leg, done: worker_pb2.PrefillDone) -> None:
        self._clocks.prefill = done
        self.run.prefill_over()
        leg.close()

    def _finished(self, leg: Leg, finished: worker_pb2.Finished) -> None:
        if finished.HasField("timings"):
            self._clocks.work = finished.timings
        self.run.end_choice(
            ChoiceEnded(finished.choice_index, finished.reason, finished.output_tokens)
        )
        leg.finished.add(finished.choice_index)
        if leg is self.decode and len(leg.finished) == self.run.job.choices:
            leg.close()

    def _leg_failed(self, leg: Leg, fault: Fault) -> None:
        leg.close(fault.name)
        if leg is self.prefill and self.decode is not None and self.decode.open:
            self.run.prefill_over()
            if self.phase is Phase.PREFILLING:
                self.phase, self._fault = Phase.ABORTING, fault
                abort = worker_pb2.Abort(attempt_id=self.id)
                self.decode.worker.send(worker_pb2.WorkRequest(abort=abort))
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


class _Clocks:
    """When things happened, by whoever saw them; Unix nanoseconds, 0 where nobody said.

    Hosts' clocks differ: a difference between two of them is never less than 0.
    """

    def __init__(self, arrived_ns: int) -> None:
        self.arrived_ns = arrived_ns
        self.dispatched_ns = 0
        self.delivered_ns = 0
        self.prefill = worker_pb2.PrefillDone()
        self.work = worker_pb2.WorkTimings()

    def timings(self) -> JobTimings:
        """The phases of the request."""
        prefill, work = self.prefill, self.work
        received_ns = prefill.received_unix_ns or work.received_unix_ns
        started_ns = prefill.started_unix_ns or work.prefill_started_unix_ns
        computed_ns = prefill.computed_unix_ns or work.ready_unix_ns
        joined_ns = work.joined_unix_ns or self.delivered_ns
        ready_ns = work.ready_unix_ns or self.delivered_ns
        moved_ns = prefill.sent_unix_ns or ready_ns
        return JobTimings(
            queue_ns=_between(self.arrived_ns, self.dispatched_ns)
            + _between(received_ns, started_ns),
            prefill_ns=_between(started_ns, computed_ns),
            kv_transfer_ns=_between(computed_ns, moved_ns),
            decode_queue_ns=_between(ready_ns, joined_ns),
            decode_ns=_between(joined_ns, work.last_token_unix_ns or time.time_ns()),
        )


def _between(start_ns: int, end_ns: int) -> int:
    return max(0, end_ns - start_ns) if start_ns and end_ns else 0


def _word(mode: str) -> str:
    return mode.removeprefix("WORK_MODE_").lower()
