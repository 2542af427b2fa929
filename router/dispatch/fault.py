"""The cause of a failed leg."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.worker.v1 import worker_pb2

if TYPE_CHECKING:
    from router.workers.link import WorkerLink

_FINAL: Final = frozenset(
    {
        worker_pb2.FAILURE_REASON_TOO_LARGE,
        worker_pb2.FAILURE_REASON_NUMERICAL,
        worker_pb2.FAILURE_REASON_STRUCTURE,
        worker_pb2.FAILURE_REASON_NO_TOKEN,
        worker_pb2.FAILURE_REASON_HOOK,
        worker_pb2.FAILURE_REASON_EXTENSION,
        worker_pb2.FAILURE_REASON_BEAMS,
    }
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
    """The cause of a leg's failure."""

    worker: WorkerLink
    reason: worker_pb2.FailureReason.ValueType | None
    """None if the worker was lost."""
    hook: str = ""
    """The hook that is the cause, if one is."""

    @property
    def name(self) -> str:
        """A short stable word."""
        if self.reason is None:
            return "worker_lost"
        if self.reason not in worker_pb2.FailureReason.values():
            return "unknown"  # Of a worker that is newer.
        name = worker_pb2.FailureReason.Name(self.reason)
        return name.removeprefix("FAILURE_REASON_").lower()

    @property
    def final(self) -> bool:
        """Whether any other worker would fail in the same way."""
        return self.reason in _FINAL

    @property
    def of_hand_off(self) -> bool:
        """Whether it arose between two workers. Either of them, or their path, may be the cause."""
        return self.reason in _OF_HAND_OFF
