"""KV slots that hold no token: 1000 requests of 256 + 256 tokens at pages of 16, 64 and 128.

python -m bench.kv_waste [--requests 1000] [--prompt 256] [--output 256] [--exact]

The scheduler, planning and settling run as on a worker, over an executor that computes nothing.
After every step the slots of all pages held are compared with the tokens in them; the waste is
1 - tokens / slots, over the sum of all steps. Lengths are spread by an eighth around their mean,
as real ones never are multiples of a page; `--exact` takes them as given.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.bounds import Bounds
from engine.loop.step_loop import hand_out
from engine.pages.blocks import BlockManager
from engine.sampling import Sampler
from engine.schedule.scheduler import Scheduler
from engine.step.executor import NullExecutor
from engine.step.plan import StepPlan
from engine.types import Event, Request, SamplingParams, StopRules

PAGE_SIZES = (16, 64, 128)
SEQUENCES = 256
VOCAB = 1024


class Waste(NamedTuple):
    """Sums over all steps."""

    steps: int
    slots: int
    tokens: int
    preemptions: int

    @property
    def percent(self) -> float:
        """Of the slots held."""
        return 100 * (1 - self.tokens / self.slots)


def build(page_size: int, pool_tokens: int, longest: int) -> Scheduler:
    """A scheduler over a pool of so many tokens."""
    config = Bounds(
        max_sequences=SEQUENCES,
        max_step_tokens=2048,
        mixed_prefill_tokens=2048,
        max_context_tokens=longest,
        page_size=page_size,
        eos_token_ids=frozenset({2}),
    )
    blocks = BlockManager(pool_tokens // page_size + 1)
    return Scheduler(config, blocks, Sampler(SEQUENCES, VOCAB, "cpu", [2]))


def submit_all(scheduler: Scheduler, lengths: Sequence[tuple[int, int]]) -> None:
    """Distinct prompts: no page is shared."""
    rng, greedy = np.random.default_rng(0), SamplingParams(temperature=0.0)
    for i, (prompt, output) in enumerate(lengths):
        ids = rng.integers(3, VOCAB, prompt, dtype=np.int32)
        stop = StopRules(output, ignore_eos=True)
        scheduler.requests.submit(Request(i.to_bytes(16, "big"), ids, greedy, stop), _ignore)


def _ignore(events: Sequence[Event]) -> None:
    """Nobody listens."""


def measure(page_size: int, pool_tokens: int, lengths: Sequence[tuple[int, int]]) -> Waste:
    """Runs all requests to their end, planning one step ahead as the step loop does."""
    longest = max(prompt + output for prompt, output in lengths)
    scheduler, executor = build(page_size, pool_tokens, longest), NullExecutor()
    submit_all(scheduler, lengths)
    steps = slots = tokens = 0
    previous: StepPlan | None = None
    while scheduler.requests.by_id or previous is not None:
        scheduler.admission.admit()
        plan = scheduler.planner.plan()
        if previous is not None:
            scheduler.settler.settle(previous, executor.launch(previous).result())
            hand_out(scheduler.requests.take_events())
        previous = plan
        held, stored = occupancy(scheduler)
        steps, slots, tokens = steps + 1, slots + held, tokens + stored
    assert scheduler.blocks.available == scheduler.blocks.total, "a page was left behind"
    return Waste(steps, slots, tokens, scheduler.requests.preemptions)


def occupancy(scheduler: Scheduler) -> tuple[int, int]:
    """Slots of the pages held by requests, and the tokens stored there or planned to be."""
    blocks, columns = scheduler.blocks, scheduler.batch.slots
    held = blocks.total - blocks.available - blocks.settling
    taken = [owner.slot for owner in scheduler.batch.owners if owner is not None]
    return held * scheduler.config.page_size, int(columns.kv_len[taken].sum())


def spread(rng: np.random.Generator, mean: int, count: int) -> list[int]:
    """Uniform within an eighth of the mean."""
    found: list[int] = rng.integers(mean - mean // 8, mean + mean // 8 + 1, count).tolist()
    return found


def main() -> None:
    """Prints a line per page size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--pool-tokens", type=int, default=1 << 17)
    parser.add_argument("--exact", action="store_true", help="all lengths equal")
    arguments = parser.parse_args()
    count, rng = arguments.requests, np.random.default_rng(1)
    prompts, outputs = [arguments.prompt] * count, [arguments.output] * count
    if not arguments.exact:
        prompts, outputs = (spread(rng, m[0], count) for m in (prompts, outputs))
    lengths = list(zip(prompts, outputs, strict=True))
    print(f"{'page':>5} {'waste':>7} {'steps':>6} {'preempted':>9}")
    for page_size in PAGE_SIZES:
        waste = measure(page_size, arguments.pool_tokens, lengths)
        print(f"{page_size:5d} {waste.percent:6.2f}% {waste.steps:6d} {waste.preemptions:9d}")


if __name__ == "__main__":
    main()
