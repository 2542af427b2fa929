"""The fuel of a mask: enough for the schemas that people write, and too little to stop a step."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.masks import matchers
from router.structure import checking
from router.structure.schema import LIMITS

AMBIGUOUS = "start: e\ne: e e | e e e | /[a-z]/"
END = 2


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> LLTokenizer:
    return LLTokenizer((demo_model / "tokenizer.json").read_text(), 49152, [END])


def longest_mask_s(
    matcher: LLMatcher, tokens: int, seed: int = 0, enough_s: float = math.inf, every: int = 1
) -> float:
    """Draws tokens at random until the fuel is spent, the text ends or a mask took long enough.
    `every`: so many tokens have the mask of the first of them."""
    rng, longest_s, allowed = np.random.default_rng(seed), 0.0, np.zeros(0, np.int64)
    for number in range(tokens):
        if number % every:
            matcher.consume_token(int(rng.choice(allowed)))
            continue
        began_s = time.thread_time()
        mask = matcher.compute_bitmask()
        longest_s = max(longest_s, time.thread_time() - began_s)
        if matcher.is_error() or longest_s > enough_s:
            break
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        allowed = np.setdiff1d(np.flatnonzero(bits), [END])
        if not len(allowed):
            break
        matcher.consume_token(int(rng.choice(allowed)))
    return longest_s


def schema(optional: int) -> dict[str, Any]:
    names = [f"p{i}" for i in range(optional)]
    properties = {name: {"type": ["string", "null"]} for name in names}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def test_routers_check_with_the_fuel_of_workers() -> None:
    assert repr(LIMITS) == repr(matchers.LIMITS)
    assert LIMITS.step_max_items == matchers.ITEMS_A_MASK


def test_an_ambiguous_grammar_is_stopped_early(tokenizer: LLTokenizer) -> None:
    matcher = LLMatcher(tokenizer, AMBIGUOUS, log_level=0, limits=LIMITS)
    ours_s = longest_mask_s(matcher, 60, every=6)  # A mask is for any letters.
    assert matcher.is_error()
    assert "start" not in matcher.get_error(), "it does not show the grammar"
    loose = LLParserLimits(verbose_errors=False)
    unbounded = LLMatcher(tokenizer, AMBIGUOUS, log_level=0, limits=loose)
    assert longest_mask_s(unbounded, 120, enough_s=2 * ours_s, every=6) > 2 * ours_s


@pytest.mark.parametrize("optional", [20, 150])
def test_wide_schemas_have_enough(tokenizer: LLTokenizer, optional: int) -> None:
    options: Any = {"whitespace_pattern": "[ \\n]?"}
    grammar = LLMatcher.grammar_from_json_schema(schema(optional), overrides=options)
    for seed in range(2):
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        longest_mask_s(matcher, 80, seed)
        assert not matcher.is_error(), matcher.get_error()


def test_a_grammar_that_passes_a_router_cannot_end_a_worker(demo_model: Path) -> None:
    """This is ten times as deep as a router lets pass, and too deep for a usual stack."""
    assert 64 * checking.STACK_BYTES == matchers.STACK_BYTES
    script = f"""
from engine.masks.matchers import Matchers
from engine.types import Request, SamplingParams, StopRules
names = ["r" + "".join(chr(97 + int(digit)) for digit in str(i)) for i in range(4000)]
rules = [f"{{one}}: {{other}}" for one, other in zip(["start", *names], names)]
grammar = "\\n".join([*rules, names[-1] + ': "x"'])
matchers = Matchers({str(demo_model)!r}, 49152, [2])
request = Request(b"a", [1], SamplingParams(grammar=grammar), StopRules(max_tokens=1))
print(matchers.prepare(request).result()[0].is_broken)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr[-2000:]
