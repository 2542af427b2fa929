"""Why a part of an attempt failed, and what the client is told where no attempt follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.worker.v1 import worker_pb2
from router import errors

if TYPE_CHECKING:
    from router.job_run import JobRun
    from router.link import WorkerLink

_FINAL: Final = frozenset(
    {worker_pb2.FAILURE_REASON_TOO_LARGE, worker_pb2.FAILURE_REASON_NUMERICAL}
)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a leg failed."""

    worker: WorkerLink
    reason: worker_pb2.FailureReason.ValueType | None
    """None: the worker was lost."""

    @property
    def name(self) -> str:
        """A short stable word."""
        if self.reason is None:
            return "worker_lost"
        name = worker_pb2.FailureReason.Name(self.reason)
        return name.removeprefix("FAILURE_REASON_").lower()

    @property
    def final(self) -> bool:
        """Another worker would only repeat it."""
        return self.reason in _FINAL


def error_of(run: JobRun, fault: Fault) -> errors.RouterError:
    """What the client is told when no attempt follows."""
    match fault.reason:
        case worker_pb2.FAILURE_REASON_NUMERICAL:
            return errors.numerical_error()
        case worker_pb2.FAILURE_REASON_INTERNAL:
            return errors.internal()
        case worker_pb2.FAILURE_REASON_TOO_LARGE:
            job, room = run.job, fault.worker.room()
            limit_tokens = room.total_pages * job.model.page_size_tokens
            return errors.context_length_exceeded(
                job.prompt_tokens, job.stopping.max_tokens, limit_tokens
            )
    if run.started:
        return errors.worker_lost_mid_stream(run.tokens_sent)
    match fault.reason:
        case None | worker_pb2.FAILURE_REASON_DRAINING:
            return errors.worker_lost(run.attempts)
        case worker_pb2.FAILURE_REASON_QUEUE_FULL:
            return errors.queue_full(0, retry_after_s=1.0)
        case _:
            return errors.kv_transfer_failed(run.attempts)
