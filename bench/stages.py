"""What a second GPU brings as another stage (`pp`), beside one GPU with the same model.

    python -m bench.stages [--stages 2] [--ranks 1] [--precisions bf16] [--model FOLDER]
                           [--cases NAME ...] [--chunks 2048 4096] [--repeats 3] [--alone]
                           [--shared] [--json FILE]
                           and the options of engines of bench.engine

Dummy weights, random token ids, greedy, lengths forced, no prefix cache. One engine after the
other: one GPU first, then the stages (with `--alone` these alone, for a model that no GPU holds).

Cases: `queue`, 24 prompts of 8,000 tokens that wait one behind the other, and `lone`, one of them
by itself: prompt tokens a second. `rows`, 64 rows behind 1,024 tokens: output tokens a second while
all decode, and ms a token. `row`, one row. `x` is the ratio to one GPU.

`--chunks`: the most prompt tokens of a step, each by itself; one GPU takes them, too. `--shared`:
all stages on the first GPU, through host memory, which says what stages cost and not what they
bring. The log of each engine tells which GPUs it has.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any, Final

import torch

from bench.engine import PRECISIONS, SHAPE, Case, add_engine_options, build, free_memory, run_case
from bench.harness import write_json
from bench.speculation import run
from engine.bounds import PromptLimits
from engine.engine import Engine

PROMPTS: Final = {"queue": Case(24, 8000, 1, 0, 0, 0), "lone": Case(1, 8000, 1, 0, 0, 0)}
ROWS: Final = {"rows": Case(64, 1024, 256, 0, 0, 0), "row": Case(1, 1024, 256, 0, 0, 0)}
Rates = dict[str, list[float]]


def prompts(engine: Engine, arguments: argparse.Namespace, found: Rates) -> None:
    """Prompt tokens a second, by case and chunk."""
    repeats = arguments.repeats
    for chunk in arguments.chunks:
        engine.limit_prompts(PromptLimits(alone_tokens=chunk))
        for name, case in PROMPTS.items():
            if name not in arguments.cases:
                continue
            run_case(engine, Case(min(case.prompts, 2), case.prompt_tokens, 1, 0, 0, 0), 1)
            for repeat in range(repeats * (1 if case.prompts > 1 else 5)):
                seconds, _ = run_case(engine, case, 100 + repeat)
                rates = found.setdefault(f"{name} {chunk}", [])
                rates.append(case.counted_tokens / seconds)
            tell(f"{name} {chunk}", rates)
    engine.limit_prompts(PromptLimits())


def rows(engine: Engine, arguments: argparse.Namespace, found: Rates) -> None:
    """Output tokens a second while all decode, by case."""
    for name, case in ROWS.items():
        if name not in arguments.cases:
            continue
        for repeat in range(-1, arguments.repeats):
            _, rate = run(engine, case, 100 + repeat)
            if repeat >= 0:
                found.setdefault(name, []).append(rate)
        tell(name, found[name])


def tell(name: str, rates: list[float]) -> None:
    """Prints each repeat."""
    print(f"  {name}: " + " ".join(f"{rate:,.0f}" for rate in rates), flush=True)


def measured(arguments: argparse.Namespace, precision: str, stages: int) -> dict[str, float]:
    """Medians of one engine."""
    grid = {"pp": stages, "tp": arguments.ranks if stages > 1 else 1}
    if stages > 1 and arguments.shared:
        grid["device"] = "cuda:0"
    engine = build(arguments, 16, arguments.model, {**PRECISIONS[precision], **grid})
    found: Rates = {}
    try:
        prompts(engine, arguments, found)
        rows(engine, arguments, found)
    finally:
        engine.stop()
    return {name: statistics.median(rates) for name, rates in found.items()}


def compare(arguments: argparse.Namespace, precision: str) -> dict[str, Any]:
    """One GPU, and the stages."""
    one: dict[str, float] = {}
    if not arguments.alone:
        print(f"{precision}, one GPU")
        one = measured(arguments, precision, 1)
        free_memory()
    print(f"{precision}, {arguments.stages} stages of {arguments.ranks}")
    several = measured(arguments, precision, arguments.stages)
    free_memory()
    for name, rate in several.items():
        of_one = one.get(name, 0.0)
        ratio = f"{rate / of_one:6.3f} x" if of_one else ""
        token_ms = f"{1e3 * ROWS[name].prompts / rate:7.2f} ms a token" if name in ROWS else ""
        print(f"{precision:>7} {name:>12} {of_one:10,.0f} {rate:10,.0f} {ratio} {token_ms}")
    return {"precision": precision, "one": one, "stages": several}


def main() -> None:
    """Measures what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_engine_options(parser)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--precisions", nargs="+", default=["bf16"], choices=list(PRECISIONS))
    cases = [*PROMPTS, *ROWS]
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases)
    parser.add_argument("--chunks", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--model", type=Path, default=SHAPE)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    about = {"device": torch.cuda.get_device_name(), "stages": arguments.stages,
             "ranks": arguments.ranks, "shared": arguments.shared}  # fmt: skip
    figures = [compare(arguments, precision) for precision in arguments.precisions]
    write_json(arguments.json, {**about, "runs": figures})


if __name__ == "__main__":
    main()
