"""Beam search beside as many choices of one prompt: tokens a second, and the pages that it holds.

python -m bench.beams [--shape llama-8b] [--width 8] [--prompt 1024] [--tokens 256] [--repeats 3]
                      [--device cuda] [--profile] and the options of engines of bench.engine

As `bench.engine`: dummy weights, random token ids, lengths forced, no prefix cache. Both run in
turns in one engine: `width` greedy choices, then `width` beams. A rate counts `tokens` for each
choice or beam, so what a search draws and drops is not in it. Pages are the most that were in use
at once. `--profile` prints where the device's time goes in each.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench.engine import GREEDY, add_engine_options, build, profiled
from bench.harness import write_json
from engine.beams.params import BeamParams
from engine.engine import Engine
from engine.types import Event, Request, RequestFailed, SequenceEnded, StopRules

SHAPES = Path(__file__).parent / "shapes"


def run(engine: Engine, arguments: argparse.Namespace, number: int) -> float:
    """Tokens a second of one request, from its submission to its end. Those of odd numbers are
    searches."""
    over, failed, searches = threading.Event(), list[str](), number % 2 == 1
    rng = np.random.default_rng(number // 2)
    prompt = rng.integers(3, engine.model.vocab_size, arguments.prompt, dtype=np.int32)
    width, tokens = int(arguments.width), int(arguments.tokens)

    def sink(events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, RequestFailed):
                failed.append(event.reason.value)
                over.set()
            elif isinstance(event, SequenceEnded) and event.last:
                over.set()

    begin = time.perf_counter()
    request = Request(
        b"beams" + number.to_bytes(8, "big"),
        prompt,
        GREEDY,
        StopRules(tokens, ignore_eos=True),
        choices=width,
        beams=BeamParams(width) if searches else None,
    )
    engine.submit(request, sink)
    most = 0
    while not over.wait(0.005):
        load = engine.load()
        most = max(most, load.total_pages - load.free_pages - load.evictable_pages)
    assert not failed, failed
    rate = float(width * tokens) / (time.perf_counter() - begin)
    print(
        f"{'beams' if searches else 'choices':8} {rate:10,.1f} tokens/s {most:7} pages", flush=True
    )
    return rate


def seconds(engine: Engine, arguments: argparse.Namespace, number: int) -> float:
    """Seconds of a request."""
    return float(arguments.width * arguments.tokens) / run(engine, arguments, number)


def main() -> None:
    """Runs both in turns, and prints how the medians compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_engine_options(parser)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = {"device": arguments.device}
    engine = build(arguments, model=SHAPES / arguments.shape, options=options)
    rates: dict[str, list[float]] = {"choices": [], "beams": []}
    for number in range(2 * (arguments.repeats + 1)):
        rate = run(engine, arguments, number)
        if number > 1:  # The first of each warms up.
            rates["beams" if number % 2 else "choices"].append(rate)
    if arguments.profile:
        for number, name in enumerate(rates, 1000):
            print(profiled(name, partial(seconds, engine, arguments, number)))
    engine.stop()
    choices, beams = (float(np.median(rates[name])) for name in ("choices", "beams"))
    print(f"beams at {beams / choices:.3f} of the rate of choices ({beams:,.1f} / {choices:,.1f})")
    write_json(arguments.json, rates)


if __name__ == "__main__":
    main()
