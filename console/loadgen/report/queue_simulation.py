"""Computes the time to first token that queueing alone causes: one server, first come first served.

Each prompt occupies the simulated server for the idle TTFT. A real server's TTFT above this result
is its own doing; any server with one queue has the rest.
"""

from __future__ import annotations

from collections.abc import Sequence


def single_server_waits_s(arrivals_s: Sequence[float], service_s: Sequence[float]) -> list[float]:
    """Returns each arrival's time in the system: its wait and its service, seconds.

    Args:
        arrivals_s: arrival times, in order.
        service_s: service time of each arrival.
    """
    free_s = 0.0
    times = []
    for arrival_s, takes_s in zip(arrivals_s, service_s, strict=True):
        free_s = max(free_s, arrival_s) + takes_s
        times.append(free_s - arrival_s)
    return times
