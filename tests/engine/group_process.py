"""A worker of an expert group on a GPU, which runs what it is told and says what came of it.

python group_process.py MODEL PLACE OPTIONS

Each line of its input is a list of prompts' lengths; it answers with their tokens, or with why the
group is lost. Before, and when all prompts are accepted, it says `ready`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engine_kit import Run, build, check_baseline, submit
from test_cuda_ranks import TOKENS, prompt_of


def answers(runs: list[Run]) -> list[list[int]]:
    for run in runs:
        assert run.done.wait(120), run.heard_so_far()
        assert run.failed is None, run.failed
    return [run.tokens[0] for run in runs]


def main(model: str, place: str, options: str) -> None:
    engine = build(Path(model), device="cuda", expert_group=place, **json.loads(options))
    print("ready", engine.ranks.dispatch._link.path, flush=True)
    for line in sys.stdin:
        lengths, tokens = json.loads(line)
        runs = [
            submit(engine, prompt_of(n), tokens or TOKENS, min_tokens=tokens or TOKENS)
            for n in lengths
        ]
        print("ready", flush=True)
        try:
            told = answers(runs)
            check_baseline(engine)
        except AssertionError:
            if not engine.lost:
                raise
            told = engine.lost
        print(json.dumps(told), flush=True)
    engine.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
