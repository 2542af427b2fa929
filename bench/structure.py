"""What structured output costs a worker: compiling grammars, masks, and the steps of a GPU.

    python -m bench.structure [--tokenizer FOLDER] [--fuel 5000 10000 ...]
    python -m bench.structure --tokenizer FOLDER --on-gpu CASE ... [--repeats 3] [--profile]

Each row of a batch is at another place of its text. What it costs the router's event loop is
measured by `tests/router/test_structure_lag.py`.

`--fuel`: bounds on the items of a mask, instead of `ITEMS_A_MASK`. For each the share of random
texts of a wide schema that it ends, and the longest mask of a grammar made to be ambiguous.

On a GPU the cases of `bench.engine` run with every row sampled at one temperature, and with every
row under a schema at the same temperature, in turns: lists of objects that never end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton.inference.v1 import inference_pb2 as api
from bench import engine as gpu
from engine.engine import Engine
from engine.masks.matchers import LIMITS, MASK_THREADS, MaskFiller, Masks, TokenMatcher, Wanted
from engine.step.sampling import words_of
from engine.types import SamplingParams
from router.structure.grammar import Grammar
from serving.models import demo_model

PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
ROWS: Final = (1, 16, 64, 256)
TEXTS: Final = 24
END: Final = 2
"""The demo model's end of a sequence."""


def wide(count: int) -> dict[str, Any]:
    """A schema of alternatives, 340 bytes each."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {f"p{i}": {"type": "string", "maxLength": 20}},
                "required": [f"p{i}"],
                "additionalProperties": False,
                "description": "x" * 230,
            }
            for i in range(count)
        ]
    }


def grammar_of(schema: dict[str, Any]) -> str:
    """The grammar as a router writes it, without its checks of the schema's parts."""
    grammar = Grammar({})
    given = api.JsonSchema(schema=json.dumps(schema), strict=True)
    grammar.structure(api.Structure(json_schema=given))
    return grammar.text()


def texts(tokenizer: LLTokenizer, grammar: str, count: int, tokens: int) -> list[list[int]]:
    """Texts of random tokens that the grammar allows."""
    rng, found = np.random.default_rng(0), []
    compiled = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    for _ in range(count):
        matcher, drawn = compiled.deep_copy(), list[int]()
        while len(drawn) < tokens and not matcher.is_stopped():
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            drawn.append(int(rng.choice(allowed)))
            matcher.consume_token(drawn[-1])
        found.append(drawn)
    return found


def masks(tokenizer: LLTokenizer, vocab: int) -> None:
    """Times of compiling, and of filling the masks of a batch, in which each row is elsewhere."""
    for name, schema in (("person", PERSON), ("250 KiB of alternatives", wide(680))):
        times = []
        grammar = grammar_of(schema)
        for _ in range(5):
            began_s = time.perf_counter()
            LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
            times.append(time.perf_counter() - began_s)
        print(f"compile {name}: {1e3 * statistics.median(times):.1f} ms")
    grammar, filler = grammar_of(PERSON), MaskFiller()
    compiled = [
        LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS) for _ in range(MASK_THREADS)
    ]
    for rows in ROWS:
        drawn = texts(tokenizer, grammar, rows, 40)
        matchers = [TokenMatcher(compiled[i % MASK_THREADS].deep_copy()) for i in range(rows)]
        bits, times = np.empty((rows, words_of(vocab)), np.int32), []
        for step in range(40):
            alive = [i for i in range(rows) if step < len(drawn[i])]
            if len(alive) < rows / 2:
                break
            wanted = [Wanted(matchers[i], step) for i in alive]
            began_s = time.perf_counter()
            filler.fill(bits[: len(alive)], wanted)
            times.append(time.perf_counter() - began_s)
            for i in alive:
                matchers[i].consume([drawn[i][step]])
        p50, p99 = np.percentile(np.array(times) * 1e3, (50, 99))
        print(f"masks of {rows} rows: p50 {p50:.2f} ms, p99 {p99:.2f} ms a step")


