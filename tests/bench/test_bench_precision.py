"""What a precision costs in quality, on SmolLM2 and 4,000 tokens of fixed text."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from quantised_folders import write_quantised

from bench.precision import FLOAT, HEAD, TOKENS, WINDOW, measure, windows

FLOAT_PERPLEXITY = 34.580
SLACK = 2.0
"""By how much worse than what was seen a precision may be."""


class Seen(NamedTuple):
    """What was measured: see `bench/history/precision.md`."""

    options: dict[str, Any]
    form: str
    more_perplexity: float
    """Beside that of float32."""
    kl: float


SEEN = {
    "FP8 weights": Seen({"quantization": "fp8"}, "", 0.469, 0.0278),
    "INT4 weights, groups of 32": Seen({}, "pack-quantized-group", 8.987, 0.3312),
    "INT4 weights, groups of 32, zero points (AWQ's form)": Seen({}, "awq", 7.474, 0.2494),
    "FP8 KV": Seen({"kv_cache_dtype": "fp8"}, "", 0.135, 0.0065),
    "FP8 weights and KV": Seen({"quantization": "fp8", "kv_cache_dtype": "fp8"}, "", 0.965, 0.0352),
}


@pytest.mark.model
def test_the_text_is_the_one_whose_figures_are_kept(demo_model):
    parts = windows(demo_model)
    assert [len(part) for part in parts] == [WINDOW] * (TOKENS // WINDOW)


@pytest.mark.matrix
@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SEEN)
def test_a_precision_costs_at_most_twice_what_was_seen(name, demo_model, tmp_path):
    seen = SEEN[name]
    options = dict(seen.options)
    if seen.form:
        write_quantised(demo_model, tmp_path / seen.form, seen.form)
        options["model"] = str(tmp_path / seen.form)
    exact, found = measure(demo_model, {name: options})
    print("", HEAD, exact, found, sep="\n")
    assert exact.name == FLOAT
    assert exact.perplexity == pytest.approx(FLOAT_PERPLEXITY, rel=1e-3)
    assert found.kl <= SLACK * seen.kl
    assert found.perplexity - exact.perplexity <= SLACK * seen.more_perplexity
