"""What queueing alone makes of the time to first token: one server, first come, first served.

A prompt of the same length takes the server the same time, the idle TTFT; what a loaded server adds
to that can be told from what any server with one queue must add.
"""

from __future__ import annotations

from collections.abc import Sequence


def single_server_waits_s(arrivals_s: Sequence[float], service_s: Sequence[float]) -> list[float]:
    """Time in the system of each arrival: its wait and its own service.

    Args:
        arrivals_s: when each came, in order.
        service_s: how long the server takes for each.
    """
    free_s = 0.0
    times = []
    for arrival_s, takes_s in zip(arrivals_s, service_s, strict=True):
        free_s = max(free_s, arrival_s) + takes_s
        times.append(free_s - arrival_s)
    return times
