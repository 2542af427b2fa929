"""A leg: one worker's part of an attempt, its messages and its reservation.

Life: made -> `submit`: OPEN -> `close`. It closes when its worker says that it holds nothing of the
attempt any more, gets a Cancel, or is lost.

Invariant: its worker has the reservation exactly while the leg is open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.worker.v1 import worker_pb2
from router.placement.routing import decode_reservation, prefill_reservation
from serving.wire import pack_ids
from telemetry.names import Attr, SpanName
from telemetry.tracing import SpanKind, end_span, start_span, traceparent_of

if TYPE_CHECKING:
    from router.dispatch.job_run import ChoiceGroup
    from router.placement.placing import LocalReason
    from router.placement.routing import Route
    from router.placement.ways import Way
    from router.workers.link import WorkerLink
    from router.workers.load_estimate import Reservation


_WORDS: Final = {
    mode: name.removeprefix("WORK_MODE_").lower() for name, mode in worker_pb2.WorkMode.items()
}


class Leg:
    """One worker's part of an attempt."""

    def __init__(
        self,
        mode: worker_pb2.WorkMode.ValueType,
        route: Route,
        group: ChoiceGroup,
        attempt_id: bytes,
    ) -> None:
        self.mode = mode
        self.worker, self._peer = _ends(route, mode)
        self.open = False
        self.finished: set[int] = set()
        """Choices of the attempt that ended at this worker."""
        self._group = group
        self._attempt_id = attempt_id
        self._route = route
        prefills = mode == worker_pb2.WORK_MODE_PREFILL
        self._span = start_span(
            SpanName.PREFILL if prefills else SpanName.DECODE,
            group.run.job.context,
            {
                Attr.WORKER_ID: self.worker.worker_id,
                Attr.ATTEMPT_ID: attempt_id.hex(),
                Attr.WORK_MODE: _WORDS[mode],
            },
            kind=SpanKind.CLIENT,
        )

    def submit(self) -> None:
        """Hands the worker its part, and reserves what it takes."""
        self.open = True
        demand = self._group.demand
        self.worker.estimate.reserve(
            self._attempt_id, self._reservation(), demand.holder, demand.model.digest
        )
        self.worker.send(worker_pb2.WorkRequest(submit=self._message()))

    def mark_local(self, reason: LocalReason) -> None:
        """Notes that this decode worker computes the prompt itself."""
        self._span.set_attribute(Attr.ROUTE_LOCAL_REASON, reason)

    def cancel(self, fault: str = "") -> None:
        """Ends the leg at the worker if it is open. `fault` is the cause."""
        if self.open:
            cancel = worker_pb2.Cancel(attempt_id=self._attempt_id)
            self.worker.send(worker_pb2.WorkRequest(cancel=cancel))
            self.close(fault)

    def close(self, fault: str = "") -> None:
        """Closes the leg: the worker holds nothing of the attempt any more. `fault` is the
        cause."""
        if not self.open:
            return
        self.open = False
        self.worker.estimate.release(self._attempt_id)
        end_span(self._span, error=fault)

    def _reservation(self) -> Reservation:
        demand = self._group.demand
        if self.mode == worker_pb2.WORK_MODE_DECODE:
            return decode_reservation(demand)
        prompt = prefill_reservation(demand, self._route.way.cached_tokens)
        if self.mode != worker_pb2.WORK_MODE_WHOLE:
            return prompt
        return decode_reservation(demand)._replace(prefill_tokens=prompt.prefill_tokens)

    def _message(self) -> worker_pb2.Submit:
        group, job = self._group, self._group.run.job
        decodes = self.mode == worker_pb2.WORK_MODE_DECODE
        prefills = self.mode == worker_pb2.WORK_MODE_PREFILL
        searches = job.beams is not None
        scores_wanted = job.prompt_logprobs and not group.run.started
        return worker_pb2.Submit(
            attempt_id=self._attempt_id,
            mode=self.mode,
            prompt_ids=pack_ids(job.prompt_ids),
            generated=[
                worker_pb2.GeneratedTokens(token_ids=pack_ids(token_ids))
                for token_ids in group.generated
            ],
            sampling=job.sampling,
            stopping=job.stopping,
            choices=1 if searches and prefills else len(group.choices),
            first_choice=group.choices[0],
            priority=job.priority,
            cache_salt=job.cache_salt,
            adapter=job.model.digest,
            traceparent=traceparent_of(self._span),
            deadline_unix_ns=job.deadline_ns,
            time_left_ms=max(0, round(group.run.left_s * 1e3)),
            peer_agent_name=self._peer.agent_name if self._peer else "",
            prompt_logprobs=scores_wanted and not decodes,
            tenant=job.tenant,
            takeover_tokens=self._route.takeover_tokens if decodes else 0,
            extensions=job.extensions or None,
            no_speculation=not job.speculates,
            beams=job.beams,
            pooling=job.pooling,
            fetch=None if decodes else _fetch_message(self._route.way),
        )


def _ends(
    route: Route, mode: worker_pb2.WorkMode.ValueType
) -> tuple[WorkerLink, WorkerLink | None]:
    """The leg's worker, and the worker of the attempt's other leg, if there is one."""
    if mode == worker_pb2.WORK_MODE_DECODE and route.decode is not None:
        return route.decode, route.prefill
    return route.prefill, None if route.whole else route.decode


def _fetch_message(way: Way) -> worker_pb2.PeerFetch | None:
    """Where the worker that computes the prompt gets pages that it lacks; None: it computes
    them."""
    if way.holder is None:
        return None
    return worker_pb2.PeerFetch(agent_name=way.holder.agent_name, pages=way.fetched_pages)
