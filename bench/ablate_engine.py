"""What the step loop's heuristics gain, with and without, on loads that they were not tuned on.

python -m bench.ablate_engine [--seconds 20] [--turns 2] [--model FOLDER] [--json FILE]

One engine computes prompts and decodes (`--role both`). Requests arrive at random, at a rate of
their own for each load; the cases take turns on the same arrivals. Loads: chats with the lengths
of the Azure trace of 2023, and log-normal lengths with a mean of 2,048 tokens in and 28 out.

- `launch at once`: the next step is launched as soon as the one before it is settled, without
  waiting for requests that arrive until the predicted end (`engine.loop.pacing`);
- `pieces of N`: so many prompt tokens at most beside rows that decode.

A table, in ms: time to the first token and between tokens, median and p99 over all turns. On a CPU
`--model` names a small model and `--scale` shortens its prompts.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.engine import GREEDY, SHAPE
from console.loadgen.trace_files import read_trace
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loop.pacing import LaunchPacer
from engine.step.plan import StepPlan
from engine.types import Event, NewTokens, Request, RequestFailed, SequenceEnded, StopRules

PIECE = 192
"""What decode workers compute beside their rows."""


class Load(NamedTuple):
    """Requests that arrive at random."""

    rate: float
    """A second."""
    lengths: Sequence[tuple[int, int]]
    """Tokens in and out, drawn from with equal chances."""


class AtOnce(LaunchPacer):
    """Never waits."""

    def wait_s(self, in_flight: StepPlan, began: float, prompts_s: float) -> float:
        """See `LaunchPacer`."""
        return 0.0


class Watch:
    """The sink of a run: when each token of each request came."""

    def __init__(self, expected: int) -> None:
        self.done = threading.Event()
        self.came_s: dict[bytes, list[float]] = {}
        self._left = expected

    def __call__(self, events: Sequence[Event]) -> None:
        """See `engine.types.Sink`."""
        now_s = time.perf_counter()
        for event in events:
            if isinstance(event, NewTokens):
                for request_id in event.request_ids:
                    self.came_s.setdefault(request_id, []).append(now_s)
            self._left -= isinstance(event, SequenceEnded | RequestFailed)
        if self._left == 0:
            self.done.set()


def run(engine: Engine, load: Load, seconds: float, seed: int) -> tuple[list[float], list[float]]:
    """Times to first tokens and between tokens, seconds."""
    rng = np.random.default_rng(seed)
    due_s = np.cumsum(rng.exponential(1 / load.rate, int(seconds * load.rate)))
    lengths = [load.lengths[i] for i in rng.integers(len(load.lengths), size=len(due_s))]
    watch, begin, asked_s = Watch(len(due_s)), time.perf_counter(), {}
    for i, (at_s, (tokens, output)) in enumerate(zip(due_s.tolist(), lengths, strict=True)):
        time.sleep(max(0.0, begin + at_s - time.perf_counter()))
        prompt = rng.integers(3, engine.model.vocab_size, tokens, dtype=np.int32)
        request_id = seed.to_bytes(8, "big") + i.to_bytes(8, "big")
        stop = StopRules(output, ignore_eos=True)
        asked_s[request_id] = time.perf_counter()
        engine.submit(Request(request_id, prompt, GREEDY, stop), watch)
    assert watch.done.wait(120), "a run did not end"
    first = [came[0] - asked_s[request_id] for request_id, came in watch.came_s.items()]
    between = [gap for came in watch.came_s.values() for gap in np.diff(came).tolist()]
    return first, between


def loads(most_tokens: int, scale: float) -> dict[str, Load]:
    """Those that are not tuned on."""
    azure = read_trace("azure-conversation")
    chats = [(entry.prompt_tokens, entry.output_tokens) for entry in azure]
    rng = np.random.default_rng(0)
    drawn = zip(log_normal(rng, 2048), log_normal(rng, 28), strict=True)
    found = {"azure chats": Load(6.0, chats), "log-normal": Load(8.0, list(drawn))}
    return {
        name: load._replace(
            lengths=[
                (max(1, min(most_tokens, int(scale * tokens))), max(2, min(512, output)))
                for tokens, output in load.lengths
            ]
        )
        for name, load in found.items()
    }


def log_normal(rng: np.random.Generator, mean: float, sigma: float = 0.8) -> list[int]:
    """Lengths with that mean."""
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, 2000)
    return [max(1, round(length)) for length in drawn]


def cases(engine: Engine) -> dict[str, Callable[[], None]]:
    """What each case sets before it runs."""
    loop = engine._loop
    planner, usual = loop._scheduler.planner, loop._pacer

    def use(pacer: LaunchPacer, piece: int) -> None:
        loop._pacer = pacer
        planner._config = replace(planner._config, mixed_prefill_tokens=piece)

    return {
        "as shipped": lambda: use(usual, PIECE),
        "launch at once": lambda: use(AtOnce(), PIECE),
        "pieces of 96": lambda: use(usual, 96),
        "pieces of 512": lambda: use(usual, 512),
        "pieces of 2048": lambda: use(usual, 2048),
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--model", default=str(SHAPE))
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    config = EngineConfig(
        model=arguments.model,
        load_format="dummy",
        max_sequences=128,
        max_step_tokens=2048,
        prefix_cache=False,
        num_pages=0 if on_gpu else 2000,
        gpu_memory_utilization=0.85,
    )
    engine = Engine.build(config)
    engine.start()
    ways, seen = cases(engine), []
    most_tokens = min(8192, engine.model.max_context_tokens - 600)
    for name, load in loads(most_tokens, arguments.scale).items():
        figures: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in ways}
        ways["as shipped"]()
        run(engine, load, 3.0, 1)
        for turn in range(arguments.turns):
            for way, prepare in ways.items():
                prepare()
                for kept, new in zip(
                    figures[way], run(engine, load, arguments.seconds, 100 + turn), strict=True
                ):
                    kept += new
        seen += [row(name, way, *figures[way]) for way in ways]
    engine.stop()
    if arguments.json:
        arguments.json.write_text(json.dumps(seen, indent=1))


def row(load: str, way: str, first: list[float], between: list[float]) -> dict[str, Any]:
    """Prints a line of the table; returns what it says."""
    figures = {
        f"{name}_{p}_ms": 1e3 * float(np.percentile(times, p))
        for name, times in (("ttft", first), ("itl", between))
        for p in (50, 99)
    }
    cells = "  ".join(f"{name} {value:7.2f}" for name, value in figures.items())
    print(f"{load:12} {way:16} n {len(first):4}  {cells}", flush=True)
    return {"load": load, "case": way, "requests": len(first), **figures}


if __name__ == "__main__":
    main()
