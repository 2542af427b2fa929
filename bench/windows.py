"""Models whose layers look back over a window: how many long sequences run together, and how fast.

python -m bench.windows [--shapes NAME ...] [--together 8192] [--sequences 256] [--no-speed]
                        [--json FILE] and the options of engines of bench.engine

As `bench.engine`: dummy weights, random token ids, greedy, lengths forced, no prefix cache.
*Together* is the largest number of sequences with `--together` tokens of prompt that ran at one
time without one being preempted: as many prompts as there are slots are submitted, with outputs so
long that none ends before the last that fits has begun. Shapes are written after the public
configs of openai/gpt-oss-20b, openai/gpt-oss-120b and google/gemma-3-27b-it (its text part).
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bench.engine import GREEDY, Case, add_engine_options, build, free_memory, measure
from bench.harness import write_json
from engine.engine import Engine
from engine.types import Event, Request, RequestFailed, SequenceEnded, StopRules

SHAPES: Final = Path(__file__).parent / "shapes"
NAMES: Final = ("gpt-oss-20b", "gpt-oss-120b", "gemma-3-27b", "gemma-4-26b-a4b")
OUTPUT: Final = 256
"""Tokens of each answer while sequences are counted."""
QUIET_S: Final = 3.0
"""The count goes on for so long after the first sequence has ended."""
SPEED: Final = {
    "prefill-8192": Case(8, 8192, 1, 0, 0, 0),
    "prefill-1024": Case(64, 1024, 1, 0, 0, 0),
    "decode-1": Case(1, 128, 256, 0, 0, 0),
    "16x4096+128": Case(16, 4096, 128, 0, 0, 0),
    "64x1024+256": Case(64, 1024, 256, 0, 0, 0),
}


class Most:
    """Watches how many sequences run at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._over = engine, threading.Event()
        self.running = 0
        self.preempted = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        first = self._engine.load().preemptions
        while not self._over.wait(0.02):
            load = self._engine.load()
            self.preempted = load.preemptions - first
            if self.preempted == 0:
                self.running = max(self.running, load.running_sequences)

    def end(self) -> None:
        """Stops watching."""
        self._over.set()
        self._thread.join()


def together(engine: Engine, sequences: int, tokens: int) -> dict[str, int]:
    """Most sequences of so many prompt tokens that ran together, and how many were preempted."""
    rng, ended = np.random.default_rng(3), threading.Semaphore(0)

    def sink(events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, SequenceEnded | RequestFailed):
                ended.release()

    most, stop = Most(engine), StopRules(OUTPUT, ignore_eos=True)
    prompts = rng.integers(3, engine.model.vocab_size, (sequences, tokens), dtype=np.int32)
    names = [b"together" + i.to_bytes(8, "big") for i in range(sequences)]
    for name, prompt in zip(names, prompts, strict=True):
        engine.submit(Request(name, prompt, GREEDY, stop), sink)
    ended.acquire()
    time.sleep(QUIET_S)
    most.end()
    for name in names:
        engine.cancel(name)
    while engine.load().requests:
        time.sleep(0.05)
    return {"together": most.running, "preempted": most.preempted}


def run_shape(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """One shape: what fits, then its speed."""
    engine = build(arguments, model=SHAPES / name)
    found: dict[str, Any] = {"shape": name}
    found |= together(engine, arguments.sequences, arguments.together)
    print(f"{name}: {found['together']} sequences of {arguments.together} tokens", flush=True)
    for case in () if arguments.no_speed else SPEED:
        outcome = measure(engine, case, arguments.repeats, cases=SPEED)
        found[case] = outcome.rate
        print(f"{name} {case:>14} {outcome.rate:10,.1f} {outcome.step_p50_ms:8.2f} ms", flush=True)
    engine.stop()
    return found


def main() -> None:
    """Runs the shapes and prints what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_engine_options(parser)
    parser.add_argument("--shapes", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--together", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--no-speed", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and there is none")
    rows = []
    for name in arguments.shapes:
        rows.append(run_shape(arguments, name))
        free_memory()
    write_json(arguments.json, rows)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
