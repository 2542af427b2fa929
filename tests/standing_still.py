"""How long this machine lets a process wait that wants to run: others may use it, too.

A test whose figures are times holds them to a bound where the machine kept still for no longer than
the bound allows, and otherwise tries again.
"""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple, Self

_WATCH = """
import select, sys, time
waited = [0.0]
while True:
    began_s, cpu_s = time.monotonic(), time.thread_time()
    asked, _, _ = select.select([sys.stdin], [], [], 0.002)
    if asked: break
    until_s = time.thread_time() + 0.0002
    while time.thread_time() < until_s: pass
    spent_s = time.thread_time() - cpu_s
    waited.append(time.monotonic() - began_s - 0.002 - spent_s)
waited.sort()
print(waited[int(0.99 * len(waited))], waited[-1])
"""


class Waits(NamedTuple):
    """Of a process that sleeps 2 ms and works 0.2 ms in turns, beyond both, seconds."""

    p99_s: float
    longest_s: float


class StandingStill:
    """Watches the machine while the block runs; `waits` is there when it has ended."""

    waits: Waits

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _WATCH],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        told, _ = self._process.communicate(timeout=60)
        self.waits = Waits(*map(float, told.split()))