def fuel(tokenizer: LLTokenizer, bounds: Sequence[int]) -> None:
    """What bounds on the items of a mask end: texts of a schema that people write, and a grammar
    that is hostile."""
    names = [f"p{i}" for i in range(150)]
    properties = {name: {"type": ["string", "null"]} for name in names}
    grammar = grammar_of({"type": "object", "properties": properties})
    hostile = "start: e\ne: e e | e e e | /[a-z]/"
    for bound in bounds:
        limits = LLParserLimits(step_max_items=bound, verbose_errors=False)
        walks = [
            walk(LLMatcher(tokenizer, one, log_level=0, limits=limits), seed)
            for one, seeds in ((grammar, TEXTS), (hostile, 1))
            for seed in range(seeds)
        ]
        ended = sum(is_ended for is_ended, _ in walks[:-1]) / TEXTS
        print(f"{bound} items: {ended:.0%} of wide texts, a mask of {1e3 * walks[-1][1]:.0f} ms")


def walk(matcher: LLMatcher, seed: int) -> tuple[bool, float]:
    """80 random tokens; whether the fuel did not do, and the longest mask, seconds of CPU."""
    rng, longest_s = np.random.default_rng(seed), 0.0
    for _ in range(80):
        began_s = time.thread_time()
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        longest_s = max(longest_s, time.thread_time() - began_s)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        allowed = allowed[allowed != END]
        if matcher.is_error() or not len(allowed):
            break
        matcher.consume_token(int(rng.choice(allowed)))
    return matcher.is_error(), longest_s


class TimedFiller(MaskFiller):
    """Notes how long the masks of each step took."""

    def __init__(self) -> None:
        super().__init__()
        self.times_ms: list[float] = []

    def fill(self, masks: Masks, wanted: Sequence[Wanted]) -> list[int]:
        """See `MaskFiller`."""
        began_s = time.perf_counter()
        found = super().fill(masks, wanted)
        self.times_ms.append(1e3 * (time.perf_counter() - began_s))
        return found


def on_gpu(engine: Engine, case: str, repeats: int, with_profile: bool) -> None:
    """One case without and with a schema in all rows, in turns."""
    filler = TimedFiller()
    engine._loop._filler = filler
    endless = {"type": "array", "items": PERSON, "minItems": 1000}
    options = {
        "temperature": SamplingParams(temperature=0.8),
        "schema": SamplingParams(temperature=0.8, grammar=grammar_of(endless)),
    }
    runs: dict[str, list[gpu.Outcome]] = {name: [] for name in options}
    for _ in range(repeats):
        for name, sampling in options.items():
            runs[name].append(gpu.measure(engine, case, 1, sampling))
    rates = {name: statistics.median(run.rate for run in found) for name, found in runs.items()}
    for name, found in runs.items():
        share = rates[name] / rates["temperature"]
        step = statistics.median(run.step_p50_ms for run in found)
        each = ", ".join(f"{run.rate:,.0f}" for run in found)
        print(f"{case} {name}: {rates[name]:,.0f} tok/s ({share:.1%}; {each}), step {step:.2f} ms")
    p50, p99 = np.percentile(np.array(filler.times_ms), (50, 99))
    print(f"{case}: masks p50 {p50:.2f} ms, p99 {p99:.2f} ms a step", flush=True)
    if with_profile:
        for name, sampling in options.items():
            print(f"{name}: {gpu.profile(engine, case, sampling, rows=6)}", flush=True)


def main() -> None:
    """Runs all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu.add_engine_options(parser)
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--fuel", nargs="+", type=int, default=[])
    parser.add_argument("--on-gpu", nargs="+", default=[], choices=list(gpu.CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    folder = Path(arguments.tokenizer or demo_model.ensure())
    if arguments.on_gpu:
        with tempfile.TemporaryDirectory() as model:
            for file in (*gpu.SHAPE.iterdir(), folder / "tokenizer.json"):
                shutil.copy(file, model)
            engine = gpu.build(arguments, model=Path(model))
            for case in arguments.on_gpu:
                on_gpu(engine, case, arguments.repeats, arguments.profile)
            engine.stop()
        return
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = LLTokenizer((folder / "tokenizer.json").read_text(), vocab, [END])
    if arguments.fuel:
        fuel(tokenizer, arguments.fuel)
    else:
        masks(tokenizer, vocab)


if __name__ == "__main__":
    main()
