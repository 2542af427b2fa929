"""`baton plan`."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from console.loadgen.errors import WrongUseError
from console.loadgen.trace_files import read_trace
from console.planning.rates import GPUS, routers_for
from console.planning.shapes import shape_of
from serving.output import stdout

SHOWN = 4
"""Plans that are shown: the best, and some to compare it with."""


def plan(
    model: Annotated[
        str, typer.Option("--model", metavar="FOLDER", help="A dense model's folder.")
    ] = "",
    parameters: Annotated[
        float, typer.Option("--parameters", min=0, help="Its parameters, billions, without one.")
    ] = 0,
    kv_bytes: Annotated[
        int, typer.Option("--kv-bytes", min=0, help="Bytes of a token's KV in bfloat16.")
    ] = 0,
    gpu: Annotated[str, typer.Option("--gpu", help=f"Kind: {' or '.join(GPUS)}.")] = "h100",
    gpus: Annotated[int, typer.Option("--gpus", min=1, max=64, help="Number of GPUs.")] = 2,
    trace: Annotated[
        str, typer.Option("--trace", help="Lengths of a trace, as of `baton bench --trace`.")
    ] = "",
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Without a trace: of each prompt.")
    ] = 1024,
    output_tokens: Annotated[
        int, typer.Option("--output-tokens", min=1, help="Without a trace: of each answer.")
    ] = 256,
    rate: Annotated[float, typer.Option("--rate", min=0.001, help="Requests a second.")] = 4,
    first_token_ms: Annotated[
        float, typer.Option("--first-token-ms", min=1, help="Goal: a request's first token.")
    ] = 400,
    token_ms: Annotated[
        float,
        typer.Option("--token-ms", min=1, help="Goal: p99 of a request's times between tokens."),
    ] = 25,
    fp8: Annotated[bool, typer.Option("--fp8", help="Consider FP8 weights as well.")] = False,
    tp: Annotated[
        int, typer.Option("--tp", min=0, help="Ranks of each stage. 0: 1, 2, 4 and 8 are tried.")
    ] = 0,
    pp: Annotated[
        int, typer.Option("--pp", min=0, help="Stages of each worker. 0: 1, 2 and 4 are tried.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how many workers of which role, and routers, a load needs, and whether to disaggregate.

    Rates measured with an 8B model are scaled to yours, and requests are simulated. Nothing runs.

    Example: [cyan]baton plan --model ./Llama-3.1-8B --gpus 4 --rate 28 --token-ms 12[/]
    """
    from console.planning.search import RANKS, STAGES, Kind, Lengths, Level, breaks, options

    if gpu not in GPUS:
        raise WrongUseError(f"--gpu: {gpu} is none of {', '.join(GPUS)}, which were measured")
    if bool(model) == bool(parameters and kv_bytes):
        raise WrongUseError("give --model, or --parameters and --kv-bytes")
    count, kv = parameters * 1e9, kv_bytes
    if model:
        shape = shape_of(Path(model))
        count, kv = shape.parameters, shape.kv_bytes_per_token
    lengths = Lengths([prompt_tokens], [output_tokens])
    if trace:
        rows = read_trace(trace)
        lengths = Lengths([one.prompt_tokens for one in rows], [one.output_tokens for one in rows])
    level = Level(first_token_ms / 1e3, token_ms / 1e3)
    ranks, stages = ((tp,) if tp else RANKS), ((pp,) if pp else STAGES)
    kinds = [Kind(*each) for each in product(ranks, stages, {False, fp8})]
    found = options(GPUS[gpu], gpus, count, kv, lengths, rate, level, kinds=kinds)
    broken = breaks(found[0], lengths, rate, level)
    routers = routers_for(rate * sum(lengths.output) / len(lengths.output))
    _print(found, broken, rate, routers, as_json=as_json)


def _print(found: list[Any], broken: str, rate: float, routers: int, *, as_json: bool) -> None:
    figures = [_figures(one, rate) for one in found]
    why = _verdict(found)
    if as_json:
        is_split = not found[0].plan.both
        said = {"best": found[0].name, "disaggregate": is_split, "why": why}
        shown = json.dumps({**said, "breaks_first": broken, "routers": routers, "options": figures})
        stdout.print(shown, markup=False, soft_wrap=True)
        return
    head = {"plan": "workers", "kept": "kept", "goodput": "a second"}
    head |= {"first_token_ms": "first ms", "token_ms": "a token ms", "gap_p99_ms": "gaps p99"}
    rows = [head, *figures[:SHOWN]]
    width = max(len(row["plan"]) for row in rows)
    for row in rows:
        cells = [f"{row[key]!s:<{width if key == 'plan' else 10}}" for key in head]
        stdout.print("  ".join(cells).rstrip(), markup=False, soft_wrap=True)
    for line in (why, f"Breaks first: {broken}", f"Routers: {routers}"):
        stdout.print(line, markup=False, soft_wrap=True)


def _figures(option: Any, rate: float) -> dict[str, Any]:
    import numpy as np

    served = option.served
    return {
        "plan": option.name,
        "kept": f"{100 * option.kept:.0f} %",
        "goodput": round(option.kept * rate, 2),
        "first_token_ms": round(1e3 * float(np.median(served.first_s)), 1),
        "first_token_p99_ms": round(1e3 * float(np.percentile(served.first_s, 99)), 1),
        "token_ms": round(1e3 * float(np.median(served.token_s)), 2),
        "gap_p99_ms": round(1e3 * float(np.percentile(served.gap_s, 99)), 1),
        "busy": {role: round(float(part), 2) for role, part in served.busy.items()},
    }


def _verdict(found: list[Any]) -> str:
    """Whether to disaggregate, in words."""
    best = found[0]
    other = next((one for one in found if bool(one.plan.both) != bool(best.plan.both)), None)
    if other is None:
        return "There is one GPU's worth of workers: nothing to disaggregate."
    kept = f"{100 * best.kept:.0f} % of requests, and {other.name} {100 * other.kept:.0f} %"
    if best.plan.both:
        return f"Do not disaggregate: {best.name} keeps the level for {kept}."
    return f"Disaggregate: {best.name} keeps the level for {kept}."
