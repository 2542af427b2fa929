"""Does what a plan's faults say, to the processes of an arena."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from chaos.arena import ASIDE_MODULE, STORE_MODULE, Arena, Care
from chaos.plan import Fault

VICTIM_BEGINS_S = 20.0
VICTIM_AWAKE_S = 0.3


@asynccontextmanager
async def inflicted(arena: Arena, faults: Sequence[Fault]) -> AsyncIterator[None]:
    """Failpoints are armed before the block; all other faults strike while it runs. Afterwards
    every one has struck, and processes are started again and woken. What was armed below a worker
    is there no more."""
    arena.care = {
        fault.target: Care(fault.restart_after_s or 0.2, fault.lasts_s or 0.5) for fault in faults
    }
    below = await _arm_below(arena, faults)
    for target in {fault.target for fault in faults}:
        own = [fault for fault in faults if fault.target == target and fault.kind != "below"]
        armed = [fault.failpoint for fault in own if fault.failpoint]
        if armed:
            await arena.arm(target, ",".join(armed))
    arena.cuts += sum(fault.kind == "cut_path" for fault in faults)
    tending = asyncio.create_task(arena.tend())
    striking = [asyncio.create_task(_strike(arena, fault)) for fault in faults]
    try:
        yield
        await asyncio.gather(*striking)
        await arena.ready()
    finally:
        for task in (*striking, tending):
            task.cancel()
        await asyncio.gather(*striking, tending, return_exceptions=True)
    await _disarm_below(arena, below)  # Nobody tends them now.


async def _arm_below(arena: Arena, faults: Sequence[Fault]) -> dict[str, int]:
    """Starts the workers anew below which failpoints are to be armed. Returns the process of
    each."""
    below = [fault for fault in faults if fault.kind == "below"]
    targets = {fault.target for fault in below}
    for target in targets:
        wanted = [fault.failpoint for fault in below if fault.target == target]
        arena.fired_before[target] = arena.fired_below(target)
        await asyncio.to_thread(arena.start_armed, target, ",".join(wanted))
    if below:
        await arena.ready()
    return {name: arena.pid(name) for name in targets}


async def _disarm_below(arena: Arena, below: Mapping[str, int]) -> None:
    """A worker that has been started since has none any more."""
    for name, pid in below.items():
        if arena.pid(name) == pid:
            await asyncio.to_thread(arena.start_armed, name, "")
    if below:
        await arena.ready()


async def fired(arena: Arena, faults: Sequence[Fault]) -> Counter[str]:
    """How often failpoints have fired in the processes that outlived them; disarms them."""
    found: Counter[str] = Counter()
    for target in {fault.target for fault in faults if fault.kind == "below"}:
        found += arena.fired_below(target) - arena.fired_before[target]
    for target in {fault.target for fault in faults if fault.failpoint}:
        with contextlib.suppress(OSError):
            for point, (_, times) in json.loads(await arena.failpoints(target)).items():
                found[point] += times
            await arena.arm(target, "")
    return found


async def _strike(arena: Arena, fault: Fault) -> None:
    await asyncio.sleep(fault.at_s)
    match fault.kind:
        case "kill" | "kill_writer" | "kill_router" if arena.is_alive(fault.target):
            arena.kill(fault.target)
        case "restart" if arena.is_alive(fault.target):
            await arena.restart(fault.target)
        case "change_role":
            own = fault.target.partition("-")[0]
            await arena.set_role(fault.target, "decode" if own == "prefill" else "prefill")
            await asyncio.sleep(fault.lasts_s)
            await arena.set_role(fault.target, own)
        case "kill_rank" if ranks := arena.other_ranks(fault.target):
            ranks[-1].kill()  # Its worker ends by itself.
        case "freeze_rank" if ranks := arena.other_ranks(fault.target):
            arena.freeze_rank(fault.target, ranks[-1])
            await asyncio.sleep(fault.lasts_s)
            arena.wake_rank(fault.target, ranks[-1])
        case "freeze" | "freeze_router" if arena.is_alive(fault.target):
            arena.freeze(fault.target)
            try:
                await asyncio.sleep(fault.lasts_s)
            finally:
                arena.wake(fault.target)
        case "kill_store" if arena.is_alive(fault.target):
            arena.signal_children(fault.target, signal.SIGKILL, STORE_MODULE)
        case "kill_aside" if arena.is_alive(fault.target):
            arena.signal_children(fault.target, signal.SIGKILL, ASIDE_MODULE)
        case "freeze_store" if arena.is_alive(fault.target):
            arena.signal_children(fault.target, signal.SIGSTOP, STORE_MODULE)
            await asyncio.sleep(fault.lasts_s)
            arena.signal_children(fault.target, signal.SIGCONT, STORE_MODULE)
        case "kill_client" | "freeze_client":
            await _strike_client(arena, fault.lasts_s)


async def _strike_client(arena: Arena, lasts_s: float) -> None:
    """It stands still for so long, where that is not 0, and then dies."""
    victim = arena.victim()
    try:
        assert victim.stdout is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(VICTIM_BEGINS_S):
                await asyncio.to_thread(victim.stdout.readline)
        if lasts_s:
            victim.send_signal(signal.SIGSTOP)
            await asyncio.sleep(lasts_s)
            victim.send_signal(signal.SIGCONT)
            await asyncio.sleep(VICTIM_AWAKE_S)
    finally:
        victim.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            victim.wait(5)
