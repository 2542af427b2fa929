"""Texts that are embedded, beside prompts of the same length that draw a token: tokens a second.

python -m bench.embedding [--texts 256] [--tokens 512] [--repeats 5] [--json FILE] and the options
                          of engines of bench.engine

Dummy weights, random token ids, no prefix cache. All texts are submitted at once. The kinds take
turns, so that a drift of the clock reaches all of them. The median of the repeats counts.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.engine import GREEDY, add_engine_options, build
from bench.harness import write_json
from engine.engine import Engine
from engine.pooling.requests import Pooled, Pooling, PoolKind
from engine.types import Event, Mode, Request, RequestFailed, SequenceEnded, StopRules

KINDS: Final[dict[str, Pooling | None]] = {
    "prompt": None,
    "last": Pooling(PoolKind.LAST, normalise=True),
    "mean": Pooling(PoolKind.MEAN, normalise=True),
}


def seconds(engine: Engine, pooling: Pooling | None, texts: int, tokens: int) -> float:
    """Seconds until all texts are done."""
    rng, ended = np.random.default_rng(3), threading.Semaphore(0)

    def sink(events: Sequence[Event]) -> None:
        for event in events:
            assert not isinstance(event, RequestFailed), event
            if isinstance(event, SequenceEnded | Pooled):
                ended.release()

    prompts = rng.integers(3, engine.model.vocab_size, (texts, tokens), dtype=np.int32)
    mode = Mode.WHOLE if pooling is None else Mode.POOL
    stop = StopRules(1 if pooling is None else 0)
    began_s = time.perf_counter()
    for number, ids in enumerate(prompts):
        name = b"embedding" + number.to_bytes(8, "big")
        engine.submit(Request(name, ids, GREEDY, stop, mode, pooling=pooling), sink)
    for _ in prompts:
        ended.acquire()
    return time.perf_counter() - began_s


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    add_engine_options(parser)
    arguments = parser.parse_args()
    engine = build(arguments)
    took: dict[str, list[float]] = {name: [] for name in KINDS}
    for repeat in range(arguments.repeats + 1):
        for name, pooling in KINDS.items():
            found = seconds(engine, pooling, arguments.texts, arguments.tokens)
            if repeat:  # The first warms up.
                took[name].append(found)
    work = arguments.texts * arguments.tokens
    rates: dict[str, Any] = {name: work / statistics.median(all_s) for name, all_s in took.items()}
    for name, rate in rates.items():
        print(f"{name:8} {rate:12,.0f} tokens/s  {rate / rates['prompt']:.3f} of prompts")
    write_json(arguments.json, rates)
    engine.stop()


if __name__ == "__main__":
    main()
