"""Drafts change no token where weights or KV have fewer bits, with one rank and with two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_kit import finish, running, submit
from quantised_folders import write_quantised
from speculation_kit import Switching, speculating
from test_speculation import TOKENS, prompts_of
from tiny_models import write_tiny_model

from engine.engine import Engine
from engine.types import SamplingParams

FORMS: dict[str, dict[str, Any]] = {
    "fp8": {"quantization": "fp8"},
    "int4": {},
    "fp8 kv": {"kv_cache_dtype": "fp8"},
    "fp8, fp8 kv": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
FEW = SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(5, 9), 30.0))
"""Answers of four tokens repeat themselves, so drafts are right at times."""


def tokens_of(engine: Engine) -> list[list[int]]:
    asked = {"sampling": FEW, "ignore_eos": True}
    runs = [submit(engine, prompt, TOKENS, **asked) for prompt in prompts_of(1)]
    finish(*runs)
    return [run.tokens[0] for run in runs]


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", FORMS)
def test_the_tokens_of_the_engine_without_drafts(tmp_path: Path, form: str, tp: int) -> None:
    folder = write_tiny_model(tmp_path / "float", tokenizer=False)
    if form == "int4":
        write_quantised(folder, tmp_path / "int4", "pack-quantized-group")
        folder = tmp_path / "int4"
    options = FORMS[form] | {"tp": tp}
    with running(folder, **options) as alone:
        wanted = tokens_of(alone)
    with speculating(folder, widths=Switching(), **options) as engine:
        assert tokens_of(engine) == wanted
        load = engine.load().speculation
    assert load.accepted_tokens > 20
    assert load.drafted_tokens > load.accepted_tokens + 20, "and no draft was wrong"
