"""What structured output costs a worker's CPUs: compiling grammars, and the masks of a step.

    python -m bench.structure [--tokenizer FOLDER]

Each row of a batch is at another place of its text. What it costs the router's event loop is
measured by `tests/router/test_structure_lag.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from baton import demo_model
from baton.inference.v1 import inference_pb2 as api
from engine.masks.matchers import LIMITS, MaskFiller, TokenMatcher
from engine.masks.rules import words_of
from router.structure.grammar import Grammar

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
    grammar = Grammar(lambda _: None)
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
    compiled = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    for rows in ROWS:
        drawn = texts(tokenizer, grammar, rows, 40)
        matchers = [TokenMatcher(compiled.deep_copy()) for _ in range(rows)]
        bits, times = np.empty((rows, words_of(vocab)), np.int32), []
        for step in range(40):
            alive = [i for i in range(rows) if step < len(drawn[i])]
            if len(alive) < rows / 2:
                break
            wanted = [(matchers[i], step) for i in alive]
            began_s = time.perf_counter()
            filler.fill(bits[: len(alive)], wanted)
            times.append(time.perf_counter() - began_s)
            for i in alive:
                matchers[i].consume([drawn[i][step]])
        p50, p99 = np.percentile(np.array(times) * 1e3, (50, 99))
        print(f"masks of {rows} rows: p50 {p50:.2f} ms, p99 {p99:.2f} ms a step")


def main() -> None:
    """Runs all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", default="")
    folder = Path(parser.parse_args().tokenizer or demo_model.ensure())
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = LLTokenizer((folder / "tokenizer.json").read_text(), vocab, [2])
    masks(tokenizer, vocab)


if __name__ == "__main__":
    main()
