"""The waste that the benchmark reports: within its bounds, and what partial pages alone explain."""

import numpy as np
import pytest

from bench.kv_waste import measure, spread

REQUESTS, MEAN, POOL_TOKENS = 60, 256, 1 << 15


@pytest.mark.parametrize(("page_size", "bound"), [(16, 2.5), (64, 9.0), (128, 18.0)])
def test_waste_is_the_partial_page_and_little_more(page_size: int, bound: float) -> None:
    rng = np.random.default_rng(1)
    prompts, outputs = (spread(rng, MEAN, REQUESTS) for _ in range(2))
    waste = measure(page_size, POOL_TOKENS, list(zip(prompts, outputs, strict=True)))
    # On average half a page of each sequence is empty, beside 1.5 times MEAN tokens.
    partial = page_size / 2
    explained = 100 * partial / (1.5 * MEAN + partial)
    assert 0.75 * explained < waste.percent <= bound
    assert waste.tokens > sum(prompts)
    assert waste.steps >= max(outputs)


def test_a_prompt_longer_than_a_step_holds_its_pages_while_it_is_computed() -> None:
    # 4096 tokens take two steps, and all 256 pages are held in both: half of the first's are empty.
    waste = measure(16, POOL_TOKENS, [(4096, 1)])
    assert waste.percent == pytest.approx(100 * (1 - (2048 + 4096) / (2 * 4096)), abs=1)
