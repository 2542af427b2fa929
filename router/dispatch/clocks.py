"""Times of an attempt's events, as the workers and the router report them, and its phases."""

from __future__ import annotations

import time

from baton.worker.v1 import worker_pb2
from router.jobs import JobTimings


class Clocks:
    """Times of events by the clock of their host, Unix nanoseconds; 0 if not reported.

    The clocks of hosts differ, so a difference between two of them counts as at least 0.
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
