"""Prompts that two workers share: what local prefill could do at best.

python -m bench.two_queues [--rate 24] [--prefill-ms 25.4] [--local-ms 57] [--late-ms 8]
                           [--requests 300] [--runs 400] [--rows ROWS.jsonl]

Simulated, nothing computed: Poisson arrivals at a prefill worker that takes `prefill-ms` a prompt
and a decode worker that takes `local-ms`, and `late-ms` to begin and to tell. Each prompt goes
where it is done first; both queues are known to the millisecond. Prints the p99 of the time to a
first token: median, and tenth and ninetieth percentile of all runs, beside those of the prefill
worker alone. With `rows`, p50 / p99 on the arrivals of each run at that rate that `pd.sh` wrote
there, beside what was seen.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from baton.bench.workload import Workload


def first_tokens_s(
    arrivals_s: np.ndarray, prefill_s: float, local_s: float, late_s: float
) -> list[float]:
    """Seconds from each arrival to its first token; `local_s` may be infinite."""
    free_s = [0.0, 0.0]
    took_s = [prefill_s, local_s]
    found = []
    for now_s in arrivals_s.tolist():
        done_s = [max(now_s, free) + took for free, took in zip(free_s, took_s, strict=True)]
        where = int(done_s[1] < done_s[0])
        free_s[where] = done_s[where]
        found.append(done_s[where] - now_s + where * late_s)
    return found


def compare(path: Path, rate: float, ways_s: dict[str, tuple[float, float, float]]) -> None:
    """Prints a line for each run of a file at that rate."""
    rows = [json.loads(line) for line in path.open()]
    for load, run in ((row["workload"], run) for row in rows for run in row["runs"]):
        if load["rate"] != rate:
            continue
        lengths = load["prompt_tokens"], load["output_tokens"]
        plan = Workload(run["requests"], *lengths).plan(rate, run["seed"])
        arrivals_s = np.array([request.due_s for request in plan.requests])
        cells = [f"seen {run['ttft_ms']['p50']:4.0f} / {run['ttft_ms']['p99']:4.0f}"]
        for name, times_s in ways_s.items():
            middle, tail = np.percentile(first_tokens_s(arrivals_s, *times_s), [50, 99])
            cells.append(f"{name} {1e3 * middle:4.0f} / {1e3 * tail:4.0f}")
        print(f"seed {run['seed']:10}  {'  '.join(cells)} ms")


def main() -> None:
    """Prints two lines, or one for each run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=24)
    parser.add_argument("--prefill-ms", type=float, default=25.4)
    parser.add_argument("--local-ms", type=float, default=57)
    parser.add_argument("--late-ms", type=float, default=8)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--rows", type=Path)
    arguments = parser.parse_args()
    prefill_s, late_s = arguments.prefill_ms / 1e3, arguments.late_ms / 1e3
    ways_s = {
        "shared": (prefill_s, arguments.local_ms / 1e3, late_s),
        "one queue": (prefill_s, float("inf"), late_s),
    }
    if arguments.rows:
        compare(arguments.rows, arguments.rate, ways_s)
        return
    for name, times_s in ways_s.items():
        tails_ms = []
        for seed in range(arguments.runs):
            gaps_s = np.random.default_rng(seed).exponential(1 / arguments.rate, arguments.requests)
            tails_ms.append(1e3 * np.percentile(first_tokens_s(gaps_s.cumsum(), *times_s), 99))
        low, middle, high = np.percentile(tails_ms, [10, 50, 90])
        print(f"{name:10} p99 {middle:5.0f} ms, {low:.0f} to {high:.0f}")


if __name__ == "__main__":
    main()
