"""When nothing runs, nothing may be left: pages, grants, quarantine, streams, tasks, descriptors.

Pages and work are compared with zero; tasks, streams and open files with what the same process had
when it was first seen at rest, since what is normal there depends on the topology. Whoever comes
and goes leaves a bounded number of open files behind: a peer that left is remembered for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from chaos.arena import Arena, Sample

QUIET_S: Final = 20.0
POLL_S: Final = 0.05
FILES_A_BLOW: Final = 12
"""Open files that a process may keep for each death and freezing that it has seen, and for each
path that was cut. Those are opened anew though their connection is sound, and UCX keeps that as
well: 2 sockets each time over TCP, 1 where pages go through shared memory."""
TASKS_SLACK: Final = 2
"""A scrape, or a keep-alive connection of one."""

ZERO: Final = {
    "baton_requests_inflight": "requests in the router",
    "baton_queue_depth": "requests in the router's queue",
    "baton_queue_tokens": "tokens in the router's queue",
    "baton_running_sequences": "sequences in the batch",
    "baton_waiting_requests": "requests that wait",
    "baton_queued_prefill_tokens": "prompt tokens to compute",
    "baton_kv_transfers_quarantined": "transfers in quarantine",
    "baton_kv_sends_in_progress": "pushes in progress",
}
ALWAYS_ZERO: Final = {
    "baton_kv_damaged_pages_total": "free pages that were written",
}
PAGES: Final = "baton_kv_pages"
GROUP_PAGES: Final = "baton_kv_group_pages"
USED_STATES: Final = ("granted", "quarantined", "used")
SLOTS: Final = "baton_kv_tier_slots"
WATCHED: Final = {
    "baton_event_loop_tasks": TASKS_SLACK,
    "baton_work_streams": 0,
    "process_open_fds": 4,
}


@dataclass
class Baselines:
    """What each process had at rest, by name and pid."""

    of: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)
    blows: dict[tuple[str, int], int] = field(default_factory=dict)


async def wait_for_quiet(arena: Arena, baselines: Baselines) -> list[str]:
    """What is left after a bounded wait; empty: nothing."""
    deadline_s = time.monotonic() + QUIET_S
    while True:
        left = [text for name in arena.names for text in await _left(arena, baselines, name)]
        left += arena.orphans() + arena.late + arena.leftovers()
        if not left or time.monotonic() > deadline_s:
            return left
        await asyncio.sleep(POLL_S)


async def _left(arena: Arena, baselines: Baselines, name: str) -> list[str]:
    try:
        found = await arena.metrics(name)
    except OSError as error:
        return [f"{name}: no metrics ({type(error).__name__})"]
    left = _work(found) + _pages(found) + _above_baseline(arena, baselines, name, found)
    return [f"{name}: {text}" for text in left]


def _work(found: Mapping[Sample, float]) -> list[str]:
    values = {key: value for (key, labels), value in found.items() if not labels}
    return [
        f"{values[key]:.0f} {what}"
        for key, what in {**ZERO, **ALWAYS_ZERO}.items()
        if values.get(key, 0) != 0
    ]


def _pages(found: Mapping[Sample, float]) -> list[str]:
    by_state = {dict(labels)["state"]: v for (key, labels), v in found.items() if key == PAGES}
    left = [f"{by_state[s]:.0f} pages {s}" for s in USED_STATES if by_state.get(s, 0) != 0]
    if by_state and not left:
        capacity = found["baton_kv_pages_capacity", ()]
        missing = capacity - by_state["free"] - by_state["cached"]
        left += [f"{missing:.0f} pages nowhere"] if missing else []
    by_group = {labels: value for (key, labels), value in found.items() if key == GROUP_PAGES}
    left += [
        f"{value:.0f} pages in {dict(labels)}"
        for labels, value in by_group.items()
        if dict(labels)["state"] == "used" and value
    ]
    held = found.get((SLOTS, (("state", "held"),)), 0)
    return left + ([f"{held:.0f} host slots held"] if held else [])


def _blows(arena: Arena) -> int:
    """How often peers have lost a path to a worker."""
    return len(arena.blows) + arena.cuts + arena.restarts


def _above_baseline(
    arena: Arena, baselines: Baselines, name: str, found: Mapping[Sample, float]
) -> list[str]:
    if found.get(("baton_work_streams", ()), 1) == 0:
        return ["no router is attached"]
    key = name, arena.pid(name)
    now = {metric: found[metric, ()] for metric in WATCHED if (metric, ()) in found}
    if key not in baselines.of:
        baselines.of[key], baselines.blows[key] = now, _blows(arena)
        return []
    blows = _blows(arena) - baselines.blows[key]
    slack = dict(WATCHED)
    slack["process_open_fds"] += FILES_A_BLOW * blows * max(arena.topology.ranks)
    return [
        f"{metric} is {value:.0f}, at rest it was {baselines.of[key][metric]:.0f}"
        for metric, value in now.items()
        if value > baselines.of[key][metric] + slack[metric]
    ]
