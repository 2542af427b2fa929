"""`python -m chaos --runs 500 --seed 1`: many runs, a line for each, a summary at the end.

The exit code is 0 where every run was good. `--only N` runs one of them again. `--merge FILE...`
runs nothing and sums up the figures that `--summary` wrote.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from chaos.figures import Figures
from chaos.harness import harness, run_many


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", type=int, help="run this one alone")
    parser.add_argument("--lenient", action="store_true", help="excuse failures under any fault")
    parser.add_argument("--tls", action="store_true", help="TLS between all processes")
    parser.add_argument("--within-s", type=float, default=float("inf"), help="begin no run later")
    parser.add_argument("--summary", type=Path, help="file for the figures, JSON")
    parser.add_argument("--keep", type=Path, help="folder for logs, kept")
    parser.add_argument("--merge", type=Path, nargs="+", help="summaries to sum up")
    options = parser.parse_args()
    if options.merge:
        print_now(json.dumps(Figures.read(options.merge).summary(), indent=1))
        return 0
    numbers = range(options.first, options.first + options.runs)
    if options.only is not None:
        numbers = range(options.only, options.only + 1)
    until_s = time.monotonic() + options.within_s
    began_s = time.monotonic()
    with harness(lenient=options.lenient, workspace=options.keep, tls=options.tls) as made:
        outcomes = run_many(made, options.seed, numbers, print_now, until_s)
        made.close_cluster()
        summary = {"seed": options.seed, **made.figures.summary()}
    summary["took_s"] = round(time.monotonic() - began_s, 1)
    print_now(json.dumps(summary, indent=1))
    if options.summary:
        made.figures.write(options.summary, seed=options.seed, took_s=summary["took_s"])
    bad = [outcome.plan.number for outcome in outcomes if not outcome.is_good]
    print_now(f"{len(outcomes)} runs of seed {options.seed}, failed: {bad or 'none'}")
    return 1 if bad else 0


def print_now(text: str) -> None:
    """A line that is seen at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
