"""Why a part of an attempt failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.worker.v1 import worker_pb2

if TYPE_CHECKING:
    from router.workers.link import WorkerLink

_FINAL: Final = frozenset(
    {worker_pb2.FAILURE_REASON_TOO_LARGE, worker_pb2.FAILURE_REASON_NUMERICAL}
)
_OF_HAND_OFF: Final = frozenset(
    {
        worker_pb2.FAILURE_REASON_KV_TRANSFER,
        worker_pb2.FAILURE_REASON_BAD_PEER,
        worker_pb2.FAILURE_REASON_EXPIRED,
    }
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
        """Any other worker would fail in the same way."""
        return self.reason in _FINAL

    @property
    def of_hand_off(self) -> bool:
        """It arose between two workers: either of them may be the cause, or their path."""
        return self.reason in _OF_HAND_OFF
