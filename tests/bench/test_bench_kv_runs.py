"""What the benchmark reports of a server that has run for a while."""

import numpy as np

from bench.kv_runs import Load, serve

PROMPT, PAGES = 32, 2048


def test_prompts_get_runs_of_pages_after_thousands_of_others_in_a_full_pool() -> None:
    found, _, free = serve(Load("", PROMPT, output=6, live=8), PAGES, requests=4000)
    assert PROMPT * np.mean(found[-1000:]) < 2, "descriptors, which are runs at both ends"
    assert free <= (PAGES - 1) // 16 + PROMPT, "more of the cache was let go than is said"
