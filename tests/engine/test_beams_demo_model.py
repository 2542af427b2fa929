"""SmolLM2: searches of 24 prompts equal transformers, alone and beside others.

All 24 did with each width on 2026-11-27. That takes too long for every run of the slow tests.
"""

from __future__ import annotations

from pathlib import Path

import demo_prompts as demo
import pytest
from beams_kit import Searches, check
from engine_kit import finish, held, running, submit

from engine.beams.params import BeamParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

prompts = demo.prompts
TOKENS = 14
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def searches(demo_model: Path) -> Searches:
    return Searches(demo_model)


@pytest.mark.parametrize(
    ("width", "some"),
    [
        pytest.param(4, slice(3, 4), id="one"),
        *(
            pytest.param(width, slice(None, None, step), id=f"{name}-{width}", marks=SLOW)
            for width, step, name in ((2, 3, "a-third"), (4, 1, "all"), (8, 3, "a-third"))
        ),
    ],
)
def test_what_transformers_finds(demo_model, prompts, searches, width, some):
    """One after the other; then each beside the next and greedy ones, from the prefix cache."""
    params = BeamParams(width)
    with running(demo_model, num_pages=700, max_sequences=24, max_step_tokens=512) as engine:
        ends = engine.model.eos_token_ids
        found = {}
        for prompt in prompts[some]:
            run = submit(engine, prompt, TOKENS, beams=params)
            finish(run, timeout_s=120)
            found[tuple(prompt)] = searches.find(prompt, params, TOKENS, ends)
            check(run, found[tuple(prompt)])
        for one, other in zip(prompts[some], prompts[1:], strict=False):
            with held(engine):
                runs = [submit(engine, prompt, TOKENS, beams=params) for prompt in (one, other)]
                beside = [submit(engine, prompt, TOKENS) for prompt in prompts[:4]]
            finish(*runs, *beside, timeout_s=120)
            for run, prompt in zip(runs, (one, other), strict=True):
                if tuple(prompt) in found:
                    check(run, found[tuple(prompt)])
