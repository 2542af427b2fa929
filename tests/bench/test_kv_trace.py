"""A trace through the tiers finds nearly what ideal caches of the same size find."""

from __future__ import annotations

import pytest

from bench.kv_trace import BLOCK, Replay, ideal, trace


def test_an_ideal_cache():
    assert ideal([[1, 2, 3], [1, 2, 3], [1, 2, 4, 5]], 10) == 2 + 2
    assert ideal([[1, 2, 3], [4, 5, 6], [1, 2, 3]], 4) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "objects", "least"), [(1600, 0, 0.9), (1600, 8000, 0.7)])
def test_hits_of_the_conversation_trace(tmp_path, slots, objects, least):
    prompts = trace("")
    replay = Replay(400, slots, objects, "lru", str(tmp_path))
    replay.run(prompts)
    found = replay.scheduler.admission.cached_tokens // BLOCK
    assert found >= least * ideal(prompts, 400 + slots + objects)
