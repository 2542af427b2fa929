"""What the step loop costs the CPU: plan and settle of one decode step, nothing computed.

python bench/step_cost.py [--sequences 256] [--steps 2000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np

from engine.admission import admit
from engine.blocks import BlockManager
from engine.executor import NullExecutor
from engine.planning import plan_step
from engine.sampling import Sampler
from engine.scheduler import Scheduler, SchedulerConfig
from engine.settling import settle_step
from engine.step_loop import hand_out
from engine.types import Event, Request, SamplingParams, StopRules


def build(sequences: int, steps: int) -> Scheduler:
    """A scheduler with so many running sequences that outlast the measurement."""
    config = SchedulerConfig(
        max_sequences=sequences,
        max_step_tokens=64 * sequences,
        mixed_prefill_tokens=64 * sequences,
        max_context_tokens=2 * steps + 64,
        page_size=16,
        eos_token_ids=frozenset({2}),
    )
    blocks = BlockManager(sequences * (steps + 64) // 8)
    scheduler = Scheduler(config, blocks, Sampler(sequences, 128_256, "cpu", [2]))
    stop = StopRules(2 * steps)
    for i in range(sequences):
        prompt = np.full(32, i + 3, np.int32)
        greedy = SamplingParams(temperature=0.0)
        scheduler.submit(Request(i.to_bytes(16, "big"), prompt, greedy, stop), _ignore)
    return scheduler


def _ignore(events: Sequence[Event]) -> None:
    """One owner for all requests, as on a worker."""


def measure(sequences: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of planning and of settling, events handed out included, per step."""
    scheduler, executor = build(sequences, steps), NullExecutor()
    admit(scheduler)
    plans, settles = [], []
    previous = None
    for _ in range(steps):
        began = time.perf_counter()
        admit(scheduler)
        plan = plan_step(scheduler)
        planned = time.perf_counter()
        if previous is not None:
            settle_step(scheduler, previous, executor.launch(previous).result())
            hand_out(scheduler.take_events())
        settled = time.perf_counter()
        plans.append(planned - began)
        settles.append(settled - planned)
        previous = plan
    return plans[10:], settles[10:]


def main() -> None:
    """Prints medians and 99th percentiles in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    plans, settles = measure(arguments.sequences, arguments.steps)
    both = [a + b for a, b in zip(plans, settles, strict=True)]
    for name, series in (("plan", plans), ("settle", settles), ("both", both)):
        p99 = statistics.quantiles(series, n=100)[98]
        print(f"{name:7} p50 {statistics.median(series) * 1e3:.3f} ms  p99 {p99 * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
